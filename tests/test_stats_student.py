"""Student's t against printed tables, closed forms and the finite series."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab.stats import t_quantile, t_tail

TABLE = [
    *((0.80, dof, t) for dof, t in ((1, 1.376), (2, 1.061), (7, 0.896), (30, 0.854))),
    *((0.95, dof, t) for dof, t in ((1, 6.314), (7, 1.895), (9, 1.833), (100, 1.660))),
    *((0.975, dof, t) for dof, t in ((1, 12.706), (2, 4.303), (5, 2.571), (7, 2.365), (10, 2.228), (30, 2.042))),
    *((0.995, dof, t) for dof, t in ((1, 63.657), (4, 4.604), (7, 3.499), (8, 3.355), (15, 2.947), (100, 2.626))),
    *((0.9995, dof, t) for dof, t in ((1, 636.619), (7, 5.408), (30, 3.646))),
]


@pytest.mark.parametrize(("probability", "dof", "t"), TABLE)
def test_printed_tables(probability: float, dof: int, t: float) -> None:
    """The three digits that every statistics book prints."""
    assert t_quantile(probability, dof) == pytest.approx(t, abs=5.1e-4)


@pytest.mark.parametrize("p", [0.5001, 0.6, 0.8, 0.95, 0.975, 0.995, 0.9999, 1 - 1e-9])
def test_closed_forms_of_few_degrees_of_freedom(p: float) -> None:
    """One, two and four degrees of freedom have one, exact to the last digits."""
    q = 1 - p
    assert t_quantile(p, 1) == pytest.approx(1 / math.tan(math.pi * q), rel=1e-11)
    assert t_quantile(p, 2) == pytest.approx((2 * p - 1) / math.sqrt(2 * p * q), rel=1e-11)
    alpha = math.sqrt(4 * p * q)
    four = 2 * math.sqrt(math.cos(math.acos(alpha) / 3) / alpha - 1)
    assert t_quantile(p, 4) == pytest.approx(four, rel=1e-10)


def central(t: float, dof: int) -> float:
    """Return P(|T| <= t) by the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(dof))
    odd = dof % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for i in range(1 + odd, dof, 2):
        total += term
        term *= math.cos(angle) ** 2 * i / (i + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


@given(st.floats(min_value=0, max_value=60), st.integers(min_value=1, max_value=120))
def test_tail_is_that_of_the_finite_series(t: float, dof: int) -> None:
    """Two formulas that share nothing."""
    assert 2 * t_tail(t, dof) == pytest.approx(1 - central(t, dof), abs=1e-12)


@given(st.floats(min_value=1e-12, max_value=1 - 1e-12), st.floats(min_value=1, max_value=200))
def test_quantile_is_the_inverse(p: float, dof: float) -> None:
    """Of any number of degrees of freedom, Welch's fractions too."""
    assert 1 - t_tail(t_quantile(p, dof), dof) == pytest.approx(p, rel=1e-10, abs=1e-14)


def test_far_tails_keep_their_digits() -> None:
    """A p value of 1e-20 is 1e-20 and not what 1 - 1 leaves."""
    assert t_tail(1e20, 1) == pytest.approx(1 / (math.pi * 1e20), rel=1e-12)
    assert t_tail(1e160, 1) > 0
    assert t_tail(math.inf, 7) == pytest.approx(0, abs=1e-300)
    assert t_tail(-2.365, 7) == pytest.approx(1 - t_tail(2.365, 7))
    assert (t_tail(0, 3), t_quantile(0.5, 3)) == (0.5, 0.0)


@pytest.mark.parametrize(("p", "dof"), [(0, 7), (1, 7), (math.nan, 7), (0.5, 0), (0.5, math.nan)])
def test_what_has_no_quantile_is_refused(p: float, dof: float) -> None:
    """ValueError, never NaN."""
    with pytest.raises(ValueError, match="no quantile"):
        t_quantile(p, dof)


@pytest.mark.parametrize(("t", "dof"), [(math.nan, 7), (1.0, 0), (1.0, math.nan)])
def test_what_has_no_tail_is_refused(t: float, dof: float) -> None:
    """The same."""
    with pytest.raises(ValueError, match="no t distribution"):
        t_tail(t, dof)
