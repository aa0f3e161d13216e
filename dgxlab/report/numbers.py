"""The numbers of a report, each with its spread and how many values stand behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

from dgxlab.published import Figure


@dataclass(frozen=True)
class Quantity:
    """One metric of one cell in one run.

    Attributes:
        metric: Name in `units`.
        unit: Unit of `median` and `spread`, the metric's stored one.
        median: Of the counted samples.
        n: How many there are.
        spread: Their scaled MAD; None for a single one, which has none.
        of: What n counts: samples of a run, or values of an imported file.
    """

    metric: str
    unit: str
    median: float
    n: int
    spread: float | None = None
    of: str = "samples"

    @property
    def middle(self) -> float:
        """The number itself, whatever kind of average it is."""
        return self.median


@dataclass(frozen=True)
class Mean:
    """One metric of one cell in one arm of a session of two arms.

    Attributes:
        metric: Name in `units`.
        unit: Unit of `mean`, the metric's stored one.
        mean: Geometric, over the cycles that count.
        n: How many runs that are.
        spread: The scaled MAD of those runs; None for a single one, which has none.
    """

    metric: str
    unit: str
    mean: float
    n: int
    spread: float | None = None

    @property
    def middle(self) -> float:
        """As in `Quantity`."""
        return self.mean


@dataclass(frozen=True)
class Printed:
    """One number of an imported file, with the spread that the tool printed beside it.

    Attributes:
        metric: The tool's own name.
        unit: Of `value` and `spread`.
        value: As printed, mostly a mean.
        spread: What the tool calls stddev, or the error.
        n: How many values stand behind it; None where the file does not say.
    """

    metric: str
    unit: str
    value: float
    spread: float
    n: int | None

    @property
    def middle(self) -> float:
        """As in `Quantity`."""
        return self.value


Value = Union[Quantity, Mean, Printed, Figure, str, int, float, bool, None]
"""What a table's cell holds; None is missing, shown as a dash and never as 0."""


def percent(share: float, sign: str = "") -> str:
    """Write a share as a number of percent: `0.59`; `+59.19` with a sign, of which 0 has none."""
    shown = f"{100 * share:{sign}.2f}"
    return "0.00" if shown in ("+0.00", "-0.00") else shown
