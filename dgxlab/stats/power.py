"""What a session will be able to see, before it is run, where the noise from run to run is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from dgxlab.stats.chain import CYCLES, EXTRA_CYCLES, sigma_bound
from dgxlab.stats.precision import standard_error
from dgxlab.stats.student import t_quantile
from dgxlab.stats.verdict import ALPHA, MOST_CYCLES, POWER, fewest_cycles


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


def cycles_for(burn_ins: Iterable[Sequence[float | None]], effect: float, claims: int = 1) -> int:
    """Return how many cycles a chain is to have, from nothing but the runs of its burn-in.

    It is the smallest number with which the effect is found at the upper bound of the noise, in the noisiest cell; the
    most that there may be, where that is too few or nothing is known of the noise.

    Args:
        burn_ins: The values of each cell, one a run; None where a run gave none.
        effect: A share of the baseline.
        claims: Of the whole session.
    """
    bounds = [sigma_bound(values) for values in burn_ins]
    known = [bound for bound in bounds if bound is not None]
    return cycles_at(max(known, default=math.inf) if len(known) == len(bounds) else math.inf, effect, claims)


def cycles_at(bound: float, effect: float, claims: int = 1) -> int:
    """Return how many cycles a chain is to have whose noise is at most `bound`, a share; inf where it is not known."""
    least, most = cycle_range(claims)
    fits = (cycles for cycles in range(least, most) if mde(bound, cycles, claims) <= effect)
    return next(fits, most) if bound < math.inf else most


def cycle_range(claims: int = 1) -> tuple[int, int]:
    """Return the fewest and the most cycles that a chain may be given, in a session of so many claims."""
    least = max(CYCLES[0], fewest_cycles(claims) + EXTRA_CYCLES)  # some may not count
    return least, max(CYCLES[1], least)
