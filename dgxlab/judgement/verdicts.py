"""Compute verdicts from the chains of a job."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgxlab import stats
from dgxlab.chains import ChainRun, Comparison, Over, chain_of, comparisons, flaw, over, whole_cycles
from dgxlab.model import ChainStep, Check, GateStep, Noise, ParityGate, about, from_json
from dgxlab.model.plan import BASELINE, BURN_IN, CANDIDATE
from dgxlab.model.reasons import says_not_engaged
from dgxlab.stats import Chain, Verdict
from dgxlab.store import Job, Store

ROLES = (BASELINE, CANDIDATE)

ENDS = {  # by state
    "done": "the job ended",
    "failed": "the job failed",
    "cancelled": "the job was cancelled",
    "lost": "the job was lost",
}

NOT_PROMOTED = "not promoted: "
"""Prefix of the reason why a faster candidate is not promoted; the only mark of it in the record."""

IN_CYCLE_SPACE = 0.5  # if less than this share of an effect remains per clock cycle, clocks cause the effect
MORE_POWER = 1.05  # a candidate that draws more than this times the baseline's power gets a warning


@dataclass(frozen=True)
class Judged:
    """The verdict on one comparison of a chain, and the means of its arms; an A/A session has the same arm twice."""

    chain: str  # ChainStep.id
    comparison: Comparison
    verdict: Verdict  # its reasons include gates, builds and clocks
    noise: Noise | None  # the plan's, from an A/A session: decides screens and, before protocol 3, promotion
    promoted: bool
    baseline: float | None  # geometric mean over the valid cycles, of both baselines of each; None if invalid
    candidate: float | None  # the same of the candidates; candidate / baseline is 1 + effect
    baseline_arm: str
    candidate_arm: str
    model_id: str | None  # None also if the chain did not begin


def judge(store: Store, job_id: str) -> list[Judged]:
    """Compute a verdict on every comparison of a job, in plan order; none if it was rejected or may still run."""
    job = store.job(job_id)
    if job.state not in ENDS or job.rejected:
        return []
    evidence = _Evidence(store, job)
    cases = [case for step in evidence.plan.chains for case in _cases(evidence, step)]
    together = iter(stats.judge_session(case.chain for case in cases if not case.faults and not case.step.screen))
    screens = sum(case.step.screen for case in cases)
    return [_judged(evidence, case, _verdict(case, screens) or next(together)) for case in cases]


def doubts(store: Store, job_id: str) -> list[str]:
    """Return why the gates of an A/B session, none of which failed, are not in order; [] if they are."""
    evidence = _Evidence(store, store.job(job_id))
    return list(dict.fromkeys(text for step in evidence.plan.chains for text in _doubts(evidence, step)))


def counted(verdict: Verdict, role: str) -> list[int]:
    """Return the numbers of the runs in an arm's mean, by the arm's role; a number twice means twice the weight.

    Valid cycle i has the candidate run i and the baseline runs i - 1 and i.
    """
    cycles = [cycle for cycle in range(1, verdict.cycles + 1) if cycle not in verdict.flaws]
    return [number for cycle in cycles for number in (cycle - 1, cycle)] if role == BASELINE else cycles


@dataclass(frozen=True)
class _Run:
    chain: str
    model_id: str | None
    failed: str  # why it failed as a process
    slot: ChainRun
    unsettled: str  # set if it was the last run of a burn-in that had not settled
    clock: float | None  # median SM clock in MHz; None for several GPUs, or without telemetry
    power: float | None  # sum of the median W of its GPUs; None without telemetry


@dataclass(frozen=True)
class _Gate:
    arm: str
    after: bool  # the chains, not before
    status: str
    sentence: str  # why it failed or was flaky


class _Evidence:
    def __init__(self, store: Store, job: Job) -> None:
        self.plan = job.plan
        self.runs = tuple(_runs(store, job.job_id))
        self.gates = tuple(_gates(store, job.job_id))
        self.ending = ENDS[job.state]
        if job.error and job.state in ("failed", "lost"):
            self.ending += f": {job.error}"

    def chain(self, step: ChainStep) -> list[_Run]:
        return [run for run in self.runs if run.chain == step.id]

    def counting(self, step: ChainStep) -> list[_Run]:
        # the last run in each place, without burn-in
        places = {(run.slot.role, run.slot.cycle): run for run in self.chain(step)}
        return [run for (role, _), run in places.items() if role != BURN_IN]

    def gates_of(self, step: ChainStep, status: str) -> list[_Gate]:
        return [gate for gate in self.gates if gate.arm in step.arms and gate.status == status]

    def gated_after(self, step: ChainStep) -> bool:
        last = max(index for index, other in enumerate(self.plan.steps) if isinstance(other, ChainStep))
        planned = [other.arm for other in self.plan.steps[last:] if isinstance(other, GateStep)]
        ran = [gate.arm for gate in self.gates if gate.after]
        return all(ran.count(arm) >= planned.count(arm) for arm in step.arms)


def _runs(store: Store, job_id: str) -> Iterator[_Run]:
    def by_run(columns_from: str, where: str) -> defaultdict[str, list[dict[str, Any]]]:
        sql = f"SELECT run_id, {columns_from} JOIN runs USING (run_id) WHERE job_id = ? AND {where}"
        rows = defaultdict(list)
        for row in store.rows(sql, (job_id,)):
            rows[row["run_id"]].append(row)
        return rows

    values: defaultdict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for run_id, samples in by_run("cell, metric, value FROM samples", "discarded IS NULL").items():
        for row in samples:
            values[run_id][row["cell"], row["metric"]].append(row["value"])
    flags = by_run("kind, hard, flags.reason AS reason FROM flags", "true ORDER BY run_id, device, kind")
    telemetry = by_run("name, median FROM telemetry", "name IN ('clocks.sm', 'power.draw')")
    places = "chain, role, cycle, status, reason, model_id, seconds FROM chain_runs"
    for run_id, (row,) in by_run(places, "true ORDER BY position").items():
        counts = row["status"] == "valid"
        medians = {key: stats.median(samples) for key, samples in values[run_id].items()} if counts else {}
        wrong = flaw(row["status"], row["reason"], [flag["reason"] for flag in flags[run_id] if flag["hard"]])
        idle = says_not_engaged(row["reason"])
        unsettled = [flag["reason"] for flag in flags[run_id] if flag["kind"] == "unsettled"]
        clocks, powers = (
            [each["median"] for each in telemetry[run_id] if each["name"] == name]
            for name in ("clocks.sm", "power.draw")
        )
        yield _Run(
            row["chain"],
            row["model_id"],
            row["reason"] if row["status"] == "failed" else "",
            ChainRun(row["role"], row["cycle"], medians, wrong, row["seconds"], idle, row["reason"]),
            "".join(unsettled),
            clocks[0] if len(clocks) == 1 else None,
            sum(powers) if powers else None,
        )


def _gates(store: Store, job_id: str) -> Iterator[_Gate]:
    """Yield the gates of a job; keys of gates and runs end in the line number of the journal, which gives the order."""

    def line(key: str) -> int:
        return int(key.rsplit("/", 1)[1])

    placed = store.rows("SELECT run_id FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ?", (job_id,))
    first = min((line(row["run_id"]) for row in placed), default=None)
    rows = store.rows("SELECT * FROM gate_list WHERE job_id = ? ORDER BY gate IS NOT NULL, at, key", (job_id,))
    for row in rows:
        after = first is not None and line(row["key"]) > first
        why = "; ".join(json.loads(row["reasons"]) or json.loads(row["flaky"]))
        how = "was flaky" if row["status"] == "flaky" else "failed"
        when = "after" if after else "before"
        sentence = f"gate {gate_name(row)} {how} for {row['arm']} {when} the chains: {why}"
        yield _Gate(row["arm"], after, row["status"], sentence)


def gate_name(row: Mapping[str, Any]) -> str:
    """Return a gate's name, such as `MUL_MAT on CUDA0`, given its row of `gates`, `checks` or `gate_list`."""
    if row.get("gate"):
        return about(from_json(Check, json.loads(row["gate"])))
    return f"{row['op']} on {row['backend']}"


@dataclass(frozen=True)
class _Case:
    step: ChainStep
    comparison: Comparison
    runs: Sequence[_Run]  # those of its chain that count
    chain: Chain
    faults: tuple[str, ...]  # why no verdict is possible, whatever the values

    @property
    def noise(self) -> Noise | None:
        wanted = (self.comparison.baseline, self.comparison.metric)
        return next((noise for noise in self.step.noise if (noise.cell, noise.metric) == wanted), None)


def _cases(evidence: _Evidence, step: ChainStep) -> list[_Case]:
    if not (asked := comparisons(step)):
        return []
    slots = [run.slot for run in evidence.chain(step)]
    chains = [chain_of(step, comparison, slots, evidence.plan.protocol) for comparison in asked]
    faults = tuple(_faults(evidence, step, chains))
    runs = evidence.counting(step)
    return [_Case(step, comparison, runs, chain, faults) for comparison, chain in zip(asked, chains, strict=True)]


def _faults(evidence: _Evidence, step: ChainStep, chains: Sequence[Chain]) -> Iterator[str]:
    failed = evidence.gates_of(step, "failed")
    yield from (gate.sentence for gate in failed)
    # if half of an arm's runs failed, the others may have succeeded by chance
    for role, arm in zip(ROLES, (step.baseline.arm, step.candidate.arm), strict=True):
        runs = [run for run in evidence.counting(step) if run.slot.role == role]
        crashes = [run.failed for run in runs if run.failed]
        if crashes and 2 * len(crashes) >= len(runs):
            yield f"{arm} failed as {role} in {len(crashes)} of {len(runs)} runs: {crashes[-1]}"
    ran = evidence.chain(step)
    if not ran:
        if not failed:  # otherwise the failed gate is the reason that it did not begin
            yield from ("the chain was not begun", evidence.ending)
        return
    first, slots = chains[0], [run.slot for run in ran]  # all chains of a step are equally long
    done, planned = whole_cycles(first), first.planned
    ended = over(step, chains, slots) if (len(first.a), len(first.b)) == (done + 1, done) else None
    if not first.a:
        yield "the chain was cut in its burn-in"
    elif ended is Over.IDLE:
        yield f"the path under test ran in none of the first {done} cycles"
    elif ended:
        return
    else:
        another = " and before another" if done >= planned else ""
        yield f"the chain was cut after {done} of {planned} cycles{another}: runs before and after a gap are not joined"
    if slots[-1].flaw:
        yield f"{slots[-1].role} {slots[-1].cycle} {slots[-1].flaw}"
    yield evidence.ending


def _verdict(case: _Case, screens: int) -> Verdict | None:
    """Return the verdict of one comparison; with several screens each verdict mentions that."""
    if case.faults:
        done = whole_cycles(case.chain)
        flaws = {cycle: flaw for cycle, flaw in case.chain.invalid_cycles().items() if cycle <= done}
        return replace(stats.invalid(done, *case.faults, flaws=flaws), screen=case.step.screen)
    if not case.step.screen:
        return None
    noise = case.noise
    verdict = stats.screen(case.chain, noise.sigma, noise.cycles) if noise else stats.screen(case.chain, None)
    alone = f"one of {screens} screens, each of which errs by itself"
    return replace(verdict, reasons=(*verdict.reasons, alone)) if screens > 1 else verdict


def _judged(evidence: _Evidence, case: _Case, verdict: Verdict) -> Judged:
    verdict = replace(verdict, better=case.chain.better)
    held = tuple(f"{NOT_PROMOTED}{why}" for why in _held_back(evidence, case, verdict))
    ran = evidence.chain(case.step)
    unsettled = [run.unsettled for run in ran if run.unsettled][:1]
    more = (*unsettled, *_clock_says(case, verdict), *_power_says(case, verdict), *held)
    verdict = replace(verdict, reasons=(*verdict.reasons, *more))
    means: list[float | None] = [None, None]
    if verdict.verdict != "invalid":  # over the valid cycles, so that the ratio of the means is 1 + effect
        a = [case.chain.a[cycle] for cycle in counted(verdict, BASELINE)]
        b = [case.chain.b[cycle - 1] for cycle in counted(verdict, CANDIDATE)]
        means = [statistics.geometric_mean([value for value in side if value is not None]) for side in (a, b)]
    return Judged(
        case.step.id,
        case.comparison,
        verdict,
        case.noise,
        promoted=verdict.verdict == "faster" and not verdict.screen and not held,
        baseline=means[0],
        candidate=means[1],
        baseline_arm=case.step.baseline.arm,
        candidate_arm=case.step.candidate.arm,
        model_id=next((run.model_id for run in ran if run.slot.role == BASELINE), None),
    )


def _held_back(evidence: _Evidence, case: _Case, verdict: Verdict) -> Iterator[str]:
    if verdict.verdict != "faster" or verdict.screen:
        return
    if len(case.step.arms) == 1:
        yield "both arms are the same"
        return
    dirty = [name for name in case.step.arms if evidence.plan.arm(name).source.dirty]
    if dirty:
        yield f"{' and '.join(dirty)} was built from a checkout that is no commit"
    yield from _doubts(evidence, case.step)
    # the chain's own noise floor decides; before protocol 3 the noise in the plan took its place
    planned = case.noise.sigma if case.noise else None
    floor = verdict.noise if case.chain.protocol >= stats.STEPS else planned
    if floor is None or verdict.ci is None:
        yield "the noise floor is not known"
    elif not stats.promoted(verdict, floor):
        least, wanted = stats.least_gain(verdict.ci, verdict.better), stats.promotion_limit(floor)
        floors = f", which is 3 noise floors of {100 * floor:.3g} %" if wanted > stats.PROMOTION else ""
        yield f"in speed the interval begins at {100 * least:+.2f} %, not above {100 * wanted:.3g} %{floors}"


def _doubts(evidence: _Evidence, step: ChainStep) -> Iterator[str]:
    """Yield why the gates of a chain's arms, none of which failed, are not in order."""
    yield from (gate.sentence for gate in evidence.gates_of(step, "flaky"))
    steps = [other for other in evidence.plan.steps if isinstance(other, GateStep) and other.arm in step.arms]
    if ungated := [arm for arm in step.arms if arm not in {other.arm for other in steps}]:
        yield f"{' and '.join(ungated)} has no gate that checks results"
    gates = (other.gate for other in steps)
    if changed := [gate for gate in gates if isinstance(gate, ParityGate) and gate.overridden]:
        yield f"--set changed what gate {changed[0].op} on {changed[0].backend} must reach"
    if not evidence.gated_after(step):
        yield f"the gates after the chains did not run, {evidence.ending}"


def _clock_says(case: _Case, verdict: Verdict) -> Iterator[str]:
    """Yield a reason if the difference comes from clocks: it vanishes when values are taken per SM clock cycle."""
    if verdict.verdict not in ("faster", "slower") or verdict.screen or not all(run.clock for run in case.runs):
        return
    # throughputs are divided by the clock of their run, times multiplied by it
    clocks = {(run.slot.role, run.slot.cycle): run.clock or 1 for run in case.runs}
    sign = -1 if case.chain.better == "higher" else 1
    a, b = (
        [value and value * clocks[role, cycle] ** sign for cycle, value in enumerate(values, first)]
        for role, first, values in ((BASELINE, 0, case.chain.a), (CANDIDATE, 1, case.chain.b))
    )
    per_cycle = stats.judge(replace(case.chain, a=a, b=b, before=None))
    if verdict.effect is None or per_cycle.effect is None or per_cycle.ci is None:
        return
    if per_cycle.ci[0] <= 0 <= per_cycle.ci[1] and abs(per_cycle.effect) < IN_CYCLE_SPACE * abs(verdict.effect):
        medians = [stats.median([run.clock or 0 for run in case.runs if run.slot.role == role]) for role in ROLES]
        yield (
            f"a clock, not a kernel: at {medians[0]:.0f} and {medians[1]:.0f} MHz the arms differ by "
            f"{100 * per_cycle.effect:+.2f} % per clock cycle, and the interval contains 0"
        )


def _power_says(case: _Case, verdict: Verdict) -> Iterator[str]:
    """Yield a reason if the candidate draws more power: its heat slows the baselines too, which hides its cost."""
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
