"""The rules by which a chain is run: burn-in, steps, further cycles, and how long it is."""

import math
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from dgxlab import stats
from dgxlab.chains import over
from dgxlab.stats import PLANNING_RUNS, Chain, VerdictCode, VerdictReason, another_cycle, burn_in_needed


@pytest.mark.parametrize(
    ("values", "settled"),
    [
        ([100.0, 95.0, 91.0, 88.5], False),
        ([100.0, 95.0, 91.0, 88.5, 87.5], True),
        ([100.0, 100.1, 90.0], False),
        # where runs differ by 5 %, two within 1.5 % would be luck
        ([100.0, 105.0, 99.0, 104.0], True),
        ([100.0, 100.1, 100.2, 109.0], False),
        *(([100.0, 100.0, bad, bad], False) for bad in (None, math.nan, 0.0, -1.0, math.inf)),
    ],
)
def test_burn_in_ends_when_two_in_a_row_agree(values: list[float | None], settled: bool) -> None:
    assert stats.burn_in_settled(values) is settled


def test_burn_in_has_fewest_and_most_runs() -> None:
    assert burn_in_needed([100.0, 105.0, 99.0, 104.0], PLANNING_RUNS)
    assert not burn_in_needed([100.0, 105.0] * 4, PLANNING_RUNS)
    steeper = [100 * math.exp(-0.001 * n**3) for n in range(16)]
    assert burn_in_needed(steeper[:15])
    assert not burn_in_needed(steeper)
    assert not stats.burn_in_settled(steeper)


@pytest.mark.parametrize(
    ("before", "after", "limit", "code"),
    [
        (100.0, 104.9, 0.05, None),
        (100.0, 106.0, 0.05, VerdictCode.APART),
        (106.0, 100.0, 0.05, VerdictCode.APART),
        (100.0, 103.0, 0.02, VerdictCode.APART),
        *(
            (*pair, 0.05, VerdictCode.NO_BASELINE)
            for bad in (None, math.nan, 0.0)
            for pair in ((bad, 100.0), (100.0, bad))
        ),
    ],
)
def test_a_bracket_that_does_not_close(before: float, after: float, limit: float, code: VerdictCode | None) -> None:
    flaw = stats.drift_flaw(before, after, limit)
    assert (flaw.code if flaw else None) is code


@pytest.mark.parametrize(
    ("valid_of", "cycles"),
    [
        ("1" * 10, 8),
        ("0" + "1" * 9, 9),
        ("1111111" + "01", 9),
        ("1111111" + "001", 10),
        ("0" * 12, 10),
        ("00111111111", 10),
    ],
)
def test_invalid_cycles_are_followed_by_others(valid_of: str, cycles: int) -> None:
    done = 0
    while another_cycle(8, done, valid_of[:done].count("1")):
        done += 1
    assert done == cycles


def test_more_than_half_must_be_valid_and_many_claims_need_more() -> None:
    assert [stats.cycles_needed(k) for k in (2, 3, 4, 7, 8, 9, 16)] == [2, 3, 3, 5, 5, 6, 9]
    assert [stats.fewest_cycles(claims) for claims in (1, 2, 24, 60, 1000)] == [5, 5, 7, 8, 10]


def test_differences_cancel_linear_drift() -> None:
    a, b = [100.0, 98.0, 96.04], [99.0 * 1.02, 97.02 * 1.02]
    assert Chain(a, b).differences() == pytest.approx([math.log(1.02)] * 2, abs=6e-5)
    assert Chain([100, None, 100], [100, 100], flaws={1: "x", 2: "x"}).differences() == [None, None]


def test_any_distance_discarded_a_cycle_until_protocol_3() -> None:
    chain = Chain([100, 120, 100, 100], [100, 100, 100], flaws={2: "disturbed"}, protocol=2)
    apart = VerdictReason(VerdictCode.APART, percent=18.23, limit=5)
    assert chain.invalid_cycles() == {1: apart, 2: "disturbed"}
    assert chain.flawed() == chain.invalid_cycles()
    now = replace(chain, protocol=3)
    assert now.invalid_cycles() == now.flawed() == chain.flaws


@pytest.mark.parametrize(
    ("a", "before", "steps"),
    [
        ([100, 80, 80, 80], None, []),
        ([100, 80, 80, 80], 100, [1]),
        ([100, 80, 80, 80], 90, []),
        ([80, 80, 80, 100], 80, []),
        ([100, 100, 80, 100, 100], 100, []),
        ([100, 100, 80, None, 80], 100, []),
        ([100, 100.2, 99.9, 80, 80.1, 79.9, 80, 100.1, 100], None, [3, 7]),
        # neighbours are 6 % apart as a rule
        ([100, 106, 100, 94, 106, 108, 102, 107, 100], None, []),
    ],
)
def test_a_step_has_calm_on_both_sides(a: list[float | None], before: float | None, steps: list[int]) -> None:
    chain = Chain(a, [100.0] * (len(a) - 1), before=before, flaws={4: "it failed"} if None in a else {})
    assert [c for c, flaw in chain.invalid_cycles().items() if getattr(flaw, "code", None) is VerdictCode.STEP] == steps
    assert chain.flawed() == chain.flaws


def test_steps_do_not_end_a_chain() -> None:
    flaws = dict.fromkeys((1, 3, 5), "it failed")
    chain = Chain([100, 100, 80, 80, 100, 100, 80, 80], [100.0] * 7, flaws=flaws, cycles=8)
    assert sorted(chain.invalid_cycles()) == [1, 2, 3, 4, 5, 6]
    assert over(SimpleNamespace(screen=False), [chain], []) is None
    defect = chain.defect()
    assert defect is not None
    assert defect.code is VerdictCode.CUT


def test_the_bound_of_sigma_is_one_of_95_per_cent() -> None:
    source = Random(8)  # noqa: S311 - not for secrets
    logs = [[source.gauss(0, 0.01) for _ in range(8)] for _ in range(4000)]
    bounds = [stats.sigma_bound([math.exp(log) for log in of_box]) or 0 for of_box in logs]
    assert sum(bound >= 0.01 for bound in bounds) / 4000 == pytest.approx(0.96, abs=0.015)
    assert stats.sigma_bound([7 * math.exp(log + 0.01 * i) for i, log in enumerate(logs[0])]) == pytest.approx(
        bounds[0]
    )
    assert stats.sigma_bound([100.0, 101.0]) is None
    assert stats.sigma_bound([100.0, None, 101.0, None, 102.0]) is None


def test_the_length_of_a_chain_follows_the_noise_of_its_burn_in() -> None:
    source = Random(9)  # noqa: S311 - not for secrets
    logs = [source.gauss(0, 1) for _ in range(8)]
    bound = stats.sigma_bound([math.exp(log) for log in logs]) or 0

    def chosen(sigma: float, effect: float = 0.02, claims: int = 1) -> int:
        sigma_bound = stats.sigma_bound([math.exp(sigma / bound * log) for log in logs])
        return stats.planned_cycles([sigma_bound], effect, claims)

    assert [chosen(sigma) for sigma in (0.001, 0.1)] == [8, 40]
    assert 8 < chosen(0.01) < chosen(0.013) < 40
    assert chosen(0.01, effect=0.012) > chosen(0.01) > chosen(0.01, effect=0.04)
    assert chosen(0.01, claims=20) > chosen(0.01)
    assert stats.mde(0.01, chosen(0.01)) <= 0.02 < stats.mde(0.01, chosen(0.01) - 1)
    assert stats.planned_cycles([0.0, None], 0.02) == 40
    assert stats.cycles_to_detect(0.02, 0.01) == chosen(0.01)
    assert stats.cycles_to_detect(0.02, 0.3, claims=60) is None
