"""The standard error and its degrees of freedom: against every run's weight in every difference."""

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab import stats
from dgxlab.stats import Chain
from dgxlab.stats.distributions import t_quantile
from dgxlab.stats.precision import alternates, shared_error, standard_error


def weights(*run_weights: tuple[int, float], runs: int) -> list[float]:
    """Return the weights of the runs a_-1 a_0 b_1 a_1 ... in a contrast."""
    row = [0.0] * runs
    for run, weight in run_weights:
        row[run] = weight
    return row


def differences(cycles: int) -> list[list[float]]:
    """Return the weights of the runs in each d_i."""
    runs = 2 * cycles + 2
    return [weights((2 * i - 1, -0.5), (2 * i, 1.0), (2 * i + 1, -0.5), runs=runs) for i in range(1, cycles + 1)]


@given(st.lists(st.booleans(), min_size=2, max_size=14).filter(lambda mask: sum(mask) >= 2))
def test_standard_error_is_exact_for_any_gaps(valid: list[bool]) -> None:
    m = sum(valid)
    rows = [row for row, counts in zip(differences(len(valid)), valid, strict=True) if counts]
    mean = [sum(column) / m for column in zip(*rows, strict=True)]
    of_mean = sum(w * w for w in mean)
    of_spread = sum((w - c) ** 2 for row in rows for w, c in zip(row, mean, strict=True)) / (m - 1)
    pairs = sum(left and right for left, right in pairwise(valid))
    assert standard_error(1.0, m, pairs) == pytest.approx(math.sqrt(of_mean / of_spread), rel=1e-12)


@pytest.mark.parametrize(("cycle", "pairs"), [(1, 6), (4, 5), (8, 6)])
def test_protocol_2_takes_both_arms_for_equally_noisy(cycle: int, pairs: int) -> None:
    source = Random(1)  # noqa: S311 - not for secrets
    a, b = ([100 * math.exp(source.gauss(0, 0.006)) for _ in range(runs)] for runs in (9, 8))
    verdict = stats.judge(Chain(a, b, flaws={cycle: "x"}, protocol=2))
    assert verdict.ci is not None
    half = math.log1p(verdict.ci[1]) - math.log1p(verdict.effect or 0)
    error = t_quantile(0.995, 6) * standard_error(verdict.spread or 0, 7, pairs)
    assert half == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize(("noise_a", "noise_b"), [(0.03, 0.003), (0.003, 0.03)])
def test_a_noisy_baseline_is_known_from_itself(noise_a: float, noise_b: float) -> None:
    source = Random(12)  # noqa: S311 - not for secrets
    means, errors = [], []
    for _ in range(2000):
        a = [math.exp(source.gauss(0, noise_a)) for _ in range(9)]
        chain = Chain(a, [math.exp(source.gauss(0, noise_b)) for _ in range(8)], drift_limit=1.0)
        verdict = stats.judge(chain)
        means.append(math.log1p(verdict.effect or 0))
        errors.append(shared_error(verdict.spread or 0, 8, 7, chain.triples(range(1, 9)))[0])
    of_mean, of_errors = (math.fsum(x * x for x in values) / 2000 for values in (means, errors))
    assert of_errors == pytest.approx(of_mean, rel=0.1)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("cycles", [5, 8, 24])
def test_degrees_of_freedom_are_those_of_the_quadratic_form(cycles: int, ratio: float) -> None:
    """(tr Q S)^2 / tr (Q S)^2, where s_d^2 + A / 2 is x Q x and S the variances of the runs x.

    The formula is given the s_d^2 and bends that are expected, and may give fewer where there are few runs.
    """
    runs = 2 * cycles + 2
    variances = [ratio if run == 0 or run % 2 else 1.0 for run in range(runs)]
    d = differences(cycles)
    mean = [sum(column) / cycles for column in zip(*d, strict=True)]
    bends = [weights((max(0, i - 2), 1.0), (i, -2.0), (i + 2, 1.0), runs=runs) for i in range(1, runs - 2, 2)]
    rows = [([w - c for w, c in zip(row, mean, strict=True)], 1 / (cycles - 1)) for row in d]
    rows += [(row, 1 / 12 / len(bends)) for row in bends]
    q = [[sum(share * row[i] * row[j] for row, share in rows) for j in range(runs)] for i in range(runs)]
    trace = sum(q[i][i] * variances[i] for i in range(runs))
    square = sum(q[i][j] ** 2 * variances[i] * variances[j] for i in range(runs) for j in range(runs))
    bent = [0.0, math.sqrt(1.5 * ratio), 0.0]  # (x - 2 y + z)^2 is 6 A
    _, dof = shared_error(math.sqrt(trace - ratio / 2), cycles, cycles - 1, [bent] * cycles)
    assert 0.8 * trace**2 / square <= dof <= 1.03 * trace**2 / square
    assert dof >= cycles - 1


def test_runs_that_alternate_are_told() -> None:
    drifting = Chain([100, 98, 96, 94, 92, 90, 88, 86, 84], [99, 97, 95, 93, 91, 89, 87, 85])
    assert not alternates(drifting)
    assert not alternates(replace(drifting, b=[100] * 8))
    source, rates = Random(6), []  # noqa: S311 - not for secrets
    for phi in (0.0, -0.8):
        count = 0
        for _ in range(1000):
            noise = [source.gauss(0, 0.01)]
            for _ in range(48):
                noise.append(phi * noise[-1] + source.gauss(0, 0.01))
            values = [math.exp(each) for each in noise]
            chain = Chain(values[::2], values[1::2])
            count += alternates(chain)
        rates.append(count / 1000)
    assert rates[0] < 0.015
    assert rates[1] > 0.95
    assert any(getattr(reason, "code", None) is stats.VerdictCode.ALTERNATES for reason in stats.judge(chain).reasons)
