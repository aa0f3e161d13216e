"""Probabilistic bisection finds the step in spite of wrong answers, as often as it says."""

import math
import random

import pytest

from dgxlab.stats import Bisection, Chain, estimate, judge, past_half


@pytest.mark.parametrize("guilty", range(1, 12))
def test_sure_answers_halve_the_steps(guilty: int) -> None:
    state, tests = Bisection(11), 0
    while (step := state.next()) is not None:
        state.answer(step, 1.0 if step >= guilty else 0.0)
        tests += 1
    assert state.suspects[0] == range(guilty, guilty + 1)
    assert state.suspects[1] >= 0.95
    assert tests <= 4


def test_unsure_answers_are_right_as_often_as_they_say() -> None:
    """Each answer is wrong with its own probability, of up to 45 %; 400 searches are right 95 times of 100."""
    rng, right = random.Random(7), 0  # noqa: S311 - no secret
    for _ in range(400):
        guilty, state = rng.randint(1, 9), Bisection(9)
        while (step := state.next()) is not None:
            wrong = rng.uniform(0.02, 0.45)
            there = (step >= guilty) != (rng.random() < wrong)
            state.answer(step, 1 - wrong if there else wrong)
        right += guilty in state.suspects[0]
    assert right / 400 > 0.93


def test_steps_that_cannot_be_tested_are_suspected_together() -> None:
    state = Bisection(6)
    state.untestable |= {3, 4}
    while (step := state.next()) is not None:
        assert step not in (3, 4, 6)
        state.answer(step, 1.0 if step >= 4 else 0.0)
    assert state.suspects[0] == range(3, 6)
    alone = Bisection(3)
    alone.untestable |= {1, 2}
    assert (alone.next(), alone.suspects) == (None, (range(1, 4), pytest.approx(1.0)))
    assert Bisection(1).next() is None


def test_no_answer_counts_for_certain() -> None:
    """A contradiction leaves the search undecided, and does not divide by zero."""
    state = Bisection(2)
    state.answer(1, 1.0)
    state.answer(1, 0.0)
    assert state.weights == pytest.approx([0.5, 0.5])
    with pytest.raises(ValueError, match="no probability"):
        state.answer(1, float("nan"))


@pytest.mark.parametrize("whole", [-0.2, 0.2])
def test_an_effect_past_half_of_the_whole(whole: float) -> None:
    """In either direction: sure at the ends, even in the middle, and less sure the larger the error."""
    full = math.log1p(whole)
    assert past_half(full, 0.001, 7, whole) > 0.999
    assert past_half(0.0, 0.001, 7, whole) < 0.001
    assert past_half(full / 2, 0.1, 7, whole) == pytest.approx(0.5)
    assert 0.5 < past_half(full, 0.2, 7, whole) < past_half(full, 0.05, 7, whole) < 1
    assert (past_half(full, 0.0, 7, whole), past_half(0.0, 0.0, 7, whole)) == (1.0, 0.0)


@pytest.mark.parametrize("cycles", [6, 8])
def test_a_chain_in_the_middle_is_called_sure_no_more_often_than_by_chance(cycles: int) -> None:
    """At exactly half of the effect, one answer of ten is past 95 % or below 5 %, though cycles share baselines."""
    rng, whole, sure = random.Random(cycles), -0.02, 0  # noqa: S311 - no secret
    for _ in range(1000):
        a = [math.exp(rng.gauss(0, 0.006)) for _ in range(cycles + 1)]
        b = [math.exp(math.log1p(whole) / 2 + rng.gauss(0, 0.006)) for _ in range(cycles)]
        found = estimate(judge(Chain(a, b)))
        assert found
        sure += not 0.05 < past_half(*found, cycles - 1, whole) < 0.95
    assert sure / 1000 == pytest.approx(0.1, abs=0.03)
