"""Median, MAD and noise: what they are, and what they refuse."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab import stats

FINITE = st.floats(min_value=-1e12, max_value=1e12, allow_nan=False)


def test_median_of_odd_and_even() -> None:
    """The middle value, or the mean of the two in the middle, in any order."""
    assert stats.median([3.0, 1.0, 2.0]) == 2.0
    assert stats.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert stats.median([7.0]) == 7.0


def test_mad_is_scaled_and_ignores_a_wild_value() -> None:
    """Five repetitions of which the first is cold: the spread is that of the other four."""
    assert stats.mad([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.4826)
    assert stats.mad([32003.2, 36858.7, 37972.0, 37879.8, 37805.8]) == pytest.approx(1.4826 * 166.2, rel=1e-6)


def test_mad_estimates_sigma() -> None:
    """On normal values it is close to the standard deviation."""
    source = random.Random(1)  # noqa: S311 - not for secrets
    assert stats.mad([source.gauss(100.0, 2.0) for _ in range(20_000)]) == pytest.approx(2.0, rel=0.03)


def test_noise_is_mad_over_median() -> None:
    """Relative to the size of the median, whatever its sign."""
    assert stats.noise([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.4826 / 3)
    assert stats.noise([-1.0, -2.0, -3.0]) == pytest.approx(1.4826 / 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("function", [stats.median, stats.mad, stats.noise])
def test_what_is_not_finite_is_refused(function: object, bad: float) -> None:
    """NaN or infinity in, ValueError out: never a number."""
    with pytest.raises(ValueError, match="not a measurement"):
        function([1.0, bad, 2.0])  # type: ignore[operator]


def test_too_few_values_are_refused() -> None:
    """No median of nothing, no spread of one value, no relative spread around 0."""
    with pytest.raises(ValueError, match="no values"):
        stats.median([])
    with pytest.raises(ValueError, match="at least two"):
        stats.mad([1.0])
    with pytest.raises(ValueError, match="around 0"):
        stats.noise([-1.0, 0.0, 1.0])


@given(st.lists(FINITE, min_size=2, max_size=30), st.floats(min_value=0.001, max_value=1000))
def test_scaling_the_values_scales_the_spread(values: list[float], factor: float) -> None:
    """A unit change is no change of noise; shifting leaves the spread alone; it is never negative."""
    spread = stats.mad(values)
    assert spread >= 0
    assert stats.mad([value * factor for value in values]) == pytest.approx(spread * factor, rel=1e-6, abs=1e-3)
