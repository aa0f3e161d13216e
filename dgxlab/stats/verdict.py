"""What an A/B chain says: faster, slower, same, inconclusive or invalid, and never a number without that word.

The estimator works on d_i = ln b_i - (ln a_{i-1} + ln a_i) / 2 of the valid cycles (`chain`): the mean of d is the log
of candidate over baseline. Drift that is linear over a cycle cancels in d, whatever its size.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dgxlab.stats.chain import Chain, cycles_needed
from dgxlab.stats.student import t_quantile, t_tail

VERDICTS = ("faster", "slower", "same", "inconclusive", "invalid")

ALPHA = 0.01
"""Error that a claim of faster or slower may have; in a session of several cells, all of them together."""

SAME_ALPHA = 0.05
"""Error of either side of a claim of same: two one-sided tests, which is a 90 % interval inside the margin."""

SAME_MARGIN = math.log(1.01)
POWER = 0.80
"""Chance with which an effect of the size of the MDE is found."""

PROMOTION = 0.02
"""Smallest effect that is worth keeping a change for."""

PROMOTION_NOISE = 3.0
"""The same in noise floors."""

MOST_CYCLES = 100
"""A longer chain is not proposed."""

HOPELESS = f"not even a session of {MOST_CYCLES} cycles would settle an effect of this size"

NO_SPREAD = 1e-12
LARGEST_LOG = 700.0
"""Beyond it exp overflows; no interval that reaches there says anything."""


@dataclass(frozen=True)
class Verdict:
    """What was found; numbers are None where the verdict is invalid, and a screen has only the effect.

    Effects are shares of the baseline, in the metric's own direction: 0.03 is 3 % more, of a time as of a throughput.

    Attributes:
        verdict: One of VERDICTS.
        effect: exp(mean d) - 1.
        ci: Its interval at `confidence`, which clears 0 if and only if the verdict is faster or slower.
        mde: Smallest effect that this chain would have found with a chance of 80 %.
        valid_cycles: Cycles that count.
        cycles: Cycles that were run.
        p: Two-sided, of this chain alone; faster and slower need p <= 1 - confidence.
        confidence: 0.99, or more where Holm's procedure over a session's cells asks for it.
        spread: s_d, the standard deviation of d over the valid cycles.
        k_to_settle: Cycles of a new session that would probably settle an inconclusive one; None beyond 100.
        flaws: The cycles that do not count, from 1, and why.
        reasons: Why this verdict, in words.
        better: The metric's direction.
        screen: Whether this is a screen: one bracket, which settles nothing.
    """

    verdict: str
    cycles: int
    reasons: tuple[str, ...]
    effect: float | None = None
    ci: tuple[float, float] | None = None
    mde: float | None = None
    valid_cycles: int = 0
    p: float | None = None
    confidence: float = 1 - ALPHA
    spread: float | None = None
    k_to_settle: int | None = None
    flaws: Mapping[int, str] = field(default_factory=dict)
    better: str = "higher"
    screen: bool = False


def judge(chain: Chain) -> Verdict:
    """Return the verdict of a chain that stands alone."""
    (verdict,) = judge_session([chain])
    return verdict


def judge_session(chains: Iterable[Chain]) -> list[Verdict]:
    """Return the verdicts of the chains of one session, one a cell.

    Holm's procedure makes the chance of any false faster or slower in the session ALPHA, whatever the cells have in
    common. Cells whose chain is invalid claim nothing and do not count. `same` is not adjusted: it bounds an effect.
    Give one metric a cell: time and throughput of the same runs are one claim, not two.
    """
    found = [_estimate(chain) for chain in chains]
    factors = iter(holm([one.p for one in found if isinstance(one, _Estimate)]))
    return [one.judged(next(factors)) if isinstance(one, _Estimate) else one for one in found]


def holm(p_values: Sequence[float]) -> list[int]:
    """Return for each p by what it is multiplied before it is compared with ALPHA (Holm, 1979).

    The smallest of n is multiplied by n, the next by n - 1, until one does not pass; the rest are as good as that one
    and keep its factor. So p times its factor is at most ALPHA exactly for what may be claimed, and an interval at
    1 - ALPHA / factor clears 0 exactly then.
    """
    factors = [0] * len(p_values)
    factor, stopped = len(p_values), False
    for index in sorted(range(len(p_values)), key=p_values.__getitem__):
        factors[index] = factor
        stopped = stopped or p_values[index] * factor > ALPHA
        factor -= not stopped
    return factors


def standard_error(spread: float, valid: int, pairs: int) -> float:
    """Return the standard error of the mean of d.

    Runs vary independently with sigma. d_i has variance 1.5 sigma^2, and two neighbours that share a baseline have
    covariance sigma^2 / 4. With m valid cycles, `pairs` of which follow one another directly,

        Var(mean d) = sigma^2 (1.5 + pairs / (2 m)) / m
        E(s_d^2)    = sigma^2 (1.5 - pairs / (2 m (m - 1)))

    and SE = s_d / sqrt(m) times the root of the brackets' quotient. A whole chain has m = k and k - 1 pairs, which is
    sqrt((2 - 1/(2k)) / (1.5 - 1/(2k))); an invalid cycle inside takes two pairs away, one at an end takes one.

    Args:
        spread: s_d, sample standard deviation of the valid d.
        valid: m, at least 2.
        pairs: From 0 to m - 1.
    """
    shared = pairs / (2 * valid)
    return spread * math.sqrt((1.5 + shared) / (1.5 - shared / (valid - 1)) / valid)


def noise_floor(verdict: Verdict) -> float | None:
    """Return the relative sigma from run to run that an A/A chain found, s_d / sqrt(1.5); None if it was invalid."""
    return None if verdict.spread is None else verdict.spread / math.sqrt(1.5)


def promoted(verdict: Verdict, noise: float | None) -> bool:
    """Return whether a change is worth keeping: it is faster by more than 2 % and by more than 3 noise floors.

    The whole interval must be, taken as a change of speed, so that it is the same for a time and its throughput.
    Without a noise floor (a share above 0), and by a screen, nothing is promoted.
    """
    if verdict.verdict != "faster" or verdict.ci is None or noise is None or not 0 < noise < 1:
        return False
    low, high = verdict.ci
    least = math.log1p(low) if verdict.better == "higher" else -math.log1p(high)
    return least > math.log1p(max(PROMOTION, PROMOTION_NOISE * noise))


def invalid(cycles: int, *reasons: str, flaws: Mapping[int, str] | None = None) -> Verdict:
    """Return the verdict of what cannot be judged.

    Args:
        cycles: Cycles that were run.
        reasons: Why, in words.
        flaws: The cycles that do not count, where it is known.
    """
    flaws = flaws or {}
    valid = cycles - len(flaws) if flaws else 0
    return Verdict("invalid", cycles, reasons, valid_cycles=valid, flaws=flaws)


@dataclass(frozen=True)
class _Estimate:
    """What a chain's valid cycles say, before it is known how many other cells there are."""

    chain: Chain
    flaws: Mapping[int, str]
    valid: int
    mean: float
    spread: float
    error: float

    @property
    def p(self) -> float:
        """Two-sided."""
        if self.error < NO_SPREAD:
            return float(abs(self.mean) < NO_SPREAD)
        return 2 * t_tail(abs(self.mean) / self.error, self.valid - 1)

    def half(self, alpha: float) -> float:
        """Return half of the width of a 1 - alpha interval."""
        return t_quantile(1 - alpha / 2, self.valid - 1) * self.error

    def seen(self, alpha: float) -> float:
        """Return how far from 0 (from a margin, for same) an effect must be to be found with a chance of POWER."""
        return self.half(alpha) + t_quantile(POWER, self.valid - 1) * self.error

    def planned(self, cycles: int) -> _Estimate:
        """Return what a whole chain of that many cycles would have found if all else stayed as it is."""
        return replace(self, valid=cycles, error=standard_error(self.spread, cycles, cycles - 1))

    def settles(self, alpha: float) -> bool:
        """Return whether a chain like this one would probably tell what its mean is: a difference, or the same."""
        distance = abs(self.mean)
        return self.seen(alpha) <= distance or self.seen(2 * SAME_ALPHA) <= SAME_MARGIN - distance

    def judged(self, factor: int) -> Verdict:
        """Return the verdict where claims are held to ALPHA / factor."""
        alpha = ALPHA / factor
        low, high = self.mean - self.half(alpha), self.mean + self.half(alpha)
        word, settled_by = self._word(low, high), None
        if word == "inconclusive":
            lengths = range(2, MOST_CYCLES + 1)
            index = bisect_left(lengths, True, key=lambda cycles: self.planned(cycles).settles(alpha))
            settled_by = lengths[index] if index < len(lengths) else None
        return Verdict(
            word,
            len(self.chain.b),
            tuple(self._reasons(word, factor, settled_by)),
            effect=_share(self.mean),
            ci=(_share(low), _share(high)),
            mde=_share(self.seen(alpha)),
            valid_cycles=self.valid,
            p=self.p,
            confidence=1 - alpha,
            spread=self.spread,
            k_to_settle=settled_by,
            flaws=self.flaws,
            better=self.chain.better,
        )

    def _word(self, low: float, high: float) -> str:
        if low > 0 or high < 0:
            return "faster" if (low > 0) == (self.chain.better == "higher") else "slower"
        same = abs(self.mean) + self.half(2 * SAME_ALPHA) <= SAME_MARGIN
        return "same" if same else "inconclusive"

    def _reasons(self, word: str, factor: int, settled_by: int | None) -> Iterator[str]:
        level = f"{100 * (1 - ALPHA / factor):.4g} % interval"
        if word in ("faster", "slower"):
            yield f"the {level} lies {'above' if self.mean > 0 else 'below'} 0"
        elif word == "same":
            yield "the 90 % interval lies inside +-1 %"
        else:
            yield f"the {level} contains 0 and the 90 % interval is not inside +-1 %"
            yield f"a new session of {settled_by} cycles would probably settle it" if settled_by else HOPELESS
        if factor > 1:
            yield f"held to {100 * ALPHA:g} % over the session's cells (Holm)"
        if self.spread < NO_SPREAD:
            yield "the cycles do not differ at all: rounded or copied values hide their noise"
        yield from (f"cycle {cycle} does not count: {flaw}" for cycle, flaw in self.flaws.items())


def _estimate(chain: Chain) -> _Estimate | Verdict:
    """Return what the valid cycles say, or the verdict that nothing can be said."""
    done = len(chain.b)
    if defect := chain.defect():
        return invalid(done, defect)
    flaws = chain.invalid_cycles()
    d = [one for cycle, one in enumerate(chain.differences(), 1) if one is not None and cycle not in flaws]
    if len(d) < (needed := cycles_needed(chain.planned)):
        why = (f"cycle {cycle} does not count: {flaw}" for cycle, flaw in flaws.items())
        return invalid(done, f"{len(d)} of {done} cycles are valid, at least {needed} must be", *why, flaws=flaws)
    pairs = sum(cycle not in flaws and cycle + 1 not in flaws for cycle in range(1, done))
    spread = statistics.stdev(d)
    return _Estimate(chain, flaws, len(d), statistics.fmean(d), spread, standard_error(spread, len(d), pairs))


def _share(log: float) -> float:
    return math.expm1(min(log, LARGEST_LOG))
