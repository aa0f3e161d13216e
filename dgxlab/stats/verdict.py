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

from dgxlab.stats.chain import STEPS, Chain, cycles_needed, sigma_bound
from dgxlab.stats.precision import NO_SPREAD, alternates, rounding, shared_covariance, shared_error, standard_error
from dgxlab.stats.student import t_quantile, t_tail

VERDICTS = ("faster", "slower", "same", "inconclusive", "invalid")

ALPHA = 0.01
"""Error that a claim of faster or slower may have; in a session of several cells, all of them together."""

SAME_ALPHA = 0.05
"""Error of a claim of same, held over a session's cells too; two one-sided tests, for one cell a 90 % interval."""

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
        same_ci: The interval that lies inside +-1 % if and only if an effect of 1 % either way is ruled out; at 90 %,
            or more where Holm's procedure over a session's cells asks for it.
        mde: Smallest effect that this chain would have found with a chance of 80 %.
        valid_cycles: Cycles that count.
        cycles: Cycles that were run.
        p: Two-sided, of this chain alone; faster and slower need p <= 1 - confidence.
        confidence: 0.99, or more where Holm's procedure over a session's cells asks for it.
        spread: s_d, the standard deviation of d over the valid cycles.
        noise: The chain's own noise floor: the `sigma_bound` of the noisier arm.
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
    same_ci: tuple[float, float] | None = None
    mde: float | None = None
    valid_cycles: int = 0
    p: float | None = None
    confidence: float = 1 - ALPHA
    spread: float | None = None
    noise: float | None = None
    k_to_settle: int | None = None
    flaws: Mapping[int, str] = field(default_factory=dict)
    better: str = "higher"
    screen: bool = False

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval that decided: `same_ci` of `same`, `ci` of the others."""
        return self.same_ci or self.ci if self.verdict == "same" else self.ci


def judge(chain: Chain) -> Verdict:
    """Return the verdict of a chain that stands alone."""
    (verdict,) = judge_session([chain])
    return verdict


def judge_session(chains: Iterable[Chain]) -> list[Verdict]:
    """Return the verdicts of the chains of one session, one a cell.

    Holm's procedure makes the chance of any false faster or slower in the session ALPHA, and that of any false same
    SAME_ALPHA, whatever the cells have in common. Cells whose chain is invalid claim nothing and do not count.
    Give one metric a cell: time and throughput of the same runs are one claim, not two.
    """
    chains = list(chains)
    found = [_estimate(chain, len(chains)) for chain in chains]
    estimates = [one for one in found if isinstance(one, _Estimate)]
    differ = holm([one.p for one in estimates], ALPHA)
    same = holm([one.p_same for one in estimates], SAME_ALPHA)
    factors = iter(zip(differ, same, strict=True))
    return [one.judged(*next(factors)) if isinstance(one, _Estimate) else one for one in found]


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[int]:
    """Return for each p by what it is multiplied before it is compared with alpha (Holm, 1979).

    The smallest of n is multiplied by n, the next by n - 1, until one does not pass; the rest are as good as that one
    and keep its factor. So p times its factor is at most alpha exactly for what may be claimed, and an interval at
    1 - alpha / factor clears 0 exactly then.
    """
    factors = [0] * len(p_values)
    factor, stopped = len(p_values), False
    for index in sorted(range(len(p_values)), key=p_values.__getitem__):
        factors[index] = factor
        stopped = stopped or p_values[index] * factor > alpha
        factor -= not stopped
    return factors


def fewest_cycles(claims: int) -> int:
    """Return with how many valid cycles at least a session may make that many claims.

    The runs of a chain without an effect lie in any order: among them, with chance 2 / C(2k + 1, k), the one in which
    all candidates beat all baselines, or lose to all. (That matters where launches fall into modes, within which they
    hardly differ.) This chance over all claims must not exceed ALPHA.
    """
    cycles = 1
    while 2 * claims > ALPHA * math.comb(2 * cycles + 1, cycles):
        cycles += 1
    return cycles


def noise_floor(verdict: Verdict) -> float | None:
    """Return the relative sigma from run to run that an A/A chain found, s_d / sqrt(1.5); None if it was invalid."""
    return None if verdict.spread is None else verdict.spread / math.sqrt(1.5)


def promoted(verdict: Verdict, noise: float | None = None) -> bool:
    """Return whether a change is worth keeping: it is faster by more than 2 % and by more than 3 noise floors.

    The whole interval must be, taken as a change of speed, so that it is the same for a time and its throughput. A
    screen promotes nothing.

    Args:
        noise: The noise floor, a share above 0, if not the chain's own: before `chain.STEPS` it was that of an A/A
            session.
    """
    noise = verdict.noise if noise is None else noise
    if verdict.verdict != "faster" or verdict.ci is None or noise is None or not 0 < noise < 1:
        return False
    return least_gain(verdict.ci, verdict.better) > worth(noise)


def least_gain(ci: tuple[float, float], better: str) -> float:
    """Return by what share a candidate is faster at least, given the interval of its effect."""
    low, high = ci
    return low if better == "higher" else 1 / (1 + high) - 1


def worth(noise: float) -> float:
    """Return by what share a candidate must be faster to be promoted, given a noise floor."""
    return max(PROMOTION, PROMOTION_NOISE * noise)


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
    """What a chain's valid cycles say, before it is known how many other cells there are.

    Attributes:
        sampling: Standard error by the noise from run to run.
        rounded: Standard error by rounding, which more cycles do not make smaller.
        fewest: Cycles that a session with this many claims needs at least.
    """

    chain: Chain
    flaws: Mapping[int, str]
    valid: int
    mean: float
    spread: float
    sampling: float
    rounded: float
    fewest: int

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return math.hypot(self.sampling, self.rounded)

    @property
    def p(self) -> float:
        """Two-sided."""
        if self.error < NO_SPREAD:
            return float(abs(self.mean) < NO_SPREAD)
        return 2 * t_tail(abs(self.mean) / self.error, self.valid - 1)

    @property
    def p_same(self) -> float:
        """The larger of two one-sided ones."""
        room = SAME_MARGIN - abs(self.mean)
        if self.error < NO_SPREAD:
            return float(room < 0)
        return t_tail(room / self.error, self.valid - 1)

    def half(self, alpha: float) -> float:
        """Return half of the width of a 1 - alpha interval."""
        return t_quantile(1 - alpha / 2, self.valid - 1) * self.error

    def seen(self, alpha: float) -> float:
        """Return how far from 0 (from a margin, for same) an effect must be to be found with a chance of POWER."""
        return self.half(alpha) + t_quantile(POWER, self.valid - 1) * self.error

    def planned(self, cycles: int) -> _Estimate:
        """Return what a whole chain of that many cycles would have found if all else stayed as it is."""
        old = self.chain.protocol < STEPS
        by_size = self.sampling * math.sqrt(self.valid / cycles)
        return replace(self, valid=cycles, sampling=standard_error(self.spread, cycles, cycles - 1) if old else by_size)

    def settles(self, alpha: float, same_alpha: float) -> bool:
        """Return whether a chain like this one would probably tell what its mean is: a difference, or the same."""
        distance = abs(self.mean)
        return self.seen(alpha) <= distance or self.seen(2 * same_alpha) <= SAME_MARGIN - distance

    def judged(self, factor: int, same_factor: int) -> Verdict:
        """Return the verdict where claims are held to ALPHA / factor, and those of same to SAME_ALPHA / same_factor."""
        old = self.chain.protocol < STEPS
        alpha, same_alpha = ALPHA / factor, SAME_ALPHA if old else SAME_ALPHA / same_factor
        low, high = self.mean - self.half(alpha), self.mean + self.half(alpha)
        narrow = (self.mean - self.half(2 * same_alpha), self.mean + self.half(2 * same_alpha))
        word, settled_by = self._word((low, high), narrow), None
        if word == "inconclusive":
            lengths = range(self.fewest, MOST_CYCLES + 1)
            index = bisect_left(lengths, True, key=lambda cycles: self.planned(cycles).settles(alpha, same_alpha))
            settled_by = lengths[index] if index < len(lengths) else None
        return Verdict(
            word,
            len(self.chain.b),
            tuple(self._reasons(word, alpha, same_alpha, settled_by)),
            effect=_share(self.mean),
            ci=(_share(low), _share(high)),
            same_ci=None if old else (_share(narrow[0]), _share(narrow[1])),
            mde=_share(self.seen(alpha)),
            valid_cycles=self.valid,
            p=self.p,
            confidence=1 - alpha,
            spread=self.spread,
            noise=None if old else self._noise(),
            k_to_settle=settled_by,
            flaws=self.flaws,
            better=self.chain.better,
        )

    def _noise(self) -> float | None:
        """Return the noise floor; across a cycle that does not count there is no difference between runs of an arm."""
        gaps = [(value,) if cycle not in self.flaws else (None, value) for cycle, value in enumerate(self.chain.a)]
        b = [None if cycle in self.flaws else value for cycle, value in enumerate(self.chain.b, 1)]
        bounds = map(sigma_bound, ([value for gap in gaps for value in gap], b))
        return max(filter(None, bounds), default=None)

    def _word(self, interval: tuple[float, float], narrow: tuple[float, float]) -> str:
        low, high = interval
        if low > 0 or high < 0:
            return "faster" if (low > 0) == (self.chain.better == "higher") else "slower"
        return "same" if max(abs(bound) for bound in narrow) <= SAME_MARGIN else "inconclusive"

    def _reasons(self, word: str, alpha: float, same_alpha: float, settled_by: int | None) -> Iterator[str]:
        level, same_level = f"{100 * (1 - alpha):.4g} % interval", f"{100 * (1 - 2 * same_alpha):.4g} % interval"
        if word in ("faster", "slower"):
            yield f"the {level} lies {'above' if self.mean > 0 else 'below'} 0"
        elif word == "same":
            yield f"the {same_level} lies inside +-1 %"
        else:
            yield f"the {level} contains 0 and the {same_level} is not inside +-1 %"
            yield f"a new session of {settled_by} cycles would probably settle it" if settled_by else HOPELESS
        held, own = (SAME_ALPHA, same_alpha) if word == "same" else (ALPHA, alpha)
        if own < held:
            yield f"held to {100 * held:g} % over the session's cells (Holm)"
        if self.spread < NO_SPREAD:
            yield "the cycles do not differ at all: rounded or copied values hide their noise"
        if self.chain.protocol >= STEPS and alternates(self.chain):
            yield (
                "the runs alternate between high and low beyond chance (negative autocorrelation): "
                "the interval may be too narrow"
            )
        yield from (f"cycle {cycle} does not count: {flaw}" for cycle, flaw in self.flaws.items())


def _estimate(chain: Chain, claims: int) -> _Estimate | Verdict:
    """Return what the valid cycles say, or the verdict that nothing can be said."""
    done = len(chain.b)
    if defect := chain.defect():
        return invalid(done, defect)
    flaws = chain.invalid_cycles()
    counted = {cycle: d for cycle, d in enumerate(chain.differences(), 1) if d is not None and cycle not in flaws}
    valid, fewest = len(counted), 2 if chain.protocol < STEPS else fewest_cycles(claims)
    if valid < (needed := max(fewest, cycles_needed(chain.planned))):
        why = (f"cycle {cycle} does not count: {flaw}" for cycle, flaw in flaws.items())
        for_claims = f" for {claims} claims" if needed == fewest and claims > 1 else ""
        reason = f"{valid} of {done} cycles are valid, at least {needed} must be{for_claims}"
        return invalid(done, reason, *why, flaws=flaws)
    pairs = [cycle for cycle in counted if cycle + 1 in counted]
    spread, mean = statistics.stdev(counted.values()), statistics.fmean(counted.values())
    if chain.protocol < STEPS:
        sampling, rounded = standard_error(spread, valid, len(pairs)), 0.0
    else:
        covariance = shared_covariance([chain.a[cycle - 1 : cycle + 2] for cycle in pairs])
        sampling, rounded = shared_error(spread, valid, len(pairs), covariance), rounding(chain)
    return _Estimate(chain, flaws, valid, mean, spread, sampling, rounded, fewest)


def _share(log: float) -> float:
    return math.expm1(min(log, LARGEST_LOG))
