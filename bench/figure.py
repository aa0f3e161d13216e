"""Figures: their definition, how they are measured, and the machine."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgxlab.agent import facts
from dgxlab.stats import mad, median


@dataclass(frozen=True)
class Figure:
    """One number about this program, with the bounds that it must reach.

    Attributes:
        name: Its name for `--only`.
        what: What it is.
        value: The median of the turns, or a rate.
        unit: "s", "us", "x" for a ratio, "%" for a rate.
        n: Number of turns, or the number of cases that a rate is a share of.
        spread: Scaled median absolute deviation of the turns, None for a single one; standard error of a rate.
        reach: Upper bound of a good value.
        least: Lower bound of a good value.
        parts: Medians of the times that the value was computed from, in seconds.
        counts: Further numbers by name.
        table: Rates by row and column.
    """

    name: str
    what: str
    value: float
    unit: str
    n: int
    spread: float | None
    reach: float | None = None
    least: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    table: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        """Whether the value is within its bounds."""
        low, high = (-math.inf if self.least is None else self.least), (math.inf if self.reach is None else self.reach)
        return low <= self.value <= high


def take_turns(n: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Call all functions in turn, A B A B, `n` times, and return the values of each.

    They take turns because a busy machine changes by the minute.
    """
    turns = [[side() for side in sides] for _ in range(n)]
    return [list(values) for values in zip(*turns, strict=True)]


def figure(name: str, what: str, values: Sequence[float], unit: str, reach: float, **parts: Sequence[float]) -> Figure:
    """Return the figure of the median of `values`, one a turn; `parts` are the times that these were computed from."""
    spread = mad(values) if len(values) > 1 else None
    medians = {part: median(of) for part, of in parts.items()}
    return Figure(name, what, median(values), unit, len(values), spread, reach=reach, parts=medians)


def ratios(name: str, what: str, reach: float, **sides: Sequence[float]) -> Figure:
    """Return the figure of the first side's times divided by the second's, turn by turn; both are given by name."""
    ours, theirs = sides.values()
    return figure(name, what, [a / b for a, b in zip(ours, theirs, strict=True)], "x", reach, **sides)


def rate_error(rate: float, n: int) -> float:
    """Return the standard error of a rate among n cases, both in per cent; it is not 0 for a rate of 0."""
    share = max(rate / 100, 1 / n)
    return 100 * math.sqrt(share * (1 - share) / n)


# -- the machine -------------------------------------------------------------------------------------------------------

TICKS = os.sysconf("SC_CLK_TCK")


def described() -> dict[str, Any]:
    """Return facts about the machine."""
    details = facts.gather().details
    return {name: details[name] for name in ("cpu", "cpus", "memory_mib", "os", "kernel", "python")}


class Others:
    """Measures how many processors other programs used since this object was constructed.

    This process and its children do not count; other virtual machines and a detached agent do. If others used much, a
    figure in seconds is an upper bound.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._busy, self._own = _busy(), _own()

    def cpus(self) -> float:
        """Return the mean number of processors that others used."""
        seconds = time.monotonic() - self._begin
        return max(0.0, (_busy() - self._busy - (_own() - self._own)) / seconds)


def _busy() -> float:
    """Return the CPU seconds that this machine has spent since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, softirqs, steal = fields
    return (user + nice + system + interrupts + softirqs + steal) / TICKS


def _own() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
