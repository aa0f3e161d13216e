"""What a report asks of the record: the user's `Query`, and an `Ask` for each arm.

An `Ask` has the cells and gates that an arm should have; `evidence` then looks for their results.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dgxlab import plan, tools
from dgxlab.errors import DgxlabError, UsageError, command
from dgxlab.judgement.names import CellAsk
from dgxlab.model import (
    PROTOCOL,
    SESSIONS,
    Arm,
    Cell,
    Device,
    Experiment,
    FileModel,
    GateStep,
    LaunchedGate,
    Model,
    ModelStep,
    Param,
    Plan,
    Source,
    arms_of,
    from_json,
)
from dgxlab.project import first_command
from dgxlab.store import REJECTED, UNCOUNTED, gate_digest

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

ARMS = ("experiment", "session", "host")
OF_CHECKOUTS = "SELECT job_id FROM arms WHERE dirty"
"""The jobs that built a checkout; an older dgxlab recorded them under the name of the experiment itself."""
_OVERRIDDEN = "SELECT job_id FROM gates WHERE overridden"  # by --set, so that they are not about the file's experiment

KEYS: Mapping[str, tuple[str, ...]] = {
    "steps": ("experiment", "baseline", "host", "model", "cells", "published"),
    "single-stream": (*ARMS, "model", "cells", "published"),
    "concurrency": (*ARMS, "model", "cells", "published"),
    "serving": (*ARMS, "model", "cells"),
    "ops": (*ARMS, "cells", "published"),
    "profile": (*ARMS, "model", "cells"),
    "history": ("experiment", "host", "model", "cells"),
    "gates": (*ARMS, "published"),
    "verdicts": ("experiment", "baseline", "session", "host"),
    "fleet": ("experiment", "baseline"),
    "levers": ("experiment",),
    "tries": ("experiment", "host"),
    "provenance": ARMS,
    "published": ("table", "source"),
    "imported": ("file", "cells"),
}
"""By form, the keys that its query may have, besides VIEW."""

VIEW = ("columns", "wide")  # keys that every form takes: they only choose what is shown
WITHOUT_NAMES = ("history", "levers", "tries", "published", "imported")  # forms that need no experiment or session

LISTS = ("experiment", "session", "cells", "table", "source", "published", "file", "columns")
"""Keys whose value is a list, with commas between its items."""


@dataclass(frozen=True)
class Query:
    """A request for the tables of one form.

    The items of `cells`, `published` and `source` are patterns: a pattern matches what has all its words.
    """

    form: str
    experiment: tuple[str, ...] = ()  # the newest session of each is shown
    session: tuple[str, ...] = ()  # job ids; each shows only its own results
    baseline: str = ""  # the experiment that steps and verdicts compare with
    host: str = ""
    model: str = ""
    cells: tuple[str, ...] = ()  # such as `q4_K n=512` or `pp512`
    published: tuple[str, ...] = ()  # published figures to add to measured numbers, such as `seed000 MMQ`
    table: tuple[str, ...] = ()  # names of tables of published figures
    source: tuple[str, ...] = ()  # published figures to show alone
    file: tuple[str, ...] = ()  # imported files, by name or the beginning of their id; () lists all
    columns: tuple[str, ...] = ()  # by their labels, in this order; () for the usual ones
    wide: bool = False


def query(words: Mapping[str, str]) -> Query:
    """Parse a query, given its keys and values as a document's block or a command line has them.

    Raises UsageError if the form is unknown, it does not take a key, or a value is missing or given twice.
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
        values[key] = text
        if key in LISTS:
            values[key] = parts = tuple(" ".join(part.split()) for part in text.split(","))
            if "" in parts:
                raise UsageError(f"{key} has an empty value between its commas")
            if twice := [part for part in parts if parts.count(part) > 1]:
                raise UsageError(f"{key} names {twice[0]!r} twice")
    if "wide" in words:
        if words["wide"] not in ("yes", "no"):
            raise UsageError(f"wide is yes or no, not {words['wide']!r}")
        values["wide"] = words["wide"] == "yes"
    wanted = Query(**values)  # type: ignore[arg-type]  # each key has its type above
    _check(wanted)
    return wanted


def _check(wanted: Query) -> None:
    if wanted.experiment and wanted.session:
        raise UsageError("experiment and session exclude each other")
    if wanted.form == "published" and not (wanted.table or wanted.source):
        raise UsageError("form=published needs table or source")
    if wanted.cells and wanted.form == "imported" and not wanted.file:
        raise UsageError("cells are of a file")
    if wanted.form == "history" and not wanted.cells:
        raise UsageError("form=history needs cells")
    if not (wanted.experiment or wanted.session or wanted.form in WITHOUT_NAMES):
        either = " or session" if "session" in KEYS[wanted.form] else ""
        raise UsageError(f"form={wanted.form} needs experiment{either}")
    for key in ("baseline", "host"):
        if wanted.session and getattr(wanted, key):
            raise UsageError(f"a session has its own {key}")


def _unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"{what} {name!r}; " + (f"there is {near[0]!r}" if near else f"there are {', '.join(known)}")


AskedGate = tuple[LaunchedGate, Mapping[str, str]]  # a gate that an arm should have passed, and its environment

OP_ORDER = ("type_a", "type_b", "type", "m", "n", "k")


@dataclass(frozen=True)
class Ask:
    """What to look for in the record for one arm: its cells, gates and models, and on which device."""

    arm: Arm
    cells: tuple[CellAsk, ...]
    gates: Mapping[str, AskedGate]  # by gate_digest
    models: Mapping[str, Model]
    markers: Mapping[str, tuple[str, ...]]
    """By tool, what the plan of its runs must require on stderr: the path that other runs took is unknown."""
    host: str = ""  # its name in hosts.yaml
    device_id: str | None = None  # None for any device
    protocol: int = PROTOCOL
    session: str | None = None  # only this job's results; None for the newest of any job
    hypothesis: str = ""

    def on(self, host: str, device_id: str) -> Ask:
        """Return the same ask for another device."""
        return replace(self, host=host, device_id=device_id)


def of_session(store: Store, job: Job) -> list[Ask]:
    """Return the ask of each arm in a job's plan, for the results of that job alone."""
    whole = job.plan
    about = {"protocol": job.protocol, "session": job.job_id, "hypothesis": hypothesis(store, job)}
    return [_of_plan(whole, arm, host=job.host, **about) for arm in whole.arms]


def of_newest(store: Store, job: Job, name: str) -> Ask:
    """Return the ask of an experiment on the tree and device of `job`, for the newest results of any job.

    `name` is the experiment's arm in the job's plan; if it has no such arm, the first.
    """
    whole = job.plan
    experiment = _experiment(store, job)
    arm = next((arm for arm in whole.arms if arm.name == name), whole.arms[0])
    device = store.devices(job.job_id).get(arm.name)
    about = {"host": job.host, "device_id": device.id if device else None, "protocol": job.protocol}
    if experiment is not None:
        return _of_experiment(experiment, arm, **about)
    rows = store.rows(
        """SELECT hypothesis FROM experiments JOIN jobs ON jobs.experiment = digest
           WHERE experiments.name = ? ORDER BY intent_at DESC, job_id DESC LIMIT 1""",
        (name,),
    )
    return _of_plan(whole, arm, hypothesis=str(rows[0]["hypothesis"]) if rows else "", **about)


def of_experiment(experiment: Experiment, source: Source, device: Device) -> Ask:
    """Return the ask of an experiment on a tree and device, for the newest results of any job."""
    arm = plan.make_arm(experiment, source)
    return _of_experiment(experiment, arm, host=experiment.host, device_id=device.id)


def newest_on(store: Store, experiment: Experiment, device: Device) -> Job | None:
    """Return the newest job of an experiment alone on a device, or None; a rejected one only if there is no other.

    A job that ended before it had built anything is taken to be on the device.
    """
    on_device = "coalesce((SELECT max(device_id = :device_id) FROM arms WHERE arms.job_id = jobs.job_id), true)"
    where = f"experiment = :experiment AND host_id = :host_id AND kind IN ('run', 'gate') AND {on_device}"
    of_device = {"experiment": experiment.digest, "host_id": device.host_id, "device_id": device.id}
    return newest(store, where, f"job_id IN ({REJECTED})", **of_device)


def job_of_arm(store: Store, name: str, host: str = "") -> Job:
    """Return the newest job that an experiment was part of, alone or as an arm, on `host` unless that is "".

    A job without valid runs of the experiment is returned only if there is no other. Raises UsageError if there is no
    such job, or `name` is the name of a comparison.
    """
    own = "(name = :name OR EXISTS (SELECT 1 FROM arms WHERE arms.job_id = jobs.job_id AND arm = :name))"
    without_numbers = f"""NOT EXISTS (SELECT 1 FROM runs WHERE runs.job_id = jobs.job_id AND arm = :name
                                      AND status = 'valid') OR job_id IN ({UNCOUNTED}),
                          job_id IN ({OF_CHECKOUTS} AND arm = :name), job_id IN ({_OVERRIDDEN})"""  # noqa: S608 - our own
    job = newest(store, f"{own} AND :host IN ('', host)", without_numbers, name=name, host=host)
    if job is None and host and newest(store, own, name=name):
        raise UsageError(f"{store.path} has no session of {name!r} on {host!r}", next="dgxlab sessions")
    if job is None:
        raise _no_session(store, name)
    if job.kind in SESSIONS and job.name == name:
        message = f"{name!r} compares two experiments; its numbers are in form=verdicts"
        raise UsageError(message, next=f"dgxlab report --form verdicts {job.job_id}")
    return job


def newest_job(store: Store, name: str) -> Job:
    """Return the newest job of this name, else the newest with an arm of this name (`job_of_arm`).

    A rejected one, one of a checkout, with a gate that --set changed or with gates alone is the last choice.
    """
    # a session of gates only, perhaps of another tree, must not hide measured results
    last = f"job_id IN ({REJECTED}), job_id IN ({OF_CHECKOUTS}), job_id IN ({_OVERRIDDEN}), kind = 'gate'"
    return newest(store, "name = :name", last, name=name) or job_of_arm(store, name)


def newest(store: Store, where: str, last: str = "NULL", **params: Any) -> Job | None:
    """Return the newest job for which the SQL condition `where` is true, or None; `params` are its parameters.

    Jobs for which `last`, one or more SQL expressions, is true come after all others.
    """
    rows = store.rows(
        f"SELECT job_id FROM jobs WHERE {where} ORDER BY {last}, intent_at DESC, job_id DESC LIMIT 1",  # noqa: S608
        params,
    )
    return store.job(rows[0]["job_id"]) if rows else None


def _no_session(store: Store, name: str) -> UsageError:
    names = [row["name"] for row in store.rows("SELECT name FROM jobs UNION SELECT arm FROM arms ORDER BY 1")]
    near = difflib.get_close_matches(name, names, n=1)
    message = f"{store.path} has no session of an experiment {name!r}"
    if near:
        return UsageError(f"{message}; there is {near[0]!r}", next=f"dgxlab report {near[0]}")
    return UsageError(message, next="dgxlab sessions" if names else first_command())


def no_verdict(store: Store, name: str, baseline: str, host: str = "") -> UsageError:
    """Return the error for an experiment without a verdict, against a baseline and on a host unless they are ""."""
    against = f" against {baseline!r}" if baseline else ""
    on_host = f" on {host!r}" if host else ""
    measures = command("dgxlab", "ab", baseline, name, *(("--host", host) if host else ()))
    message = f"{store.path} has no verdict on {name!r}{against}{on_host}"
    if baseline:
        return UsageError(message, next=measures)
    compared = store.rows(
        """SELECT candidate_arm FROM verdict_list WHERE baseline_arm = ? AND ? IN ('', host)
           ORDER BY intent_at DESC, job_id DESC LIMIT 1""",
        (name, host),
    )
    if not compared:
        return UsageError(message, next="dgxlab report")
    words = ("--form", "verdicts", compared[0]["candidate_arm"], "--baseline", name)
    return UsageError(f"{message}; it is the baseline of others", next=command("dgxlab", "report", *words))


def op_params(params: Mapping[str, Param]) -> dict[str, Param]:
    """Return an operation's parameters without its name and backend, those of a matrix multiplication first."""
    own = {name: value for name, value in params.items() if name not in ("op_name", "backend_name")}
    return {**{name: own[name] for name in OP_ORDER if name in own}, **own}


def label(cell: Cell) -> str:
    """Return a cell's name in tables.

    For an operation it is made from the parameters: in `cell.label` their order is the spec's, which JSON loses.
    """
    if not tools.BENCHES[cell.tool].one_device:
        return cell.label
    return " ".join(
        [str(cell.params.get("op_name")), *(f"{name}={value}" for name, value in op_params(cell.params).items())]
    )


def has_words(pattern: str, name: str, params: Mapping[str, Any]) -> bool:
    """Return whether each word of a pattern is in a name, is a parameter's value, or is a parameter as `key=value`."""
    known = {*name.split(), *map(str, params.values()), *(f"{key}={value}" for key, value in params.items())}
    return known.issuperset(pattern.split())


def hypothesis(store: Store, job: Job) -> str:
    """Return the hypothesis of a job's experiment; "" if the experiment is unknown."""
    experiment = store.experiment(job.experiment)
    return str(experiment["hypothesis"]) if experiment else ""


def _experiment(store: Store, job: Job) -> Experiment | None:
    """Return a job's experiment; None if unknown, or written by a dgxlab with other fields."""
    experiment = store.experiment(job.experiment)
    if not experiment or job.kind != "run":
        return None
    try:
        return from_json(Experiment, {**json.loads(experiment["spec"]), "path": "", "root": ""})
    except ValueError:
        return None


def _of_experiment(experiment: Experiment, arm: Arm, **about: Any) -> Ask:
    """Expand the matrix again: a plan holds only the cells that were not up to date when it was made."""
    try:
        launches = list(tools.launches(experiment))
    except DgxlabError:  # refused by a newer rule: no cells to look for
        launches = []
    cells = [CellAsk(cell, launch.model, launch.env) for launch in launches for cell in launch.cells]
    gates = [(gate, {**experiment.env, **gate.env}) for gate in plan.launched_gates(experiment)]
    about |= {"markers": experiment.markers, "hypothesis": experiment.hypothesis}
    return _ask(arm, cells, gates, experiment.models, **about)


def _of_plan(whole: Plan, arm: Arm, **about: Any) -> Ask:
    cells = [CellAsk(cell, run.model, run.env) for run in whole.runs if run.arm == arm.name for cell in run.cells]
    steps = [step for step in whole.steps if arm.name in arms_of(step)]
    gates = [(step.gate, step.env) for step in steps if isinstance(step, GateStep)]
    models = {step.model: step.recipe or FileModel(step.path) for step in steps if isinstance(step, ModelStep)}
    return _ask(arm, cells, gates, models, markers=whole.markers(arm.name), **about)


def _ask(
    arm: Arm, cells: Iterable[CellAsk], gates: Iterable[AskedGate], models: Mapping[str, Model], **about: Any
) -> Ask:
    # without repetitions: a session has a cell in many runs, and gates before and after its chains
    once = {ask.identity: ask for ask in cells}
    return Ask(arm, tuple(once.values()), {gate_digest(*gate): gate for gate in gates}, models, **about)
