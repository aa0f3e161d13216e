"""The rules by which a chain is held."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab import stats
from dgxlab.agent.slots import goes_on
from dgxlab.stats import (
    PLANNING_RUNS,
    Chain,
    another_cycle,
    burn_in_needed,
    burn_in_settled,
    cycles_needed,
    drift_flaw,
)


def test_burn_in_ends_when_two_in_a_row_agree() -> None:
    """Within 1.5 %, and only the last two count."""
    falling = [100.0, 95.0, 91.0, 88.5, 87.5]
    needed = [burn_in_needed(falling[:n]) for n in range(6)]
    assert needed == [True, True, True, True, True, False]
    assert [burn_in_settled(falling[:n]) for n in range(6)] == [False, False, False, False, False, True]
    assert not burn_in_settled([100.0, 100.1, 90.0])


def test_burn_in_ends_within_its_own_noise() -> None:
    """On a box whose runs differ by 5 %, to wait for two within 1.5 % would be to wait for luck."""
    assert burn_in_settled([100.0, 105.0, 99.0, 104.0])
    assert not burn_in_settled([100.0, 100.1, 100.2, 109.0])
    assert burn_in_needed([100.0, 105.0, 99.0, 104.0], PLANNING_RUNS)
    assert not burn_in_needed([100.0, 105.0] * 4, PLANNING_RUNS)


def test_burn_in_never_needs_a_seventeenth_run() -> None:
    """A box that does not settle is measured all the same, and known not to have settled."""
    steeper = [100 * math.exp(-0.001 * n**3) for n in range(16)]
    assert burn_in_needed(steeper[:15])
    assert not burn_in_needed(steeper)
    assert not burn_in_settled(steeper)


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
    """A cycle has one reason; the others are computed. Until protocol 3 any distance was one."""
    chain = Chain([100, 120, 100, 100], [100, 100, 100], flaws={2: "another program used the GPU"}, protocol=2)
    apart = "its baselines are 18.2 % apart, the limit is 5 %"
    assert chain.invalid_cycles() == {1: apart, 2: "another program used the GPU"}
    assert chain.flawed() == chain.invalid_cycles()
    now = replace(chain, protocol=3)
    assert now.invalid_cycles() == now.flawed() == chain.flaws


STEP = [100.0, 100.2, 99.9, 80.0, 80.1, 79.9, 80.0, 100.1, 100.0]


def test_a_step_discards_its_cycle() -> None:
    """And nothing else, in neither direction; it brings no further cycle."""
    chain = Chain(STEP, [100.0] * 8)
    assert sorted(chain.invalid_cycles()) == [3, 7]
    assert chain.flawed() == {}
    assert chain.invalid_cycles()[3].startswith("a step: its baselines are 22.2 % apart, the limit is 5 %")


def test_steps_do_not_end_a_chain() -> None:
    """Six of seven cycles do not count, three of them by flaws: these alone decide that it goes on."""
    flaws = dict.fromkeys((1, 3, 5), "it failed")
    chain = Chain([100, 100, 80, 80, 100, 100, 80, 80], [100.0] * 7, flaws=flaws, cycles=8)
    assert sorted(chain.invalid_cycles()) == [1, 2, 3, 4, 5, 6]
    assert goes_on(SimpleNamespace(screen=False), [chain])
    assert (chain.defect() or "").startswith("cut after 7 of 8 cycles")


@pytest.mark.parametrize(
    ("a", "before", "steps"),
    [
        ([100, 80, 80, 80], None, []),
        ([100, 80, 80, 80], 100, [1]),
        ([100, 80, 80, 80], 90, []),
        ([80, 80, 80, 100], 80, []),
        ([100, 100, 80, 100, 100], 100, []),
        ([100, 100, 80, None, 80], 100, []),
    ],
)
def test_a_step_has_calm_on_both_sides(a: list[float | None], before: float | None, steps: list[int]) -> None:
    """The last run of the burn-in is a neighbour too; one slow run is no step, nor is one whose neighbour failed."""
    chain = Chain(a, [100.0] * (len(a) - 1), before=before, flaws={4: "it failed"} if None in a else {})
    assert [cycle for cycle, flaw in chain.invalid_cycles().items() if flaw.startswith("a step")] == steps


def test_a_step_is_larger_than_noise() -> None:
    """Where neighbours are 6 % apart as a rule, a distance of 12 % is none."""
    noisy = [100.0, 106.0, 100.0, 94.0, 106.0, 108.0, 102.0, 107.0, 100.0]
    assert Chain(noisy, [100.0] * 8).invalid_cycles() == {}


@given(st.floats(0.001, 0.05), st.integers(0, 1000))
def test_the_bound_of_sigma_holds(sigma: float, seed: int) -> None:
    """It grows with sigma, whatever the drift, and the unit does not matter."""
    source = Random(seed)  # noqa: S311 - not for secrets
    logs = [source.gauss(0, 1) for _ in range(8)]
    one = stats.sigma_bound([math.exp(sigma * log) for log in logs])
    two = stats.sigma_bound([7 * math.exp(2 * sigma * log + 0.01 * i) for i, log in enumerate(logs)])
    assert one is not None
    assert two == pytest.approx(2 * one, rel=1e-6)


def test_the_bound_of_sigma_is_one_of_95_per_cent() -> None:
    """Over boxes of known noise; a run without a value takes its differences with it."""
    source = Random(8)  # noqa: S311 - not for secrets
    bounds = [stats.sigma_bound([math.exp(source.gauss(0, 0.01)) for _ in range(8)]) or 0 for _ in range(4000)]
    assert sum(bound >= 0.01 for bound in bounds) / 4000 == pytest.approx(0.96, abs=0.015)
    assert stats.sigma_bound([100.0, 101.0]) is None
    assert stats.sigma_bound([100.0, None, 101.0, None, 102.0]) is None


def test_the_length_of_a_chain_follows_the_noise_of_its_burn_in() -> None:
    """8 at least, 40 at most; more claims need more, a larger effect fewer."""
    source = Random(9)  # noqa: S311 - not for secrets
    logs = [source.gauss(0, 1) for _ in range(8)]
    bound = stats.sigma_bound([math.exp(log) for log in logs]) or 0

    def chosen(sigma: float, effect: float = 0.02, claims: int = 1) -> int:
        return stats.cycles_for([[math.exp(sigma / bound * log) for log in logs]], effect, claims)

    assert [chosen(sigma) for sigma in (0.001, 0.1)] == [8, 40]
    assert 8 < chosen(0.01) < chosen(0.013) < 40
    assert chosen(0.01, effect=0.012) > chosen(0.01) > chosen(0.01, effect=0.04)
    assert chosen(0.01, claims=20) > chosen(0.01)
    assert stats.mde(0.01, chosen(0.01)) <= 0.02 < stats.mde(0.01, chosen(0.01) - 1)
    assert stats.cycles_for([[1.0] * 8, [1.0, None] * 4], 0.02) == 40


def test_how_few_cycles_may_claim() -> None:
    """2 / C(2k + 1, k) over all claims is at most 1 %."""
    assert {claims: stats.fewest_cycles(claims) for claims in (1, 2, 24, 60, 1000)} == {
        1: 5,
        2: 5,
        24: 7,
        60: 8,
        1000: 10,
    }


@given(st.integers(2, 100), st.integers(0, 102), st.integers(0, 102))
def test_a_chain_always_ends(planned: int, done: int, valid: int) -> None:
    """Never before the planned cycles, never more than two after."""
    assert another_cycle(planned, done, valid) or done >= planned
    assert not another_cycle(planned, planned + 2, valid)
