"""Precision of a chain: its noise, the standard error of the mean of d, and the number of cycles needed.

The formulas and their sources are in docs/statistics.md. m is the number of valid cycles, and the noise of runs is
their relative standard deviation sigma.
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

ALPHA = 0.01  # error rate of claims of faster or slower, for all cells of a session together
POWER = 0.80  # probability of detecting an effect of the size of the MDE
MOST_CYCLES = 100  # a longer chain is not proposed
NO_SPREAD = 1e-12
LARGEST_LOG = 700.0  # beyond it exp overflows
ALTERNATION_ALPHA = 0.01  # error of the test for runs that alternate


def share(log: float) -> float:
    """Return an effect as a share of the baseline, given the difference of logarithms."""
    return math.expm1(min(log, LARGEST_LOG))


def sigma_bound(values: Sequence[float | None]) -> float | None:
    """Return the upper 95 % bound of sigma, given runs in their order; None for fewer than three values.

    From successive differences without their drift (von Neumann, Kent, Bellinson and Hart, 1941).
    """
    differences = successive(values)
    n = len(differences)
    if n < 2:
        return None
    variance = (n - 1) * statistics.variance(differences) / (2 * n - 2 / n)
    return math.sqrt(variance) * bound_factor(n)


def bound_factor(n: int) -> float:
    """Return the factor from s to its upper bound, for n >= 2 successive differences (`sigma_bound`).

    Neighbouring differences share a run, so that s^2 has nu = (tr M C)^2 / tr (M C)^2 degrees of freedom, where C is
    the covariance of the differences (2 and -1) and M removes their mean (Satterthwaite).
    """
    dof = (2 * n - 2 / n) ** 2 / (6 * n - 2 - 4 / n + 4 / n**2)
    return math.sqrt(dof / chi2_quantile(0.05, dof))


def standard_error(spread: float, valid: int, pairs: int) -> float:
    """Return the standard error of the mean of d, assuming that both arms are equally noisy.

    d_i has variance 1.5 sigma^2, and two neighbours, which share a baseline, have covariance sigma^2 / 4:
    Var(mean d) = sigma^2 (1.5 + pairs / (2 m)) / m and E(s_d^2) = sigma^2 (1.5 - pairs / (2 m (m - 1))).

    `spread` is s_d, `valid` is m (at least 2), `pairs` the number of pairs of successive valid cycles.
    """
    shared = pairs / (2 * valid)
    return spread * math.sqrt((1.5 + shared) / (1.5 - shared / (valid - 1)) / valid)


def shared_error(spread: float, valid: int, pairs: int, triples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the standard error of the mean of d and its degrees of freedom, for any noise of either arm.

    A, the variance of one baseline, comes from `Chain.triples`: the smaller of two estimates, since surroundings that
    wander make the bends larger, but at least a quarter of the bends, since drift makes the product of steps smaller.
    The degrees of freedom are those of Satterthwaite (1946), with 7/9 for all runs that the terms share.
    """
    variance, n = spread**2, len(triples)
    if not triples or not pairs:
        return spread / math.sqrt(valid), valid - 1
    bends = statistics.fmean((x - 2 * y + z) ** 2 for x, y, z in triples) / 6
    steps = -statistics.fmean((y - x) * (z - y) for x, y, z in triples)
    shared = pairs / (2 * (valid - 1)) * max(bends / 4, min(bends, steps))
    of_squares = variance**2 / (valid - 1) + 7 * bends**2 / (9 * n)
    dof = (variance + shared) ** 2 / of_squares if of_squares else 0.0
    # rounded, because t quantiles are cached by degrees of freedom
    return math.sqrt((variance + shared) / valid), max(valid - 1, round(dof, 1))


def rounding(chain: Chain) -> float:
    """Return the standard error that rounding adds to the mean of d.

    Noise of more than half a digit is in the spread of d. With less, all runs of an arm are rounded alike, and no
    number of runs averages that away: a last digit of size u has the standard deviation u / sqrt(12).
    """
    arms = [[value for value in arm if value is not None] for arm in (chain.a, chain.b)]
    # lower bound of the printed decimal places: some of many values does not end in 0
    exponents = [int(Decimal(repr(value)).normalize().as_tuple().exponent) for arm in arms for value in arm]
    digit, variance = 10.0 ** min(0, *exponents), 0.0
    for values in arms:
        if len(values) < 2 or statistics.stdev(values) < digit / 2:
            variance += (digit / statistics.fmean(values)) ** 2 / 12
    return math.sqrt(variance)


def alternates(chain: Chain) -> bool:
    """Return whether successive runs alternate around their arm's mean more than chance explains.

    For independent runs the lag-1 autocorrelation of n residuals, each over its arm's standard deviation, has about the
    mean -1 / n and the variance 1 / n (Kendall and Stuart, 48.2). Drift makes it larger, and hides this.
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


def fewest_cycles(claims: int) -> int:
    """Return the minimum number of valid cycles for a session with this many claims.

    Without an effect any order of the runs is equally likely. All candidates beat (or lose to) all baselines with
    probability 2 / C(2k + 1, k); over all claims this must not exceed ALPHA.
    """
    cycles = 1
    while 2 * claims > ALPHA * math.comb(2 * cycles + 1, cycles):
        cycles += 1
    return cycles


def mde(noise: float, cycles: int, claims: int = 1) -> float:
    """Return the minimum effect, a share, that a chain of at least 2 cycles detects with a probability of 80 %.

    `noise` is the relative sigma from run to run. Each claim is tested at ALPHA / claims, Holm's first step.
    """
    error = standard_error(noise * math.sqrt(1.5), cycles, cycles - 1)
    quantiles = t_quantile(1 - ALPHA / claims / 2, cycles - 1) + t_quantile(POWER, cycles - 1)
    return share(quantiles * error)


def to_see(effect: float, noise: float, claims: int = 1) -> int | None:
    """Return the minimum cycles to detect an effect, a share; None if over 100."""
    return next((cycles for cycles in range(2, MOST_CYCLES + 1) if mde(noise, cycles, claims) <= effect), None)


def cycles_for(burn_ins: Iterable[Sequence[float | None]], effect: float, claims: int = 1) -> int:
    """Return the cycles to detect an effect, a share, given the burn-in's values of each cell: the noisiest decides."""
    bounds = map(sigma_bound, burn_ins)
    return cycles_at(max((math.inf if bound is None else bound for bound in bounds), default=math.inf), effect, claims)


def cycles_at(bound: float, effect: float, claims: int = 1) -> int:
    """Return the cycles of a chain whose noise is at most `bound`, a share (inf if unknown)."""
    least, most = cycle_range(claims)
    return min(max(least, to_see(effect, bound, claims) or most), most)


def cycle_range(claims: int = 1) -> tuple[int, int]:
    """Return the minimum and maximum planned cycles of a chain, in a session with this many claims."""
    least = max(CYCLES[0], fewest_cycles(claims) + EXTRA_CYCLES)  # some may not count
    return least, max(CYCLES[1], least)
