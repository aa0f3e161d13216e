"""What was asked for: the cells, gates and models of each arm, from an experiment or from one session's plan."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dgxlab import matrix, plan
from dgxlab.errors import DgxlabError, UsageError
from dgxlab.model import (
    PROTOCOL,
    Arm,
    Cell,
    Experiment,
    FileModel,
    GateStep,
    Model,
    ModelStep,
    Param,
    ParityGate,
    Plan,
    Source,
    arms_of,
    digest,
    from_json,
)
from dgxlab.store import gate_digest

if TYPE_CHECKING:
    from dgxlab.store import Job, Store


OP_ORDER = ("type_a", "type_b", "type", "m", "n", "k")


@dataclass(frozen=True)
class CellAsk:
    """A cell that should have a number, on a model ("" for none), in an environment."""

    cell: Cell
    key: str
    """Cell.key, computed once."""
    model: str
    env: Mapping[str, str]
    env_digest: str


@dataclass(frozen=True)
class GateAsk:
    """A parity gate that should have been run."""

    gate: ParityGate
    digest: str


@dataclass(frozen=True)
class ArmAsk:
    """All that one arm should have."""

    arm: Arm
    cells: tuple[CellAsk, ...]
    gates: tuple[GateAsk, ...]
    models: Mapping[str, Model]


@dataclass(frozen=True)
class Ask:
    """What a report is about.

    Attributes:
        host: Name of the host as the user says it.
        host_id: Which machine that is, whatever it was called when it measured; None while it is not known.
        protocol: Results of another one are not looked at.
        job: The newest session, or the one that was named; None when nothing was started yet.
        session: Only what this job measured; None for whatever is newest.
    """

    title: str
    hypothesis: str
    host: str
    host_id: str | None
    arms: tuple[ArmAsk, ...]
    protocol: int = PROTOCOL
    job: Job | None = None
    session: str | None = None


def of_session(store: Store, job: Job) -> Ask:
    """Return what one session's plan asked for."""
    whole = plan_of(job)
    arms = tuple(_arm_of_plan(whole, arm) for arm in whole.arms)
    title = f"Session {job.job_id}"
    return Ask(title, hypothesis(store, job), job.host, job.host_id, arms, job.protocol, job, job.job_id)


def of_newest(store: Store, job: Job) -> Ask:
    """Return what the experiment of its newest session asks for, on the tree that this session had."""
    name = job.name
    whole = plan_of(job)
    experiment = _experiment(store, job)
    arm = next((arm for arm in whole.arms if arm.name == name), whole.arms[0])
    asked = _arm_of_plan(whole, arm) if experiment is None else _arm_of_experiment(experiment, arm)
    why = experiment.hypothesis if experiment else ""
    return Ask(f"Experiment {name}", why, job.host, job.host_id, (asked,), job.protocol, job)


def of_experiment(store: Store, experiment: Experiment, source: Source, host_id: str) -> Ask:
    """Return what an experiment asks for on a tree and machine, also when everything was measured by others for it."""
    arm = _arm_of_experiment(experiment, plan.make_arm(experiment, source))
    found = store.rows(
        """SELECT job_id FROM jobs WHERE experiment = ? AND host_id = ? AND kind IN ('run', 'gate')
           ORDER BY intent_at DESC, job_id DESC LIMIT 1""",
        (experiment.digest, host_id),
    )
    job = store.job(found[0]["job_id"]) if found else None
    return Ask(f"Experiment {experiment.name}", experiment.hypothesis, experiment.host, host_id, (arm,), job=job)


def op_params(cell: Cell) -> dict[str, Param]:
    """Return the parameters that tell an operation's cells apart, those of a GEMM first and in its order."""
    params = {name: value for name, value in cell.params.items() if name not in ("op_name", "backend_name")}
    return {**{name: params[name] for name in OP_ORDER if name in params}, **params}


def label(cell: Cell) -> str:
    """Name a cell. An operation's own label follows its spec, whose order is lost where it was kept as JSON."""
    if cell.tool != "backend-ops":
        return cell.label
    return " ".join([str(cell.params.get("op_name")), *(f"{name}={value}" for name, value in op_params(cell).items())])


def hypothesis(store: Store, job: Job) -> str:
    """Return what a job's experiment was made to show, "" where it is not known."""
    found = store.rows("SELECT hypothesis FROM experiments WHERE digest = ?", (job.experiment,))
    return str(found[0]["hypothesis"]) if found else ""


# -- experiments and plans --------------------------------------------------------------------------------------------


def newest_job(store: Store, name: str) -> Job:
    """Return the newest session of an experiment.

    Raises:
        UsageError: if there is none; with the newest session of two arms that it is one of, or the nearest name.
    """
    found = store.rows(
        # gates alone, perhaps of another tree, do not hide what was measured
        "SELECT job_id FROM jobs WHERE name = ? ORDER BY kind = 'gate', intent_at DESC, job_id DESC LIMIT 1",
        (name,),
    )
    if found:
        return store.job(found[0]["job_id"])
    compared = store.rows(
        "SELECT name FROM arms JOIN jobs USING (job_id) WHERE arm = ? ORDER BY intent_at DESC, job_id DESC LIMIT 1",
        (name,),
    )
    if compared:
        session = compared[0]["name"]
        raise UsageError(
            f"{store.path} has no session of {name!r} alone; it is an arm of {session!r}",
            next=f"dgxlab report {session}",
        )
    names = [row["name"] for row in store.rows("SELECT DISTINCT name FROM jobs ORDER BY name")]
    near = difflib.get_close_matches(name, names, n=1)
    raise UsageError(
        f"{store.path} has no session of an experiment {name!r}" + (f"; there is {near[0]!r}" if near else ""),
        next=f"dgxlab report {near[0]}" if near else "dgxlab jobs",
    )


def plan_of(job: Job) -> Plan:
    """Return what a job carries out.

    Raises:
        UsageError: if a dgxlab with other fields wrote it.
    """
    try:
        return job.plan
    except ValueError as error:
        raise UsageError(
            f"the plan of session {job.job_id} was written by dgxlab {job.dgxlab_version} and cannot be read: {error}",
            next="install that dgxlab to report on it",
        ) from error


def _experiment(store: Store, job: Job) -> Experiment | None:
    """Return a job's experiment; None when it is not known, or was written by a dgxlab with other fields."""
    found = store.rows("SELECT spec FROM experiments WHERE digest = ?", (job.experiment,))
    if not found or job.kind != "run":
        return None
    try:
        return from_json(Experiment, {**json.loads(found[0]["spec"]), "path": "", "root": ""})
    except ValueError:
        return None


def _arm_of_experiment(experiment: Experiment, arm: Arm) -> ArmAsk:
    """Expand the matrix again: a plan holds only the cells that were not up to date when it was made."""
    try:
        launches = list(matrix.launches(experiment))
    except DgxlabError:  # a rule that came later refuses it; then it has no cells to look for
        launches = []
    cells = [cell_ask(cell, launch.model, launch.env) for launch in launches for cell in launch.cells]
    gates = [
        GateAsk(gate, gate_digest(gate, plan.gate_env(experiment, gate)))
        for gate in experiment.gates
        if isinstance(gate, ParityGate)
    ]
    return ArmAsk(arm, _unique(cells), tuple({gate.digest: gate for gate in gates}.values()), experiment.models)


def _arm_of_plan(whole: Plan, arm: Arm) -> ArmAsk:
    steps = [step for step in whole.steps if arm.name in arms_of(step)]
    runs = [run for run in whole.runs if run.arm == arm.name]
    cells = [cell_ask(cell, run.model, run.env) for run in runs for cell in run.cells]
    gates = [GateAsk(step.gate, gate_digest(step.gate, step.env)) for step in steps if isinstance(step, GateStep)]
    models = {step.model: step.recipe or FileModel(step.path) for step in whole.steps if isinstance(step, ModelStep)}
    return ArmAsk(arm, _unique(cells), tuple({gate.digest: gate for gate in gates}.values()), models)


def cell_ask(cell: Cell, model: str, env: Mapping[str, str]) -> CellAsk:
    """Return what is asked of a cell, its identities computed."""
    return CellAsk(cell, cell.key, model, env, digest(env, 16))


def _unique(cells: list[CellAsk]) -> tuple[CellAsk, ...]:
    """A session with many runs of one entry asks for each of its cells once."""
    return tuple({(ask.key, ask.model, ask.env_digest): ask for ask in cells}.values())
