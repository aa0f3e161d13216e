"""The A/B chain a_0 b_1 a_1 ... b_k a_k: when it may begin, which cycles count, when another cycle is needed.

The agent that runs a chain and the client that judges it call the same functions. Distances between values are
differences of their natural logarithms: 0.05 is 5 %, whichever of the two values is larger.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import TypeGuard

from dgxlab.stats.distributions import MAD_SCALE


class VerdictCode(Enum):
    """Reasons that follow from the values; a code's value is its sentence, with parameters in braces."""

    # of a chain
    CUT = "cut after {done} of {planned} cycles: runs before and after a gap are not joined"
    UNPAIRED = "{baselines} baselines and {candidates} candidates: k candidates need k + 1 baselines"
    TOO_LONG = "{done} cycles where {planned} were planned: at most {extra} may follow"
    NO_CANDIDATES = "no candidates"
    DIRECTION = "better is 'higher' or 'lower', not {better!r}"
    DRIFT_LIMIT = "the drift limit {limit} is no number above 0"
    NO_CYCLE = "there is no cycle {cycle} in a chain of {done}"
    NO_VALUE = "{arm}[{index}] is {value!r:.40}: a measurement is a finite number above 0"
    TOO_FEW = "{valid} of {done} cycles are valid, at least {needed} must be"
    TOO_FEW_FOR_CLAIMS = "{valid} of {done} cycles are valid, at least {needed} must be for {claims} claims"

    # of a cycle
    NO_BASELINE = "a baseline beside it has no value"
    APART = "its baselines are {percent:.1f} % apart, the limit is {limit:.3g} %"
    STEP = (
        "a step: its baselines are {percent:.1f} % apart, the limit is {limit:.3g} %, "
        "and each agrees with its other neighbour"
    )
    NOT_COUNTED = "cycle {cycle} does not count: {flaw}"

    # of an interval
    ABOVE = "the {level:.4g} % interval lies above 0"
    BELOW = "the {level:.4g} % interval lies below 0"
    INSIDE = "the {same_level:.4g} % interval lies inside ±1 %"
    OPEN = "the {level:.4g} % interval contains 0, and the {same_level:.4g} % interval is not inside ±1 %"
    SETTLED_BY = "a new session of {cycles} cycles would probably settle it"
    HOPELESS = "not even a session of {most} cycles would settle an effect of this size"
    HOLM = "corrected for {comparisons} comparisons (Holm)"
    NO_SPREAD = "the cycles do not differ at all: rounded or copied values hide their noise"
    ALTERNATES = (
        "the runs alternate between high and low beyond chance (negative autocorrelation): "
        "the interval may be too narrow"
    )

    # of a screen
    NO_NOISE = "a screen needs the noise of this host, from an A/A session"
    UNKNOWN_NOISE = "{cycles} cycles are too few to estimate the noise"
    NOT_ONE_BRACKET = "a screen is one bracket, not {cycles} cycles"
    BRACKET = "the bracket does not count: {flaw}"
    BEATS_BOTH = (
        "one bracket, in which the candidate beats both baselines by more than {times:.3g} times the noise "
        "of {percent:.2g} %"
    )
    LOSES_TO_BOTH = (
        "one bracket, in which the candidate loses to both baselines by more than {times:.3g} times the noise "
        "of {percent:.2g} %"
    )
    WITHIN = "one bracket, in which the candidate is within {times:.3g} times the noise of {percent:.2g} %"


class VerdictReason(str):
    """The sentence of a reason, which also has its code and parameters; the record keeps only the sentence."""

    code: VerdictCode
    parameters: Mapping[str, object]

    def __new__(cls, code: VerdictCode, **parameters: object) -> VerdictReason:
        """Format the code's sentence with these parameters."""
        reason = super().__new__(cls, code.value.format(**parameters))
        reason.code, reason.parameters = code, parameters
        return reason


STEPS = 3  # the first protocol in which only a step discards a cycle; before, any large drift of its baselines did
CYCLES = (8, 40)  # fewest and most candidate runs of a chain whose length is chosen from its burn-in
EXTRA_CYCLES = 2  # most cycles that may follow the planned ones, in place of those with a flaw
DRIFT_LIMIT = 0.05  # largest distance between two successive baselines that is never a step
_STEP_SIGMAS = 3.0  # the same in standard deviations of neighbours' distances; the larger limit applies
SCREEN_DRIFT_LIMIT = 0.02  # tighter, because a single bracket has no neighbours to tell a step from noise
_BURN_IN_AGREEMENT = 0.015
BURN_IN_RUNS = (4, 16)  # fewest and most
PLANNING_RUNS = 8  # fewest runs of a burn-in from which the length of the chain is chosen


@dataclass(frozen=True)
class Chain:
    """The values of one comparison in one session, one per run, in one metric and unit; None if a run gave no value.

    Cycle i is baseline a[i - 1], candidate b[i - 1] and baseline a[i]; successive cycles share a baseline.
    """

    a: Sequence[float | None]  # baselines, one more than candidates
    b: Sequence[float | None]  # candidates: b[i] ran between a[i] and a[i + 1]
    better: str = "higher"  # or "lower"
    drift_limit: float = DRIFT_LIMIT
    cycles: int | None = None  # how many were planned; None for as many as there are
    flaws: Mapping[int, str] = field(default_factory=dict)  # cycles invalid for reasons other than steps
    before: float | None = None  # the last run of the burn-in, the neighbour of a[0]
    protocol: int = STEPS  # of the job; chains of all protocols from `STEPS` on are judged by the same rules

    @property
    def planned(self) -> int:
        """The number of cycles that were planned, without extra ones."""
        return len(self.b) if self.cycles is None else self.cycles

    def defect(self) -> VerdictReason | None:
        """Return why the chain as a whole cannot be judged (cut off, values missing, bad settings); None if it can."""
        done, planned = len(self.b), self.planned
        if self.cycles is not None and len(self.a) == done <= planned:
            return VerdictReason(VerdictCode.CUT, done=max(0, done - 1), planned=planned)
        if len(self.a) != done + 1:
            return VerdictReason(VerdictCode.UNPAIRED, baselines=len(self.a), candidates=done)
        if done < planned and not hopeless(planned, done, done - len(self.flawed())):
            return VerdictReason(VerdictCode.CUT, done=done, planned=planned)
        if done > planned + EXTRA_CYCLES:
            return VerdictReason(VerdictCode.TOO_LONG, done=done, planned=planned, extra=EXTRA_CYCLES)
        if planned < 1:
            return VerdictReason(VerdictCode.NO_CANDIDATES)
        if self.better not in ("higher", "lower"):
            return VerdictReason(VerdictCode.DIRECTION, better=self.better)
        if not _is_value(self.drift_limit):
            return VerdictReason(VerdictCode.DRIFT_LIMIT, limit=self.drift_limit)
        if unknown := [cycle for cycle in self.flaws if not 1 <= cycle <= done]:
            return VerdictReason(VerdictCode.NO_CYCLE, cycle=unknown[0], done=done)
        for arm, values in (("a", self.a), ("b", self.b)):
            for i, value in enumerate(values):
                beside = (i, i + 1) if arm == "a" else (i + 1,)
                excused = all(cycle in self.flaws for cycle in beside if 1 <= cycle <= len(self.b))
                if not _is_value(value) and not (value is None and excused):
                    return VerdictReason(VerdictCode.NO_VALUE, arm=arm, index=i, value=value)
        return None

    def invalid_cycles(self) -> dict[int, str]:
        """Return the cycles that do not count, each with the reason: those in `flaws`, and those at a step.

        At a step, the cycle's two baselines differ by more than noise, and each agrees with its other neighbour.
        Nothing else in the values discards a cycle, since discarding for noise would bias the effect. In screens, and
        before protocol STEPS, it is enough that the two baselines differ by more than `drift_limit`.
        """
        flaws, limit = dict(self.flaws), self.drift_limit
        # a screen is one bracket: its baselines have no other neighbours
        steps = self.protocol >= STEPS and self.planned != 1
        if steps and (distances := [abs(difference) for difference in successive(self.a)]):
            limit = max(limit, _STEP_SIGMAS * MAD_SCALE * statistics.median(distances))  # more than noise explains
        for cycle in range(1, len(self.a)):
            before, after = self.a[cycle - 1 : cycle + 1]
            if cycle in flaws or (flaw := drift_flaw(before, after, limit)) is None:
                continue
            if steps:
                earlier = self.a[cycle - 2] if cycle > 1 else self.before
                later = self.a[cycle + 1] if cycle + 1 < len(self.a) else None
                if _distance(before, earlier) > limit or _distance(after, later) > limit:
                    continue
                flaw = VerdictReason(VerdictCode.STEP, **flaw.parameters)
            flaws[cycle] = flaw
        return dict(sorted(flaws.items()))

    def flawed(self) -> Mapping[int, str]:
        """Return the invalid cycles that extra cycles may replace, each with the reason.

        From protocol STEPS on, cycles at a step are not among them: values must not decide how long a chain runs.
        """
        return self.invalid_cycles() if self.protocol < STEPS else self.flaws

    def differences(self) -> list[float | None]:
        """Return d_i = ln b_i - (ln a_{i-1} + ln a_i) / 2 for each cycle, None where a value is missing."""
        return [
            None
            if before is None or candidate is None or after is None
            else math.log(candidate) - (math.log(before) + math.log(after)) / 2
            for before, candidate, after in zip(self.a[:-1], self.b, self.a[1:], strict=True)
        ]

    def triples(self, counted: Collection[int]) -> list[list[float]]:
        """Return the logarithms of a[i - 2], a[i - 1], a[i] for each i where cycles i - 1 and i are in `counted`.

        For i = 1, `before` replaces the missing a[-1]; without it there is no such triple.
        """
        runs = [self.before, *self.a]
        return [
            [math.log(value) for value in runs[cycle - 1 : cycle + 2] if value is not None]
            for cycle in counted
            if (cycle - 1 in counted if cycle > 1 else _is_value(self.before))
        ]


def burn_in_settled(values: Sequence[float | None]) -> bool:
    """Return whether a burn-in may end: its last two values differ by at most 1.5 %, or by the noise of those before.

    False for fewer than four values.
    """
    if len(values) < BURN_IN_RUNS[0]:
        return False
    earlier = successive(values[:-1])
    # two standard deviations of the run-to-run differences, which are 0 for a steady fall
    noise = 2 * statistics.stdev(earlier) if len(earlier) > 1 else 0.0
    return _distance(values[-2], values[-1]) <= max(_BURN_IN_AGREEMENT, noise)


def burn_in_needed(values: Sequence[float | None], fewest: int = BURN_IN_RUNS[0]) -> bool:
    """Return whether a burn-in needs another run: it has at least `fewest`, and at most 16 until it has settled.

    `values` has one value for each run so far, of one comparison.
    """
    return len(values) < fewest or (len(values) < BURN_IN_RUNS[1] and not burn_in_settled(values))


def drift_flaw(before: float | None, after: float | None, limit: float = DRIFT_LIMIT) -> VerdictReason | None:
    """Return why the baselines before and after a candidate are too far apart; None if they are not.

    `limit` is a difference of logarithms. A missing baseline is always too far.
    """
    distance = _distance(before, after)
    if distance <= limit:
        return None
    if distance == math.inf:
        return VerdictReason(VerdictCode.NO_BASELINE)
    return VerdictReason(VerdictCode.APART, percent=100 * distance, limit=100 * limit)


def cycles_needed(planned: int) -> int:
    """Return how many cycles of a chain must be valid: more than half of the planned ones."""
    return (planned + 1) // 2 + 1


def another_cycle(planned: int, done: int, valid: int) -> bool:
    """Return whether another cycle follows: the planned ones, then one for each flawed cycle, at most EXTRA_CYCLES.

    `valid` of the `done` cycles are not in `Chain.flawed`; of several comparisons, give the smallest number.
    """
    return done < planned or (valid < planned and done < planned + EXTRA_CYCLES)


def hopeless(planned: int, done: int, valid: int) -> bool:
    """Return whether even extra cycles could not make the chain valid; arguments as in `another_cycle`."""
    return done - valid > planned + EXTRA_CYCLES - cycles_needed(planned)


def successive(values: Sequence[float | None]) -> list[float]:
    """Return ln y - ln x for each two neighbours x, y; pairs with a missing value are left out."""
    logs = [math.log(value) if _is_value(value) else None for value in values]
    return [after - before for before, after in pairwise(logs) if before is not None and after is not None]


def _distance(left: float | None, right: float | None) -> float:
    return abs(math.log(left) - math.log(right)) if _is_value(left) and _is_value(right) else math.inf


def _is_value(value: object) -> TypeGuard[float]:
    """Return whether it is a finite number above 0; it may be anything that JSON can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1.7e308
