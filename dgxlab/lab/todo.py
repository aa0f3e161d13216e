"""What is left of an experiment on a host, and the plan that does just that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dgxlab import checks, matrix, plan
from dgxlab.errors import SpecError, UsageError, edit
from dgxlab.lab.base import Side
from dgxlab.model import (
    PROTOCOL,
    WAIT_S,
    Cell,
    Check,
    Device,
    Experiment,
    FileModel,
    GateStep,
    HarnessGate,
    ParityGate,
    Plan,
    Source,
    SyntheticModel,
    build_id,
    digest,
    model_id,
    sources,
    to_json,
)
from dgxlab.store import Store, gate_digest
from dgxlab.transport.host import Host, Probe


@dataclass(frozen=True)
class Todo:
    """What is left of an experiment on one host."""

    cells: frozenset[tuple[str, str, str]]
    """(model name, environment digest, cell key) to measure."""
    planned: int
    gates: tuple[ParityGate | Check, ...]

    @property
    def nothing(self) -> bool:
        """Whether everything is up to date."""
        return not self.cells and not self.gates


def ask(host: Host, *sides: Side) -> Probe:
    """Return what the host has of what the arms need, in one round trip.

    Raises:
        SpecError: if a model file is not there.
    """
    commits = [commit for side in sides for commit in (side.source.pin, side.source.commit)]
    models = [model for side in sides for model in side.experiment.models.values()]
    paths = [model.path for model in models if isinstance(model, FileModel)]
    recipes = [model_id(model) for model in models if isinstance(model, SyntheticModel)]
    probe = host.probe(*(list(dict.fromkeys(asked)) for asked in (commits, paths, recipes)))
    for side in sides:
        _need_models(side.experiment, host.name, probe)
    return probe


def left_to_do(store: Store, side: Side, probe: Probe, *, again: bool = False, bench: bool = True) -> Todo:
    """Return the open gates, and the cells without a valid run of this build, model, environment and device."""
    experiment, source = side.experiment, side.source
    build = build_id(source, plan.make_arm(experiment, source).cmake, probe.facts.toolchain)
    asked: dict[tuple[str, str, str], tuple[str, str, str]] = {}

    def note(model: str, env: Mapping[str, str], cell: Cell) -> bool:
        env_digest = digest(env, 16)
        asked[model, env_digest, cell.key] = (cell.key, identity(experiment, model, probe), env_digest)
        return True

    if bench:
        for _ in matrix.launches(experiment, note):
            pass
    device = device_of(experiment, source, probe)
    done = set() if again else store.up_to_date(build, device.id, list(asked.values()), PROTOCOL)
    cells = frozenset(name for name, stored in asked.items() if stored not in done)
    gates = plan.own(experiment)
    if bench and not again:
        gates = [gate for gate in gates if not _passed(store, experiment, gate, build, device, probe)]
    if not bench and not gates:
        raise UsageError(f"{experiment.name} has no gate that runs by itself under gates:", next=edit(experiment.path))
    return Todo(cells, len(asked), tuple(gates))


def device_of(experiment: Experiment, source: Source, probe: Probe) -> Device:
    """Return what an experiment computes on, on the host that was asked."""
    return Device.of(to_json(probe.facts), plan.make_arm(experiment, source).cmake)


def _passed(
    store: Store, experiment: Experiment, gate: ParityGate | Check, build: str, device: Device, probe: Probe
) -> bool:
    asked = gate_digest(gate, plan.gate_env(experiment, gate))
    if not isinstance(gate, ParityGate):
        read = {name: identity(experiment, name, probe) for name in checks.models_of(gate)}
        if isinstance(gate, HarnessGate):
            read |= sources(gate.kernel, checks.kernel_files(experiment.root, gate.kernel))
        return store.check_passed(build, device.id, asked, read)
    return store.gate_passed(build, device.id, asked, gate)


def make_plan(
    store: Store, side: Side, todo: Todo, probe: Probe, *, bench: bool = True, wait_s: float = WAIT_S
) -> Plan:
    """Return the plan for what is left, with recorded expectations filled in."""
    experiment = side.experiment
    made = plan.make(
        experiment,
        side.source,
        job_id=plan.new_job_id(experiment.name),
        wanted=lambda model, env, cell: (model, digest(env, 16), cell.key) in todo.cells,
        gates=todo.gates,
        bench=bench,
        wait_s=wait_s,
    )
    return with_expectations(store, made, probe)


def with_expectations(store: Store, made: Plan, probe: Probe) -> Plan:
    """Return the plan with what earlier clean baselines recorded filled into gates that expect nothing yet.

    A candidate's gate is held against the baseline's in its own session, and keeps what its spec says.
    """
    steps = tuple(_known(store, made, step, probe) if isinstance(step, GateStep) else step for step in made.steps)
    return replace(made, steps=steps)


def _known(store: Store, made: Plan, step: GateStep, probe: Probe) -> GateStep:
    arm = made.arm(step.arm)
    compute_cap = Device.of(to_json(probe.facts), arm.cmake).compute_cap
    recorded = store.expectation(arm.source.pin, arm.source.tree, gate_digest(step.gate, step.env), compute_cap)
    gate = step.gate
    if recorded and not step.like:
        expect, unsupported, cases = recorded
        if gate.expect is None:
            gate = replace(gate, expect=expect, unsupported=unsupported)
        if gate.expect == expect and not gate.cases:
            gate = replace(gate, cases=cases)
    return replace(step, gate=gate, listed=store.case_list(gate.cases) is not None)


def _need_models(experiment: Experiment, host: str, probe: Probe) -> None:
    for name, model in experiment.models.items():
        if isinstance(model, FileModel) and probe.models[model.path] is None:
            raise SpecError(
                f"model {name} is not on host {host}: there is no file {model.path}, which the spec names",
                next=edit(experiment.path),
            )


def identity(experiment: Experiment, name: str, probe: Probe) -> str:
    """Return what a model is stored as: the recipe's digest, or what the host says of the file; "" for no model."""
    if not name:
        return ""
    model = experiment.models[name]
    if isinstance(model, FileModel):
        found = probe.models[model.path]
        return str(found["model_id"]) if found else ""
    return model_id(model)
