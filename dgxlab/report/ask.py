"""What was asked for: the cells, gates and models of each arm, from an experiment or from one session's plan."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dgxlab import plan, tools
from dgxlab.errors import DgxlabError, UsageError
from dgxlab.model import (
    PROTOCOL,
    SESSIONS,
    Arm,
    Cell,
    Check,
    CheckStep,
    Device,
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
from dgxlab.store import REJECTED, UNCOUNTED, gate_digest

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
class CheckAsk:
    """A gate on a model that should have been run."""

    gate: Check
    env: Mapping[str, str]
    digest: str


@dataclass(frozen=True)
class ArmAsk:
    """All that one arm should have."""

    arm: Arm
    cells: tuple[CellAsk, ...]
    gates: tuple[GateAsk, ...]
    checks: tuple[CheckAsk, ...]
    models: Mapping[str, Model]


@dataclass(frozen=True)
class Ask:
    """What a report is about.

    Attributes:
        host: Name of the host as the user says it.
        device_id: What computes there; None for whatever did.
        protocol: Results of another one are not looked at.
        job: The newest session, or the one that was named; None when nothing was started yet.
        session: Only what this job measured; None for whatever is newest.
    """

    title: str
    hypothesis: str
    host: str
    device_id: str | None
    arms: tuple[ArmAsk, ...]
    protocol: int = PROTOCOL
    job: Job | None = None
    session: str | None = None


def of_session(store: Store, job: Job) -> Ask:
    """Return what one session's plan asked for."""
    whole = plan_of(job)
    arms = tuple(_arm_of_plan(whole, arm) for arm in whole.arms)
    title = f"Session {job.job_id}"
    return Ask(title, hypothesis(store, job), job.host, None, arms, job.protocol, job, job.job_id)


def of_newest(store: Store, job: Job, arm_name: str = "") -> Ask:
    """Return what the experiment of its newest session asks for, on the tree that this session had.

    Args:
        arm_name: Which experiment, where the session has two.
    """
    name = arm_name or job.name
    whole = plan_of(job)
    experiment = _experiment(store, job)
    arm = next((arm for arm in whole.arms if arm.name == name), whole.arms[0])
    asked = _arm_of_plan(whole, arm) if experiment is None else _arm_of_experiment(experiment, arm)
    why = experiment.hypothesis if experiment else _hypothesis_of(store, name) if arm_name else ""
    found = store.devices(job.job_id).get(arm.name)
    return Ask(f"Experiment {name}", why, job.host, found.id if found else None, (asked,), job.protocol, job)


def of_experiment(store: Store, experiment: Experiment, source: Source, device: Device) -> Ask:
    """Return what an experiment asks for on a tree and device, also when everything was measured by others for it."""
    arm = _arm_of_experiment(experiment, plan.make_arm(experiment, source))
    found = store.rows(
        f"""SELECT job_id FROM jobs WHERE experiment = ? AND host_id = ? AND kind IN ('run', 'gate')
           AND coalesce((SELECT max(device_id = ?) FROM arms WHERE arms.job_id = jobs.job_id), true)
           ORDER BY job_id IN ({REJECTED}), intent_at DESC, job_id DESC LIMIT 1""",  # noqa: S608 - our own
        (experiment.digest, device.host_id, device.id),
    )
    job = store.job(found[0]["job_id"]) if found else None
    return Ask(f"Experiment {experiment.name}", experiment.hypothesis, experiment.host, device.id, (arm,), job=job)


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


def _hypothesis_of(store: Store, name: str) -> str:
    """Return the hypothesis of the newest experiment of a name that was the subject of a session."""
    found = store.rows(
        """SELECT hypothesis FROM experiments JOIN jobs ON jobs.experiment = digest WHERE experiments.name = ?
           ORDER BY intent_at DESC, job_id DESC LIMIT 1""",
        (name,),
    )
    return str(found[0]["hypothesis"]) if found else ""


# -- experiments and plans --------------------------------------------------------------------------------------------


def newest_job(store: Store, name: str) -> Job:
    """Return the newest session of an experiment.

    Raises:
        UsageError: if there is none; with the newest session of two arms that it is one of, or the nearest name.
    """
    # gates alone, perhaps of another tree, do not hide what was measured
    if found := _first(store, "name = :name", f"job_id IN ({REJECTED}), kind = 'gate'", name):
        return found
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
    raise _no_session(store, name)


UNMEASURED = f"""NOT EXISTS (SELECT 1 FROM runs WHERE runs.job_id = jobs.job_id AND arm = :name AND status = 'valid')
                 OR job_id IN ({UNCOUNTED})"""  # noqa: S608 - our own
"""Whether a session has no numbers of an arm, or shows none yet."""


def of_arm(store: Store, name: str, host: str = "") -> Ask:
    """Return what an experiment's newest session asks for, alone or beside another; one that measured it, if any did.

    Args:
        host: Only sessions there.

    Raises:
        UsageError: if there is none.
    """
    own = "(name = :name OR EXISTS (SELECT 1 FROM arms WHERE arms.job_id = jobs.job_id AND arm = :name))"
    job = _first(store, own, UNMEASURED, name, host)
    if job is None and host and _first(store, own, UNMEASURED, name):
        raise UsageError(f"{store.path} has no session of {name!r} on {host!r}", next="dgxlab jobs")
    if job is None:
        raise _no_session(store, name)
    if job.kind in SESSIONS and job.name == name:
        raise UsageError(f"{name!r} compares two experiments; its numbers are in form=verdicts", next="dgxlab jobs")
    return of_newest(store, job, name)


def _first(store: Store, where: str, rank: str, name: str, host: str = "") -> Job | None:
    """Return the newest session of the lowest rank."""
    found = store.rows(
        f"""SELECT job_id FROM jobs WHERE {where} AND (:host = '' OR host = :host)
            ORDER BY {rank}, intent_at DESC, job_id DESC LIMIT 1""",  # noqa: S608 - our own
        {"name": name, "host": host},
    )
    return store.job(found[0]["job_id"]) if found else None


def _no_session(store: Store, name: str) -> UsageError:
    """Say that an experiment was never measured, with the nearest name that was."""
    names = [row["name"] for row in store.rows("SELECT name FROM jobs UNION SELECT arm FROM arms ORDER BY 1")]
    near = difflib.get_close_matches(name, names, n=1)
    return UsageError(
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
        launches = list(tools.launches(experiment))
    except DgxlabError:  # a rule that came later refuses it; then it has no cells to look for
        launches = []
    cells = [cell_ask(cell, launch.model, launch.env) for launch in launches for cell in launch.cells]
    asked = [(gate, plan.gate_env(experiment, gate)) for gate in plan.own(experiment)]
    return ArmAsk(arm, _unique(cells), *_gates(asked), models=experiment.models)


def _arm_of_plan(whole: Plan, arm: Arm) -> ArmAsk:
    steps = [step for step in whole.steps if arm.name in arms_of(step)]
    runs = [run for run in whole.runs if run.arm == arm.name]
    cells = [cell_ask(cell, run.model, run.env) for run in runs for cell in run.cells]
    asked = [(step.gate, step.env) for step in steps if isinstance(step, (GateStep, CheckStep))]
    models = {step.model: step.recipe or FileModel(step.path) for step in whole.steps if isinstance(step, ModelStep)}
    return ArmAsk(arm, _unique(cells), *_gates(asked), models=models)


def _gates(
    asked: Sequence[tuple[ParityGate | Check, Mapping[str, str]]],
) -> tuple[tuple[GateAsk, ...], tuple[CheckAsk, ...]]:
    """Return the gates that are asked for, each once: a session asks before and after."""
    parity = [GateAsk(gate, gate_digest(gate, env)) for gate, env in asked if isinstance(gate, ParityGate)]
    others = [CheckAsk(gate, env, gate_digest(gate, env)) for gate, env in asked if not isinstance(gate, ParityGate)]
    return (
        tuple({gate.digest: gate for gate in parity}.values()),
        tuple({check.digest: check for check in others}.values()),
    )


def cell_ask(cell: Cell, model: str, env: Mapping[str, str]) -> CellAsk:
    """Return what is asked of a cell, its identities computed."""
    return CellAsk(cell, cell.key, model, env, digest(env, 16))


def _unique(cells: list[CellAsk]) -> tuple[CellAsk, ...]:
    """A session with many runs of one entry asks for each of its cells once."""
    return tuple({(ask.key, ask.model, ask.env_digest): ask for ask in cells}.values())
