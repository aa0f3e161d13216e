"""What of a request is left to do on a host, and the plan for it, given the record and the host's facts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from dgxlab import judgement, model, plan, tools
from dgxlab.chains import comparisons
from dgxlab.errors import ConditionsError, UsageError, edit
from dgxlab.lab import Lab, Side, Watch, cluster
from dgxlab.lab.outlook import device_on, jobs_on, model_on, noise_command, shared
from dgxlab.lab.request import Request, sourced
from dgxlab.model import PROTOCOL, ChainStep, Check, Device, Experiment, GateStep, ModelStep, ParityGate, Plan, digest
from dgxlab.source import PinCache
from dgxlab.store import Store, gate_digest
from dgxlab.transport.host import Host, Probe


def device_of(side: Side, probe: Probe) -> Device:
    """Return the device that a side's build measures on."""
    return Device.of(model.to_json(probe.facts), plan.make_arm(side.experiment, side.source).cmake)


def build_of(side: Side, probe: Probe) -> str:
    """Return the id of a side's build."""
    return model.build_id(side.source, plan.make_arm(side.experiment, side.source).cmake, probe.facts.toolchain)


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
        SpecError: if the arms have nothing in common to measure, or a session has too few cycles for its claims, or too
            little time.
        ConditionsError: if the noise for a screen is not known; and as `request.check`.
    """
    job_id = plan.new_job_id(request.name)
    if request.baseline is None:
        todo = _left_to_do(store, request, sides[0], probe, again=request.again and not followed)
        if not todo.cells and not todo.gates:
            return todo, None
        return todo, _from_record(store, everything(request, sides, job_id, todo), sides[0], probe)
    job = _from_record(store, everything(request, sides, job_id), sides[0], probe)
    for chain in job.chains if request.kind == "screen" else ():
        known = {(noise.cell, noise.metric) for noise in chain.noise}
        for comparison in comparisons(chain):
            if (comparison.baseline, comparison.metric) not in known:
                cell = next(cell.label for cell in chain.baseline.cells if cell.key == comparison.baseline)
                baseline = sides[0].experiment
                message = f"a screen needs the noise of host {baseline.host} for {cell}"
                raise ConditionsError(f"{message}, and no A/A session has measured it", next=noise_command(baseline))
    if request.check:
        request.check(job)
    models = {_identity(*each, probe) for each in _models(sides, job)}
    done = store.job(followed) if followed else None
    if done and done.state == "done" and done.plan.compared == job.compared and models <= _read(store, followed):
        return Todo(), None
    return Todo(), shared(store, job, device_of(sides[0], probe).id)


def answered(lab: Lab, request: Request, sides: Sequence[Side], besides: Collection[str] = ()) -> str:
    """Return the oldest session that has answered a request, on the device of `device_on`; "" for none.

    It compared the same and ended well, and is none of `besides` and not rejected. The host is not contacted: its
    model files are taken to be as it last had them.
    """
    asked, store = everything(request, sides, request.name), lab.store
    device = device_on(store, lab.connect(request.experiment.host).entry, asked)
    models = {model_on(store, of.models[name], device) for of, name in _models(sides, asked)}
    rows = store.rows(
        """SELECT job_id FROM jobs WHERE (host, kind, experiment, protocol, exit_code) = (?, ?, ?, ?, 0)
           ORDER BY intent_at""",
        (request.experiment.host, request.kind, request.experiment.digest, PROTOCOL),
    )
    for job in (store.job(row["job_id"]) for row in rows if row["job_id"] not in besides):
        there = {each.id for each in store.devices(job.job_id).values()} == {device}
        same = there and job.subject == request.subject and job.plan.compared == asked.compared
        if same and not job.rejected and models <= _read(store, job.job_id):
            return job.job_id
    return ""


def _models(sides: Sequence[Side], job: Plan) -> list[tuple[Experiment, str]]:
    """Return the models that a job needs, each by its experiment and its name there."""
    experiments = {side.experiment.name: side.experiment for side in sides}
    return [(experiments[step.arm], step.model) for step in job.steps if isinstance(step, ModelStep)]


def _read(store: Store, job_id: str) -> set[str]:
    """Return the ids of the models that a job had."""
    return {row["model_id"] for row in store.rows("SELECT model_id FROM inputs WHERE job_id = ?", (job_id,))}


@dataclass(frozen=True)
class Place:
    """What is left of a request where the least is left."""

    probe: Probe  # its facts are the node's, if that is known
    todo: Todo
    job: Plan | None


def place(store: Store, host: Host, request: Request, sides: Sequence[Side], probe: Probe, followed: str) -> Place:
    """Return what is left to do: on a cluster, on the node that has measured the most of it; see plan_missing.

    The plan names a node where the node has results that it completes or noise that it uses, or is the only one.

    Raises:
        SpecError: if the cluster's time limit is too short for the plan; and as `plan_missing`.
        ConditionsError: as `plan_missing`.
    """
    places = []
    for node in (node for node in probe.nodes if node.facts and cluster.same_gpus(host, node)):
        assert node.facts
        with suppress(ConditionsError):
            at_node = replace(probe, facts=node.facts)
            todo, job = plan_missing(store, request, sides, at_node, followed)
            places.append(Place(at_node, todo, job and replace(job, node=node.name)))
    best = min(places, key=lambda at: len(at.todo.cells) + len(at.todo.gates), default=None)
    if best and (best.job is None or best.todo.reused or request.kind == "screen" or len(probe.nodes) == 1):
        chosen = best
    else:
        chosen = Place(probe, *plan_missing(store, request, sides, probe, followed))
    if chosen.job:
        device = device_of(sides[0], best.probe if best else probe).id
        cluster.refuse_short(store, host, chosen.job, device)
    return chosen


@dataclass(frozen=True)
class Recorded:
    """What the record has of an experiment on its host, as the host was when it last reported."""

    built: bool
    gates: tuple[int, int]  # how many passed, and how many the experiment has
    cells: tuple[int, int]  # how many are measured, and how many the experiment names


def recorded(store: Store, cache: PinCache, on: model.HostEntry, request: Request, watch: Watch) -> Recorded | None:
    """Return what the record has of a run on its host, which is not contacted; None without one of `jobs_on`."""
    request, sides = sourced(cache, request, watch)
    experiment, host = request.experiment, request.experiment.host
    facts = next(filter(None, (store.job(job_id).facts for job_id in jobs_on(store, on))), None)
    if facts is None:
        return None
    files = store.rows(
        "SELECT path, model_id FROM inputs JOIN jobs USING (job_id) WHERE host = ? ORDER BY intent_at", (host,)
    )
    known = {
        path: {"model_id": row["model_id"], "path": row["path"], "size": 0, "digest": row["model_id"]}
        for path in {path for each in experiment.models.values() for path in model.files_of(each)}
        for row in files
        if model.is_at(path, row["path"])
    }
    probe = Probe(model.from_json(model.Facts, facts), (), known, {}, ())  # type: ignore[arg-type]
    todo = _left_to_do(store, request, sides[0], probe, again=False)
    gates, build = len(plan.launched_gates(experiment)), build_of(sides[0], probe)
    built = store.rows("SELECT 1 FROM arms JOIN jobs USING (job_id) WHERE host = ? AND build_id = ?", (host, build))
    return Recorded(bool(built), (gates - len(todo.gates), gates), (todo.reused, todo.planned))


def _left_to_do(store: Store, request: Request, side: Side, probe: Probe, *, again: bool) -> Todo:
    """Return the open gates, and the cells without a valid run of this build, model, environment and device."""
    experiment, bench = side.experiment, request.kind != "gate"
    build, device = build_of(side, probe), device_of(side, probe).id
    asked: dict[tuple[str, str, str], tuple[str, str, str]] = {}
    for launch in tools.launches(experiment) if bench else ():
        env_digest, identity = digest(launch.env, 16), _identity(experiment, launch.model, probe)
        for cell in launch.cells:
            asked[launch.model, env_digest, cell.key] = (cell.key, identity, env_digest)
    done = set() if again else store.up_to_date(build, device, asked.values(), experiment.markers)
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
    if not again:
        gates = [gate for gate in gates if not passed(gate)]
    if not bench and not plan.launched_gates(experiment):
        raise UsageError(f"{experiment.name} has no gate that runs by itself under gates:", next=edit(experiment.path))
    return Todo(len(asked), cells, tuple(gates))


def everything(request: Request, sides: Sequence[Side], job_id: str, todo: Todo | None = None) -> Plan:
    """Return the plan of a request, of what is in `todo` alone if that is given."""
    if request.baseline is not None:
        sources = (sides[0].source, sides[-1].source)
        limits: dict[str, Any] = {"wait_s": request.wait_s, "max_s": request.max_s, "cells": request.cells}
        limits["level"] = request.level
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


def _from_record(store: Store, job: Plan, side: Side, probe: Probe) -> Plan:
    """Return the plan with data from the record: the noise, and expected counts for gates without one."""
    device = device_of(side, probe)

    def known(step: model.Step) -> model.Step:
        if isinstance(step, ChainStep):
            name, cells = step.baseline.model, [cell.key for cell in step.baseline.cells]
            noises = judgement.noises(store, device.id, cells, _identity(side.experiment, name, probe))
            return replace(step, noise=tuple(noises))
        if not isinstance(step, GateStep):
            return step
        arm, gate = job.arm(step.arm), step.gate
        if not isinstance(gate, ParityGate):
            return step
        compute_cap = Device.of(model.to_json(probe.facts), arm.cmake).compute_cap
        recorded = store.expectation(arm.source.pin, arm.source.tree, gate_digest(gate, step.env), compute_cap)
        if recorded and not step.like:  # a candidate's gate is compared with the baseline's in the same session
            gate = gate.completed(*recorded)
        return replace(step, gate=gate, listed=store.case_list(gate.cases) is not None)

    return replace(job, steps=tuple(known(step) for step in job.steps))


def _identity(experiment: Experiment, name: str, probe: Probe) -> str:
    """Return a model's id in the record, with its files as the host knows them; "" for no model."""
    files = {path: file["model_id"] for path, file in probe.models.items() if file}
    return model.model_id(experiment.models[name], files) if name else ""
