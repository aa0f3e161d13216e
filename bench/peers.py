"""Rules that benchmarks are commonly judged by, to be wrong or right on the same simulated boxes.

All of them are held to the same error of 1 % as the verdicts of this program, whatever they use by default: what they
get wrong is then not a matter of the level.
"""

from __future__ import annotations

import math
from functools import cache
from random import Random
from statistics import fmean, variance

from bench.simulated_box import Box
from dgxlab.stats import CYCLES, median, t_tail

ALPHA = 0.01
THRESHOLD = 0.02


def welch(box: Box, _random: Random) -> str:
    """A then B, Welch's t test over the repetitions of the two launches."""
    a, b = box.run(candidate=False), box.run(candidate=True)
    errors = variance(a) / len(a), variance(b) / len(b)
    dof = sum(errors) ** 2 / (errors[0] ** 2 / (len(a) - 1) + errors[1] ** 2 / (len(b) - 1))
    gain = fmean(b) - fmean(a)
    return _word(2 * t_tail(abs(gain) / math.sqrt(sum(errors)), dof) <= ALPHA, gain)


def threshold(box: Box, _random: Random) -> str:
    """A then B, the medians of their repetitions differ by more than 2 %."""
    a, b = median(box.run(candidate=False)), median(box.run(candidate=True))
    return _word(abs(b / a - 1) > THRESHOLD, b - a)


def mann_whitney(box: Box, random: Random) -> str:
    """As many launches of each as a chain has candidates, in random order; Mann and Whitney's exact U test."""
    order = [False, True] * CYCLES[0]
    random.shuffle(order)
    runs = [(median(box.run(candidate)), candidate) for candidate in order]
    a = [value for value, candidate in runs if not candidate]
    b = [value for value, candidate in runs if candidate]
    u = sum(y > x for x in a for y in b)
    extreme = min(u, len(a) * len(b) - u)
    p = min(
        1.0,
        2 * sum(_arrangements(len(a), len(b), below) for below in range(extreme + 1)) / math.comb(len(runs), len(a)),
    )
    return _word(p <= ALPHA, u - len(a) * len(b) / 2)


PEERS = {"A then B, Welch": welch, "A then B, 2 %": threshold, "shuffled, Mann-Whitney": mann_whitney}


def _word(different: bool, gain: float) -> str:
    return "inconclusive" if not different else "faster" if gain > 0 else "slower"


@cache
def _arrangements(a: int, b: int, u: int) -> int:
    """Return how many of the orders of a + b values have that U."""
    if u < 0 or a == 0 or b == 0:
        return int(u == 0)
    return _arrangements(a - 1, b, u - b) + _arrangements(a, b - 1, u)
