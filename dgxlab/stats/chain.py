"""The A/B chain a_0 b_1 a_1 ... b_k a_k: when it may begin, which of its cycles count, when it needs another.

The agent that holds a chain and the client that judges it call the same functions. Distances between values are
differences of their natural logarithms: 0.05 is 5 %, whichever of the two values is larger.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dgxlab.stats.spread import MAD_SCALE
from dgxlab.stats.student import chi2_quantile

STEPS = 3
"""The protocol since which a step discards a cycle; before, any distance between its baselines did."""

CYCLES = (8, 40)
"""Fewest and most candidate runs of a chain whose length is chosen from its burn-in."""

EXTRA_CYCLES = 2
"""How many more may follow for cycles with a flaw."""

DRIFT_LIMIT = 0.05
"""How far two baselines that follow one another may be apart before they may lie on two sides of a step."""

STEP_SIGMAS = 3.0
"""The same in standard deviations of the distance between neighbours, where these are noisier."""

SCREEN_DRIFT_LIMIT = 0.02
"""How far the two baselines of a screen may be apart: a single bracket has no neighbours to tell a step from noise."""

BURN_IN_AGREEMENT = 0.015
BURN_IN_RUNS = (4, 16)
"""Fewest and most runs of burn-in."""

PLANNING_RUNS = 8
"""Fewest runs of a burn-in from which the length of the chain is chosen."""


@dataclass(frozen=True)
class Chain:
    """The values of one cell in one session, one a run, all of one metric and unit.

    A value is None where a run gave none; the cycles that it belongs to are then in `flaws`.

    Attributes:
        a: Baselines, one more than candidates.
        b: Candidates: b[i] ran between a[i] and a[i + 1], and is cycle i + 1.
        better: "higher" or "lower".
        drift_limit: How far two baselines that follow one another may be apart before they may lie on two sides of
            a step.
        cycles: How many were planned; None for as many as there are.
        flaws: Cycles in which something happened that makes them invalid whatever their values, and what; cycles count
            from 1. Steps are not among them: they are computed.
        before: The last run of the burn-in, the neighbour of a[0]; None where there is none.
        protocol: By which the chain was held and is judged; all since `STEPS` are judged alike.
    """

    a: Sequence[float | None]
    b: Sequence[float | None]
    better: str = "higher"
    drift_limit: float = DRIFT_LIMIT
    cycles: int | None = None
    flaws: Mapping[int, str] = field(default_factory=dict)
    before: float | None = None
    protocol: int = STEPS

    @property
    def planned(self) -> int:
        """How many cycles were planned."""
        return len(self.b) if self.cycles is None else self.cycles

    def defect(self) -> str | None:
        """Return why the chain as a whole cannot be judged, or None."""
        done = len(self.b)
        if self.cycles is not None and len(self.a) == done <= self.planned:
            return self._cut(max(0, done - 1))
        if len(self.a) != done + 1:
            return f"{len(self.a)} baselines and {done} candidates: k candidates need k + 1 baselines"
        if done < self.planned and not hopeless(self.planned, done, done - len(self.flawed())):
            return self._cut(done)
        if done > self.planned + EXTRA_CYCLES:
            return f"{done} cycles where {self.planned} were planned: at most {EXTRA_CYCLES} may follow"
        if self.planned < 1:
            return "no candidates"
        if self.better not in ("higher", "lower"):
            return f"better is 'higher' or 'lower', not {self.better!r}"
        if not _is_value(self.drift_limit):
            return f"a drift limit of {self.drift_limit} is none"
        if strange := [cycle for cycle in self.flaws if not 1 <= cycle <= done]:
            return f"there is no cycle {strange[0]} in a chain of {done}"
        return self._no_value()

    def _cut(self, done: int) -> str:
        return f"cut after {done} of {self.planned} cycles: nothing is glued across a gap"

    def _no_value(self) -> str | None:
        for name, values in (("a", self.a), ("b", self.b)):
            for i, value in enumerate(values):
                beside = (i, i + 1) if name == "a" else (i + 1,)
                excused = all(cycle in self.flaws for cycle in beside if 1 <= cycle <= len(self.b))
                if not _is_value(value) and not (value is None and excused):
                    return f"{name}[{i}] is {value!r:.40}: a measurement is a finite number above 0"
        return None

    def invalid_cycles(self) -> dict[int, str]:
        """Return the cycles that do not count and why; there is one baseline more than candidates."""
        found, limit = dict(self.flaws), self._limit()
        for cycle in range(1, len(self.a)):
            if cycle not in found and (flaw := self._apart_at(cycle, limit)):
                found[cycle] = flaw
        return dict(sorted(found.items()))

    def flawed(self) -> Mapping[int, str]:
        """Return the cycles that decide how long the chain is, for which others may follow, and why.

        Whether there is a step depends on the values, and values must not decide how long a chain is. (Before `STEPS`
        they did.)
        """
        return self.invalid_cycles() if self.protocol < STEPS else self.flaws

    def _limit(self) -> float:
        """Return the distance between two baselines that noise does not explain."""
        distances = [abs(one) for one in _successive(self.a)]
        if self.protocol < STEPS or self.planned == 1 or not distances:
            return self.drift_limit
        return max(self.drift_limit, STEP_SIGMAS * MAD_SCALE * statistics.median(distances))

    def _apart_at(self, cycle: int, limit: float) -> str | None:
        """Return in words how the baselines of a cycle are too far apart, or None.

        To discard a cycle for noise biases the effect: only baselines are looked at, so that a slow one goes and a slow
        candidate stays. A step is a lasting change, larger than noise: each of its two baselines agrees with its other
        neighbour. A screen is one bracket, and has no other neighbours.
        """
        before, after = self.a[cycle - 1 : cycle + 1]
        flaw = drift_flaw(before, after, limit)
        if flaw is None or self.protocol < STEPS or self.planned == 1:
            return flaw
        outer = (
            self.a[cycle - 2] if cycle > 1 else self.before,
            self.a[cycle + 1] if cycle + 1 < len(self.a) else None,
        )
        calm = all(_apart(*pair) <= limit for pair in zip((before, after), outer, strict=True))
        return f"a step: {flaw}, and each agrees with its other neighbour" if calm else None

    def differences(self) -> list[float | None]:
        """Return d_i = ln b_i - (ln a_{i-1} + ln a_i) / 2 for each cycle, None where a value is missing."""
        return [_difference(*cycle) for cycle in zip(self.a[:-1], self.b, self.a[1:], strict=True)]


def burn_in_settled(values: Sequence[float | None]) -> bool:
    """Return whether the last two runs of a burn-in agree: within 1.5 %, or within the noise of the runs before.

    That noise is 2 standard deviations of the differences from run to run: a steady fall is none.
    """
    if len(values) < BURN_IN_RUNS[0]:
        return False
    earlier = _successive(values[:-1])
    noise = 2 * statistics.stdev(earlier) if len(earlier) > 1 else 0.0
    return _apart(values[-2], values[-1]) <= max(BURN_IN_AGREEMENT, noise)


def burn_in_needed(values: Sequence[float | None], fewest: int = BURN_IN_RUNS[0]) -> bool:
    """Return whether a burn-in with these values, one a run, needs another run; it ends settled or with the last.

    Args:
        fewest: `PLANNING_RUNS` where the length of the chain is chosen from it.
    """
    return len(values) < fewest or (len(values) < BURN_IN_RUNS[1] and not burn_in_settled(values))


def drift_flaw(before: float | None, after: float | None, limit: float = DRIFT_LIMIT) -> str | None:
    """Return in words why a cycle between these two baselines does not count, or None if it does."""
    distance = _apart(before, after)
    if distance <= limit:
        return None
    if distance == math.inf:
        return "a baseline beside it has no value"
    return f"its baselines are {100 * distance:.1f} % apart, the limit is {100 * limit:.3g} %"


def cycles_needed(planned: int) -> int:
    """Return how many of the planned cycles must be valid: more than half of them."""
    return (planned + 1) // 2 + 1


def another_cycle(planned: int, done: int, valid: int) -> bool:
    """Return whether a chain goes on: until the planned cycles are done, then for each flawed one, at most two.

    Args:
        planned: Fixed before the first candidate run.
        done: Cycles so far.
        valid: How many of them are not `Chain.flawed`; with several cells, the fewest of any.
    """
    return done < planned or (valid < planned and done < planned + EXTRA_CYCLES)


def hopeless(planned: int, done: int, valid: int) -> bool:
    """Return whether so many cycles are invalid that even all the others could not make the chain a valid one."""
    return done - valid > planned + EXTRA_CYCLES - cycles_needed(planned)


def sigma_bound(values: Sequence[float | None]) -> float | None:
    """Return the upper 95 % bound of the relative sigma of single runs; None for fewer than three values.

    With n successive differences, of runs that vary independently with sigma,

        s^2 = sum (difference - mean difference)^2 / (2 n - 2 / n)

    has the mean sigma^2 (von Neumann, Kent, Bellinson and Hart, 1941, with the drift removed). Neighbouring differences
    share a run, so that s^2 has fewer degrees of freedom than n - 1: nu = (tr M C)^2 / tr (M C)^2, where C is the
    covariance of the differences (2 and -1) and M removes their mean (Satterthwaite). The bound is
    s sqrt(nu / chi2_0.05(nu)), s times `bound_factor`.

    Args:
        values: In the order in which they ran; None where a run gave none.
    """
    differences = _successive(values)
    n = len(differences)
    if n < 2:
        return None
    mean = statistics.fmean(differences)
    variance = sum((one - mean) ** 2 for one in differences) / (2 * n - 2 / n)
    return math.sqrt(variance) * bound_factor(n)


def bound_factor(n: int) -> float:
    """Return how many times as large as s its bound is, of n successive differences, at least 2 (`sigma_bound`)."""
    dof = (2 * n - 2 / n) ** 2 / (6 * n - 2 - 4 / n + 4 / n**2)
    return math.sqrt(dof / chi2_quantile(0.05, dof))


def _successive(values: Sequence[float | None]) -> list[float]:
    logs = [math.log(value) if value is not None and _is_value(value) else None for value in values]
    return [after - before for before, after in pairwise(logs) if before is not None and after is not None]


def _difference(before: float | None, candidate: float | None, after: float | None) -> float | None:
    if before is None or candidate is None or after is None:
        return None
    return math.log(candidate) - (math.log(before) + math.log(after)) / 2


def _apart(one: float | None, other: float | None) -> float:
    if one is None or other is None or not (_is_value(one) and _is_value(other)):
        return math.inf
    return abs(math.log(one) - math.log(other))


def _is_value(value: object) -> bool:
    """Return whether it is a finite number above 0; whoever reads JSON may hand over anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= 1.7e308
