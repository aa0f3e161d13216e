"""Medians and quantiles: printed tables, closed forms, the finite series, and what is refused."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab.stats.distributions import chi2_quantile, mad, median, t_quantile, t_tail


def test_mad_is_scaled_and_ignores_a_wild_value() -> None:
    assert mad([32003.2, 36858.7, 37972.0, 37879.8, 37805.8]) == pytest.approx(1.4826 * 166.2, rel=1e-6)
    source = Random(1)  # noqa: S311 - not for secrets
    assert mad([source.gauss(100.0, 2.0) for _ in range(20_000)]) == pytest.approx(2.0, rel=0.03)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        *(
            (function, ([1.0, bad, 2.0],), "not a measurement")
            for function in (median, mad)
            for bad in (math.nan, math.inf)
        ),
        (median, ([],), "no values"),
        (mad, ([1.0],), "at least two"),
        *((t_quantile, bad, "no quantile") for bad in ((0, 7), (1, 7), (math.nan, 7), (0.5, 0), (0.5, math.nan))),
        *((t_tail, bad, "no t distribution") for bad in ((math.nan, 7), (1.0, 0), (1.0, math.nan))),
        *((chi2_quantile, bad, "no quantile") for bad in ((0, 7), (1, 7), (0.5, 0))),
    ],
)
def test_what_has_no_answer_is_refused(function: Callable[..., float], arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        function(*arguments)


def test_printed_tables() -> None:
    for probability, dof, t in ((0.80, 30, 0.854), (0.975, 7, 2.365), (0.995, 100, 2.626), (0.9995, 1, 636.619)):
        assert t_quantile(probability, dof) == pytest.approx(t, abs=5.1e-4)
    for probability, dof, x in ((0.05, 1, 0.00393), (0.05, 7, 2.167), (0.95, 10, 18.307)):
        assert chi2_quantile(probability, dof) == pytest.approx(x, rel=1e-3)


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
    assert 2 * t_tail(t, dof) == pytest.approx(1 - central(t, dof), abs=1e-12)


@given(st.floats(min_value=1e-12, max_value=1 - 1e-12), st.floats(min_value=1, max_value=200))
def test_quantile_is_the_inverse(p: float, dof: float) -> None:
    assert 1 - t_tail(t_quantile(p, dof), dof) == pytest.approx(p, rel=1e-10, abs=1e-14)


def test_far_tails_keep_their_digits() -> None:
    assert t_tail(1e20, 1) == pytest.approx(1 / (math.pi * 1e20), rel=1e-12)
    assert t_tail(1e160, 1) > 0
    assert t_tail(math.inf, 7) == pytest.approx(0, abs=1e-300)
    assert t_tail(-2.365, 7) == pytest.approx(1 - t_tail(2.365, 7))
    assert (t_tail(0, 3), t_quantile(0.5, 3)) == (0.5, 0.0)
