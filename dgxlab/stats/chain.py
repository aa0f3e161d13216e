"""The A/B chain a_0 b_1 a_1 ... b_k a_k: when it may begin, which of its cycles count, when it needs another.

The agent that runs a chain and the client that judges it call the same functions. Distances between values are
differences of their natural logarithms: 0.05 is 5 %, whichever of the two values is larger.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dgxlab.stats.distributions import MAD_SCALE
from dgxlab.stats.reasons import VerdictCode, VerdictReason

STEPS = 3
"""The first protocol in which only a step discards a cycle; before, any distance between its baselines did."""

CYCLES = (8, 40)
"""Fewest and most candidate runs of a chain whose length is chosen from its burn-in."""

EXTRA_CYCLES = 2
"""Most cycles that may follow the planned ones, in place of those with a flaw."""

DRIFT_LIMIT = 0.05
"""Largest distance between two successive baselines that is never a step."""

STEP_SIGMAS = 3.0
"""The same in standard deviations of the distance between neighbours, where these are noisier."""

SCREEN_DRIFT_LIMIT = 0.02
"""Largest distance between the two baselines of a screen: a single bracket has no neighbours to tell a step from noise.
"""

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
        drift_limit: Largest distance between two successive baselines that is never a step.
        cycles: How many were planned; None for as many as there are.
        flaws: Cycles that are invalid whatever their values, and why; cycles count from 1. Steps are not among them:
            they are computed.
        before: The last run of the burn-in, the neighbour of a[0]; None where there is none.
        protocol: By which the chain was run and is judged; all since `STEPS` are judged alike.
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

    def defect(self) -> VerdictReason | None:
        """Return why the chain as a whole cannot be judged, or None."""
        done, planned = len(self.b), self.planned
        if self.cycles is not None and len(self.a) == done <= planned:
            return VerdictReason(VerdictCode.CUT, done=max(0, done - 1), planned=planned)
        if len(self.a) != done + 1:
            return VerdictReason(VerdictCode.UNPAIRED, baselines=len(self.a), candidates=done)
        if done < planned and not hopeless(planned, done, done - len(self.flawed())):
            return VerdictReason(VerdictCode.CUT, done=done, planned=planned)
        if done > planned + EXTRA_CYCLES:
            return VerdictReason(VerdictCode.TOO_LONG, done=done, planned=planned, extra=EXTRA_CYCLES)
        if planned < 1:
            return VerdictReason(VerdictCode.NO_CANDIDATES)
        if self.better not in ("higher", "lower"):
            return VerdictReason(VerdictCode.DIRECTION, better=self.better)
        if not _is_value(self.drift_limit):
            return VerdictReason(VerdictCode.DRIFT_LIMIT, limit=self.drift_limit)
        if unknown := [cycle for cycle in self.flaws if not 1 <= cycle <= done]:
            return VerdictReason(VerdictCode.NO_CYCLE, cycle=unknown[0], done=done)
        for arm, values in (("a", self.a), ("b", self.b)):
            for i, value in enumerate(values):
                beside = (i, i + 1) if arm == "a" else (i + 1,)
                excused = all(cycle in self.flaws for cycle in beside if 1 <= cycle <= len(self.b))
                if not _is_value(value) and not (value is None and excused):
                    return VerdictReason(VerdictCode.NO_VALUE, arm=arm, index=i, value=value)
        return None

    def invalid_cycles(self) -> dict[int, str]:
        """Return the cycles that do not count and why; there is one baseline more than candidates.

        To discard a cycle for noise biases the effect: only baselines are looked at, so that a slow one goes and a slow
        candidate stays. A step is a lasting change, larger than noise: each of its two baselines agrees with its other
        neighbour.
        """
        flaws, limit = dict(self.flaws), self.drift_limit
        # a screen is one bracket: its baselines have no other neighbours
        steps = self.protocol >= STEPS and self.planned != 1
        if steps and (distances := [abs(difference) for difference in successive(self.a)]):
            limit = max(limit, STEP_SIGMAS * MAD_SCALE * statistics.median(distances))  # what noise does not explain
        for cycle in range(1, len(self.a)):
            before, after = self.a[cycle - 1 : cycle + 1]
            if cycle in flaws or (flaw := drift_flaw(before, after, limit)) is None:
                continue
            if steps:
                earlier = self.a[cycle - 2] if cycle > 1 else self.before
                later = self.a[cycle + 1] if cycle + 1 < len(self.a) else None
                if _distance(before, earlier) > limit or _distance(after, later) > limit:
                    continue
                flaw = VerdictReason(VerdictCode.STEP, **flaw.parameters)
            flaws[cycle] = flaw
        return dict(sorted(flaws.items()))

    def flawed(self) -> Mapping[int, str]:
        """Return the cycles for which others may follow, and why.

        Whether there is a step depends on the values, and values must not decide how long a chain is. (Before `STEPS`
        they did.)
        """
        return self.invalid_cycles() if self.protocol < STEPS else self.flaws

    def differences(self) -> list[float | None]:
        """Return d_i = ln b_i - (ln a_{i-1} + ln a_i) / 2 for each cycle, None where a value is missing."""
        return [
            None
            if before is None or candidate is None or after is None
            else math.log(candidate) - (math.log(before) + math.log(after)) / 2
            for before, candidate, after in zip(self.a[:-1], self.b, self.a[1:], strict=True)
        ]

    def triples(self, counted: Collection[int]) -> list[list[float]]:
        """Return the logarithms of each three baselines that follow one another and whose cycles all count.

        The first triple begins with the last run of the burn-in, if there is one.
        """
        runs = [self.before, *self.a]
        return [
            [math.log(value) for value in runs[cycle - 1 : cycle + 2] if value is not None]
            for cycle in counted
            if (cycle - 1 in counted if cycle > 1 else _is_value(self.before))
        ]


def burn_in_settled(values: Sequence[float | None]) -> bool:
    """Return whether the last two runs of a burn-in agree: within 1.5 %, or within the noise of the runs before.

    That noise is 2 standard deviations of the differences from run to run: a steady fall is none.
    """
    if len(values) < BURN_IN_RUNS[0]:
        return False
    earlier = successive(values[:-1])
    noise = 2 * statistics.stdev(earlier) if len(earlier) > 1 else 0.0
    return _distance(values[-2], values[-1]) <= max(BURN_IN_AGREEMENT, noise)


def burn_in_needed(values: Sequence[float | None], fewest: int = BURN_IN_RUNS[0]) -> bool:
    """Return whether a burn-in with these values, one a run, needs another run; it ends settled or with the last.

    Args:
        fewest: `PLANNING_RUNS` where the length of the chain is chosen from it.
    """
    return len(values) < fewest or (len(values) < BURN_IN_RUNS[1] and not burn_in_settled(values))


def drift_flaw(before: float | None, after: float | None, limit: float = DRIFT_LIMIT) -> VerdictReason | None:
    """Return why a cycle between these two baselines does not count, or None if it does."""
    distance = _distance(before, after)
    if distance <= limit:
        return None
    if distance == math.inf:
        return VerdictReason(VerdictCode.NO_BASELINE)
    return VerdictReason(VerdictCode.APART, percent=100 * distance, limit=100 * limit)


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


def successive(values: Sequence[float | None]) -> list[float]:
    """Return the differences of the logarithms of neighbours; none across a run without a value."""
    logs = [math.log(value) if value is not None and _is_value(value) else None for value in values]
    return [after - before for before, after in pairwise(logs) if before is not None and after is not None]


def _distance(left: float | None, right: float | None) -> float:
    if left is None or right is None or not (_is_value(left) and _is_value(right)):
        return math.inf
    return abs(math.log(left) - math.log(right))


def _is_value(value: object) -> bool:
    """Return whether it is a finite number above 0; it may be anything that JSON can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= 1.7e308
