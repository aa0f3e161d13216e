"""The A/B chain a_0 b_1 a_1 ... b_k a_k: when it may begin, which of its cycles count, when it needs another.

Whoever holds a chain and whoever judges it afterwards ask the same functions. Distances between values are differences
of their natural logarithms: 0.05 is 5 %, and it does not matter which of two values is the larger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

CYCLES = 8
"""Candidate runs of a chain where nothing else is said."""

EXTRA_CYCLES = 2
"""How many more may follow for invalid ones."""

DRIFT_LIMIT = 0.05
"""How far the two baselines of a cycle may be apart: loose, for a bracket cancels drift and must reject only flips."""

SCREEN_DRIFT_LIMIT = 0.02
"""The same for a screen, which is a single bracket."""

BURN_IN_AGREEMENT = 0.015
BURN_IN_RUNS = (2, 8)
"""Fewest and most runs of burn-in."""


@dataclass(frozen=True)
class Chain:
    """The values of one cell in one session, one a run, all of one metric and unit.

    A value is None where a run gave none; the cycles that it belongs to are then in `flaws`.

    Attributes:
        a: Baselines, one more than candidates.
        b: Candidates: b[i] ran between a[i] and a[i + 1], and is cycle i + 1.
        better: "higher" or "lower".
        drift_limit: How far the two baselines of a cycle may be apart.
        cycles: How many were planned; None for as many as there are.
        flaws: Cycles in which something happened that makes them invalid whatever their values, and what; cycles count
            from 1. Drift is not among them: it is computed.
    """

    a: Sequence[float | None]
    b: Sequence[float | None]
    better: str = "higher"
    drift_limit: float = DRIFT_LIMIT
    cycles: int | None = None
    flaws: Mapping[int, str] = field(default_factory=dict)

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
        if done < self.planned and not hopeless(self.planned, done, done - len(self.invalid_cycles())):
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
        found = dict(self.flaws)
        for cycle, (before, after) in enumerate(zip(self.a[:-1], self.a[1:], strict=True), 1):
            if cycle not in found and (flaw := drift_flaw(before, after, self.drift_limit)):
                found[cycle] = flaw
        return dict(sorted(found.items()))

    def differences(self) -> list[float | None]:
        """Return d_i = ln b_i - (ln a_{i-1} + ln a_i) / 2 for each cycle, None where a value is missing."""
        return [_difference(*cycle) for cycle in zip(self.a[:-1], self.b, self.a[1:], strict=True)]


def burn_in_settled(values: Sequence[float | None]) -> bool:
    """Return whether the last two runs of a burn-in agree."""
    return len(values) >= BURN_IN_RUNS[0] and _apart(values[-2], values[-1]) <= BURN_IN_AGREEMENT


def burn_in_needed(values: Sequence[float | None]) -> bool:
    """Return whether a burn-in with these values, one a run, needs another run; it ends settled or with the eighth."""
    return len(values) < BURN_IN_RUNS[1] and not burn_in_settled(values)


def drift_flaw(before: float | None, after: float | None, limit: float = DRIFT_LIMIT) -> str | None:
    """Return in words why a cycle between these two baselines does not count, or None if it does."""
    distance = _apart(before, after)
    if distance <= limit:
        return None
    if distance == math.inf:
        return "a baseline beside it has no value"
    return f"its baselines are {100 * distance:.1f} % apart, the limit is {100 * limit:g} %"


def cycles_needed(planned: int) -> int:
    """Return how many of the planned cycles must be valid: more than half of them."""
    return (planned + 1) // 2 + 1


def another_cycle(planned: int, done: int, valid: int) -> bool:
    """Return whether a chain goes on: until the planned cycles are done, then for each invalid one, at most two.

    Args:
        planned: Fixed before the session.
        done: Cycles so far.
        valid: How many of them count; with several cells, the fewest of any.
    """
    return done < planned or (valid < planned and done < planned + EXTRA_CYCLES)


def hopeless(planned: int, done: int, valid: int) -> bool:
    """Return whether so many cycles are invalid that even all the others could not make the chain a valid one."""
    return done - valid > planned + EXTRA_CYCLES - cycles_needed(planned)


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
