"""How precisely a chain tells an effect: its noise, the standard error of the mean of d, and how many cycles it needs.

`chain` has d_i; m is the number of valid cycles and k that of all. The noise of runs is their relative standard
deviation sigma.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import pairwise, zip_longest
from statistics import NormalDist

from dgxlab.stats.chain import CYCLES, EXTRA_CYCLES, Chain, successive
from dgxlab.stats.distributions import chi2_quantile, t_quantile

ALPHA = 0.01
"""Error that a claim of faster or slower may have; in a session of several cells, all of them together."""

POWER = 0.80
"""Chance with which an effect of the size of the MDE is found."""

MOST_CYCLES = 100
"""A longer chain is not proposed."""

NO_SPREAD = 1e-12

LARGEST_LOG = 700.0
"""Beyond it exp overflows."""

ALTERNATION_ALPHA = 0.01
"""Error of the test for runs that alternate, which the standard error does not know of."""


def share(log: float) -> float:
    """Return an effect as a share of the baseline, given the difference of logarithms."""
    return math.expm1(min(log, LARGEST_LOG))


def sigma_bound(values: Sequence[float | None]) -> float | None:
    """Return the upper 95 % bound of the relative sigma of single runs; None for fewer than three values.

    With n successive differences, of runs that vary independently with sigma,

        s^2 = sum (difference - mean difference)^2 / (2 n - 2 / n)

    has the mean sigma^2 (von Neumann, Kent, Bellinson and Hart, 1941, with the drift removed). Neighbouring differences
    share a run, so that s^2 has fewer degrees of freedom than n - 1: nu = (tr M C)^2 / tr (M C)^2, where C is the
    covariance of the differences (2 and -1) and M removes their mean (Satterthwaite). The bound is
    s sqrt(nu / chi2_0.05(nu)), s times `bound_factor`.

    Args:
        values: In the order in which they ran; None where a run gave none.
    """
    differences = successive(values)
    n = len(differences)
    if n < 2:
        return None
    variance = (n - 1) * statistics.variance(differences) / (2 * n - 2 / n)
    return math.sqrt(variance) * bound_factor(n)


def bound_factor(n: int) -> float:
    """Return how many times as large as s its bound is, of n successive differences, at least 2 (`sigma_bound`)."""
    dof = (2 * n - 2 / n) ** 2 / (6 * n - 2 - 4 / n + 4 / n**2)
    return math.sqrt(dof / chi2_quantile(0.05, dof))


def standard_error(spread: float, valid: int, pairs: int) -> float:
    """Return the standard error of the mean of d that is expected where both arms are equally noisy.

    Runs vary independently with sigma. d_i has variance 1.5 sigma^2, and two neighbours that share a baseline have
    covariance sigma^2 / 4. With m valid cycles, `pairs` of which follow one another directly,

        Var(mean d) = sigma^2 (1.5 + pairs / (2 m)) / m
        E(s_d^2)    = sigma^2 (1.5 - pairs / (2 m (m - 1)))

    and SE = s_d / sqrt(m) times the root of the brackets' quotient.

    Args:
        spread: s_d, sample standard deviation of the valid d.
        valid: m, at least 2.
        pairs: From 0 to m - 1: an invalid cycle inside takes two away, one at an end takes one.
    """
    shared = pairs / (2 * valid)
    return spread * math.sqrt((1.5 + shared) / (1.5 - shared / (valid - 1)) / valid)


def shared_error(spread: float, valid: int, pairs: int, triples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the standard error of the mean of d, whatever the noise of either arm, and its degrees of freedom.

    Two neighbours d_i and d_{i+1} share the baseline a_i. Of m valid cycles, `pairs` of which follow one another
    directly, where single runs have the variances A (baselines) and B (candidates):

        Var(mean d) = (B + A / 2 + pairs A / (2 m)) / m
        E(s_d^2)    =  B + A / 2 - pairs A / (2 m (m - 1))

    so that Var(mean d) is (E(s_d^2) + h A) / m with h = pairs / (2 (m - 1)), which is 1/2 in a whole chain.

    A comes from baselines x, y, z that follow one another: the square of the bend x - 2 y + z has the mean 6 A, and the
    product of the steps (y - x)(z - y) has the mean -A. Surroundings that wander make the bends larger and leave the
    product as it is, so that A is the smaller of the two. Drift makes the product smaller, so that A is at least a
    quarter of what the bends say.

    The degrees of freedom are those of Satterthwaite (1946), with the A of the n bends:

        nu = (s_d^2 + h A)^2 / (s_d^4 / (m - 1) + 7 A^2 / (9 n))

    where 7/9 is 35/72 as neighbouring bends share runs, 1/8 as neighbouring d do, and 1/6 as bends share runs with d.
    That is up to 1.32 (m - 1) where the arms are equally noisy, and m - 1 where all noise is of one arm; never less.

    Args:
        spread: As for `standard_error`, and so are `valid` and `pairs`.
        triples: Of `Chain.triples`.
    """
    variance, n = spread**2, len(triples)
    if not triples or not pairs:
        return spread / math.sqrt(valid), valid - 1
    bends = statistics.fmean((x - 2 * y + z) ** 2 for x, y, z in triples) / 6
    steps = -statistics.fmean((y - x) * (z - y) for x, y, z in triples)
    shared = pairs / (2 * (valid - 1)) * max(bends / 4, min(bends, steps))
    of_squares = variance**2 / (valid - 1) + 7 * bends**2 / (9 * n)
    dof = (variance + shared) ** 2 / of_squares if of_squares else 0.0
    # rounded, as t quantiles are kept by their degrees of freedom
    return math.sqrt((variance + shared) / valid), max(valid - 1, round(dof, 1))


def rounding(chain: Chain) -> float:
    """Return the standard error that rounding adds to the mean of d.

    A value rounded to a last digit of size u is uniform within u: sigma u / sqrt(12). Noise of more than half a digit
    from run to run makes these errors independent, and the spread of d holds them. With less noise, all runs of an arm
    are rounded alike, and no number of runs averages that away.
    """
    arms = [[value for value in arm if value is not None] for arm in (chain.a, chain.b)]
    # the decimal places that values were printed with, at least: of many values one ends in no 0
    exponents = [int(Decimal(repr(value)).normalize().as_tuple().exponent) for arm in arms for value in arm]
    digit, variance = 10.0 ** min(0, *exponents), 0.0
    for values in arms:
        if len(values) < 2 or statistics.stdev(values) < digit / 2:
            variance += (digit / statistics.fmean(values)) ** 2 / 12
    return math.sqrt(variance)


def alternates(chain: Chain) -> bool:
    """Return whether runs that follow one another lie on opposite sides of their arm's mean more than chance explains.

    The lag-1 autocorrelation of n residuals, each over its arm's own standard deviation, has for independent runs the
    mean -1 / n and the variance 1 / n, about (Kendall and Stuart, 48.2). Drift makes it larger, and hides this.
    """
    residuals: list[list[float | None]] = []
    for arm in (chain.a, chain.b):
        logs = [math.log(value) if value else None for value in arm]
        known = [log for log in logs if log is not None]
        mean, spread = statistics.fmean(known), statistics.pstdev(known)
        if spread < NO_SPREAD:
            return False
        residuals.append([None if log is None else (log - mean) / spread for log in logs])
    row = [residual for pair in zip_longest(*residuals) for residual in pair]  # None after the last baseline
    products = [left * right for left, right in pairwise(row) if left is not None and right is not None]
    n = len(products) + 1
    z = NormalDist().inv_cdf(ALTERNATION_ALPHA)
    return math.fsum(products) / n < -1 / n + z / math.sqrt(n)


# -- before the session ------------------------------------------------------------------------------------------------


def fewest_cycles(claims: int) -> int:
    """Return with how many valid cycles at least a session may make that many claims.

    The runs of a chain without an effect lie in any order: among them, with chance 2 / C(2k + 1, k), the one in which
    all candidates beat all baselines, or lose to all. (That matters where launches fall into modes, within which they
    hardly differ.) This chance over all claims must not exceed ALPHA.
    """
    cycles = 1
    while 2 * claims > ALPHA * math.comb(2 * cycles + 1, cycles):
        cycles += 1
    return cycles


def mde(noise: float, cycles: int, claims: int = 1) -> float:
    """Return the smallest effect that a chain will find with a chance of 80 %, as a share of the baseline.

    The formula is that of a verdict's own MDE, with the expected spread of d, and with the fewest degrees of freedom
    that `shared_error` may give.

    Args:
        noise: Relative sigma from run to run.
        cycles: Of the chain, at least 2.
        claims: How many the session makes; Holm's first step holds one to ALPHA over all of them.
    """
    error = standard_error(noise * math.sqrt(1.5), cycles, cycles - 1)
    quantiles = t_quantile(1 - ALPHA / claims / 2, cycles - 1) + t_quantile(POWER, cycles - 1)
    return share(quantiles * error)


def to_see(effect: float, noise: float, claims: int = 1) -> int | None:
    """Return the fewest cycles with which a chain sees an effect, a share; None if 100 are too few."""
    return next((cycles for cycles in range(2, MOST_CYCLES + 1) if mde(noise, cycles, claims) <= effect), None)


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
    return cycles_at(max((math.inf if bound is None else bound for bound in bounds), default=math.inf), effect, claims)


def cycles_at(bound: float, effect: float, claims: int = 1) -> int:
    """Return how many cycles a chain is to have whose noise is at most `bound`, a share; inf where it is not known."""
    least, most = cycle_range(claims)
    return min(max(least, to_see(effect, bound, claims) or most), most)


def cycle_range(claims: int = 1) -> tuple[int, int]:
    """Return the fewest and the most cycles that a chain may be given, in a session of so many claims."""
    least = max(CYCLES[0], fewest_cycles(claims) + EXTRA_CYCLES)  # some may not count
    return least, max(CYCLES[1], least)
