"""How often a loop of tries promotes what is no faster, and how many winners it finds.

Each try is a screen and, unless that drops it, a chain, with Gaussian noise from run to run. The program's own
functions plan and judge them: only the runs are simulated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from random import Random

from bench.figure import Figure, rate_error
from dgxlab import stats
from dgxlab.stats import Chain, Ended, Screened, Verdict

TRIES, GAIN = 500, 0.03
"""Tries of a loop, and the true gain of a winner, which is the wanted effect too."""
NOISES = {"0.6 %": 0.006, "3 %": 0.03}
"""Run-to-run noise of both arms."""
LOOPS = {0.0: 800, 0.05: 200}
"""Loops for each noise, by the share of winners among the tries."""
PIECE = 10  # loops that one process simulates at a time


def loop(random: Random, noise: float, winners: float, tries: int = TRIES) -> Counter[str]:
    """Return what a loop of tries does: promoted `true` and `false`, `winners`, those a screen `lost`, `chains`."""
    same, done, tally = judged(random, noise, 0.0, 0.01), list[bool](), Counter[str]()
    sigma = stats.sigma(same)
    assert sigma is not None
    for _ in range(tries):
        wins = random.random() < winners
        gain, level = math.log1p(GAIN) * wins, stats.level(done)
        tally["winners"] += wins
        first, candidate, last = (random.gauss(shift, noise) for shift in (0.0, gain, 0.0))
        bracket = Chain([100 * math.exp(first), 100 * math.exp(last)], [100 * math.exp(candidate)])
        effect = stats.screen(bracket, sigma, same.valid_cycles).effect  # None if the baselines are too far apart
        drops = effect is not None and stats.dropped([Screened(effect, "higher", sigma, same.valid_cycles)], GAIN)
        if drops and not wins:
            continue
        keeps = stats.decide([judged(random, noise, gain, level)], level) is Ended.PROMOTED
        tally["found"] += keeps and wins
        if drops:  # the chain shows only what was lost
            tally["lost"] += keeps
            continue
        tally["chains"] += 1
        tally["true" if wins else "false"] += keeps
        done.append(keeps)
    return tally


def judged(random: Random, noise: float, gain: float, level: float) -> Verdict:
    """Return the verdict of a chain that is as long as the agent makes it at this level."""
    run = partial(_run, random, noise)
    burn_in = list[float]()
    while stats.burn_in_needed(burn_in, stats.PLANNING_RUNS):
        burn_in.append(run())
    cycles = stats.planned_cycles([stats.sigma_bound(burn_in)], GAIN, stats.claims_at(level, 1))
    a = [run() for _ in range(cycles + 1)]
    return stats.judge(Chain(a, [run(gain) for _ in range(cycles)], cycles=cycles, before=burn_in[-1]))


def _run(random: Random, noise: float, gain: float = 0.0) -> float:
    return 100 * math.exp(random.gauss(gain, noise))


def _loops(count: int, tries: int, noise: float, winners: float, seed: int) -> list[Counter[str]]:
    random = Random(f"{noise} {winners} {seed}")  # noqa: S311 - not for secrets
    return [loop(random, noise, winners, tries) for _ in range(count)]


@cache
def campaign(quick: bool, winners: float) -> Mapping[str, list[Counter[str]]]:
    """Return the tallies of all loops with this share of winners, by noise, on all processors with fixed seeds."""
    count, tries = (2, 60) if quick else (PIECE, TRIES)
    pieces = [
        (count, tries, noise, winners, seed)
        for noise in NOISES.values()
        for seed in range(1 if quick else LOOPS[winners] // PIECE)
    ]
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(_loops, *zip(*pieces, strict=True)))
    return {
        name: [tally for piece, tallies in zip(pieces, results, strict=True) if piece[2] == noise for tally in tallies]
        for name, noise in NOISES.items()
    }


def loop_false(quick: bool) -> Figure:
    """Count the loops without a winner that promote anything."""
    rates = {name: _share(sum(t["false"] > 0 for t in of), len(of)) for name, of in campaign(quick, 0.0).items()}
    what = f"loops of {TRIES} tries without a winner that promote any"
    return _worst("loop_false", what, rates, LOOPS[0.0], reach=1.0)


def loop_fdr(quick: bool) -> Figure:
    """Measure the mean share of false promotions in a loop with winners."""
    rates = {
        name: _share(math.fsum(t["false"] / max(1, t["false"] + t["true"]) for t in of), len(of))
        for name, of in campaign(quick, 0.05).items()
    }
    return _worst("loop_fdr", "false among a loop's promotions, 5 % winners of +3 %", rates, LOOPS[0.05], reach=5.0)


def loop_power(quick: bool) -> Figure:
    """Count the winners that a loop promotes at 3 % noise."""
    return _power("loop_power", "3 %", quick, least=50.0)


def loop_power_quiet(quick: bool) -> Figure:
    """Count the same at 0.6 %."""
    return _power("loop_power_quiet", "0.6 %", quick, least=80.0)


def _power(name: str, noise: str, quick: bool, least: float) -> Figure:
    of = campaign(quick, 0.05)[noise]
    rate, n = _share(sum(t["true"] for t in of), sum(t["winners"] for t in of)), sum(t["winners"] for t in of)
    return Figure(name, f"winners of +3 % promoted at {noise} noise", rate, "%", n, rate_error(rate, n), least=least)


def loop_screens(quick: bool) -> Figure:
    """Count the tries that a chain would promote and the screen drops."""
    rates = {
        name: _share(sum(t["lost"] for t in of), sum(t["found"] for t in of))
        for name, of in campaign(quick, 0.05).items()
    }
    what = "dropped by the screen, of tries that a chain would promote"
    return _worst("loop_screens", what, rates, LOOPS[0.05], reach=5.0)


def _share(part: float, whole: int) -> float:
    return 100 * part / max(1, whole)


def _worst(name: str, what: str, rates: Mapping[str, float], n: int, *, reach: float) -> Figure:
    value = max(rates.values())
    return Figure(name, what, value, "%", n, rate_error(value, n), reach=reach, table={"noise": rates})
