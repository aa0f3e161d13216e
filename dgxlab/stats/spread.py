"""How a run's raw values lie: middle and spread.

A NaN or an infinity is a broken measurement, not a large one: every function refuses it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MAD_SCALE = 1.4826
"""Makes the MAD of normally distributed values estimate their standard deviation: 1 / quantile(0.75)."""


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two in the middle; the unit is the values'.

    Raises:
        ValueError: if there is no value, or one is NaN or infinite.
    """
    return statistics.median(_finite(values))


def mad(values: Sequence[float]) -> float:
    """Return the scaled median absolute deviation from the median; the unit is the values'.

    Half of the values may be wild and it stays bounded, where a standard deviation follows the wildest.

    Raises:
        ValueError: if there are fewer than two values (one value has no spread, which is not a spread of 0), or one is
            NaN or infinite.
    """
    if len(values) < 2:
        raise ValueError(f"a spread needs at least two values, not {len(values)}")
    middle = median(values)
    return MAD_SCALE * statistics.median([abs(value - middle) for value in values])


def noise(values: Sequence[float]) -> float:
    """Return the relative spread, MAD over median: 0.01 is 1 %.

    Raises:
        ValueError: as `mad`, or if the median is 0.
    """
    middle = median(values)
    if middle == 0:
        raise ValueError("a relative spread around 0 has no meaning")
    return mad(values) / abs(middle)


def _finite(values: Sequence[float]) -> Sequence[float]:
    if not values:
        raise ValueError("no values")
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a measurement")
    return values
