"""How often a verdict is wrong where the noise of runs is none of the textbook's: chains of numbers, nothing else.

The boxes of `simulated` heat, wander and flip; here each run is drawn by itself (but for autocorrelation), and what is
unusual is how: arms that are not equally noisy, launches that fall into modes, heavy tails, rounding, runs that follow
the one before.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from statistics import median, stdev

from bench.figure import Figure, rate_error
from dgxlab import stats

SESSIONS = 20_000
FAMILIES = 4_000
CELLS = 60
PIECE = 500
CLAIMS = ("faster", "slower")

BOX = Path(__file__).resolve().parent.parent / "tests" / "golden" / "h100-chains.jsonl"
"""Chains of an H100 whose noise between launches is 2 to 12 %."""


@dataclass(frozen=True)
class Noise:
    """How the runs of a chain vary, by the natural logarithm of their values.

    Attributes:
        cycles: Of the chain.
        baseline: Sigma of a baseline run.
        candidate: Sigma of a candidate run.
        effect: Of the candidate, a share.
        mode: Chance that a launch is a tenth slower than others.
        follows: Lag-1 autocorrelation.
        heavy: Whether the noise has Student's t distribution with 2 degrees of freedom.
        decimals: Values are rounded to; None for none.
        level: Value of a run.
    """

    cycles: int = 8
    baseline: float = 0.006
    candidate: float = 0.006
    effect: float = 0.0
    mode: float = 0.0
    follows: float = 0.0
    heavy: bool = False
    decimals: int | None = None
    level: float = 100.0

    def chain(self, random: Random) -> stats.Chain:
        """Return a chain, its neighbour in the burn-in included."""
        values, last = [], 0.0
        for place in range(2 * self.cycles + 2):
            candidate = place > 0 and place % 2 == 0
            last = self.follows * last + math.sqrt(1 - self.follows**2) * self._draw(random)
            log = (self.candidate if candidate else self.baseline) * last
            log += math.log1p(self.effect) * candidate + math.log(0.9) * (random.random() < self.mode)
            value = self.level * math.exp(log)
            values.append(value if self.decimals is None else round(value, self.decimals))
        return stats.Chain(values[1::2], values[2::2], before=values[0], cycles=self.cycles)

    def _draw(self, random: Random) -> float:
        return random.gauss(0, 1) / (math.sqrt(random.expovariate(1)) if self.heavy else 1)


CASES: Mapping[str, Noise] = {
    **{
        f"{100 * one:g}:{100 * two:g} % k{k}": Noise(k, one, two)
        for k in (8, 24)
        for one, two in ((0.03, 0.005), (0.005, 0.03), (0.06, 0.006), (0.006, 0.06), (0.006, 0.002), (0.002, 0.006))
    },
    **{f"modes {100 * m:g} % k{k}": Noise(k, mode=m) for k in (8, 24, 40) for m in (0.05, 0.1, 0.2, 0.3, 0.5)},
    **{f"t2 k{k}": Noise(k, heavy=True) for k in (5, 8, 24)},
    **{f"follows {f:g} k{k}": Noise(k, follows=f) for k in (8, 24) for f in (0.3, 0.6, 0.9)},
    **{
        f"rounded, {100 * s:g} % k{k}": Noise(k, s, s, decimals=0, level=100.4)
        for k in (5, 8, 24)
        for s in (0.0005, 0.002, 0.006)
    },
}
"""What must not deceive a verdict: no case has an effect."""

ALTERNATING = {f"{f:g} k{k}": Noise(k, follows=f) for k in (8, 16, 24) for f in (-0.3, -0.5)}


def noises(quick: bool) -> Figure:
    """Count claims of a difference where there is none."""
    rates = {name: _rate(tally, CLAIMS) for name, tally in _tallies(quick).items() if name in CASES}
    worst = max(rates, key=rates.__getitem__)
    what = f"claims at no effect in the worst of {len(CASES)} noises, {worst}"
    n = _sessions(_tallies(quick)[worst])
    return Figure("noises", what, rates[worst], "%", n, rate_error(rates[worst], n), reach=1.5, table=_column(rates))


def alternating(quick: bool) -> Figure:
    """Count the same where a slow run follows a fast one, and how often that is told. No box is known to do so."""
    tallies = _tallies(quick)
    table = {
        name: {"claims": _rate(tallies[name], CLAIMS), "told": _rate(tallies[name], ("told",))} for name in ALTERNATING
    }
    worst = max(table, key=lambda name: table[name]["claims"])
    what, n = f"claims at no effect of runs that alternate, {worst}", _sessions(tallies[worst])
    claims = table[worst]["claims"]
    return Figure("alternating", what, claims, "%", n, rate_error(claims, n), table=table)


def families(quick: bool) -> Figure:
    """Count sessions of 60 cells in which any cell claims a difference and none has one."""
    sessions = 10 if quick else FAMILIES
    cases = {
        f"modes {100 * mode:g} % k{k}": Noise(k, mode=mode)
        for k in (stats.fewest_cycles(CELLS), stats.fewest_cycles(CELLS) + 4)
        for mode in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
    }
    with ProcessPoolExecutor() as pool:
        wrong = list(pool.map(_wrong_families, cases.values(), [sessions] * len(cases)))
    rates = {name: 100 * count / sessions for name, count in zip(cases, wrong, strict=True)}
    worst = max(rates, key=rates.__getitem__)
    what, error = f"sessions of {CELLS} cells with any claim at no effect, {worst}", rate_error(rates[worst], sessions)
    return Figure("families", what, rates[worst], "%", sessions, error, reach=1.5, table=_column(rates))


def promotions(quick: bool) -> Figure:
    """Count promotions where the effect is none, and where it is just what must be beaten: 2 %, or 3 noise floors."""
    tallies, table = _tallies(quick), {}
    for k, sigma in ((8, 0.003), (8, 0.006), (16, 0.02), (40, 0.03)):
        row = (f"none, {100 * sigma:g} % k{k}", f"least, {100 * sigma:g} % k{k}")
        table[f"{100 * sigma:g} % k{k}"] = {
            name: _rate(tallies[case], ("promoted",)) for name, case in zip(("none", "least"), row, strict=True)
        }
    worst = max(max(row.values()) for row in table.values())
    n = min(_sessions(tallies[case]) for case in _promotions())
    what = "promotions without an effect, or with the least that must be beaten"
    return Figure("promotions", what, worst, "%", n, rate_error(worst, n), reach=0.5, table=table)


def half_widths(quick: bool) -> Figure:
    """Compare the intervals of two ways to spend 23 runs on a noisy box: this program's, and that of protocol 2.

    The noise of either arm is that of a chain of an H100. Protocol 2 is given the shortest burn-in, 2 runs, and 10
    cycles, of which it discards those whose baselines lie more than 5 % apart; now there are 4 runs and 9 cycles. A
    session without a verdict has no interval. The last column is what 10 cycles would give by the rules of now.
    """
    lines = [json.loads(line) for line in BOX.read_text().splitlines()]
    sessions, random = (20 if quick else 2000), Random("h100")  # noqa: S311 - not for secrets
    table, invalid = {}, Counter[str]()
    for line in lines:
        one, two = (stdev(math.log(value) for value in line[arm]) for arm in ("a", "b"))
        widths: dict[str, list[float]] = {"now": [], "then": [], "ten": []}
        for _ in range(sessions):
            ten = Noise(10, one, two).chain(random)
            chains = {"now": Noise(9, one, two).chain(random), "then": replace(ten, protocol=2), "ten": ten}
            for name, chain in chains.items():
                found = stats.judge(chain)
                invalid[name] += found.verdict == "invalid"
                widths[name].append(_half_width(found))
        table[line["name"]] = {name: 100 * median(of) for name, of in widths.items()}
    real = [stats.judge(stats.Chain(line["a"], line["b"], before=line["burn_in"][-1])) for line in lines]
    counts = {
        "invalid of the real chains": sum(found.verdict == "invalid" for found in real),
        "invalid now": invalid["now"],
        "invalid by protocol 2": invalid["then"],
    }
    worst = max(row["now"] / row["then"] for row in table.values())
    what = "half-width of an interval over protocol 2's, same wall time, noise of an H100, worst chain"
    return Figure("half_widths", what, worst, "x", sessions * len(lines), None, reach=1.0, counts=counts, table=table)


def _half_width(found: stats.Verdict) -> float:
    return math.inf if found.ci is None else (math.log1p(found.ci[1]) - math.log1p(found.ci[0])) / 2


# -- the sessions -----------------------------------------------------------------------------------------------------


@cache
def _promotions() -> Mapping[str, Noise]:
    cases = {}
    for k, sigma in ((8, 0.003), (8, 0.006), (16, 0.02), (40, 0.03)):
        cases[f"none, {100 * sigma:g} % k{k}"] = Noise(k, sigma, sigma)
        cases[f"least, {100 * sigma:g} % k{k}"] = Noise(k, sigma, sigma, effect=max(0.02, 3 * sigma))
    return cases


@cache
def _tallies(quick: bool) -> Mapping[str, Counter[str]]:
    """Return what is said of the sessions of every case, on all processors; seeds are fixed."""
    cases = {**CASES, **ALTERNATING, **_promotions()}
    size, pieces = (PIECE // 20, 1) if quick else (PIECE, SESSIONS // PIECE)
    jobs = [(name, noise, seed, size) for name, noise in cases.items() for seed in range(pieces)]
    tallies: dict[str, Counter[str]] = {}
    with ProcessPoolExecutor() as pool:
        for (name, *_), tally in zip(jobs, pool.map(_simulate, *zip(*jobs, strict=True), chunksize=8), strict=True):
            tallies.setdefault(name, Counter()).update(tally)
    return tallies


def _simulate(name: str, noise: Noise, seed: int, sessions: int) -> Counter[str]:
    random, tally = Random(f"{name} {seed}"), Counter[str]()  # noqa: S311 - not for secrets
    for _ in range(sessions):
        chain = noise.chain(random)
        found = stats.judge(chain)
        tally[found.verdict] += 1
        tally["promoted"] += stats.promoted(found)
        tally["told"] += stats.alternates(chain)
    return tally


def _wrong_families(noise: Noise, sessions: int) -> int:
    random = Random(f"family {noise}")  # noqa: S311 - not for secrets
    found = (stats.judge_session(noise.chain(random) for _ in range(CELLS)) for _ in range(sessions))
    return sum(any(verdict.verdict in CLAIMS for verdict in session) for session in found)


def _rate(tally: Counter[str], words: tuple[str, ...]) -> float:
    return 100 * sum(tally[word] for word in words) / _sessions(tally)


def _sessions(tally: Counter[str]) -> int:
    return sum(tally[word] for word in stats.VERDICTS)


def _column(rates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    return {name: {"claims": rate} for name, rate in rates.items()}
