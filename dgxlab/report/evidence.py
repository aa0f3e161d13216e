"""What the store has on one arm, of one build on one host: the newest valid run of each cell, gates, what failed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dgxlab import stats
from dgxlab.model import Model, RunStep, SyntheticModel, model_id
from dgxlab.report.ask import ArmAsk, Ask, CellAsk, label
from dgxlab.report.records import Quantity
from dgxlab.store import OPEN_CHAINS

if TYPE_CHECKING:
    from dgxlab.store import Store

BATCH = 500
"""Parameters in one statement; SQLite's own limit is far higher, but was 999 for long."""

Row = Mapping[str, Any]

Key = tuple[str, str, str]
"""Cell.key, model name, env_digest: what tells one asked cell from another."""


@dataclass(frozen=True)
class Measured:
    """A cell with its newest valid run."""

    ask: CellAsk
    run: Row
    quantities: Mapping[str, Quantity]
    """By metric."""
    conditions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest median over the devices of each quantity that was sampled during the run, by name."""
    flags: tuple[Row, ...] = ()
    """What speaks against the run."""


@dataclass(frozen=True)
class Lost:
    """A run that does not count, with the cells it should have given (none when its plan cannot be read)."""

    run: Row
    model: str
    keys: tuple[Key, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """What was found for one arm.

    Attributes:
        build_id: The newest build with evidence, None when there is none.
        host: What the host is called, by the user and by itself.
        measured: In the order asked.
        gates: The newest of each gate, by its digest.
        failed_gates: Every gate that failed on this build and host, newest first.
        lost: Every run on this build and host that does not count, newest first.
    """

    build_id: str | None
    host: str
    measured: tuple[Measured, ...] = ()
    gates: Mapping[str, Row] = field(default_factory=dict)
    failed_gates: tuple[Row, ...] = ()
    lost: tuple[Lost, ...] = ()


def find(store: Store, ask: Ask, arm: ArmAsk) -> Evidence:
    """Look for what `arm` asks. Runs of different builds or hosts are never mixed: the newest pair is taken whole."""
    arms = _arms(store, ask, arm)
    jobs, builds = (sorted({row[key] for row in arms}) for key in ("job_id", "build_id"))
    mine = {(row["job_id"], row["arm"]) for row in arms}
    runs = [row for row in rows_of(store, RUNS, jobs) if (row["job_id"], row["arm"]) in mine]
    gates = [row for row in rows_of(store, GATES, builds) if (row["job_id"], row["arm"]) in mine]
    runs.sort(key=lambda row: (row["at"], row["run_id"]))  # oldest first: in a dict by cell the last wins
    gates.sort(key=lambda row: (row["at"], row["gate_id"]))
    if not runs and not gates:
        return Evidence(arms[-1]["build_id"] if arms else None, machine(store, ask.host, ask.host_id))
    newest = max(runs + gates, key=lambda row: float(row["at"]))
    context = (newest["build_id"], newest["host_id"])
    runs = [row for row in runs if (row["build_id"], row["host_id"]) == context]
    gates = [row for row in gates if (row["build_id"], row["host_id"]) == context]
    # one run of many in a chain counts where nothing else gave the cell: beside those of an ordinary session it would
    # be another day's, and the last of a session that may have drifted
    valid = sorted((row for row in runs if row["status"] == "valid"), key=lambda row: not row["in_chain"])
    return Evidence(
        newest["build_id"],
        machine(store, ask.host, newest["host_id"]),
        _measured(store, arm, valid),
        {row["gate_digest"]: row for row in gates},
        tuple(row for row in reversed(gates) if row["status"] == "failed"),
        _lost(store, [row for row in reversed(runs) if row["status"] != "valid"]),
    )


# -- queries ----------------------------------------------------------------------------------------------------------

RUNS = f"""SELECT run_id, job_id, arm, build_id, host_id, tool, coalesce(model_id, '') AS model_id, env_digest, argv,
                 started AS at, status, reason, run_id IN (SELECT run_id FROM chain_runs) AS in_chain
          FROM runs WHERE job_id IN ({{marks}}) AND job_id NOT IN ({OPEN_CHAINS})"""  # noqa: S608 - both are our own

GATES = """SELECT gates.*, expectations.job_id AS recorded_by
           FROM gates JOIN arms USING (job_id, arm, build_id)
           LEFT JOIN expectations USING (pin, tree, gate_digest)
           WHERE build_id IN ({marks}) ORDER BY at, gate_id"""

SAMPLES = """SELECT run_id, cell, metric, value, unit FROM samples
             WHERE run_id IN ({marks}) AND discarded IS NULL ORDER BY run_id, cell, metric, ordinal"""

TELEMETRY = """SELECT run_id, name, min(median) AS low, max(median) AS high FROM telemetry
               WHERE run_id IN ({marks}) GROUP BY run_id, name"""

FLAGS = (
    "SELECT run_id, kind, hard, reason FROM flags WHERE run_id IN ({marks}) ORDER BY run_id, hard DESC, device, kind"
)


def _arms(store: Store, ask: Ask, arm: ArmAsk) -> list[dict[str, Any]]:
    """Return the builds of exactly this tree and configuration, on this host, whichever experiment asked for them.

    A host is the machine, whatever it was called when it measured.
    """
    found = store.rows(
        """SELECT arms.job_id, arms.arm, arms.build_id, arms.cmake FROM arms JOIN jobs USING (job_id)
           WHERE arms.pin = :pin AND arms.tree = :tree AND jobs.protocol = :protocol
             AND CASE WHEN :host_id IS NULL THEN jobs.host = :host ELSE jobs.host_id = :host_id END
             AND (:session IS NULL OR (arms.job_id = :session AND arms.arm = :arm))
           ORDER BY jobs.intent_at, arms.job_id""",
        {
            "pin": arm.arm.source.pin,
            "tree": arm.arm.source.tree,
            "host": ask.host,
            "host_id": ask.host_id,
            "protocol": ask.protocol,
            "session": ask.session,
            "arm": arm.arm.name,
        },
    )
    return [row for row in found if json.loads(row["cmake"]) == dict(arm.arm.cmake)]


def rows_of(store: Store, sql: str, values: Sequence[str]) -> list[dict[str, Any]]:
    """Run a query with `IN ({marks})` over any number of values."""
    found: list[dict[str, Any]] = []
    for start in range(0, len(values), BATCH):
        batch = values[start : start + BATCH]
        found += store.rows(sql.format(marks=",".join("?" * len(batch))), batch)
    return found


def machine(store: Store, name: str, host_id: str | None) -> str:
    """Say which machine it is: its name here, its own, and what computes in it."""
    found = store.rows("SELECT hostname, facts FROM hosts WHERE host_id = ?", (host_id,))
    if not found:
        return name
    details = json.loads(found[0]["facts"]).get("details", {})
    gpus = [gpu["name"] for gpu in details.get("gpus", []) if gpu.get("name")]
    own = "" if found[0]["hostname"] == name else found[0]["hostname"]
    known = ", ".join(filter(None, (own, *(gpus or [details.get("cpu", "")]))))
    return f"{name} ({known})" if known else name


# -- cells ------------------------------------------------------------------------------------------------------------


def _measured(store: Store, arm: ArmAsk, valid: Sequence[Row]) -> tuple[Measured, ...]:
    newest = _newest(store, valid)
    inputs = _inputs(store, valid)
    accepted = {name: _accepted(model, inputs, valid) for name, model in arm.models.items()}
    chosen: list[tuple[CellAsk, Row]] = []
    for ask in arm.cells:
        found = newest.get((ask.key, accepted.get(ask.model, ""), ask.env_digest))
        if found is not None and found["tool"] == ask.cell.tool:
            chosen.append((ask, found))
    runs = sorted({run["run_id"] for _, run in chosen})
    quantities, conditions, flags = _quantities(store, runs), conditions_of(store, runs), flags_of(store, runs)
    return tuple(
        Measured(ask, run, quantities[run_id, ask.key], conditions[run_id], tuple(flags[run_id]))
        for ask, run in chosen
        if ((run_id := run["run_id"]), ask.key) in quantities
    )


def _newest(store: Store, valid: Sequence[Row]) -> dict[tuple[str, str, str], Row]:
    """Return the newest valid run by (Cell.key, model_id, env_digest)."""
    by_id = {row["run_id"]: row for row in valid}
    cells = defaultdict(list)
    for row in rows_of(store, "SELECT run_id, cell FROM rows WHERE run_id IN ({marks})", list(by_id)):
        cells[row["run_id"]].append(row["cell"])
    return {(cell, run["model_id"], run["env_digest"]): run for run_id, run in by_id.items() for cell in cells[run_id]}


def _inputs(store: Store, runs: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Return the path of each model by (job_id, model_id)."""
    jobs = sorted({row["job_id"] for row in runs})
    found = rows_of(store, "SELECT job_id, model_id, path FROM inputs WHERE job_id IN ({marks})", jobs)
    return {(row["job_id"], row["model_id"]): row["path"] for row in found}


def _accepted(model: Model, inputs: Mapping[tuple[str, str], str], valid: Sequence[Row]) -> str:
    """Return the model_id that counts: the recipe's, or of a file what it was in the newest run that read it."""
    if isinstance(model, SyntheticModel):
        return model_id(model)
    ids = [
        str(row["model_id"])
        for row in valid
        if _same_path(model.path, inputs.get((row["job_id"], row["model_id"]), ""))
    ]
    return ids[-1] if ids else "nothing read it"


def _same_path(asked: str, found: str) -> bool:
    return found == asked or (asked.startswith("~/") and found.endswith(asked[1:]))


def _quantities(store: Store, runs: Sequence[str]) -> dict[tuple[str, str], dict[str, Quantity]]:
    values: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    for row in rows_of(store, SAMPLES, runs):
        values[row["run_id"], row["cell"], row["metric"], row["unit"]].append(row["value"])
    found: dict[tuple[str, str], dict[str, Quantity]] = defaultdict(dict)
    for (run, cell, metric, unit), samples in values.items():
        spread = stats.mad(samples) if len(samples) > 1 else None
        found[run, cell][metric] = Quantity(metric, unit, stats.median(samples), len(samples), spread)
    return found


def conditions_of(store: Store, runs: Sequence[str]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return Measured.conditions of each run."""
    found: dict[str, dict[str, tuple[float, float]]] = {run: {} for run in runs}
    for row in rows_of(store, TELEMETRY, runs):
        found[row["run_id"]][row["name"]] = (row["low"], row["high"])
    return found


def flags_of(store: Store, runs: Sequence[str]) -> dict[str, list[Row]]:
    """Return what speaks against each run."""
    found: dict[str, list[Row]] = {run: [] for run in runs}
    for row in rows_of(store, FLAGS, runs):
        found[row["run_id"]].append(row)
    return found


# -- what does not count ----------------------------------------------------------------------------------------------


def _lost(store: Store, runs: Sequence[Row]) -> tuple[Lost, ...]:
    steps: dict[str, tuple[RunStep, ...]] = {job: _steps(store, job) for job in {run["job_id"] for run in runs}}
    return tuple(_with_cells(run, steps[run["job_id"]]) for run in runs)


def _steps(store: Store, job_id: str) -> tuple[RunStep, ...]:
    try:
        plan = store.job(job_id).plan
    except ValueError:  # of a dgxlab with other fields: the run is listed without its cells
        return ()
    return tuple(plan.runs)


def _with_cells(run: Row, steps: Sequence[RunStep]) -> Lost:
    """Add the cells of the step that a run carried out: the one whose arguments it had."""
    argv = json.loads(run["argv"])
    for step in steps:
        if (step.arm, step.tool) == (run["arm"], run["tool"]) and _fits(step.argv, argv):
            keys = tuple((cell.key, step.model, run["env_digest"]) for cell in step.cells)
            return Lost(run, step.model, keys, tuple(label(cell) for cell in step.cells))
    return Lost(run, "", (), ())


def _fits(planned: Sequence[str], ran: Sequence[str]) -> bool:
    """Compare arguments; one with a placeholder may have become anything."""
    return len(planned) == len(ran) and all("{" in p or p == r for p, r in zip(planned, ran, strict=True))
