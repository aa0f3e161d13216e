"""One pipeline for run, gate, ab, noise and screen.

Make the sources, settle unfinished jobs on the host, probe the host, plan the missing work, join a running job with the
same work or start one, and follow it. Kinds of jobs differ only in their plan. Verdicts are made when a job ends.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgxlab import compare, judgement, model, plan, series, tools
from dgxlab.chains import comparisons
from dgxlab.errors import ConditionsError, DgxlabError, UsageError, edit
from dgxlab.lab import Lab, Side, Watch, cluster, noted
from dgxlab.lab.jobs import join, settle, start_and_follow
from dgxlab.lab.outlook import command_for
from dgxlab.lab.provision import prepare
from dgxlab.model import ChainStep, Check, Device, Experiment, GateStep, ParityGate, Plan, Source, digest, events
from dgxlab.source import PinCache
from dgxlab.store import Store, gate_digest
from dgxlab.transport.host import Host, Probe

OF_TREE = "-tree-"
"""In the name of an experiment that is built from a checkout, what comes before the first digits of its tree."""
_DIGITS, _NAMED = 8, 50  # characters of the tree, and most of the experiment's own name: together they are a NAME


@dataclass(frozen=True)
class Request:
    """What a command is asked to measure."""

    kind: str
    """run, gate (the gates alone, always), ab, noise (an A/A session) or screen (one bracket instead of a chain)."""
    experiment: Experiment
    baseline: Experiment | None = None  # the baseline of an A/B session; the experiment itself for an A/A session
    again: bool = False  # measure everything, up to date or not. A session always does
    tree: Path | None = None
    """A llama.cpp checkout to build instead of the experiment's series; see `sourced`."""
    baseline_tree: Path | None = None  # the same for the baseline
    allow: Collection[str] = ()  # kinds of `compare.MUST_AGREE` in which the arms may differ
    wait_s: float = model.WAIT_S  # max wait of the job for its devices, 0 for none
    max_s: float = 0.0  # max time of a session's chains, 0 for no limit
    cells: Collection[str] = ()  # labels of the cells that a session compares, () for all

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments, the baseline first; only one if both are equal."""
        both = [self.baseline] if self.baseline and self.baseline.digest != self.experiment.digest else []
        return [*both, self.experiment]

    @property
    def name(self) -> str:
        """The name of the job, which job ids begin with."""
        return plan.session_name(self.baseline, self.experiment) if self.baseline else self.experiment.name

    @property
    def subject(self) -> str:
        """The subject of the job, as in `Plan.subject`."""
        return model.subject(self.kind, self.experiment.digest, self.baseline.digest if self.baseline else "")


@dataclass(frozen=True)
class Outcome:
    """How a request ended; what was measured before an error is in the record."""

    job_id: str  # the last job that ran, "" when everything was up to date
    experiment: Experiment  # with its own name if it was built from a checkout
    source: Source  # the tree of the experiment
    device: Device
    planned: int = 0  # cells that the experiment names
    reused: int = 0  # cells that were up to date
    measured: int = 0  # cells with a valid run from this job
    gates: Sequence[str] = ()  # how each gate ended
    error: DgxlabError | None = None  # the error, None on success


def run(lab: Lab, request: Request, watch: Watch) -> Outcome:
    """Measure what a request names and is not up to date, and record it.

    A job of the same subject that already runs, from a dead or another client, is followed first. Where Slurm ends a
    job for others, another one goes on.

    Raises:
        SpecError: if arms cannot be compared, or a session would have too few cycles for its claims.
        DgxlabError: for any other error before a job runs; a job's own error is in the outcome.
        Interrupted: on Ctrl-C while a job runs; the job goes on.
    """
    _compared(request)  # arms that cannot be compared and an unknown host are errors before anything is fetched
    host = lab.connect(request.experiments[0].host)
    request, sides = sourced(lab.cache, request, watch)
    for sentence in _compared(request):
        noted(watch)(sentence)
    for _ in range(cluster.RESTARTS):
        outcome = _once(lab, host, request, sides, watch)
        if request.again or not cluster.may_go_on(host, outcome.error):
            return outcome
        noted(watch)(f"{outcome.error}: a new job does what is missing")
    return _once(lab, host, request, sides, watch)


def _once(lab: Lab, host: Host, request: Request, sides: Sequence[Side], watch: Watch) -> Outcome:
    """Follow or start a job for a request whose sources are made, as `run`."""
    followed = settle(lab, host, request.subject, watch)
    at = place(lab.store, host, request, sides, prepare(host, sides, watch), followed)
    at, followed = _joined(lab, host, request, sides, at, followed, watch)
    if at.job and cluster.build_first(lab, host, at.job, sides, at.probe, watch):  # others went on meanwhile
        at = place(lab.store, host, request, sides, prepare(host, sides, watch), followed)
        at, followed = _joined(lab, host, request, sides, at, followed, watch)
    todo, job, probe = at.todo, at.job, at.probe
    last = sides[-1]
    outcome = Outcome(followed, last.experiment, last.source, _device(last, probe), todo.planned, todo.reused)
    if job is None:
        if request.baseline:
            noted(watch)(f"session {followed} of the same arms went on without this command: its result is kept")
        return outcome
    measured: set[tuple[str, str]] = set()
    gates: list[str] = []

    def see(event: events.Event) -> None:
        if isinstance(event, events.RunEvent) and event.status == "valid":
            measured.update((event.id, result.cell) for result in event.results)
        elif isinstance(event, events.GateEvent):
            gates.append(event.status)
        watch(event)

    error = start_and_follow(lab, at.host, job, probe, see)
    device = next(reversed(lab.store.devices(job.job_id).values()), outcome.device)  # which node it was is known now
    return replace(outcome, job_id=job.job_id, device=device, measured=len(measured), gates=gates, error=error)


def _joined(
    lab: Lab, host: Host, request: Request, sides: Sequence[Side], at: Place, followed: str, watch: Watch
) -> tuple[Place, str]:
    """Follow another client's job of the same, if one runs; return what is left to do then, and the job's id."""
    if at.job is None or followed or request.kind == "gate":
        return at, followed
    if followed := join(lab, host, request.subject, sides, at.probe, watch):
        at = place(lab.store, host, request, sides, prepare(host, sides, watch), followed)
    return at, followed


def full_plan(cache: PinCache, request: Request, watch: Watch) -> Plan:
    """Return the plan that `run` would execute with an empty record and an empty host; SpecError as `run`."""
    _compared(request)
    request, sides = sourced(cache, request, watch)
    return _everything(request, sides, request.name)


def sourced(cache: PinCache, request: Request, watch: Watch) -> tuple[Request, list[Side]]:
    """Make the sources of a request, and return it with its sides, the baseline first; one side if both are equal.

    An experiment that is built from a checkout becomes another one, named after the tree: its results never count for
    the experiment itself, nor for another state of the checkout. Raises as `source_of`.
    """
    arms = ((request.baseline, request.baseline_tree), (request.experiment, request.tree))
    asked = {(each.digest, tree): (each, tree) for each, tree in arms if each}
    sides = [_side(cache, *each, watch) for each in asked.values()]
    baseline = sides[0].experiment if request.baseline else None
    return replace(request, baseline=baseline, experiment=sides[-1].experiment), sides


def _side(cache: PinCache, experiment: Experiment, tree: Path | None, watch: Watch) -> Side:
    source = source_of(cache, experiment, tree, watch)
    if tree is None:
        return Side(experiment, source)
    name = f"{experiment.name[:_NAMED]}{OF_TREE}{source.tree[:_DIGITS]}"
    changed = cache.git.run("diff", "--shortstat", source.pin, source.commit).strip() or "nothing changed"
    noted(watch)(f"{name} is {tree}, tree {source.tree[:12]}: {changed} since pin {source.pin[:12]}")
    named = replace(experiment, name=name, hypothesis="", series=())
    return Side(named, source, series.diff(cache, source))


def source_of(cache: PinCache, experiment: Experiment, tree: Path | None, watch: Watch) -> Source:
    """Return the source of an experiment, made in the pin cache: its pin with its series, or the checkout `tree`.

    Raises:
        SpecError: if no source has the pin.
        PatchError: if the series does not apply to the pin.
    """

    def tell(note: str) -> None:  # git's percentages move the bar
        progress = events.ProgressEvent(id="pin", done=0, total=0, note=note)
        watch(progress if "%" in note else events.NoteEvent(note=note))

    cache.ensure(experiment.pin, experiment.sources, tell)
    if tree is not None:
        return series.apply_tree(cache, experiment.pin, tree)
    root = Path(experiment.root)
    return series.apply(cache, experiment.pin, [series.read(root, name, experiment.pin) for name in experiment.series])


def _device(side: Side, probe: Probe) -> Device:
    return Device.of(model.to_json(probe.facts), plan.make_arm(side.experiment, side.source).cmake)


@dataclass(frozen=True)
class Todo:
    """The cells and gates of a request that are not up to date on a host."""

    planned: int = 0  # number of cells in the experiment of a run
    cells: frozenset[tuple[str, str, str]] = frozenset()
    """Cells to measure, each as (model name, environment digest, cell key)."""
    gates: tuple[ParityGate | Check, ...] = ()

    @property
    def reused(self) -> int:
        """Number of cells that are up to date."""
        return self.planned - len(self.cells)


def plan_missing(
    store: Store, request: Request, sides: Sequence[Side], probe: Probe, followed: str = ""
) -> tuple[Todo, Plan | None]:
    """Return the work of a request that is not up to date, and the plan for it; None if nothing is left.

    Args:
        followed: Id of a job of the same subject that has just ended, "" for none: a session that succeeded is not
            repeated.

    Raises:
        SpecError: if the arms have nothing in common to measure, or a session has too few cycles for its claims.
        ConditionsError: if a screen has no noise floor.
    """
    job_id = plan.new_job_id(request.name)
    if request.baseline is None:
        todo = _left_to_do(store, request, sides[0], probe, again=request.again and not followed)
        if not todo.cells and not todo.gates:
            return todo, None
        return todo, _from_record(store, _everything(request, sides, job_id, todo), sides[0], probe)
    job = _from_record(store, _everything(request, sides, job_id), sides[0], probe)
    for chain in job.chains if request.kind == "screen" else ():
        known = {(floor.cell, floor.metric) for floor in chain.noise}
        for comparison in comparisons(chain):
            if (comparison.baseline, comparison.metric) not in known:
                cell = next(cell.label for cell in chain.baseline.cells if cell.key == comparison.baseline)
                baseline = sides[0].experiment
                message = f"a screen needs the noise floor of host {baseline.host} for {cell}"
                raise ConditionsError(
                    f"{message}, and no A/A session has measured it", next=command_for("noise", baseline)
                )
    if followed and (done := store.job(followed)).state == "done" and _asks(done.plan) == _asks(job):
        return Todo(), None
    return Todo(), job


def _asks(job: Plan) -> tuple[object, ...]:
    """Return what a session compares: its arms, and of each chain the model, the environment and the cells."""
    return job.arms, [
        (chain.baseline.model, chain.baseline.env, [cell.key for cell in chain.baseline.cells]) for chain in job.chains
    ]


@dataclass(frozen=True)
class Place:
    """Where the work of a request is to be done, and what is left of it there."""

    host: Host
    probe: Probe  # its facts are the node's, if that is known
    todo: Todo
    job: Plan | None


def place(store: Store, host: Host, request: Request, sides: Sequence[Side], probe: Probe, followed: str) -> Place:
    """Return where the least is left to do: on a cluster, the node that has measured the most of it; see plan_missing.

    A node is asked for by its name only where it has results that this job completes.

    Raises:
        SpecError: if the cluster's time limit is too short for the plan; and as `plan_missing`.
        ConditionsError: as `plan_missing`.
    """
    places = []
    for node in (node for node in probe.nodes if node.facts and cluster.same_gpus(host, node)):
        assert node.facts
        with suppress(ConditionsError):
            there = replace(probe, facts=node.facts)
            todo, job = plan_missing(store, request, sides, there, followed)
            places.append(Place(cluster.at_node(host, node.name), there, todo, job))
    best = min(places, key=lambda at: len(at.todo.cells) + len(at.todo.gates), default=None)
    if best and (best.job is None or best.todo.reused or request.kind == "screen" or len(probe.nodes) == 1):
        chosen = best
    else:
        chosen = Place(host, probe, *plan_missing(store, request, sides, probe, followed))
    if chosen.job:
        device = _device(sides[0], best.probe if best else probe).id
        cluster.refuse_short(store, host, chosen.job, device)
    return chosen


@dataclass(frozen=True)
class Recorded:
    """What the record has of an experiment on its host, as the host was when it last reported."""

    built: bool
    gates: tuple[int, int]  # how many passed, and how many the experiment has
    cells: tuple[int, int]  # how many are measured, and how many the experiment names


def recorded(store: Store, cache: PinCache, request: Request, watch: Watch) -> Recorded | None:
    """Return what the record has of a run on its host, which is not contacted; None if it never reported."""
    request, sides = sourced(cache, request, watch)
    experiment, host = request.experiment, request.experiment.host
    rows = store.rows("SELECT facts FROM jobs WHERE host = ? AND facts <> '' ORDER BY intent_at DESC LIMIT 1", (host,))
    if not rows:
        return None
    files = store.rows(
        "SELECT path, model_id FROM inputs JOIN jobs USING (job_id) WHERE host = ? ORDER BY intent_at", (host,)
    )
    known = {
        path: {"model_id": row["model_id"], "path": row["path"], "size": 0, "digest": row["model_id"]}
        for path in {path for each in experiment.models.values() for path in model.files_of(each)}
        for row in files
        if row["path"] == path or (path.startswith("~/") and row["path"].endswith(path[1:]))
    }
    probe = Probe(model.from_json(model.Facts, json.loads(rows[0]["facts"])), (), known, {}, ())  # type: ignore[arg-type]
    todo = _left_to_do(store, request, sides[0], probe, again=False)
    arm, gates = plan.make_arm(experiment, sides[0].source), len(plan.launched_gates(experiment))
    build = model.build_id(sides[0].source, arm.cmake, probe.facts.toolchain)
    built = store.rows("SELECT 1 FROM arms JOIN jobs USING (job_id) WHERE host = ? AND build_id = ?", (host, build))
    return Recorded(bool(built), (gates - len(todo.gates), gates), (todo.reused, todo.planned))


def _left_to_do(store: Store, request: Request, side: Side, probe: Probe, *, again: bool) -> Todo:
    """Return the open gates, and the cells without a valid run of this build, model, environment and device."""
    experiment, bench = side.experiment, request.kind != "gate"
    build = model.build_id(side.source, plan.make_arm(experiment, side.source).cmake, probe.facts.toolchain)
    device = _device(side, probe).id
    asked: dict[tuple[str, str, str], tuple[str, str, str]] = {}
    for launch in tools.launches(experiment) if bench else ():
        env_digest, identity = digest(launch.env, 16), _identity(experiment, launch.model, probe)
        for cell in launch.cells:
            asked[launch.model, env_digest, cell.key] = (cell.key, identity, env_digest)
    done = set() if again else store.up_to_date(build, device, list(asked.values()), model.PROTOCOL)
    cells = frozenset(name for name, stored in asked.items() if stored not in done)

    def passed(gate: ParityGate | Check) -> bool:
        step = tools.gate_step("", "", gate, experiment)
        question = gate_digest(gate, step.env)
        if isinstance(gate, ParityGate):
            return store.gate_passed(build, device, question, gate)
        names = {command.model for command in step.commands if command.model}
        inputs = {name: _identity(experiment, name, probe) for name in names} | gate.sources(step.files)
        return store.check_passed(build, device, question, inputs)

    gates = plan.launched_gates(experiment)
    if bench and not again:
        gates = [gate for gate in gates if not passed(gate)]
    if not bench and not gates:
        raise UsageError(f"{experiment.name} has no gate that runs by itself under gates:", next=edit(experiment.path))
    return Todo(len(asked), cells, tuple(gates))


def _everything(request: Request, sides: Sequence[Side], job_id: str, todo: Todo | None = None) -> Plan:
    if request.baseline is not None:
        sources = (sides[0].source, sides[-1].source)
        limits: dict[str, Any] = {"wait_s": request.wait_s, "max_s": request.max_s, "cells": request.cells}
        job = plan.make_ab(request.baseline, request.experiment, sources, job_id=job_id, kind=request.kind, **limits)
    else:
        job = plan.make(
            request.experiment,
            sides[0].source,
            job_id=job_id,
            wanted=lambda name, env, cell: todo is None or (name, digest(env, 16), cell.key) in todo.cells,
            gates=todo.gates if todo else None,
            bench=request.kind != "gate",
            wait_s=request.wait_s,
        )
    return replace(job, diffs={side.experiment.name: side.diff for side in sides if side.diff})


def _compared(request: Request) -> list[str]:
    """Return the differences between the arms, a line each; refuses those that are not allowed."""
    baseline, candidate = request.baseline, request.experiment
    if baseline is None:
        return []
    differing = compare.differences(baseline, candidate)
    compare.refuse(differing, request.allow, candidate.path)
    both = f"{candidate.name} against {baseline.name}"
    if differing:
        return [f"{both}, which differ in", *(f"  {each}" for each in differing)]
    if candidate.digest == baseline.digest:
        return [f"{both}: nothing differs, an A/A session"]
    return [f"{both}: their specs differ in nothing but the name"]


def _from_record(store: Store, job: Plan, side: Side, probe: Probe) -> Plan:
    """Return the plan with data from the record: noise floors, and expected counts for gates without one."""
    device = _device(side, probe)

    def known(step: model.Step) -> model.Step:
        if isinstance(step, ChainStep):
            name, cells = step.baseline.model, [cell.key for cell in step.baseline.cells]
            floors = judgement.noise_floors(store, device.id, cells, _identity(side.experiment, name, probe))
            return replace(step, noise=tuple(floors))
        if not isinstance(step, GateStep):
            return step
        arm, gate = job.arm(step.arm), step.gate
        if not isinstance(gate, ParityGate):
            return step
        compute_cap = Device.of(model.to_json(probe.facts), arm.cmake).compute_cap
        recorded = store.expectation(arm.source.pin, arm.source.tree, gate_digest(gate, step.env), compute_cap)
        if recorded and not step.like:  # a candidate's gate is compared with the baseline's in the same session
            expect, unsupported, cases = recorded
            if gate.expect is None:
                gate = replace(gate, expect=expect, unsupported=unsupported)
            if gate.expect == expect and not gate.cases:
                gate = replace(gate, cases=cases)
        return replace(step, gate=gate, listed=store.case_list(gate.cases) is not None)

    return replace(job, steps=tuple(known(step) for step in job.steps))


def _identity(experiment: Experiment, name: str, probe: Probe) -> str:
    """Return a model's id in the record, with its files as the host knows them; "" for no model."""
    files = {path: file["model_id"] for path, file in probe.models.items() if file}
    return model.model_id(experiment.models[name], files) if name else ""
