"""How often a verdict is wrong if the noise of runs is not independent, normal and equal in both arms.

The boxes of `simulated` heat, wander and flip. Here only the noise is unusual: arms that are not equally noisy,
launches that fall into modes, heavy tails, rounding, runs that correlate with the one before.
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
from typing import Any

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
        cycles: Number of cycles.
        baseline: Sigma of a baseline run.
        candidate: Sigma of a candidate run.
        effect: The candidate's effect, a share.
        mode: Probability that a launch is a tenth slower.
        follows: Lag-1 autocorrelation.
        heavy: Whether the noise has Student's t distribution with 2 degrees of freedom.
        decimals: Number of decimals that values are rounded to; None for no rounding.
        level: Median value of a baseline run.
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
        """Return a random chain, with the last value of its burn-in."""
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
        f"{100 * a:g}:{100 * b:g} % k{k}": Noise(k, a, b)
        for k in (8, 24)
        for a, b in ((0.03, 0.005), (0.005, 0.03), (0.06, 0.006), (0.006, 0.06), (0.006, 0.002), (0.002, 0.006))
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
"""Cases without an effect, in which every claim is false."""

ALTERNATING = {f"{f:g} k{k}": Noise(k, follows=f) for k in (8, 16, 24) for f in (-0.3, -0.5)}

PROMOTIONS: Mapping[str, Mapping[str, Noise]] = {
    f"{100 * sigma:g} % k{k}": {
        "none": Noise(k, sigma, sigma),
        "least": Noise(k, sigma, sigma, effect=max(stats.PROMOTION, 3 * sigma)),
    }
    for k, sigma in ((8, 0.003), (8, 0.006), (16, 0.02), (40, 0.03))
}
"""Chains without an effect, and with the smallest effect that a promotion must exceed."""


def noises(quick: bool) -> Figure:
    """Count claims of a difference in cases without one."""
    rates = {name: _rate(tally, CLAIMS) for name, tally in _tallies(quick).items() if name in CASES}
    worst = max(rates, key=rates.__getitem__)
    what = f"claims at no effect in the worst of {len(CASES)} noises, {worst}"
    n = _sessions(_tallies(quick)[worst])
    return Figure("noises", what, rates[worst], "%", n, rate_error(rates[worst], n), reach=1.5, table=_column(rates))


def alternating(quick: bool) -> Figure:
    """Count the same with negative autocorrelation, and how often the verdict warns. No box is known to have it."""
    tallies = _tallies(quick)
    table = {
        name: {"claims": _rate(tallies[name], CLAIMS), "told": _rate(tallies[name], ("told",))} for name in ALTERNATING
    }
    worst = max(table, key=lambda name: table[name]["claims"])
    what, n = f"claims at no effect of runs that alternate, {worst}", _sessions(tallies[worst])
    claims = table[worst]["claims"]
    return Figure("alternating", what, claims, "%", n, rate_error(claims, n), table=table)


def families(quick: bool) -> Figure:
    """Count sessions of 60 cells without a difference in which any cell claims one."""
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
    """Count promotions without an effect, and with just the effect that must be exceeded: 2 %, or 3 times the noise."""
    tallies = _tallies(quick)
    table = {
        row: {name: _rate(tallies[f"{row}, {name}"], ("promoted",)) for name in cases}
        for row, cases in PROMOTIONS.items()
    }
    worst = max(max(row.values()) for row in table.values())
    n = min(_sessions(tallies[f"{row}, {name}"]) for row, cases in PROMOTIONS.items() for name in cases)
    what = "promotions without an effect, or with the least that must be beaten"
    return Figure("promotions", what, worst, "%", n, rate_error(worst, n), reach=0.5, table=table)


def half_widths(quick: bool) -> Figure:
    """Compare the intervals of two ways to spend 23 runs on a noisy box: this program's, and that of protocol 2.

    The noise of each arm is that of a chain of an H100. Protocol 2 has the shortest burn-in, 2 runs, and 10 cycles; it
    discards cycles whose baselines differ by more than 5 %. This program has 4 runs and 9 cycles. A session without a
    verdict has no interval. The last column has 10 cycles by this program's rules.
    """
    lines = [json.loads(line) for line in BOX.read_text().splitlines()]
    sessions = 20 if quick else SESSIONS // 4
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(_half_widths, lines, [sessions] * len(lines)))
    table = {line["name"]: medians for line, (medians, _) in zip(lines, results, strict=True)}
    invalid = sum((of_line for _, of_line in results), Counter[str]())
    real = [stats.judge(stats.Chain(line["a"], line["b"], before=line["burn_in"][-1])) for line in lines]
    counts = {
        "invalid of the real chains": sum(verdict.verdict == "invalid" for verdict in real),
        "invalid now": invalid["now"],
        "invalid by protocol 2": invalid["then"],
    }
    worst = max(row["now"] / row["then"] for row in table.values())
    what = "half-width of an interval over protocol 2's, same wall time, noise of an H100, worst chain"
    return Figure("half_widths", what, worst, "x", sessions * len(lines), None, reach=1.0, counts=counts, table=table)


def _half_widths(line: Mapping[str, Any], sessions: int) -> tuple[dict[str, float], Counter[str]]:
    """Return median half-widths in per cent, and how many sessions were invalid, under the noise of one chain."""
    random = Random(f"h100 {line['name']}")  # noqa: S311 - not for secrets
    noise = Noise(10, *(stdev(math.log(value) for value in line[arm]) for arm in ("a", "b")))
    widths: dict[str, list[float]] = {"now": [], "then": [], "ten": []}
    for _ in range(sessions):
        ten = noise.chain(random)
        chains = {
            "now": replace(ten, a=ten.a[:10], b=ten.b[:9], cycles=9),
            "then": replace(ten, protocol=2),
            "ten": ten,
        }
        for name, chain in chains.items():
            ci = stats.judge(chain).ci
            widths[name].append(math.inf if ci is None else (math.log1p(ci[1]) - math.log1p(ci[0])) / 2)
    invalid = Counter({name: values.count(math.inf) for name, values in widths.items()})
    return {name: 100 * median(values) for name, values in widths.items()}, invalid


# -- the sessions -----------------------------------------------------------------------------------------------------


@cache
def _tallies(quick: bool) -> Mapping[str, Counter[str]]:
    """Return the tallies of the sessions of every case, simulated on all processors; seeds are fixed."""
    cases = {**CASES, **ALTERNATING}
    cases |= {f"{row}, {name}": noise for row, of_row in PROMOTIONS.items() for name, noise in of_row.items()}
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
        verdict = stats.judge(chain)
        tally[verdict.verdict] += 1
        tally["promoted"] += stats.promoted(verdict)
        tally["told"] += stats.alternates(chain)
    return tally


def _wrong_families(noise: Noise, sessions: int) -> int:
    random = Random(f"family {noise}")  # noqa: S311 - not for secrets
    judged = (stats.judge_session(noise.chain(random) for _ in range(CELLS)) for _ in range(sessions))
    return sum(any(verdict.verdict in CLAIMS for verdict in session) for session in judged)


def _rate(tally: Counter[str], words: tuple[str, ...]) -> float:
    return 100 * sum(tally[word] for word in words) / _sessions(tally)


def _sessions(tally: Counter[str]) -> int:
    return sum(tally[word] for word in stats.VERDICTS)


def _column(rates: Mapping[str, float]) -> dict[str, dict[str, float]]:
    return {name: {"claims": rate} for name, rate in rates.items()}
