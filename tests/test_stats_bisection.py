"""Probabilistic bisection finds the step in spite of wrong answers, as often as it says."""

import random

import pytest

from dgxlab.stats import Bisection, past_half


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
    """In either direction: sure at the ends, even in the middle, and less sure the noisier the chain."""
    middle = (1 + whole) ** 0.5 - 1
    assert past_half(whole, 0.001, 8, whole) > 0.999
    assert past_half(0.0, 0.001, 8, whole) < 0.001
    assert past_half(middle, 0.1, 8, whole) == pytest.approx(0.5)
    assert 0.5 < past_half(whole, 0.5, 8, whole) < past_half(whole, 0.2, 8, whole) < 1
    assert (past_half(whole, 0.0, 8, whole), past_half(0.0, 0.0, 8, whole)) == (1.0, 0.0)
