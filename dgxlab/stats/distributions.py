"""Medians, and Student's t and the chi-squared distribution without scipy, whose import takes half a second."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

MAD_SCALE = 1.4826  # 1 / quantile(0.75): the MAD of normally distributed values then estimates their deviation
TINY = 1e-300  # replaces a 0 that Lentz's method would divide by


def median(values: Sequence[float]) -> float:
    """Return the median; raises ValueError if there are no values, or if any is NaN or infinite."""
    if not values:
        raise ValueError("no values")
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a measurement")
    return statistics.median(values)


def mad(values: Sequence[float]) -> float:
    """Return the median absolute deviation times MAD_SCALE, which estimates the standard deviation despite outliers.

    Raises ValueError for fewer than two values, or if any is NaN or infinite.
    """
    if len(values) < 2:
        raise ValueError(f"a spread needs at least two values, not {len(values)}")
    middle = median(values)
    return MAD_SCALE * statistics.median([abs(value - middle) for value in values])


def t_tail(t: float, dof: float) -> float:
    """Return P(T > t) for Student's t, with a relative error of about 1e-14 (Abramowitz and Stegun, 26.7.1).

    Raises ValueError if t is NaN or `dof` is not above 0.
    """
    if math.isnan(t) or not dof > 0:
        raise ValueError(f"there is no t distribution with {dof} degrees of freedom at {t}")
    if t < 0:
        return 1 - t_tail(-t, dof)
    square = min(t, 1e150) ** 2
    return _incomplete_beta(dof / 2, 0.5, dof / (dof + square), square / (dof + square)) / 2


@lru_cache(maxsize=4096)
def t_quantile(probability: float, dof: float) -> float:
    """Return the t with P(T <= t) = `probability`, with a relative error of about 1e-13.

    Raises ValueError if the probability is not inside (0, 1), or `dof` is below 1.
    """
    if not (0 < probability < 1 and dof >= 1):
        raise ValueError(f"no quantile {probability} of the t distribution with {dof} degrees of freedom")
    if probability < 0.5:
        return -t_quantile(1 - probability, dof)
    log_scale = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    # Newton's method: the normal quantile is left of the root, where the tail is convex, so every step stays there
    t = NormalDist().inv_cdf(probability)
    for _ in range(200):
        density = math.exp(log_scale - (dof + 1) / 2 * math.log1p(t * t / dof))
        step = (t_tail(t, dof) - (1 - probability)) / density
        t += step
        if step <= 1e-15 * t:
            break
    return t


@lru_cache(maxsize=4096)
def chi2_quantile(probability: float, dof: float) -> float:
    """Return the x with P(X <= x) = `probability` for chi-squared, with a relative error of about 1e-12.

    Raises ValueError if the probability is not inside (0, 1), or `dof` is not above 0.
    """
    if not (0 < probability < 1 and dof > 0):
        raise ValueError(f"no quantile {probability} of the chi-squared distribution with {dof} degrees of freedom")
    low, high = 0.0, dof
    while _lower_gamma(dof / 2, high / 2) < probability:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _lower_gamma(dof / 2, middle / 2) < probability else (low, middle)
    return high


def _lower_gamma(a: float, x: float) -> float:
    """Return the regularised P(a, x) by its series (DLMF 8.11.4)."""
    term, total, n = 1.0, 1.0, 0
    while term > 1e-17 * total:
        n += 1
        term *= x / (a + n)
        total += term
    return total * math.exp(a * math.log(x) - x - math.lgamma(a + 1)) if x > 0 else 0.0


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """Return the regularised I_x(a, b); y is 1 - x, given because 1 - x loses digits near 1."""
    if x <= 0 or y <= 0:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y))
    if x < (a + 1) / (a + b + 2):  # where the fraction converges fast
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, y) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of I_x(a, b) by Lentz's method (DLMF 8.17.22; Numerical Recipes, 6.4)."""

    def nonzero(value: float) -> float:
        return value if abs(value) > TINY else TINY

    c, d = 1.0, 1 / nonzero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            c = nonzero(1 + term / c)
            d = 1 / nonzero(1 + term * d)
            value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value
