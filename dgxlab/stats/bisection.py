"""Probabilistic bisection: which of several steps made the difference, by tests that may be wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from dgxlab.stats.distributions import t_tail
from dgxlab.stats.precision import NO_SPREAD

_SUREST = 0.999  # a chain's noise is not all that can go wrong: no test alone counts for more


@dataclass
class Bisection:
    """The steps 1 to `steps`, one of which made the difference; before the first test each is as likely.

    A test asks of a step whether the difference is there, as it is at the last step and is not before the first. Each
    answer has a probability, by which Bayes' rule updates the steps' own; the median is tested next, again if need be.

    References: M. Horstein, Sequential transmission using noiseless feedback, IEEE Trans. Inf. Theory 9 (1963);
    R. Waeber, P. I. Frazier, S. G. Henderson, Bisection search with noisy responses, SIAM J. Control Optim. 51 (2013).
    """

    steps: int
    confidence: float = 0.95
    weights: list[float] = field(init=False)  # of the steps 1, 2 ...; they add up to 1
    untestable: set[int] = field(default_factory=set)
    """Steps that cannot be tested, for the caller to fill; each is reported together with the next step."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0.5 < self.confidence < 1:
            raise ValueError(f"{self.steps} steps, confidence {self.confidence}")
        self.weights = [1 / self.steps] * self.steps

    def answer(self, step: int, probability: float) -> None:
        """Take the answer of a test: the probability that the difference is there at a step."""
        if not 0 <= probability <= 1:
            raise ValueError(f"no probability: {probability}")
        likely = min(max(probability, 1 - _SUREST), _SUREST)
        scaled = [weight * (likely if at <= step else 1 - likely) for at, weight in enumerate(self.weights, 1)]
        self.weights = [weight / sum(scaled) for weight in scaled]

    @property
    def suspects(self) -> tuple[range, float]:
        """The likeliest steps that tests can tell from all others, mostly one, and their probability."""
        return max(self._groups(), key=lambda group: (group[1], -group[0].start))

    def next(self) -> int | None:
        """Return the step to test next, None once the suspects are as probable as `confidence`."""
        if self.suspects[1] >= self.confidence:
            return None
        before, below = 0.0, {}
        for group, weight in self._groups():
            before += weight
            below[group.stop - 1] = before
        below.pop(self.steps)  # of the last step the answer is known
        return min(below, key=lambda step: abs(below[step] - 0.5))

    def _groups(self) -> Iterator[tuple[range, float]]:
        """Yield the runs of steps that end in one that can be tested, or in the last, and their probabilities."""
        start = 1
        for step in range(1, self.steps + 1):
            if step == self.steps or step not in self.untestable:
                yield range(start, step + 1), math.fsum(self.weights[start - 1 : step])
                start = step + 1


def past_half(mean: float, error: float, dof: float, whole: float) -> float:
    """Return the probability that a true effect is more than half of `whole`, on its side, given a chain's `estimate`.

    That is the mean of ln candidate - ln baseline, and its standard error with `dof` degrees of freedom; `whole` is the
    effect to find, a share of the baseline other than 0, in either direction.
    """
    full = math.log1p(whole)
    distance = math.copysign(1.0, full) * (mean - full / 2)
    if error < NO_SPREAD:
        return float(distance > 0)
    tail = t_tail(abs(distance) / error, dof)
    return 1 - tail if distance > 0 else tail
