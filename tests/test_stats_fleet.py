"""Several devices of one kind: the verdict over them, their spread, and those that stand out."""

import math
import random

import pytest

from dgxlab.stats import OUTLIER, Verdict, estimate, outliers, pool, spread


def test_a_known_meta_analysis() -> None:
    """By hand: equal errors leave the plain mean, and s / sqrt(n) as its error with n - 1 degrees of freedom."""
    effects = [0.02, 0.03, 0.04, 0.05]
    (pooled,) = pool([[(effect, 0.001) for effect in effects]], ["higher"])
    assert pooled.devices == 4
    assert pooled.effect == pytest.approx(math.expm1(0.035))
    half = 5.840909 * math.sqrt(sum((e - 0.035) ** 2 for e in effects) / 3 / 4)  # t of 3 degrees at 99.5 %
    assert pooled.ci
    assert [math.log1p(bound) for bound in pooled.ci] == pytest.approx([0.035 - half, 0.035 + half], rel=1e-6)
    assert pooled.between == pytest.approx(math.sqrt(sum((e - 0.035) ** 2 for e in effects) / 3 - 0.001**2), rel=1e-6)
    assert pooled.verdict == "inconclusive"  # 3.5 % on average, and four devices that differ too much


@pytest.mark.parametrize(
    ("shift", "better", "word"),
    [(0.05, "higher", "faster"), (0.05, "lower", "slower"), (-0.05, "higher", "slower"), (0.0, "higher", "same")],
)
def test_verdicts_over_devices(shift: float, better: str, word: str) -> None:
    devices = [(shift + 0.0005 * (-1) ** i, 0.001) for i in range(12)]
    assert pool([devices], [better])[0].verdict == word


def test_one_device_is_no_kind() -> None:
    alone, several = pool([[(0.1, 0.001)], [(0.1, 0.001)] * 3], ["higher", "higher"])
    assert (alone.verdict, alone.devices, alone.effect) == ("invalid", 1, None)
    assert several.verdict == "faster"


def test_many_cells_are_corrected_together() -> None:
    cell = [(0.012 + 0.003 * (-1) ** i, 0.001) for i in range(4)]
    (alone,) = pool([cell], ["higher"])
    together = pool([cell] * 20, ["higher"] * 20)
    assert all(each.confidence > alone.confidence for each in together)


def test_the_interval_keeps_its_level() -> None:
    """5 % between devices, eight of them; the figures over many fleets are in `python -m bench`."""
    noise, covered, trials = random.Random(7), 0, 2000  # noqa: S311
    for _ in range(trials):
        devices = [(noise.gauss(noise.gauss(0.0, 0.05), 0.002), 0.002) for _ in range(8)]
        (pooled,) = pool([devices], ["higher"])
        assert pooled.ci
        covered += pooled.ci[0] <= 0 <= pooled.ci[1]
    assert 0.98 <= covered / trials <= 0.998


def test_a_device_that_stands_out() -> None:
    values = [100.0, 101.0, 99.5, 100.5, 80.0]
    assert outliers(values) == [4]
    assert outliers(values[:3]) == []
    assert outliers([5.0] * 6) == []
    assert outliers([float(i) for i in range(9)]) == []
    assert OUTLIER > 3


def test_spread_is_a_share() -> None:
    assert spread([100.0]) is None
    assert spread([100.0, 0.0]) is None
    assert spread([100.0, 110.0]) == pytest.approx(math.log(1.1) / math.sqrt(2))


def test_the_estimate_of_a_chain() -> None:
    half = 3.249836 * 0.003  # t of 9 degrees at 99.5 %
    ends = (math.expm1(0.02 - half), math.expm1(0.02 + half))
    chain = Verdict("faster", 10, (), effect=math.expm1(0.02), ci=ends, valid_cycles=10)
    assert estimate(chain) == pytest.approx((0.02, 0.003), rel=1e-6)
    assert estimate(Verdict("invalid", 10, ())) is None
