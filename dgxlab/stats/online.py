"""Promotion in a ledger of tries: the false discovery rate of a sequence of tests whose end is not known.

Each try that ends in a chain is a test of "no cell is faster than the reference". LORD++ gives it a level from what
the tests before it promoted (Ramdas, Yang, Wainwright and Jordan, 2017, "Online control of the false discovery rate
with decaying memory", section 3; the sequence gamma is that of Javanmard and Montanari, 2018). The expected share of
false ones among the promoted tries is then at most FDR after every try, and a ledger in which no try is faster promotes
any with a probability of at most FIRST_WEALTH.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dgxlab.stats.distributions import t_quantile
from dgxlab.stats.precision import ALPHA
from dgxlab.stats.verdict import Verdict

FDR = 0.05
FIRST_WEALTH = 0.01  # the sum of all levels before the first promotion
SCREEN_ALPHA = 0.05  # largest share of winners, with the wanted effect, that a screen may drop


class Ended(Enum):
    """How a try ended: what dropped it, or that it was promoted."""

    BUILD = "build"
    GATE = "gate"
    SCREEN = "screen"
    CHAIN = "chain"
    OVERFITTED = "overfitted"
    PROMOTED = "promoted"


@dataclass(frozen=True)
class Screened:
    """One comparison of a screen: the effect, a share, and the noise with the valid cycles that it is from."""

    effect: float
    better: str
    noise: float
    cycles: int

    @property
    def gain(self) -> float:
        """The logarithm of the candidate's speed by the baseline's."""
        return math.log1p(self.effect) * (1 if self.better == "higher" else -1)

    def most(self, alpha: float) -> float:
        """Return the upper 1 - alpha bound of the gain."""
        return self.gain + t_quantile(1 - alpha, self.cycles - 1) * self.noise * math.sqrt(1.5)


def gamma(j: int) -> float:
    """Return the share of a wealth that the j-th test after its gain may spend, j >= 1; over all j they sum to 1."""
    return 0.07720838 * math.log(max(j, 2)) / (j * math.exp(math.sqrt(math.log(j))))


def level(promoted: Sequence[bool]) -> float:
    """Return the level of the next test of a ledger, given of each earlier test, in order, whether it was promoted."""
    spent = FIRST_WEALTH * gamma(len(promoted) + 1)
    gains = [len(promoted) - place for place, was in enumerate(promoted) if was]
    return spent + sum((FDR - FIRST_WEALTH * (not place)) * gamma(j) for place, j in enumerate(gains))


def wealth(promoted: Sequence[bool]) -> float:
    """Return what is left for all later tests: the first wealth and FDR a promotion, less the levels so far.

    The first promotion gains less: what it was tested with counts as part of its gain.
    """
    count = sum(promoted)
    gained = FIRST_WEALTH + count * FDR - (FIRST_WEALTH if count else 0.0)
    return gained - sum(level(promoted[:place]) for place in range(len(promoted)))


def p_faster(verdicts: Sequence[Verdict]) -> float:
    """Return the p value of a try: one-sided, that no cell of its chain is faster; Bonferroni's over its cells.

    `verdicts` are the verdicts of all cells, none of them invalid.
    """
    return min(1.0, len(verdicts) * min(map(_one_sided, verdicts)))


def _one_sided(verdict: Verdict) -> float:
    assert verdict.p is not None
    assert verdict.effect is not None
    return verdict.p / 2 if (verdict.effect > 0) == (verdict.better == "higher") else 1 - verdict.p / 2


def claims_at(alpha: float, comparisons: int) -> int:
    """Return as how many claims a chain must be planned so that each comparison is tested at alpha / comparisons."""
    return max(comparisons, math.ceil(comparisons * ALPHA / (2 * alpha)))


def dropped(screened: Sequence[Screened], effect: float) -> bool:
    """Return whether a screen drops a try: no cell can have the wanted effect, a share, or a cell is slower.

    A try that has the effect in one cell, and is slower in none, is dropped with a probability of SCREEN_ALPHA at most,
    half of it for each reason.
    """
    hopeless = all(each.most(SCREEN_ALPHA / 2) < math.log1p(effect) for each in screened)
    return hopeless or any(each.most(SCREEN_ALPHA / 2 / len(screened)) < 0 for each in screened)


def decide(chain: Sequence[Verdict], alpha: float, held_out: Sequence[Verdict] | None = None) -> Ended:
    """Return how a try ends that has a chain whose gates are in order, at the ledger's level `alpha`.

    `chain` has the verdicts of all shown cells, none of them invalid, `held_out` those of the held-out cells; None if
    they are not measured, or there are none.
    """
    if p_faster(chain) > alpha or any(verdict.verdict == "slower" for verdict in chain):
        return Ended.CHAIN
    if any(verdict.verdict == "slower" for verdict in held_out or ()):
        return Ended.OVERFITTED
    return Ended.PROMOTED
