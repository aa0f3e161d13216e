"""A model of a box that throttles: how heat, surroundings and hidden states change the speed of identical programs.

Unlike on a real box, the true effect is known. The constants are from a report about a box (8.8 TFLOPS cold, 6.6 hot:
25 % less), or plausible where there is no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

LOAD_S = 10.0
"""Seconds in which a run loads its model; the CPU does that, and heats the box as much."""

REPETITIONS = 5
REPETITION_S = 4.0
RUN_SIGMA = 0.006
"""Sigma of a run's value, which is the median of its repetitions."""
REPETITION_SIGMA = 0.0075
MEDIAN_OF_FIVE = 0.28683
"""Variance of the median of five standard normal values."""
LAUNCH_SIGMA = math.sqrt(RUN_SIGMA**2 - MEDIAN_OF_FIVE * REPETITION_SIGMA**2)
"""Sigma of a launch, the part of RUN_SIGMA that repetitions do not explain: 0.45 %."""

DEPTH = 0.25
"""Share of the throughput that is lost between cold and hot."""

HEAT_TAU_S = 90.0
CHASSIS_TAU_S = 600.0
WANDER_TAU_S = 600.0
FLIP_EVERY_S = 1800.0
FLIP_FOR_S = 300.0
FLIP_LOSS = 0.33
SETTLE_TAU_S = 60.0


@dataclass(frozen=True)
class Scenario:
    """How a box changes its speed.

    Attributes:
        what: A description.
        depth: Share of throughput lost from cold (heat 0) to hot (heat 1).
        knee: Heat below which nothing is lost.
        chassis: Share of the loss that follows the slow chassis instead.
        wander: Stationary sigma of the log throughput's slow random walk with the surroundings, an Ornstein-Uhlenbeck
            process with a correlation time of ten minutes.
        power: The candidate's power, if the baseline's is 1.
        flips: Whether the box gets a third slower for five minutes, about once in half an hour.
        settle: Share of throughput that is lost right after idling.
    """

    what: str
    depth: float = DEPTH
    knee: float = 0.0
    chassis: float = 0.0
    wander: float = 0.0
    power: float = 1.0
    flips: bool = False
    settle: float = 0.0


SCENARIOS = {
    "S0": Scenario("stationary", depth=0.0),
    "S1": Scenario("throughput falls linearly with heat"),
    "S2": Scenario("throughput falls above a knee", knee=0.5),
    "S3": Scenario("slow chassis", chassis=1.0),
    "S4": Scenario("S1 and surroundings that wander", wander=0.03),
    "S5": Scenario("S1 and a candidate that draws 10 % more", power=1.1),
    "S6": Scenario("S1 and hidden flips", flips=True),
    "S7": Scenario("S1 and clocks that settle after idling", settle=0.12),
    "S8": Scenario("all at once", chassis=0.5, wander=0.03, power=1.1, flips=True, settle=0.12),
}


class Box:
    """A box in a session; it begins cold.

    Args:
        scenario: How it changes its speed.
        gain: Log of the candidate's speed over the baseline's in the same state of the box.
        random: The source of noise, flips and wander; None for a box without these.
    """

    def __init__(self, scenario: Scenario, gain: float, random: Random | None) -> None:
        self.scenario = scenario
        self._gain = gain
        self._random = random
        self._time, self._heat, self._chassis = 0.0, 0.0, 0.0
        self._wander = self._noise(scenario.wander)
        self._flip = random.expovariate(1 / FLIP_EVERY_S) if random and scenario.flips else math.inf

    def run(self, candidate: bool) -> list[float]:
        """Return the throughput of each repetition of one launch."""
        power = self.scenario.power if candidate else 1.0
        level = (self._gain if candidate else 0.0) + self._noise(LAUNCH_SIGMA)
        self._pass(LOAD_S, 1.0)
        values = []
        for _ in range(REPETITIONS):
            self._pass(REPETITION_S / 2, power)
            values.append(100 * self._share() * math.exp(level + self._wander + self._noise(REPETITION_SIGMA)))
            self._pass(REPETITION_S / 2, power)
        return values

    @property
    def time(self) -> float:
        """Seconds since the session began."""
        return self._time

    def _pass(self, seconds: float, power: float) -> None:
        """Let time pass at a power; heat relaxes towards it."""
        scenario = self.scenario
        self._time += seconds
        self._heat = power + (self._heat - power) * math.exp(-seconds / HEAT_TAU_S)
        self._chassis = power + (self._chassis - power) * math.exp(-seconds / CHASSIS_TAU_S)
        if scenario.wander and self._random:
            kept = math.exp(-seconds / WANDER_TAU_S)
            self._wander = kept * self._wander + self._noise(scenario.wander * math.sqrt(1 - kept * kept))
        if self._random and self._time > self._flip + FLIP_FOR_S:
            self._flip = self._time + self._random.expovariate(1 / FLIP_EVERY_S)

    def _share(self) -> float:
        """Return what is left of the cold throughput."""
        scenario = self.scenario
        heat = (1 - scenario.chassis) * self._heat + scenario.chassis * self._chassis
        left = 1 - scenario.depth * max(0.0, heat - scenario.knee) / (1 - scenario.knee)
        left *= 1 - scenario.settle * math.exp(-self._time / SETTLE_TAU_S)
        return left * (1 - FLIP_LOSS if self._flip <= self._time <= self._flip + FLIP_FOR_S else 1)

    def _noise(self, sigma: float) -> float:
        return self._random.gauss(0.0, sigma) if self._random else 0.0
