"""What a session will be able to see, before it is run, where the noise from run to run is known."""

from __future__ import annotations

import math

from dgxlab.stats.student import t_quantile
from dgxlab.stats.verdict import ALPHA, MOST_CYCLES, POWER, standard_error


def mde(noise: float, cycles: int, claims: int = 1) -> float:
    """Return the smallest effect that a chain will find with a chance of 80 %, as a share of the baseline.

    The same formula as a verdict's own MDE, with the expected spread of d in place of the found one.

    Args:
        noise: Relative sigma from run to run.
        cycles: Of the chain, at least 2.
        claims: How many the session makes; Holm's first step holds one to ALPHA over all of them.
    """
    error = standard_error(noise * math.sqrt(1.5), cycles, cycles - 1)
    quantiles = t_quantile(1 - ALPHA / claims / 2, cycles - 1) + t_quantile(POWER, cycles - 1)
    return math.expm1(quantiles * error)


def to_see(effect: float, noise: float, claims: int = 1) -> int | None:
    """Return the fewest cycles with which a chain sees an effect, a share; None if 100 are too few."""
    fits = (cycles for cycles in range(2, MOST_CYCLES + 1) if mde(noise, cycles, claims) <= effect)
    return next(fits, None)
