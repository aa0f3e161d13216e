"""Verdicts of A/B chains and screens: faster, slower, same, inconclusive or invalid, with reasons.

The estimate is the mean of d_i = ln b_i - (ln a_{i-1} + ln a_i) / 2 over the valid cycles (`chain`): the log of
candidate over baseline. Drift that is linear over a cycle cancels in d, whatever its size.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dgxlab.stats import precision
from dgxlab.stats.chain import SCREEN_DRIFT_LIMIT, STEPS, Chain, VerdictCode, VerdictReason, cycles_needed
from dgxlab.stats.distributions import t_quantile, t_tail
from dgxlab.stats.precision import ALPHA, MOST_CYCLES, NO_SPREAD, POWER, share

VERDICTS = ("faster", "slower", "same", "inconclusive", "invalid")
SAME_ALPHA = 0.05  # error of a claim of same: two one-sided tests, for one cell a 90 % interval
SAME_MARGIN = math.log(1.01)
PROMOTION = 0.02  # smallest effect that is worth keeping a change for
PROMOTION_NOISE = 3.0  # the same in noise floors
SCREEN_NOISE = 2.77  # 1.96 sqrt(2): two runs of the same build differ by more sigmas in one of twenty pairs


@dataclass(frozen=True)
class Verdict:
    """The result of one chain. Numbers are None if the chain is invalid; of a screen only the effect is given.

    Effects are shares of the baseline, in the metric's own direction: 0.03 is 3 % more time or 3 % more throughput.
    """

    verdict: str  # one of VERDICTS
    cycles: int  # number of cycles run; `valid_cycles` of them count
    reasons: tuple[str, ...]  # sentences; those that this package makes are each a `VerdictReason` with its code
    effect: float | None = None  # exp(mean d) - 1
    ci: tuple[float, float] | None = None  # at `confidence`: excludes 0 if and only if faster or slower
    same_ci: tuple[float, float] | None = None  # inside ±1 % if and only if an effect of 1 % is ruled out
    mde: float | None = None  # minimum effect that this chain detects with a probability of 80 %
    valid_cycles: int = 0
    p: float | None = None  # two-sided, of this chain alone; faster and slower need p <= 1 - confidence
    confidence: float = 1 - ALPHA  # or more, by Holm's procedure over a session's cells
    spread: float | None = None  # s_d, the standard deviation of d over the valid cycles
    noise: float | None = None  # the chain's own noise floor: the `sigma_bound` of the noisier arm
    k_to_settle: int | None = None  # if inconclusive: cycles that would probably decide it; None if over MOST_CYCLES
    flaws: Mapping[int, str] = field(default_factory=dict)  # the cycles that do not count, from 1, and why
    better: str = "higher"  # or "lower"
    screen: bool = False  # one bracket: can reject, never accept

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval that decided the verdict: `same_ci` for `same`, else `ci`."""
        return self.same_ci or self.ci if self.verdict == "same" else self.ci


def invalid(cycles: int, *reasons: str, flaws: Mapping[int, str] | None = None) -> Verdict:
    """Return an invalid verdict on a chain of `cycles` cycles; `flaws` has those that do not count, None if unknown."""
    valid_cycles = 0 if flaws is None else cycles - len(flaws)
    return Verdict("invalid", cycles, reasons, valid_cycles=valid_cycles, flaws=flaws or {})


def judge(chain: Chain) -> Verdict:
    """Return the verdict of a chain that is the only one of its session."""
    (verdict,) = judge_session([chain])
    return verdict


def judge_session(chains: Iterable[Chain]) -> list[Verdict]:
    """Return the verdicts of the chains of one session, in their order.

    Holm's procedure keeps the probability of any false faster or slower in the session at ALPHA, and of any false same
    at SAME_ALPHA, even if chains are correlated. Invalid chains are not counted. Give one chain for each cell: time and
    throughput of the same runs are one claim, not two.
    """
    chains = list(chains)
    estimates = [_estimate(chain, len(chains)) for chain in chains]
    valid = [estimate for estimate in estimates if isinstance(estimate, _Estimate)]
    different = holm([estimate.p for estimate in valid], ALPHA)
    same = holm([estimate.p_same for estimate in valid], SAME_ALPHA)
    factors = zip(different, same, strict=True)
    return [
        estimate if isinstance(estimate, Verdict) else estimate.judged(*next(factors), len(valid))
        for estimate in estimates
    ]


def holm(p_values: Sequence[float], alpha: float = ALPHA) -> list[int]:
    """Return by what each p value is multiplied before it is compared with `alpha` (Holm, 1979).

    The smallest of n is multiplied by n, the next by n - 1, and so on until a product exceeds alpha; all remaining
    values get that factor. An interval at confidence 1 - alpha / factor excludes 0 if and only if p x factor <= alpha.
    """
    factors = [0] * len(p_values)
    factor, stopped = len(p_values), False
    for index in sorted(range(len(p_values)), key=p_values.__getitem__):
        factors[index] = factor
        stopped = stopped or p_values[index] * factor > alpha
        factor -= not stopped
    return factors


def sigma(verdict: Verdict) -> float | None:
    """Return the noise that an A/A chain measured, s_d / sqrt(1.5); None if its verdict is invalid."""
    return None if verdict.spread is None else verdict.spread / math.sqrt(1.5)


def promoted(verdict: Verdict, floor: float | None = None) -> bool:
    """Return whether a change is worth keeping: its `least_gain` exceeds the `promotion_limit` of the noise floor.

    A screen is never promoted. `floor` replaces the chain's own noise floor, `verdict.noise`; it is required for chains
    of a protocol before `chain.STEPS`, which have none.
    """
    floor = verdict.noise if floor is None else floor
    if verdict.verdict != "faster" or verdict.ci is None or floor is None or not 0 < floor < 1:
        return False
    return least_gain(verdict.ci, verdict.better) > promotion_limit(floor)


def speedup(effect: float, better: str) -> float:
    """Return by which share a candidate is faster, given its effect: 1 / (1 + effect) - 1 if lower is better."""
    return effect if better == "higher" else 1 / (1 + effect) - 1


def least_gain(ci: tuple[float, float], better: str) -> float:
    """Return the lower end of the speedup, given the confidence interval of the effect."""
    return min(speedup(bound, better) for bound in ci)


def promotion_limit(floor: float) -> float:
    """Return the speedup, a share, that promotion requires: 2 % or 3 noise floors, whichever is more."""
    return max(PROMOTION, PROMOTION_NOISE * floor)


@dataclass(frozen=True)
class Mean:
    """A mean of ln candidate - ln baseline."""

    mean: float
    error: float  # its standard error
    dof: float  # degrees of freedom of the error

    @property
    def p(self) -> float:
        """Two-sided p value."""
        if self.error < NO_SPREAD:
            return float(abs(self.mean) < NO_SPREAD)
        return 2 * t_tail(abs(self.mean) / self.error, self.dof)

    @property
    def p_same(self) -> float:
        """The p value of `same`: the larger of two one-sided ones."""
        room = SAME_MARGIN - abs(self.mean)
        return float(room < 0) if self.error < NO_SPREAD else t_tail(room / self.error, self.dof)

    def half(self, alpha: float) -> float:
        """Return half of the width of a 1 - alpha interval."""
        return t_quantile(1 - alpha / 2, self.dof) * self.error


@dataclass(frozen=True)
class _Estimate(Mean):
    """Estimate from a chain's valid cycles, before correction for the number of cells."""

    chain: Chain
    flaws: Mapping[int, str]
    valid: int
    spread: float
    sampling: float  # the part of the error from run-to-run noise
    rounded: float  # the part from rounding, which more cycles do not reduce
    fewest: int  # minimum cycles for a session with this many claims

    def seen(self, alpha: float) -> float:
        """Return the distance from 0 (for same, from a margin) that is detected with probability POWER."""
        return self.half(alpha) + t_quantile(POWER, self.dof) * self.error

    def judged(self, factor: int, same_factor: int, comparisons: int) -> Verdict:
        """Return the verdict with claims tested at ALPHA / factor, and those of same at SAME_ALPHA / same_factor.

        `comparisons` is how many valid chains the session has.
        """
        chain, old = self.chain, self.chain.protocol < STEPS
        alpha, same_alpha = ALPHA / factor, SAME_ALPHA if old else SAME_ALPHA / same_factor
        low, high = self.mean - self.half(alpha), self.mean + self.half(alpha)
        same_low, same_high = self.mean - self.half(2 * same_alpha), self.mean + self.half(2 * same_alpha)
        if low > 0 or high < 0:
            code = VerdictCode.ABOVE if low > 0 else VerdictCode.BELOW
            word = "faster" if (low > 0) == (chain.better == "higher") else "slower"
        elif max(abs(same_low), abs(same_high)) <= SAME_MARGIN:
            code, word = VerdictCode.INSIDE, "same"
        else:
            code, word = VerdictCode.OPEN, "inconclusive"
        k_to_settle = self._k_to_settle(alpha, same_alpha) if code is VerdictCode.OPEN else None
        # take no difference between runs of an arm across a cycle that does not count
        gaps = [(value,) if cycle not in self.flaws else (None, value) for cycle, value in enumerate(chain.a)]
        b = [None if cycle in self.flaws else value for cycle, value in enumerate(chain.b, 1)]
        bounds = map(precision.sigma_bound, ([value for gap in gaps for value in gap], b))
        return Verdict(
            word,
            len(chain.b),
            tuple(self._reasons(code, alpha, same_alpha, k_to_settle, comparisons)),
            effect=share(self.mean),
            ci=(share(low), share(high)),
            same_ci=None if old else (share(same_low), share(same_high)),
            mde=share(self.seen(alpha)),
            valid_cycles=self.valid,
            p=self.p,
            confidence=1 - alpha,
            spread=self.spread,
            noise=None if old else max(filter(None, bounds), default=None),
            k_to_settle=k_to_settle,
            flaws=self.flaws,
            better=chain.better,
        )

    def _k_to_settle(self, alpha: float, same_alpha: float) -> int | None:
        """Return the minimum cycles of a similar chain that would probably settle it; None if over 100."""

        def settles(cycles: int) -> bool:
            sampling = self.sampling * math.sqrt(self.valid / cycles)
            if self.chain.protocol < STEPS:
                sampling = precision.standard_error(self.spread, cycles, cycles - 1)
            # with the fewest degrees of freedom that it may have
            new = replace(self, valid=cycles, error=math.hypot(sampling, self.rounded), dof=cycles - 1)
            distance = abs(self.mean)
            return new.seen(alpha) <= distance or new.seen(2 * same_alpha) <= SAME_MARGIN - distance

        lengths = range(self.fewest, MOST_CYCLES + 1)
        index = bisect_left(lengths, True, key=settles)
        return lengths[index] if index < len(lengths) else None

    def _reasons(
        self, code: VerdictCode, alpha: float, same_alpha: float, k_to_settle: int | None, comparisons: int
    ) -> Iterator[VerdictReason]:
        yield VerdictReason(code, level=100 * (1 - alpha), same_level=100 * (1 - 2 * same_alpha))
        if k_to_settle:
            yield VerdictReason(VerdictCode.SETTLED_BY, cycles=k_to_settle)
        elif code is VerdictCode.OPEN:
            yield VerdictReason(VerdictCode.HOPELESS, most=MOST_CYCLES)
        if comparisons > 1 and (code is not VerdictCode.INSIDE or self.chain.protocol >= STEPS):
            yield VerdictReason(VerdictCode.HOLM, comparisons=comparisons)
        if self.spread < NO_SPREAD:
            yield VerdictReason(VerdictCode.NO_SPREAD)
        if self.chain.protocol >= STEPS and precision.alternates(self.chain):
            yield VerdictReason(VerdictCode.ALTERNATES)
        yield from not_counted(self.flaws)


def _estimate(chain: Chain, claims: int) -> _Estimate | Verdict:
    done, old = len(chain.b), chain.protocol < STEPS
    if defect := chain.defect():
        return invalid(done, defect)
    flaws = chain.invalid_cycles()
    counted = {cycle: d for cycle, d in enumerate(chain.differences(), 1) if d is not None and cycle not in flaws}
    valid, fewest = len(counted), 2 if old else precision.fewest_cycles(claims)
    if valid < (needed := max(fewest, cycles_needed(chain.planned))):
        code = VerdictCode.TOO_FEW_FOR_CLAIMS if needed == fewest and claims > 1 else VerdictCode.TOO_FEW
        few = VerdictReason(code, valid=valid, done=done, needed=needed, claims=claims)
        return invalid(done, few, *not_counted(flaws), flaws=flaws)
    pairs = sum(cycle + 1 in counted for cycle in counted)
    spread, mean = statistics.stdev(counted.values()), statistics.fmean(counted.values())
    if old:
        sampling, dof, rounded = precision.standard_error(spread, valid, pairs), valid - 1.0, 0.0
    else:
        sampling, dof = precision.shared_error(spread, valid, pairs, chain.triples(counted))
        rounded = precision.rounding(chain)
    error = math.hypot(sampling, rounded)
    return _Estimate(mean, error, dof, chain, flaws, valid, spread, sampling, rounded, fewest)


def not_counted(flaws: Mapping[int, str]) -> Iterator[VerdictReason]:
    """Yield a reason for each of `flaws`, the cycles that do not count with the cause of each."""
    return (VerdictReason(VerdictCode.NOT_COUNTED, cycle=cycle, flaw=flaw) for cycle, flaw in flaws.items())


def screen(chain: Chain, noise: float | None, noise_cycles: int | None = None) -> Verdict:
    """Return the verdict on a single cycle a_0 b_1 a_1, enough to drop a bad idea early; never `same`.

    The baselines must agree within 2 %, and the candidate beat both, or lose to both, by 2.77 times the noise. `noise`
    is the host's sigma, a share; without it the verdict is invalid. If it comes from only `noise_cycles` valid
    cycles, the factor is larger than 2.77; None means that it is exact.
    """
    chain = replace(chain, drift_limit=min(chain.drift_limit, SCREEN_DRIFT_LIMIT))
    return replace(_bracket(chain, noise, noise_cycles), better=chain.better, screen=True)


def _bracket(chain: Chain, noise: float | None, noise_cycles: int | None) -> Verdict:
    done = len(chain.b)
    if noise is None or not 0 < noise < 1:
        return invalid(done, VerdictReason(VerdictCode.NO_NOISE))
    if noise_cycles is not None and noise_cycles < 2:
        return invalid(done, VerdictReason(VerdictCode.UNKNOWN_NOISE, cycles=noise_cycles))
    if defect := chain.defect():
        return invalid(done, defect)
    if done != 1:
        return invalid(done, VerdictReason(VerdictCode.NOT_ONE_BRACKET, cycles=done))
    if flaws := chain.invalid_cycles():
        return invalid(done, VerdictReason(VerdictCode.BRACKET, flaw=flaws[1]), flaws=flaws)
    (effect,), (before, after) = chain.differences(), chain.a
    assert effect is not None and before is not None and after is not None  # noqa: PT018 - what defect() found
    half_open = abs(math.log(before) - math.log(after)) / 2  # of either baseline to their middle
    # an estimate from few cycles may be too low: t in place of 1.96 makes it 3.34 of them where they come from 8 cycles
    times = SCREEN_NOISE if noise_cycles is None else t_quantile(0.975, noise_cycles - 1) * math.sqrt(2)
    code, word = VerdictCode.WITHIN, "inconclusive"
    if abs(effect) - half_open > times * noise:
        faster = (effect > 0) == (chain.better == "higher")
        code, word = (VerdictCode.BEATS_BOTH, "faster") if faster else (VerdictCode.LOSES_TO_BOTH, "slower")
    reason = VerdictReason(code, times=times, percent=100 * noise)
    return Verdict(word, done, (reason,), effect=math.expm1(effect), valid_cycles=1)
