"""LORD++ as its paper says, the rules around it, and a loop that is simulated with them."""

import math
from collections import Counter
from random import Random

import pytest
from online_fdr.p_values.investing.lord.plus_plus import LordPlusPlus

from bench.loops import loop
from dgxlab import stats
from dgxlab.stats import Ended, Screened, Verdict


def chain(effect: float, p: float, word: str = "inconclusive", better: str = "higher") -> Verdict:
    return Verdict(word, 8, (), effect=effect, p=p, better=better)


def test_levels_are_those_of_another_implementation() -> None:
    random, other, promoted = Random(1), LordPlusPlus(stats.FDR, stats.FIRST_WEALTH), list[bool]()  # noqa: S311
    for _ in range(300):
        p = 1e-9 if random.random() < 0.1 else random.random()
        level = stats.level(promoted)
        promoted.append(bool(other.test_one(p)))
        assert math.isclose(level, other.alpha, rel_tol=1e-12)
        assert promoted[-1] is (p <= level)
    assert 20 < sum(promoted) < 50


def test_wealth_is_what_later_tests_may_spend() -> None:
    assert stats.wealth([]) == 0.01
    assert stats.wealth([False]) == 0.01 - stats.level([])
    assert stats.wealth([True]) == pytest.approx(0.05 - stats.level([]))
    later = [stats.level([True, True, *[False] * n]) for n in range(3000)]
    assert 0.3 * stats.wealth([True, True]) < sum(later) < stats.wealth([True, True])


def test_the_p_value_is_one_sided_and_corrected_for_cells() -> None:
    assert stats.p_faster([chain(0.03, 0.02)]) == 0.01
    assert stats.p_faster([chain(-0.03, 0.02)]) == 0.99
    assert stats.p_faster([chain(-0.03, 0.02, better="lower")]) == 0.01
    assert stats.p_faster([chain(0.03, 0.02), chain(0.0, 1.0), chain(-0.01, 0.3)]) == pytest.approx(0.03)


def test_decisions() -> None:
    good, bad = chain(0.03, 1e-6, "faster"), chain(-0.03, 1e-6, "slower")
    assert stats.decide([good], 1e-4) is Ended.PROMOTED
    assert stats.decide([good], 1e-7) is Ended.CHAIN
    assert stats.decide([good, bad], 1e-4) is Ended.CHAIN
    assert stats.decide([good], 1e-4, [good, bad]) is Ended.OVERFITTED
    assert stats.decide([good], 1e-4, [chain(-0.01, 0.3)]) is Ended.PROMOTED


def test_a_screen_drops_what_cannot_have_the_effect_or_is_slower() -> None:
    def of(effect: float, noise: float = 0.006, better: str = "higher") -> Screened:
        return Screened(effect, better, noise, 12)

    assert stats.dropped([of(0.0)], 0.02)
    assert not stats.dropped([of(0.0, noise=0.03)], 0.02)
    assert not stats.dropped([of(0.02), of(0.0)], 0.02)
    assert stats.dropped([of(0.02), of(-0.05)], 0.02)
    assert not stats.dropped([of(-0.02, better="lower")], 0.02)


def test_a_chain_is_as_long_as_its_level_needs() -> None:
    assert stats.claims_at(0.5, 3) == 3
    assert [stats.claims_at(1e-5, cells) for cells in (1, 2)] == [500, 1000]
    assert stats.planned_cycles([0.006], 0.02, 500) > stats.planned_cycles([0.006], 0.02)


def test_a_simulated_loop() -> None:
    """The figures are those of `python -m bench`; this shows that they measure what they say."""
    random = Random(5)  # noqa: S311 - not for secrets
    found = sum((loop(random, 0.006, 0.1, 60) for _ in range(3)), Counter[str]())
    assert found["true"] >= 0.8 * found["winners"] > 5
    assert found["false"] == 0
    luck = sum((loop(random, 0.006, 0.0, 60) for _ in range(3)), Counter[str]())
    assert (luck["true"], luck["false"], luck["winners"]) == (0, 0, 0)
    assert luck["chains"] < 60  # of 180 tries
