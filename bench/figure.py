"""What a figure is, how its values are taken, and on what machine."""

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
    """One number about this program.

    Attributes:
        name: What `--only` takes.
        what: The same in words.
        value: Median of what each turn gave.
        unit: "s", "x" for a ratio, "%" for a rate.
        n: Turns, or what a rate was counted over.
        spread: Scaled median absolute deviation of the turns, None for a single one; standard error of a rate.
        reach: The value is to be at most this.
        least: The value is to be at least this.
        parts: Medians of what the value was made from, in seconds.
        counts: What else there is to know, by its name.
        table: Rows of rates, each by the columns' names.
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
        """Whether the value is good enough."""
        low, high = (-math.inf if self.least is None else self.least), (math.inf if self.reach is None else self.reach)
        return low <= self.value <= high


def take_turns(n: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Call every side once in each of `n` turns, A B A B, and return each side's values.

    Sides take turns because a busy machine changes by the minute.
    """
    turns = [[side() for side in sides] for _ in range(n)]
    return [list(values) for values in zip(*turns, strict=True)]


def figure(name: str, what: str, values: Sequence[float], unit: str, reach: float, **parts: Sequence[float]) -> Figure:
    """Return the figure of values, one a turn; `parts` are what they were made from."""
    spread = mad(values) if len(values) > 1 else None
    medians = {part: median(of) for part, of in parts.items()}
    return Figure(name, what, median(values), unit, len(values), spread, reach=reach, parts=medians)


def ratios(name: str, what: str, reach: float, **sides: Sequence[float]) -> Figure:
    """Return the figure of one side's values over another's, turn by turn; `sides` are these two, by their names."""
    ours, theirs = sides.values()
    return figure(name, what, [a / b for a, b in zip(ours, theirs, strict=True)], "x", reach, **sides)


def rate_error(rate: float, n: int) -> float:
    """Return the Monte Carlo standard error of a rate over n, both rates in per cent; that of 0 is not 0."""
    share = max(rate / 100, 1 / n)
    return 100 * math.sqrt(share * (1 - share) / n)


# -- the machine -------------------------------------------------------------------------------------------------------

TICKS = os.sysconf("SC_CLK_TCK")


def described() -> dict[str, Any]:
    """Return the machine."""
    details = facts.gather().details
    return {name: details[name] for name in ("cpu", "cpus", "memory_mib", "os", "kernel", "python")}


class Others:
    """Counts the processors that programs other than this one and its children kept busy since it was made.

    Steal by other virtual machines counts too, and so does a detached agent. A figure in seconds that was taken while
    others had a processor that it could have used is no worse than it says.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._busy, self._own = _busy(), _own()

    def cpus(self) -> float:
        """Return how many processors they kept busy on average."""
        seconds = time.monotonic() - self._begin
        return max(0.0, (_busy() - self._busy - (_own() - self._own)) / seconds)


def _busy() -> float:
    """Return the CPU seconds that this machine has spent on anything since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, softirqs, steal = fields
    return (user + nice + system + interrupts + softirqs + steal) / TICKS


def _own() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
