"""How precise the mean of d is: its standard error, by the noise of the runs and by rounding."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from decimal import Decimal
from itertools import pairwise, zip_longest
from statistics import NormalDist

from dgxlab.stats.chain import Chain

NO_SPREAD = 1e-12

ALTERNATION_ALPHA = 0.01
"""Error of the test for runs that alternate, of which the standard error knows nothing."""


def standard_error(spread: float, valid: int, pairs: int) -> float:
    """Return the standard error of the mean of d that is expected where both arms are equally noisy.

    Runs vary independently with sigma. d_i has variance 1.5 sigma^2, and two neighbours that share a baseline have
    covariance sigma^2 / 4. With m valid cycles, `pairs` of which follow one another directly,

        Var(mean d) = sigma^2 (1.5 + pairs / (2 m)) / m
        E(s_d^2)    = sigma^2 (1.5 - pairs / (2 m (m - 1)))

    and SE = s_d / sqrt(m) times the root of the brackets' quotient. A whole chain has m = k and k - 1 pairs, which is
    sqrt((2 - 1/(2k)) / (1.5 - 1/(2k))); an invalid cycle inside takes two pairs away, one at an end takes one.

    Args:
        spread: s_d, sample standard deviation of the valid d.
        valid: m, at least 2.
        pairs: From 0 to m - 1.
    """
    shared = pairs / (2 * valid)
    return spread * math.sqrt((1.5 + shared) / (1.5 - shared / (valid - 1)) / valid)


def shared_error(spread: float, valid: int, pairs: int, covariance: float) -> float:
    """Return the standard error of the mean of d, whatever the noise of either arm.

    Two neighbours d_i and d_{i+1} share the baseline a_i, and covary by c, a quarter of the baselines' variance:

        Var(mean d) = (Var(d) + 2 pairs c / m) / m
        E(s_d^2)    = Var(d) - 2 pairs c / (m (m - 1))

    Args:
        spread: s_d, sample standard deviation of the valid d.
        valid: m, at least 2.
        pairs: Pairs of valid cycles that follow one another, from 0 to m - 1.
        covariance: c, of `shared_covariance`.
    """
    variance = spread**2 + 2 * pairs * covariance / (valid * (valid - 1))
    return math.sqrt((variance + 2 * pairs * covariance / valid) / valid)


def shared_covariance(triples: Sequence[Sequence[float | None]]) -> float:
    """Return a quarter of the variance of baselines, from those that follow one another; 0 for none.

    Of independent runs x, y, z with sigma, the square of the bend x - 2 y + z has the mean 6 sigma^2, and the product
    of the steps (y - x)(z - y) has the mean -sigma^2. Surroundings that wander make the bends larger and leave the
    product as it is: the smaller of the two is sigma^2 then. Of few runs the product says little, so at least a third
    of what the bends say is taken.

    Args:
        triples: Three baselines each, of two valid cycles that follow one another.
    """
    logs = [[math.log(value) for value in triple if value is not None] for triple in triples]
    if not logs:
        return 0.0
    bends = statistics.fmean((x - 2 * y + z) ** 2 for x, y, z in logs) / 24
    steps = -statistics.fmean((y - x) * (z - y) for x, y, z in logs) / 4
    return max(bends / 3, min(bends, steps))


def rounding(chain: Chain) -> float:
    """Return the standard error that rounding adds to the mean of d.

    A value rounded to a last digit of size u is uniform within u: sigma u / sqrt(12). Noise of more than half a digit
    from run to run makes these errors independent, and the spread of d holds them. With less noise, all runs of an arm
    are rounded alike, and no number of runs averages that away.
    """
    arms = [[value for value in arm if value is not None] for arm in (chain.a, chain.b)]
    digit, variance = 10.0 ** -max(_decimals(value) for arm in arms for value in arm), 0.0
    for values in arms:
        if len(values) < 2 or statistics.stdev(values) < digit / 2:
            variance += (digit / statistics.fmean(values)) ** 2 / 12
    return math.sqrt(variance)


def _decimals(value: float) -> int:
    """Return the decimal places that a value was printed with, at least; of many values one ends in no 0."""
    exponent = Decimal(repr(value)).normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return max(0, -exponent)


def alternates(chain: Chain) -> bool:
    """Return whether runs that follow one another lie on opposite sides of their arm's mean more than chance explains.

    The lag-1 autocorrelation of n residuals, each over its arm's own standard deviation, has for independent runs the
    mean -1 / n and the variance 1 / n, about (Kendall and Stuart, 48.2). Drift makes it larger, and hides this.
    """
    logs = [[math.log(value) if value else None for value in arm] for arm in (chain.a, chain.b)]
    residuals: list[list[float | None]] = []
    for arm in logs:
        known = [value for value in arm if value is not None]
        mean, spread = statistics.fmean(known), statistics.pstdev(known)
        if spread < NO_SPREAD:
            return False
        residuals.append([None if value is None else (value - mean) / spread for value in arm])
    baselines, candidates = residuals
    row = [value for pair in zip_longest(baselines, candidates) for value in pair][: len(baselines) + len(candidates)]
    products = [one * two for one, two in pairwise(row) if one is not None and two is not None]
    n = len(products) + 1
    z = NormalDist().inv_cdf(ALTERNATION_ALPHA)
    return math.fsum(products) / n < -1 / n + z / math.sqrt(n)
