"""Figures of fleets: the level of the verdict over devices, and the report of a large fleet."""

from __future__ import annotations

import math
from random import Random

from bench.figure import Figure, rate_error
from dgxlab import stats

DEVICES = (4, 8, 16, 64)
BETWEEN = 0.05
"""Standard deviation of the effect between devices; smaller ones are simulated too."""
ERROR = 0.002
"""Median standard error of a device's own effect; devices differ in it by a factor of about two."""


def fleet_coverage(quick: bool) -> Figure:
    """Count how often the interval over a simulated fleet holds the true effect, which is 0."""
    fleets = 200 if quick else 20_000
    rates = {}
    for devices in DEVICES:
        for between in (BETWEEN, BETWEEN / 10, 0.0):
            random = Random(f"{devices} {between}")  # noqa: S311 - not for secrets
            wrong = sum(_judged(random, devices, between) in ("faster", "slower") for _ in range(fleets))
            rates[f"{devices} devices, {100 * between:g} % apart"] = 100 - 100 * wrong / fleets
    apart = [rate for name, rate in rates.items() if f" {100 * BETWEEN:g} % apart" in name]
    worst = max(apart, key=lambda rate: abs(rate - 99))
    what = f"99 % interval over {DEVICES[0]} to {DEVICES[-1]} devices holds the truth, {100 * BETWEEN:g} % between them"
    error = rate_error(worst, fleets)
    return Figure("fleet_coverage", what, worst, "%", fleets, error, reach=99.5, least=98.5, table={"covered": rates})


def _judged(random: Random, devices: int, between: float) -> str:
    errors = [ERROR * math.exp(random.gauss(0.0, 0.5)) for _ in range(devices)]
    effects = [(random.gauss(random.gauss(0.0, between), error), error) for error in errors]
    return stats.pool([effects], ["higher"])[0].verdict
