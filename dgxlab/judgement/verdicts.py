"""From the evidence of a job to the verdicts on it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dgxlab import stats
from dgxlab.agent.slots import Comparison, chain_of, comparisons, goes_on, whole_cycles
from dgxlab.judgement.evidence import ENDS, Evidence, Run
from dgxlab.model import BASELINE, CANDIDATE, ChainStep, GateStep, NoiseFloor
from dgxlab.stats import Chain, Verdict
from dgxlab.store import Store

ROLES = (BASELINE, CANDIDATE)

IN_CYCLE_SPACE = 0.5
"""The share of an effect below which what is left of it per clock cycle is called nothing."""

MORE_POWER = 1.05
"""How many times the baseline's power a candidate may draw before a reader is warned."""


@dataclass(frozen=True)
class Judged:
    """What one chain says of one comparison.

    Attributes:
        chain: ChainStep.id.
        comparison: Cells and metric.
        verdict: With reasons that speak of gates, builds and clocks too.
        noise: The noise floor that the plan had for it; it judges screens, and held promotion before protocol 3.
        promoted: Whether the change is worth keeping.
        baseline: Geometric mean over the cycles that count, of the two runs of each; None where the verdict is invalid.
        candidate: The same of the candidate's.
        model_id: What both read, None for nothing, or where the chain was not begun.
    """

    chain: str
    comparison: Comparison
    verdict: Verdict
    noise: NoiseFloor | None
    promoted: bool
    baseline: float | None
    candidate: float | None
    baseline_arm: str
    candidate_arm: str
    model_id: str | None


@dataclass(frozen=True)
class Case:
    """A comparison and all that speaks for or against judging it.

    Attributes:
        runs: Those of its chain that count.
        chain: Their values.
        faults: Why there can be no verdict whatever the values.
    """

    step: ChainStep
    comparison: Comparison
    runs: Sequence[Run]
    chain: Chain
    faults: tuple[str, ...]

    @property
    def noise(self) -> NoiseFloor | None:
        """The noise floor that the plan has for the comparison."""
        wanted = (self.comparison.baseline, self.comparison.metric)
        return next((floor for floor in self.step.noise if (floor.cell, floor.metric) == wanted), None)

    def promotion_noise(self, verdict: Verdict) -> float | None:
        """Return the noise floor that decides on promotion: the chain's own, before protocol 3 the plan's."""
        if self.chain.protocol >= stats.STEPS:
            return verdict.noise
        return self.noise.sigma if self.noise else None


def judge(store: Store, job_id: str) -> list[Judged]:
    """Return a verdict on every comparison of a job, in the order of its plan; none while it may run, or if rejected.

    Raises:
        UsageError: if there is no such job.
    """
    job = store.job(job_id)
    if job.state not in ENDS or job.rejected:
        return []
    evidence = Evidence(store, job)
    cases = [case for step in evidence.plan.chains for case in _cases(evidence, step)]
    together = iter(stats.judge_session(case.chain for case in cases if not case.faults and not case.step.screen))
    screens = sum(case.step.screen for case in cases)
    return [_judged(evidence, case, _verdict(case, screens) or next(together)) for case in cases]


def whole(words: Sequence[str]) -> str:
    """Return the word for a session, given those on its comparisons; `mixed` where some are faster and some slower."""
    if not words or "invalid" in words:
        return "invalid"
    if "faster" in words and "slower" in words:
        return "mixed"
    some = next((word for word in ("slower", "faster") if word in words), "")
    return some or ("same" if set(words) == {"same"} else "inconclusive")


def counted(verdict: Verdict, role: str) -> list[int]:
    """Return the cycles of an arm's runs behind its mean; a baseline between two cycles that count is there twice."""
    cycles = [cycle for cycle in range(1, verdict.cycles + 1) if cycle not in verdict.flaws]
    return [place for cycle in cycles for place in (cycle - 1, cycle)] if role == BASELINE else cycles


def _cases(evidence: Evidence, step: ChainStep) -> list[Case]:
    runs = evidence.of(step)
    asked = comparisons(step)
    if not asked:
        return []
    slots = evidence.slots(step)
    chains = [chain_of(step, comparison, slots, evidence.plan.protocol) for comparison in asked]
    faults = tuple(_faults(evidence, step, chains))
    return [Case(step, comparison, runs, chain, faults) for comparison, chain in zip(asked, chains, strict=True)]


def _faults(evidence: Evidence, step: ChainStep, chains: Sequence[Chain]) -> Iterator[str]:
    failed = [gate for gate in evidence.failed if gate.arm in step.arms]
    yield from (gate.sentence for gate in failed)
    yield from _crashes(evidence, step)
    last = evidence.last(step)
    if last is None:
        if not failed:  # a failed gate is why it was not begun
            yield from ("the chain was not begun", evidence.ending)
    elif cut := _cut(step, chains):
        yield cut
        if last.slot.flaw:
            yield f"{last.slot.role} {last.slot.cycle} {last.slot.flaw}"
        yield evidence.ending


def _crashes(evidence: Evidence, step: ChainStep) -> Iterator[str]:
    """Yield that half of an arm's runs failed: the others may be those that got away with it."""
    for role, arm in zip(ROLES, (step.baseline.arm, step.candidate.arm), strict=True):
        runs = [run for run in evidence.of(step) if run.slot.role == role]
        failed = [run.failed for run in runs if run.failed]
        if failed and 2 * len(failed) >= len(runs):
            yield f"{arm} failed as {role} in {len(failed)} of {len(runs)} runs: {failed[-1]}"


def _cut(step: ChainStep, chains: Sequence[Chain]) -> str:
    """Return where a chain broke off, "" where it is whole; all chains of a step are equally long."""
    done = whole_cycles(chains[0])
    if not chains[0].a:
        return "the chain was cut in its burn-in"
    if (len(chains[0].a), len(chains[0].b)) == (done + 1, done) and not goes_on(step, chains):
        return ""
    planned = chains[0].planned
    another = " and before another" if done >= planned else ""
    return f"the chain was cut after {done} of {planned} cycles{another}: nothing is glued across a gap"


def _verdict(case: Case, screens: int) -> Verdict | None:
    """Return the verdict of a comparison that is not judged together with the session's others.

    Args:
        screens: How many comparisons of the session are screened.
    """
    if case.faults:
        done = whole_cycles(case.chain)
        flaws = {cycle: flaw for cycle, flaw in case.chain.invalid_cycles().items() if cycle <= done}
        found = stats.invalid(done, *case.faults, flaws=flaws)
        return replace(found, screen=case.step.screen, valid_cycles=done - len(flaws))
    if not case.step.screen:
        return None
    noise = case.noise
    found = stats.screen(case.chain, noise.sigma, noise.cycles) if noise else stats.screen(case.chain, None)
    alone = f"one of {screens} screens, each of which errs by itself"
    return replace(found, reasons=(*found.reasons, alone)) if screens > 1 else found


def _judged(evidence: Evidence, case: Case, verdict: Verdict) -> Judged:
    verdict = replace(verdict, better=case.chain.better)
    held = tuple(_held_back(evidence, case, verdict))
    more = (evidence.unsettled(case.step), *_clock_says(case, verdict), *_power_says(case, verdict), *held)
    verdict = replace(verdict, reasons=(*verdict.reasons, *filter(None, more)))
    promoted = verdict.verdict == "faster" and not verdict.screen and not held
    baseline, candidate = _means(case.chain, verdict)
    return Judged(
        case.step.id,
        case.comparison,
        verdict,
        case.noise,
        promoted,
        baseline,
        candidate,
        case.step.baseline.arm,
        case.step.candidate.arm,
        evidence.model_id(case.step),
    )


def _held_back(evidence: Evidence, case: Case, verdict: Verdict) -> Iterator[str]:
    """Yield why a faster candidate is not promoted all the same."""
    if verdict.verdict != "faster" or verdict.screen:
        return
    if len(case.step.arms) == 1:
        yield "not promoted: both arms are the same"
        return
    dirty = [name for name in case.step.arms if evidence.plan.arm(name).source.dirty]
    if dirty:
        yield f"not promoted: {' and '.join(dirty)} was built from a checkout that is no commit"
    yield from (f"not promoted: {gate.sentence}" for gate in evidence.flaky if gate.arm in case.step.arms)
    steps = (step for step in evidence.plan.steps if isinstance(step, GateStep) and step.arm in case.step.arms)
    if changed := [step.gate for step in steps if step.gate.overridden]:
        yield f"not promoted: --set changed what gate {changed[0].op} on {changed[0].backend} must reach"
    if not evidence.gated_after(case.step):
        yield f"not promoted: the gates after the chains were not asked, {evidence.ending}"
    noise = case.promotion_noise(verdict)
    if noise is None or verdict.ci is None:
        yield "not promoted: the noise floor is not known"
    elif not stats.promoted(verdict, noise):
        least, wanted = stats.least_gain(verdict.ci, verdict.better), stats.worth(noise)
        floors = f", which is 3 noise floors of {100 * noise:.3g} %" if wanted > stats.PROMOTION else ""
        begins = f"in speed the interval begins at {100 * least:+.2f} %"
        yield f"not promoted: {begins}, not above {100 * wanted:.3g} %{floors}"


def _means(chain: Chain, verdict: Verdict) -> tuple[float | None, float | None]:
    """Return the geometric means of both arms over the cycles that count: their quotient is 1 + effect."""
    if verdict.verdict == "invalid":
        return None, None
    values = (
        [chain.a[cycle] for cycle in counted(verdict, BASELINE)],
        [chain.b[cycle - 1] for cycle in counted(verdict, CANDIDATE)],
    )
    baseline, candidate = (statistics.geometric_mean([v for v in side if v is not None]) for side in values)
    return baseline, candidate


# -- clocks and power -------------------------------------------------------------------------------------------------


def _clock_says(case: Case, verdict: Verdict) -> Iterator[str]:
    """Yield that a difference is one of clocks, where it vanishes once values are taken per SM clock cycle."""
    if verdict.verdict not in ("faster", "slower") or verdict.screen or not all(run.clock for run in case.runs):
        return
    per_cycle = stats.judge(_per_cycle(case))
    if verdict.effect is None or per_cycle.effect is None or per_cycle.ci is None:
        return
    low, high = per_cycle.ci
    if low <= 0 <= high and abs(per_cycle.effect) < IN_CYCLE_SPACE * abs(verdict.effect):
        clocks = [stats.median([run.clock or 0 for run in case.runs if run.slot.role == role]) for role in ROLES]
        yield (
            f"a clock, not a kernel: at {clocks[0]:.0f} and {clocks[1]:.0f} MHz the arms differ by "
            f"{100 * per_cycle.effect:+.2f} % per clock cycle, and the interval contains 0"
        )


def _per_cycle(case: Case) -> Chain:
    """Return a chain with its throughputs divided by the clock of their run, and its times multiplied by it."""
    clocks = {(run.slot.role, run.slot.cycle): run.clock or 1 for run in case.runs}
    sign = -1 if case.chain.better == "higher" else 1
    a, b = (
        [value and value * clocks[role, cycle] ** sign for cycle, value in enumerate(values, first)]
        for role, first, values in ((BASELINE, 0, case.chain.a), (CANDIDATE, 1, case.chain.b))
    )
    return replace(case.chain, a=a, b=b, before=None)


def _power_says(case: Case, verdict: Verdict) -> Iterator[str]:
    """Yield that the candidate draws more power: the heat slows its baselines as much as itself, and hides its cost."""
    if verdict.verdict == "invalid" or verdict.screen or case.chain.protocol < stats.STEPS or case.step.block_s:
        return
    drawn: dict[str, list[float]] = {role: [] for role in ROLES}
    for run in case.runs:
        if run.power is not None and run.slot.cycle in counted(verdict, run.slot.role):
            drawn[run.slot.role].append(run.power)
    if not all(drawn.values()):
        return
    baseline, candidate = (stats.median(drawn[role]) for role in ROLES)
    if candidate >= MORE_POWER * baseline:
        yield (
            f"the candidate draws {candidate:.0f} W and the baseline {baseline:.0f} W, at shared temperature: "
            "session: {block_minutes: M} compares each at its own"
        )
