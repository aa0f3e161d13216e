"""The simulated boxes and the rules on them: that they are what they say, not how often they are right."""

import math
import statistics
from dataclasses import replace
from random import Random

import pytest

from bench import simulated
from bench.__main__ import line
from bench.figure import Figure
from bench.noises import Noise, half_widths
from bench.simulated import bracket, false_verdicts, hot_ratio, run_session
from bench.simulated_box import DEPTH, SCENARIOS, Box
from dgxlab import stats


def quiet(name: str, runs: int) -> list[float]:
    """Return the medians of baseline runs on a box without noise."""
    box = Box(SCENARIOS[name], 0.0, None)
    return [statistics.median(box.run(candidate=False)) for _ in range(runs)]


def test_a_box_loses_a_quarter_from_cold_to_hot() -> None:
    """Whatever the way; only the stationary one loses nothing."""
    for name, scenario in SCENARIOS.items():
        values = quiet(name, 300)
        assert values[-1] == pytest.approx(100 * (1 - scenario.depth), rel=1e-3), name
        assert 85 < values[0] <= 100
    assert DEPTH == 0.25
    assert max(quiet("S2", 2)) == 100.0  # below the knee


def logs(name: str, runs: int) -> list[float]:
    """Return the logarithm of every repetition over its mean, on a noisy box that heat does not slow down."""
    box = Box(replace(SCENARIOS[name], depth=0.0), 0.0, Random(name))  # noqa: S311 - not for secrets
    return [math.log(value / 100) for _ in range(runs) for value in box.run(candidate=False)]


def test_noise_flips_and_wander_are_as_large_as_they_say() -> None:
    """0.6 % from run to run; a seventh of the time a third slower; 3 % around the middle."""
    values = logs("S0", 4000)
    runs = [statistics.median(values[i : i + 5]) for i in range(0, len(values), 5)]
    assert statistics.stdev(runs) == pytest.approx(0.006, rel=0.04)
    assert statistics.fmean(value < math.log(0.8) for value in logs("S6", 6000)) == pytest.approx(300 / 2100, abs=0.03)
    assert statistics.stdev(logs("S4", 8000)) == pytest.approx(0.031, rel=0.1)


def test_what_is_planted_is_what_is_estimated() -> None:
    """Without noise a session in hot steady state finds exactly the gain, less what its own heat costs."""
    assert hot_ratio(SCENARIOS["S1"]) == pytest.approx(1, abs=1e-9)
    assert -0.001 < hot_ratio(SCENARIOS["S5"]) - 1 < -0.0003
    box = Box(SCENARIOS["S5"], math.log(1.02 / hot_ratio(SCENARIOS["S5"])), None)
    for _ in range(200):
        box.run(candidate=False)
        box.run(candidate=True)
    assert stats.judge(run_session(box)).effect == pytest.approx(0.02, abs=1e-4)


def test_sessions_are_held_by_the_rules_of_the_program() -> None:
    """Eight cycles, also where the box falls into another state; a screen is a bracket."""
    chain = run_session(Box(SCENARIOS["S1"], 0.0, None))
    assert (len(chain.a), len(chain.b), chain.defect()) == (9, 8, None)
    lengths = {len(run_session(Box(SCENARIOS["S6"], 0.0, Random(seed))).b) for seed in range(40)}  # noqa: S311
    assert lengths == {8}
    assert len(bracket(Box(SCENARIOS["S1"], 0.0, None)).b) == 1


def test_peers_see_what_is_there() -> None:
    for name, rule in simulated.PEERS.items():
        for gain, word in ((0.1, "faster"), (-0.1, "slower")):
            random = Random(4)  # noqa: S311 - not for secrets
            assert rule(Box(SCENARIOS["S0"], gain, random), random) == word, name


@pytest.mark.parametrize(
    ("value", "reached"), [(98.4, False), (98.5, True), (99.5, True), (99.6, False), (math.nan, False)]
)
def test_a_figure_may_have_a_lower_bound(value: float, reached: bool) -> None:
    """Both bounds are printed, and its table below."""
    figure = Figure("x", "what", value, "%", 10, 0.1, reach=99.5, least=98.5, table={"rule": {"S0": 1.0, "S1": 12.5}})
    assert figure.reached is reached
    first, columns, row = line(figure, 0.0).splitlines()
    assert ">= 98.5 % <= 99.5 %" in first
    assert columns.split() == ["%", "S0", "S1"]
    assert row.split() == ["rule", "1.00", "12.50"]


@pytest.mark.slow
def test_a_quick_campaign() -> None:
    claims = false_verdicts(quick=True)
    assert (claims.unit, claims.reach, claims.least, claims.n) == ("%", 1.5, None, 25)
    assert set(claims.table) == {"dgxlab", "any distance discards", "dgxlab --screen", *simulated.PEERS}
    assert all(set(row) == set(SCENARIOS) for row in claims.table.values())


@pytest.mark.slow
def test_quick_half_widths() -> None:
    """For each chain of the noisy box, with the sessions that have no verdict by protocol 2."""
    ratio = half_widths(quick=True)
    assert (len(ratio.table), ratio.n, ratio.counts["invalid now"]) == (15, 300, 0)
    assert ratio.counts["invalid by protocol 2"] > 0
    assert ratio.value == max(row["now"] / row["then"] for row in ratio.table.values())
    assert all(row["ten"] < row["now"] for row in ratio.table.values())


@pytest.mark.parametrize(
    ("noise", "sigma"), [(Noise(), 0.006), (Noise(follows=-0.5), 0.006), (Noise(mode=0.3), 0.1054 * math.sqrt(0.21))]
)
def test_noises_are_as_large_as_they_say(noise: Noise, sigma: float) -> None:
    """Of single runs, whatever they follow; modes are a tenth apart."""
    random = Random(5)  # noqa: S311 - not for secrets
    values = [math.log(value) for _ in range(500) for value in noise.chain(random).a if value]
    assert statistics.stdev(values) == pytest.approx(math.hypot(sigma, 0.006 if noise.mode else 0), rel=0.05)


def test_noises_have_what_they_are_named_for() -> None:
    random = Random(6)  # noqa: S311 - not for secrets
    chain = Noise(200, 0.001, 0.03, effect=0.1, decimals=1).chain(random)
    a, b = ([math.log(value) for value in arm if value] for arm in (chain.a, chain.b))
    assert (statistics.stdev(a), statistics.stdev(b)) == (pytest.approx(0.001, rel=0.2), pytest.approx(0.03, rel=0.2))
    assert statistics.fmean(b) - statistics.fmean(a) == pytest.approx(math.log(1.1), abs=0.01)
    assert all(round(value, 1) == value for value in [*chain.a, *chain.b] if value)
