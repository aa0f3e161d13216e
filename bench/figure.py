"""What a figure is, and how its values are taken: sides in turn, because a busy machine changes by the minute."""

from __future__ import annotations

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
        unit: "s", or "x" for a ratio.
        reach: The value is to be at most this.
        n: Turns.
        spread: Scaled median absolute deviation of the turns, None for a single one.
        parts: Medians of what the value was made from, in seconds.
        counts: What else there is to know, by its name.
    """

    name: str
    what: str
    value: float
    unit: str
    reach: float
    n: int
    spread: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def reached(self) -> bool:
        """Whether the value is good enough."""
        return self.value <= self.reach


def take_turns(n: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Call every side once in each of `n` turns, A B A B, and return each side's values."""
    turns = [[side() for side in sides] for _ in range(n)]
    return [list(values) for values in zip(*turns, strict=True)]


def figure(name: str, what: str, values: Sequence[float], unit: str, reach: float, **parts: Sequence[float]) -> Figure:
    """Return the figure of values, one a turn; `parts` are what they were made from."""
    spread = mad(values) if len(values) > 1 else None
    medians = {part: median(of) for part, of in parts.items()}
    return Figure(name, what, median(values), unit, reach, len(values), spread, medians)
