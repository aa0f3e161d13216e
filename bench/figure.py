"""What a figure is, and how its values are taken: sides in turn, because a busy machine changes by the minute."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

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
    """Call every side once in each of `n` turns, A B A B, and return each side's values."""
    turns = [[side() for side in sides] for _ in range(n)]
    return [list(values) for values in zip(*turns, strict=True)]


def figure(name: str, what: str, values: Sequence[float], unit: str, reach: float, **parts: Sequence[float]) -> Figure:
    """Return the figure of values, one a turn; `parts` are what they were made from."""
    spread = mad(values) if len(values) > 1 else None
    medians = {part: median(of) for part, of in parts.items()}
    return Figure(name, what, median(values), unit, len(values), spread, reach=reach, parts=medians)


def rate_error(rate: float, n: int) -> float:
    """Return the Monte Carlo standard error of a rate over n, both rates in per cent; that of 0 is not 0."""
    share = max(rate / 100, 1 / n)
    return 100 * math.sqrt(share * (1 - share) / n)
