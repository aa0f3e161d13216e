"""Several devices of one kind: what holds for the kind, how far its devices are apart, which of them stand out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dgxlab.stats.distributions import mad, median, t_quantile
from dgxlab.stats.precision import ALPHA, NO_SPREAD, share
from dgxlab.stats.verdict import SAME_ALPHA, Mean, Verdict, holm

OUTLIER = 3.5  # distance from the median, in scaled MADs, from which a device stands out (Iglewicz and Hoaglin, 1993)
FEWEST_DEVICES = 4  # with fewer, no device is told apart from the others


@dataclass(frozen=True)
class Pooled:
    """The effect of a change on a kind of device, from the effects on some devices of it."""

    verdict: str  # faster, slower, same or inconclusive; invalid with fewer than two devices
    devices: int
    effect: float | None = None  # a share of the baseline, as are the following
    ci: tuple[float, float] | None = None  # at `confidence`
    between: float | None = None  # standard deviation of the effect between devices
    confidence: float = 1 - ALPHA


def outliers(values: Sequence[float]) -> list[int]:
    """Return the indices of values that are OUTLIER scaled MADs or more from the median; [] for few or equal ones."""
    if len(values) < FEWEST_DEVICES:
        return []
    middle, scale = median(values), mad(values)
    return [i for i, value in enumerate(values) if scale > 0 and abs(value - middle) >= OUTLIER * scale]


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation of the values' logarithms, a share; None for fewer than two, or with a zero."""
    return statistics.stdev([math.log(value) for value in values]) if len(values) > 1 and min(values) > 0 else None


def estimate(verdict: Verdict) -> tuple[float, float] | None:
    """Return a chain's mean of ln candidate - ln baseline and its standard error, None if it has no interval.

    The error is that of the interval, with rounding; its degrees of freedom are about one fewer than the cycles.
    """
    if verdict.effect is None or verdict.ci is None or verdict.valid_cycles < 2:
        return None
    low, high = (math.log1p(bound) for bound in verdict.ci)
    quantile = t_quantile((1 + verdict.confidence) / 2, verdict.valid_cycles - 1)
    return math.log1p(verdict.effect), (high - low) / 2 / quantile


def pool(cells: Sequence[Sequence[tuple[float, float]]], better: Sequence[str]) -> list[Pooled]:
    """Return the verdict of each cell over the devices that measured it, corrected for the number of cells.

    Effects differ between devices (random effects): their variance is estimated by DerSimonian and Laird (Controlled
    Clinical Trials 7, 1986), the error of their mean by Hartung and Knapp (Statistics in Medicine 20, 2001), whose
    interval has Student's t with one degree of freedom fewer than devices and keeps its level with few of them. Where
    devices agree better than their errors by chance, the errors count (Rover, Knapp and Friede, BMC Medical Research
    Methodology 15, 2015).

    Args:
        cells: For each cell and device, the mean of ln candidate - ln baseline and its standard error.
        better: For each cell, `higher` or `lower`.
    """
    means = [_mean(of_cell) if len(of_cell) > 1 else None for of_cell in cells]
    known = [mean for mean in means if mean]
    factors = zip(holm([m.p for m in known], ALPHA), holm([m.p_same for m in known], SAME_ALPHA), strict=True)
    return [
        mean.judged(*next(factors), better=which) if mean else Pooled("invalid", len(of_cell))
        for mean, of_cell, which in zip(means, cells, better, strict=True)
    ]


@dataclass(frozen=True)
class _Mean(Mean):
    between: float
    devices: int

    def judged(self, factor: int, same_factor: int, better: str) -> Pooled:
        half = self.half(ALPHA / factor)
        low, high = self.mean - half, self.mean + half
        word = "same" if self.p_same * same_factor <= SAME_ALPHA else "inconclusive"
        if low > 0 or high < 0:
            word = "faster" if (low > 0) == (better == "higher") else "slower"
        ci = (share(low), share(high))
        return Pooled(word, self.devices, share(self.mean), ci, self.between, 1 - ALPHA / factor)


def _mean(devices: Sequence[tuple[float, float]]) -> _Mean:
    effects = [effect for effect, _ in devices]
    weights = [1 / max(error, NO_SPREAD) ** 2 for _, error in devices]
    total, dof = sum(weights), len(devices) - 1
    fixed = sum(map(float.__mul__, weights, effects)) / total
    q = sum(weight * (effect - fixed) ** 2 for weight, effect in zip(weights, effects, strict=True))
    variance = max(0.0, (q - dof) / (total - sum(weight**2 for weight in weights) / total))
    weights = [1 / (max(error, NO_SPREAD) ** 2 + variance) for _, error in devices]
    total = sum(weights)
    mean = sum(map(float.__mul__, weights, effects)) / total
    scatter = sum(weight * (effect - mean) ** 2 for weight, effect in zip(weights, effects, strict=True))
    return _Mean(mean, math.sqrt(max(1.0, scatter / dof) / total), dof, math.sqrt(variance), len(devices))
