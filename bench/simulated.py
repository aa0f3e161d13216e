"""How often a verdict is wrong: sessions on simulated boxes, run and judged by the program's own functions.

The true effect is the candidate's speed over the baseline's in hot steady state while both take turns. A candidate that
draws more power (S5, S8) slows itself down by 0.04 % within its own run, which is part of the effect. Alone it would
slow itself down by 2 % within minutes; a session that takes turns cannot see this, because both arms share the heat.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random
from statistics import fmean, variance

from bench.figure import Figure, rate_error
from bench.simulated_box import HEAT_TAU_S, SCENARIOS, Box, Scenario
from dgxlab import stats
from dgxlab.stats import CYCLES, median, t_tail

# -- rules that benchmarks are commonly judged by, held to the same error of 1 % ---------------------------------------

ALPHA = 0.01
THRESHOLD = 0.02


def welch(box: Box, _random: Random) -> str:
    """A then B, Welch's t test over the repetitions of the two launches."""
    a, b = box.run(candidate=False), box.run(candidate=True)
    errors = variance(a) / len(a), variance(b) / len(b)
    dof = sum(errors) ** 2 / (errors[0] ** 2 / (len(a) - 1) + errors[1] ** 2 / (len(b) - 1))
    gain = fmean(b) - fmean(a)
    return _word(2 * t_tail(abs(gain) / math.sqrt(sum(errors)), dof) <= ALPHA, gain)


def threshold(box: Box, _random: Random) -> str:
    """A then B, the medians of their repetitions differ by more than 2 %."""
    a, b = median(box.run(candidate=False)), median(box.run(candidate=True))
    return _word(abs(b / a - 1) > THRESHOLD, b - a)


def mann_whitney(box: Box, random: Random) -> str:
    """As many launches of each arm as a chain has candidates, in random order; Mann and Whitney's exact U test."""
    order = [False, True] * CYCLES[0]
    random.shuffle(order)
    runs = [(median(box.run(candidate)), candidate) for candidate in order]
    a = [value for value, candidate in runs if not candidate]
    b = [value for value, candidate in runs if candidate]
    u = sum(y > x for x in a for y in b)
    extreme = min(u, len(a) * len(b) - u)
    p = min(
        1.0,
        2 * sum(_arrangements(len(a), len(b), below) for below in range(extreme + 1)) / math.comb(len(runs), len(a)),
    )
    return _word(p <= ALPHA, u - len(a) * len(b) / 2)


PEERS = {"A then B, Welch": welch, "A then B, 2 %": threshold, "shuffled, Mann-Whitney": mann_whitney}


def _word(different: bool, gain: float) -> str:
    return "inconclusive" if not different else "faster" if gain > 0 else "slower"


@cache
def _arrangements(a: int, b: int, u: int) -> int:
    """Return how many of the orders of a + b values have that U."""
    if u < 0 or a == 0 or b == 0:
        return int(u == 0)
    return _arrangements(a - 1, b, u - b) + _arrangements(a, b - 1, u)


# -- sessions ----------------------------------------------------------------------------------------------------------

SESSIONS = {0.0: 20_000, 0.02: 20_000, -0.02: 20_000}
"""Number of sessions of each scenario, by effect: enough to tell a rate of 1.3 % from one of 1.5 %."""

RESTLESS = ("S4", "S6", "S8")
"""Scenarios whose surroundings wander or whose states flip."""

PIECE = 250
"""Sessions that one process simulates at a time."""

OURS = "dgxlab"
FIXED = "any distance discards"
SCREEN = "dgxlab --screen"

Tally = Counter[tuple[str, str]]
"""How often a rule gave a verdict, by (rule, verdict)."""


def run_session(box: Box) -> stats.Chain:
    """Run a session of the shortest chosen length as the agent does: burn-in, then the chain."""
    before = _burn_in(box)
    a, b = [_run(box, False)], list[float]()
    while stats.another_cycle(stats.CYCLES[0], len(b), len(b)):
        b.append(_run(box, True))
        a.append(_run(box, False))
    return stats.Chain(a, b, cycles=stats.CYCLES[0], before=before)


def bracket(box: Box) -> stats.Chain:
    """Run a screen: burn-in and one bracket."""
    _burn_in(box)
    before, candidate, after = (_run(box, turn) for turn in (False, True, False))
    return stats.Chain([before, after], [candidate])


def run_blocks(box: Box, block_s: float) -> stats.Chain:
    """Run a session of blocks: an arm runs for `block_s` seconds, and then once more for the value."""

    def block(candidate: bool) -> float:
        end = box.time + block_s
        while box.time < end:
            box.run(candidate)
        return _run(box, candidate)

    _burn_in(box)
    a, b = [block(False)], list[float]()
    for _ in range(stats.CYCLES[0]):
        b.append(block(True))
        a.append(block(False))
    return stats.Chain(a, b, cycles=stats.CYCLES[0])


def _burn_in(box: Box) -> float:
    """Run the baseline until it has settled; return its last value."""
    values: list[float] = []
    while stats.burn_in_needed(values):
        values.append(_run(box, False))
    return values[-1]


def _run(box: Box, candidate: bool) -> float:
    return stats.median(box.run(candidate))


# -- the sessions -----------------------------------------------------------------------------------------------------


def simulate(sessions: int, name: str, effect: float, seed: int) -> Tally:
    """Return the verdicts of every rule on this many sessions, each on another box.

    The screen's noise comes from one A/A session of the default length on another box of the same scenario.
    """
    scenario = SCENARIOS[name]
    gain = math.log1p(effect) - math.log(hot_ratio(scenario))
    random = Random(f"{name} {effect} {seed}")  # noqa: S311 - not for secrets
    tally: Tally = Counter()
    for _ in range(sessions):
        chain = run_session(Box(scenario, gain, random))
        verdict = stats.judge(chain)
        tally[OURS, verdict.verdict] += 1
        tally[FIXED, stats.judge(_discarding(chain)).verdict] += 1
        if verdict.ci is not None:
            tally[OURS, "covered"] += verdict.ci[0] <= effect <= verdict.ci[1]
        same = stats.judge(run_session(Box(replace(scenario, power=1.0), 0.0, random)))
        screened = stats.screen(bracket(Box(scenario, gain, random)), stats.sigma(same), same.valid_cycles)
        tally[SCREEN, screened.verdict] += 1
        for rule, peer in PEERS.items():
            tally[rule, peer(Box(scenario, gain, random), random)] += 1
    return tally


def _discarding(chain: stats.Chain) -> stats.Chain:
    """Return a chain without the cycles whose baselines lie further apart than the limit, step or not."""
    pairs = enumerate(pairwise(chain.a), 1)
    return replace(chain, flaws={cycle: flaw for cycle, pair in pairs if (flaw := stats.drift_flaw(*pair))})


@cache
def hot_ratio(scenario: Scenario) -> float:
    """Return the speed of a candidate without gain over the baseline's after hours of turns, without noise."""
    box = Box(scenario, 0.0, None)
    *_, before, candidate, after = [_run(box, turn % 2 == 1) for turn in range(401)]
    return candidate / math.sqrt(before * after)


@cache
def campaign(quick: bool) -> Mapping[tuple[str, float], Tally]:
    """Return the tallies by scenario and effect, simulated on all processors with fixed seeds."""
    pieces = [
        (PIECE // 10 if quick else PIECE, name, effect, seed)
        for name in SCENARIOS
        for effect in SESSIONS
        for seed in range(1 if quick else SESSIONS[effect] // PIECE)
    ]
    tallies: dict[tuple[str, float], Tally] = {}
    with ProcessPoolExecutor() as pool:
        for (_, name, effect, _), tally in zip(pieces, pool.map(simulate, *zip(*pieces, strict=True)), strict=True):
            tallies.setdefault((name, effect), Counter()).update(tally)
    return tallies


def _rates(quick: bool, effect: float, *words: str) -> dict[str, dict[str, float]]:
    """Return the per cent of sessions with one of these verdicts, by rule and scenario."""
    tallies = {name: campaign(quick)[name, effect] for name in SCENARIOS}
    return {
        rule: {name: 100 * _count(tally, rule, words) / _sessions(tally) for name, tally in tallies.items()}
        for rule in (OURS, FIXED, SCREEN, *PEERS)
    }


def _count(tally: Tally, rule: str, words: Iterable[str]) -> int:
    return sum(tally[rule, word] for word in words)


def _sessions(tally: Tally) -> int:
    return _count(tally, OURS, stats.VERDICTS)


# -- the figures ------------------------------------------------------------------------------------------------------


def false_verdicts(quick: bool) -> Figure:
    """Count claims of a difference without an effect."""
    return _worst("false_verdicts", "worst scenario's claims at no effect", quick, 0.0, ("faster", "slower"), reach=1.5)


def screens(quick: bool) -> Figure:
    """Count claims of a screen without an effect."""
    what = "worst scenario's claims of a screen at no effect"
    claims = _worst("screens", what, quick, 0.0, ("faster", "slower"), reach=2.0, rule=SCREEN)
    power = _rates(quick, 0.02, "faster")
    return replace(claims, table={"claims at 0 %": claims.table[SCREEN], "finds +2 %": power[SCREEN]})


def wrong_sign(quick: bool) -> Figure:
    """Count claims of the wrong direction with an effect of +2 % or -2 %."""
    up, down = _rates(quick, 0.02, "slower"), _rates(quick, -0.02, "faster")
    table = {rule: {name: (up[rule][name] + down[rule][name]) / 2 for name in SCENARIOS} for rule in up}
    wrong = {("slower", 0.02), ("faster", -0.02)}
    tallies = [(campaign(quick)[name, effect], word) for name in SCENARIOS for word, effect in wrong]
    sessions = sum(_sessions(tally) for tally, _ in tallies)
    rate = 100 * sum(tally[OURS, word] for tally, word in tallies) / sessions
    what = "claims of the wrong direction at +-2 %"
    return Figure("wrong_sign", what, rate, "%", sessions, rate_error(rate, sessions), reach=0.0, table=table)


def power(quick: bool) -> Figure:
    """Count how often an effect of 2 % is detected."""
    names = [name for name in SCENARIOS if name not in RESTLESS]
    return _worst("power", "worst scenario's +2 % found", quick, 0.02, ("faster",), least=90.0, names=names)


def power_restless(quick: bool) -> Figure:
    """Count the same in restless scenarios."""
    what = "the same where surroundings wander or states flip"
    return _worst("power_restless", what, quick, 0.02, ("faster",), least=82.0, names=RESTLESS)


def coverage(quick: bool) -> Figure:
    """Count how often the interval contains the true effect, among sessions with an interval."""
    rates, n = {}, {}
    for name in SCENARIOS:
        tally = sum((campaign(quick)[name, effect] for effect in SESSIONS), Counter[tuple[str, str]]())
        n[name] = _sessions(tally) - tally[OURS, "invalid"]
        rates[name] = 100 * tally[OURS, "covered"] / n[name]
    worst = max(rates, key=lambda name: abs(rates[name] - 99))
    what, error = "99 % interval holds the truth, worst scenario", rate_error(rates[worst], n[worst])
    return Figure("coverage", what, rates[worst], "%", n[worst], error, reach=99.5, least=98.5, table={OURS: rates})


def blocks(quick: bool) -> Figure:
    """Measure which part of its true loss of speed blocks show, for a candidate that draws 10 % more power."""
    sessions, scenario = (10 if quick else 500), SCENARIOS["S5"]
    alone = Box(replace(scenario, power=1.0), 0.0, None), Box(scenario, 0.0, None)
    hot = [[_run(box, candidate) for _ in range(100)][-1] for candidate, box in enumerate(alone)]
    truth, random = math.log(hot[1] / hot[0]), Random("blocks")  # noqa: S311 - not for secrets
    seen = {}
    for name, taus in (("shared", 0), ("1 tau", 1), ("3 tau", 3)):
        judged = (stats.judge(run_blocks(Box(scenario, 0.0, random), taus * HEAT_TAU_S)) for _ in range(sessions))
        seen[name] = 100 * fmean(math.log1p(verdict.effect or 0.0) for verdict in judged) / truth
    loss = f"{100 * math.expm1(truth):.1f} %"
    what = f"of the {loss} that a hotter candidate loses alone, seen in blocks of 3 time constants"
    return Figure("blocks", what, seen["3 tau"], "%", sessions, None, least=90.0, table={"seen of it": seen})


def _worst(
    name: str,
    what: str,
    quick: bool,
    effect: float,
    words: Iterable[str],
    *,
    reach: float | None = None,
    least: float | None = None,
    rule: str = OURS,
    names: Iterable[str] = tuple(SCENARIOS),
) -> Figure:
    """Return the figure of the scenario in which a rule is worst, with a table of all rules and scenarios."""
    rates = _rates(quick, effect, *words)
    table = {rule: {name: of[name] for name in names} for rule, of in rates.items()}
    ours = table[rule]
    worst = (max if least is None else min)(ours, key=ours.__getitem__)
    n = _sessions(campaign(quick)[worst, effect])
    return Figure(name, what, ours[worst], "%", n, rate_error(ours[worst], n), reach=reach, least=least, table=table)
