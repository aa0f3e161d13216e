"""The rules by which a chain is held."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab.stats import Chain, another_cycle, burn_in_needed, burn_in_settled, cycles_needed, drift_flaw


def test_burn_in_ends_when_two_in_a_row_agree() -> None:
    """Within 1.5 %, and only the last two count."""
    falling = [100.0, 95.0, 91.0, 88.5, 87.5]
    needed = [burn_in_needed(falling[:n]) for n in range(6)]
    assert needed == [True, True, True, True, True, False]
    assert [burn_in_settled(falling[:n]) for n in range(6)] == [False, False, False, False, False, True]
    assert not burn_in_settled([100.0, 100.1, 90.0])


def test_burn_in_never_needs_a_ninth_run() -> None:
    """A box that does not settle is measured all the same, and known not to have settled."""
    wild = [100.0, 90.0] * 4
    assert burn_in_needed(wild[:7])
    assert not burn_in_needed(wild)
    assert not burn_in_settled(wild)


@pytest.mark.parametrize("bad", [None, math.nan, 0.0, -1.0, math.inf])
def test_a_run_without_a_value_settles_nothing(bad: float | None) -> None:
    """It agrees with nothing, not with itself either."""
    assert not burn_in_settled([bad, bad])
    assert drift_flaw(bad, 100.0) == drift_flaw(100.0, bad) == "a baseline beside it has no value"


def test_a_bracket_that_does_not_close_is_a_flaw() -> None:
    """In either direction, at the limit that was given."""
    assert drift_flaw(100.0, 104.9) is None
    assert drift_flaw(100.0, 106.0) == drift_flaw(106.0, 100.0) == "its baselines are 5.8 % apart, the limit is 5 %"
    assert drift_flaw(100.0, 103.0, 0.02) == "its baselines are 3.0 % apart, the limit is 2 %"


@pytest.mark.parametrize(
    ("valid_of", "cycles"),
    [
        ("1" * 10, 8),
        ("0" + "1" * 9, 9),
        ("1" * 7 + "01", 9),
        ("1" * 7 + "001", 10),
        ("0" * 12, 10),
        ("00" + "1" * 9, 10),
    ],
)
def test_invalid_cycles_are_followed_by_others(valid_of: str, cycles: int) -> None:
    """By one each, by two at most."""
    done = 0
    while another_cycle(8, done, valid_of[:done].count("1")):
        done += 1
    assert done == cycles


def test_more_than_half_must_be_valid() -> None:
    """Floor((k + 1) / 2) + 1."""
    assert {k: cycles_needed(k) for k in (2, 3, 4, 7, 8, 9, 16)} == {2: 2, 3: 3, 4: 3, 7: 5, 8: 5, 9: 6, 16: 9}


def test_differences_cancel_linear_drift() -> None:
    """On the log scale, each candidate against the middle of its neighbours."""
    a, b = [100.0, 98.0, 96.04], [99.0 * 1.02, 97.02 * 1.02]
    assert Chain(a, b).differences() == pytest.approx([math.log(1.02)] * 2, abs=6e-5)
    assert Chain([100, None, 100], [100, 100], flaws={1: "x", 2: "x"}).differences() == [None, None]


def test_hard_events_come_before_drift() -> None:
    """A cycle has one reason; the others are computed."""
    chain = Chain([100, 120, 100, 100], [100, 100, 100], flaws={2: "another program used the GPU"})
    assert chain.invalid_cycles() == {
        1: "its baselines are 18.2 % apart, the limit is 5 %",
        2: "another program used the GPU",
    }


@given(st.integers(2, 100), st.integers(0, 102), st.integers(0, 102))
def test_a_chain_always_ends(planned: int, done: int, valid: int) -> None:
    """Never before the planned cycles, never more than two after."""
    assert another_cycle(planned, done, valid) or done >= planned
    assert not another_cycle(planned, planned + 2, valid)
