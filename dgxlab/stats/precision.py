"""Precision of a chain: its noise, the standard error of the mean of d, and the number of cycles needed.

docs/statistics.md has the formulas. d are the differences of the valid cycles (`Chain.differences`), m is their number,
s_d their standard deviation. The noise of an arm is sigma, the relative standard deviation from run to run. `claims` is
the number of comparisons that a session tests together. Effects and noise are shares: 0.02 is 2 %.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import pairwise, zip_longest
from statistics import NormalDist

from dgxlab.stats.chain import CYCLES, EXTRA_CYCLES, Chain, successive
from dgxlab.stats.distributions import chi2_quantile, t_quantile

ALPHA = 0.01  # error rate of claims of faster or slower, for all cells of a session together
POWER = 0.80  # probability of detecting an effect of the size of the MDE
MOST_CYCLES = 100  # a longer chain is not proposed
NO_SPREAD = 1e-12  # a standard deviation below this is rounding error: the values are all equal
LARGEST_LOG = 700.0  # beyond it exp overflows
ALTERNATION_ALPHA = 0.01  # error of the test for runs that alternate


def share(log: float) -> float:
    """Return exp(log) - 1: the effect as a share of the baseline, given ln candidate - ln baseline."""
    return math.expm1(min(log, LARGEST_LOG))


def sigma_bound(values: Sequence[float | None]) -> float | None:
    """Return the upper 95 % confidence bound of sigma, given an arm's values in order; None for fewer than three.

    Estimated from the differences of neighbours, less their mean: slow drift does not count as noise (von Neumann,
    Kent, Bellinson and Hart, 1941).
    """
    differences = successive(values)
    n = len(differences)
    if n < 2:
        return None
    variance = (n - 1) * statistics.variance(differences) / (2 * n - 2 / n)
    return math.sqrt(variance) * bound_factor(n)


def bound_factor(n: int) -> float:
    """Return the ratio of the bound that `sigma_bound` returns to its estimate of sigma, given n >= 2 differences.

    Neighbouring differences share a run, so the variance has (tr M C)^2 / tr (M C)^2 degrees of freedom, where C is
    the covariance of the differences (2 and -1) and M removes their mean (Satterthwaite).
    """
    dof = (2 * n - 2 / n) ** 2 / (6 * n - 2 - 4 / n + 4 / n**2)
    return math.sqrt(dof / chi2_quantile(0.05, dof))


def standard_error(spread: float, valid: int, pairs: int) -> float:
    """Return the standard error of the mean of d, assuming that both arms are equally noisy.

    `spread` is s_d, `valid` is m (at least 2), `pairs` the number of pairs of neighbouring cycles that both count.

    d_i has variance 1.5 sigma^2, and two neighbours, which share a baseline, have covariance sigma^2 / 4:
    Var(mean d) = sigma^2 (1.5 + pairs / (2 m)) / m and E(s_d^2) = sigma^2 (1.5 - pairs / (2 m (m - 1))).
    """
    shared = pairs / (2 * valid)
    return spread * math.sqrt((1.5 + shared) / (1.5 - shared / (valid - 1)) / valid)


def shared_error(spread: float, valid: int, pairs: int, triples: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the standard error of the mean of d and its degrees of freedom; the arms may differ in noise.

    Neighbours share a baseline, whose variance A comes from `triples` (`Chain.triples`). A is the smaller of two
    estimates: a wandering level makes the first (`bends`) too large, steady drift the second (`steps`) too small. So A
    is at least a quarter of the first. The degrees of freedom are Satterthwaite's (1946); 7/9 allows for shared runs.

    `spread`, `valid` and `pairs` are those of `standard_error`.
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
    """Return the standard error that the rounding of printed values adds to the mean of d.

    d is the log of candidate by baseline in a cycle. An arm with noise above half a unit u of the last printed digit
    adds nothing: its noise includes rounding. All runs of any other arm may be rounded alike, which no number of runs
    averages away; it adds u / (its mean * sqrt(12)). The two arms' errors are added as squares.
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
    """Return whether successive runs lie above and below their arm's mean in turn, more often than by chance (1 %).

    For n independent runs the lag-1 autocorrelation of standardised residuals has a mean of about -1 / n and a variance
    of about 1 / n (Kendall and Stuart, 48.2). Drift raises it, and can hide alternation.
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
    """Return the minimum number k of valid cycles for a session that makes this many claims.

    Without an effect any order of the runs is equally likely. All candidates beat (or lose to) all baselines with
    probability 2 / C(2k + 1, k); over all claims this must not exceed ALPHA.
    """
    cycles = 1
    while 2 * claims > ALPHA * math.comb(2 * cycles + 1, cycles):
        cycles += 1
    return cycles


def mde(noise: float, cycles: int, claims: int = 1) -> float:
    """Return the minimum detectable effect of a chain of at least 2 cycles: it is detected with a probability of 80 %.

    `noise` is sigma. Each claim is tested at ALPHA / claims, Holm's first step.
    """
    error = standard_error(noise * math.sqrt(1.5), cycles, cycles - 1)
    quantiles = t_quantile(1 - ALPHA / claims / 2, cycles - 1) + t_quantile(POWER, cycles - 1)
    return share(quantiles * error)


def cycles_to_detect(effect: float, noise: float, claims: int = 1) -> int | None:
    """Return the smallest number of cycles whose `mde` is at most `effect`; None if over MOST_CYCLES."""
    lengths = range(2, MOST_CYCLES + 1)
    index = bisect_left(lengths, True, key=lambda cycles: mde(noise, cycles, claims) <= effect)
    return lengths[index] if index < len(lengths) else None


def planned_cycles(bounds: Iterable[float | None], effect: float, claims: int = 1) -> int:
    """Return how many cycles to plan for detecting an effect, a share of the baseline; at most `cycle_range` allows.

    `bounds` has the `sigma_bound` of each comparison. The largest decides; None, an unknown one, is larger than all.
    `claims` is the number of comparisons in the session, whose verdicts together may be wrong in 1 %.
    """
    least, most = cycle_range(claims)
    noise = max((math.inf if bound is None else bound for bound in bounds), default=math.inf)
    return min(max(least, cycles_to_detect(effect, noise, claims) or most), most)


def cycle_range(claims: int = 1) -> tuple[int, int]:
    """Return the minimum and maximum number of cycles to plan, in a session with this many claims."""
    least = max(CYCLES[0], fewest_cycles(claims) + EXTRA_CYCLES)  # some may not count
    return least, max(CYCLES[1], least)
