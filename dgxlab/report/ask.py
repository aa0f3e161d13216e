"""What is asked: by a user, as a query; of the record, as the cells, gates and models that each arm should have."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

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

# -- questions --------------------------------------------------------------------------------------------------------

ARMS = ("experiment", "session", "host")
"""Keys of the forms that show what was measured for experiments, or in one session."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "steps": ("experiment", "baseline", "host", "model", "cells", "published"),
    "single-stream": (*ARMS, "model", "cells", "published"),
    "concurrency": (*ARMS, "model", "cells", "published"),
    "ops": (*ARMS, "cells", "published"),
    "gates": (*ARMS, "published"),
    "verdicts": ("experiment", "baseline", "session", "host"),
    "levers": ("experiment",),
    "provenance": ARMS,
    "published": ("table", "source"),
    "imported": ("file", "cells"),
}
"""By form, what it may be asked about."""

VIEW = ("columns", "wide")
"""Keys of every form: how it is shown."""

LISTS = ("experiment", "session", "cells", "table", "source", "published", "file", "columns")
"""Keys that take several values with commas between them."""

SWITCH = {"yes": True, "no": False}
"""What `wide` may be."""


@dataclass(frozen=True)
class Query:
    """What to show.

    Attributes:
        form: One of KEYS.
        experiment: Names; the newest session of each is shown.
        session: Ids of sessions; each shows only what it measured itself.
        baseline: What steps are compared with, or the baseline of a verdict.
        host: Only what was measured there; "" for any.
        model: Only cells that read it.
        cells: Only cells that have all words of one of these, such as `q4_K n=512` or `pp512`.
        published: Published figures to add: those that have all words of one of these, such as `seed000 MMQ`.
        table: Names of published tables.
        source: Published figures, by words as in `published`.
        file: Imported files, by their name or the beginning of their id; () lists all of them.
        columns: Columns by their labels, in this order; () for the usual ones.
        wide: Show every column, and what does not count one by one.
    """

    form: str
    experiment: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    baseline: str = ""
    host: str = ""
    model: str = ""
    cells: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    table: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    wide: bool = False


def query(words: Mapping[str, str]) -> Query:
    """Read what a block of a document or a command line asks.

    Raises:
        UsageError: if there is no such form, or it does not take such a key, or a value is missing or given twice.
    """
    form = words.get("form", "")
    if form not in KEYS:
        known = tuple(KEYS)
        raise UsageError(_unknown("form", form, known) if form else f"form is missing; there are {', '.join(known)}")
    values: dict[str, str | bool | tuple[str, ...]] = {}
    for key, text in words.items():
        if key not in ("form", *KEYS[form], *VIEW):
            raise UsageError(f"form={form} takes no {_unknown('key', key, ('form', *KEYS[form], *VIEW))}")
        if not text:
            raise UsageError(f"{key} has no value")
        values[key] = _several(key, text) if key in LISTS else text
    if "wide" in words:
        if words["wide"] not in SWITCH:
            raise UsageError(f"wide is yes or no, not {words['wide']!r}")
        values["wide"] = SWITCH[words["wide"]]
    wanted = Query(**values)  # type: ignore[arg-type]  # each key has its type above
    _check_subject(wanted)
    return wanted


def _several(key: str, text: str) -> tuple[str, ...]:
    parts = [" ".join(part.split()) for part in text.split(",")]
    if "" in parts:
        raise UsageError(f"{key} has an empty value between its commas")
    twice = [part for part in parts if parts.count(part) > 1]
    if twice:
        raise UsageError(f"{key} names {twice[0]!r} twice")
    return tuple(parts)


def _check_subject(wanted: Query) -> None:
    if wanted.experiment and wanted.session:
        raise UsageError("experiment and session exclude each other")
    if wanted.form == "published" and not (wanted.table or wanted.source):
        raise UsageError("form=published needs table or source")
    if wanted.cells and wanted.form == "imported" and not wanted.file:
        raise UsageError("cells are of a file")
    if not (wanted.experiment or wanted.session or wanted.form in ("levers", "published", "imported")):
        either = " or session" if "session" in KEYS[wanted.form] else ""
        raise UsageError(f"form={wanted.form} needs experiment{either}")
    for key in ("baseline", "host"):
        if wanted.session and getattr(wanted, key):
            raise UsageError(f"a session has its own {key}")


def _unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{what} {name!r}; " + (f"there is {near[0]!r}" if near else f"there are {', '.join(known)}")


# -- what an arm should have ------------------------------------------------------------------------------------------

Gate = TypeVar("Gate", ParityGate, Check)

OP_ORDER = ("type_a", "type_b", "type", "m", "n", "k")


@dataclass(frozen=True)
class CellAsk:
    """A cell that should have a number, on a model ("" for none), in an environment; `key` is Cell.key."""

    cell: Cell
    key: str
    model: str
    env: Mapping[str, str]
    env_digest: str

    @property
    def place(self) -> tuple[str, str, str]:
        """What tells one cell of an arm from another: Cell.key, model name, env_digest."""
        return self.key, self.model, self.env_digest


@dataclass(frozen=True)
class GateAsk(Generic[Gate]):
    """A gate that should have been run."""

    gate: Gate
    env: Mapping[str, str]
    digest: str


@dataclass(frozen=True)
class ArmAsk:
    """All that one arm should have: `parity` gates compare operations, `checks` are about models and kernels."""

    arm: Arm
    cells: tuple[CellAsk, ...]
    parity: tuple[GateAsk[ParityGate], ...]
    checks: tuple[GateAsk[Check], ...]
    models: Mapping[str, Model]


@dataclass(frozen=True)
class Ask:
    """What a report is about.

    Attributes:
        host: Name of the host as the user says it.
        device_id: What computes there; None for any device.
        protocol: Results of another one are ignored.
        job: The newest session, or the one that was named; None when nothing was started yet.
        session: Only what this job measured; None for the newest of any.
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
    """Return what the experiment of its newest session asks for, on this session's tree; `arm_name` is one of two."""
    name = arm_name or job.name
    whole = plan_of(job)
    experiment = _experiment(store, job)
    arm = next((arm for arm in whole.arms if arm.name == name), whole.arms[0])
    why = ""
    if experiment is not None:
        why, asked = experiment.hypothesis, _arm_of_experiment(experiment, arm)
    else:
        asked = _arm_of_plan(whole, arm)
        if arm_name:
            rows = store.rows(
                """SELECT hypothesis FROM experiments JOIN jobs ON jobs.experiment = digest
                   WHERE experiments.name = ? ORDER BY intent_at DESC, job_id DESC LIMIT 1""",
                (name,),
            )
            why = str(rows[0]["hypothesis"]) if rows else ""
    device = store.devices(job.job_id).get(arm.name)
    return Ask(f"Experiment {name}", why, job.host, device.id if device else None, (asked,), job.protocol, job)


def of_experiment(store: Store, experiment: Experiment, source: Source, device: Device) -> Ask:
    """Return what an experiment asks for on a tree and device, also when other experiments measured all of it."""
    arm = _arm_of_experiment(experiment, plan.make_arm(experiment, source))
    rows = store.rows(
        f"""SELECT job_id FROM jobs WHERE experiment = ? AND host_id = ? AND kind IN ('run', 'gate')
           AND coalesce((SELECT max(device_id = ?) FROM arms WHERE arms.job_id = jobs.job_id), true)
           ORDER BY job_id IN ({REJECTED}), intent_at DESC, job_id DESC LIMIT 1""",  # noqa: S608 - our own
        (experiment.digest, device.host_id, device.id),
    )
    job = store.job(rows[0]["job_id"]) if rows else None
    return Ask(f"Experiment {experiment.name}", experiment.hypothesis, experiment.host, device.id, (arm,), job=job)


def of_arm(store: Store, name: str, host: str = "") -> Ask:
    """Return what an experiment's newest session asks for, alone or beside another; one that measured it, if any did.

    Raises:
        UsageError: if there is none, or none on `host` where that is given.
    """
    own = "(name = :name OR EXISTS (SELECT 1 FROM arms WHERE arms.job_id = jobs.job_id AND arm = :name))"
    without_numbers = f"""NOT EXISTS (SELECT 1 FROM runs WHERE runs.job_id = jobs.job_id AND arm = :name
                                      AND status = 'valid') OR job_id IN ({UNCOUNTED})"""  # noqa: S608 - our own
    job = _first(store, own, without_numbers, name, host)
    if job is None and host and _first(store, own, without_numbers, name):
        raise UsageError(f"{store.path} has no session of {name!r} on {host!r}", next="dgxlab jobs")
    if job is None:
        raise _no_session(store, name)
    if job.kind in SESSIONS and job.name == name:
        raise UsageError(f"{name!r} compares two experiments; its numbers are in form=verdicts", next="dgxlab jobs")
    return of_newest(store, job, name)


def newest_job(store: Store, name: str) -> Job:
    """Return the newest session of an experiment.

    Raises:
        UsageError: if there is none; with the newest session of two arms that it is one of, or the nearest name.
    """
    # gates alone, perhaps of another tree, do not hide what was measured
    if job := _first(store, "name = :name", f"job_id IN ({REJECTED}), kind = 'gate'", name):
        return job
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


def _first(store: Store, where: str, rank: str, name: str, host: str = "") -> Job | None:
    rows = store.rows(
        f"""SELECT job_id FROM jobs WHERE {where} AND (:host = '' OR host = :host)
            ORDER BY {rank}, intent_at DESC, job_id DESC LIMIT 1""",  # noqa: S608 - our own
        {"name": name, "host": host},
    )
    return store.job(rows[0]["job_id"]) if rows else None


def _no_session(store: Store, name: str) -> UsageError:
    names = [row["name"] for row in store.rows("SELECT name FROM jobs UNION SELECT arm FROM arms ORDER BY 1")]
    near = difflib.get_close_matches(name, names, n=1)
    return UsageError(
        f"{store.path} has no session of an experiment {name!r}" + (f"; there is {near[0]!r}" if near else ""),
        next=f"dgxlab report {near[0]}" if near else "dgxlab jobs",
    )


# -- experiments and plans --------------------------------------------------------------------------------------------


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
    """Return the hypothesis of a job's experiment, "" where it is not known."""
    rows = store.rows("SELECT hypothesis FROM experiments WHERE digest = ?", (job.experiment,))
    return str(rows[0]["hypothesis"]) if rows else ""


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


def cell_ask(cell: Cell, model: str, env: Mapping[str, str]) -> CellAsk:
    """Return what is asked of a cell, its identities computed."""
    return CellAsk(cell, cell.key, model, env, digest(env, 16))


def _experiment(store: Store, job: Job) -> Experiment | None:
    """Return a job's experiment; None when it is not known, or was written by a dgxlab with other fields."""
    rows = store.rows("SELECT spec FROM experiments WHERE digest = ?", (job.experiment,))
    if not rows or job.kind != "run":
        return None
    try:
        return from_json(Experiment, {**json.loads(rows[0]["spec"]), "path": "", "root": ""})
    except ValueError:
        return None


def _arm_of_experiment(experiment: Experiment, arm: Arm) -> ArmAsk:
    """Expand the matrix again: a plan holds only the cells that were not up to date when it was made."""
    try:
        launches = list(tools.launches(experiment))
    except DgxlabError:  # a rule that came later refuses it; then it has no cells to look for
        launches = []
    cells = [cell_ask(cell, launch.model, launch.env) for launch in launches for cell in launch.cells]
    gates = [(gate, plan.gate_env(experiment, gate)) for gate in plan.own(experiment)]
    return _arm_ask(arm, cells, gates, experiment.models)


def _arm_of_plan(whole: Plan, arm: Arm) -> ArmAsk:
    runs = [run for run in whole.runs if run.arm == arm.name]
    cells = [cell_ask(cell, run.model, run.env) for run in runs for cell in run.cells]
    steps = [step for step in whole.steps if arm.name in arms_of(step)]
    gates = [(step.gate, step.env) for step in steps if isinstance(step, (GateStep, CheckStep))]
    models = {step.model: step.recipe or FileModel(step.path) for step in whole.steps if isinstance(step, ModelStep)}
    return _arm_ask(arm, cells, gates, models)


def _arm_ask(
    arm: Arm,
    cells: Iterable[CellAsk],
    gates: Iterable[tuple[ParityGate | Check, Mapping[str, str]]],
    models: Mapping[str, Model],
) -> ArmAsk:
    """Each cell and gate once: a session with many runs has a cell many times, and gates before and after."""
    once = {gate_digest(gate, env): (gate, env) for gate, env in gates}
    return ArmAsk(
        arm,
        tuple({ask.place: ask for ask in cells}.values()),
        tuple(GateAsk(gate, env, key) for key, (gate, env) in once.items() if isinstance(gate, ParityGate)),
        tuple(GateAsk(gate, env, key) for key, (gate, env) in once.items() if not isinstance(gate, ParityGate)),
        models,
    )
