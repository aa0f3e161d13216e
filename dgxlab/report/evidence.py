"""What the record has on one arm, of one build on one device: the newest valid run of each cell, gates, what failed.

Of a session's chain it is the arm's mean that the verdict is about, where there is a verdict.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dgxlab import judgement, stats, units
from dgxlab.judgement import Judged
from dgxlab.model import BASELINE, CANDIDATE, Device, FileModel, Model, RunStep, model_id
from dgxlab.report.ask import ArmAsk, Ask, CellAsk, label
from dgxlab.report.records import Conditions, Number
from dgxlab.store import REJECTED, UNCOUNTED

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

Row = Mapping[str, Any]

Key = tuple[str, str, str]
"""CellAsk.place."""

BATCH = 500
"""Parameters in one statement: SQLite's own limit was 999 for long."""

# -- queries ----------------------------------------------------------------------------------------------------------

RUNS = f"""SELECT run_id, job_id, arm, build_id, device_id, tool, coalesce(model_id, '') AS model_id, env_digest, argv,
                 started AS at, status, reason, chain, role, cycle
          FROM runs JOIN arms USING (job_id, arm, build_id) LEFT JOIN chain_runs USING (run_id)
          WHERE job_id IN ({{marks}}) AND job_id NOT IN ({UNCOUNTED})"""  # noqa: S608 - both are our own

GATES = f"""SELECT gates.*, device_id, expectations.job_id AS recorded_by, printed.lines AS printed,
                  demanded.lines AS demanded
           FROM gates JOIN arms USING (job_id, arm, build_id) JOIN devices USING (device_id)
           LEFT JOIN expectations USING (pin, tree, gate_digest, compute_cap)
           LEFT JOIN case_lists AS printed ON printed.cases = gates.cases AND status = 'failed'
           LEFT JOIN case_lists AS demanded ON demanded.cases = expected_cases AND status = 'failed'
           WHERE build_id IN ({{marks}}) AND gates.job_id NOT IN ({REJECTED}) ORDER BY at, gate_id"""  # noqa: S608

CHECKS = f"""SELECT checks.*, device_id FROM checks JOIN arms USING (job_id, arm, build_id)
            WHERE build_id IN ({{marks}}) AND job_id NOT IN ({REJECTED}) ORDER BY at, check_id"""  # noqa: S608

VALUES = """SELECT run_id, cell, metric, unit, value, n, spread FROM measurements
            WHERE run_id IN ({marks}) ORDER BY run_id, cell, metric"""

TELEMETRY = """SELECT run_id, name, min(median) AS low, max(median) AS high FROM telemetry
               WHERE run_id IN ({marks}) GROUP BY run_id, name"""

FLAGS = (
    "SELECT run_id, kind, hard, reason FROM flags WHERE run_id IN ({marks}) ORDER BY run_id, hard DESC, device, kind"
)


def rows_of(store: Store, sql: str, values: Sequence[str]) -> list[dict[str, Any]]:
    """Run a query with `IN ({marks})` over any number of values."""
    rows: list[dict[str, Any]] = []
    for start in range(0, len(values), BATCH):
        batch = values[start : start + BATCH]
        rows += store.rows(sql.format(marks=",".join("?" * len(batch))), batch)
    return rows


def by_run(store: Store, sql: str, runs: Sequence[str]) -> dict[str, list[Row]]:
    """Return the rows of a query by their run, an empty list for a run without any."""
    groups: dict[str, list[Row]] = {run: [] for run in runs}
    for row in rows_of(store, sql, runs):
        groups[row["run_id"]].append(row)
    return groups


def conditions_of(telemetry: Iterable[Row]) -> dict[str, tuple[float, float]]:
    """Return the lowest and highest median over the runs of these rows of TELEMETRY."""
    return range_of({row["name"]: (row["low"], row["high"])} for row in telemetry)


def range_of(ranges: Iterable[Conditions]) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest of several ranges, by name."""
    total: dict[str, tuple[float, float]] = {}
    for each in ranges:
        for name, (low, high) in each.items():
            before = total.get(name, (low, high))
            total[name] = (min(before[0], low), max(before[1], high))
    return total


def first_of(reasons: Iterable[str]) -> str:
    """Return the first reason and how many others there are: each names its own duration, so that all differ."""
    first, *others = dict.fromkeys(reasons)
    return f"{first}, and {len(others)} like it" if others else first


# -- one arm ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """A cell with its newest valid run.

    Attributes:
        run: Of a chain the last of its arm's.
        quantities: By metric.
        flags: Rows of FLAGS, those of a chain's runs with the same kind merged.
    """

    ask: CellAsk
    run: Row
    quantities: Mapping[str, Number]
    conditions: Conditions = field(default_factory=dict)
    flags: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Lost:
    """A run that does not count, with the cells it should have given (none when its plan cannot be read)."""

    run: Row
    model: str
    keys: tuple[Key, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Evidence:
    """What the record has on one arm.

    Attributes:
        build_id: The newest build with evidence, None when there is none.
        host: What the host is called, by the user and by itself, and what computes there.
        host_name: What the user calls it.
        device: What computed; None when there is no build.
        measured: In the order asked.
        gates: The newest row of each gate that was asked for, by its digest: of GATES, or of CHECKS.
        failed: Every such row of this build and device that failed, newest first, parity gates before others.
        lost: Every run on this build and device that does not count, newest first.
    """

    build_id: str | None
    host: str
    measured: tuple[Measured, ...] = ()
    gates: Mapping[str, Row] = field(default_factory=dict)
    failed: tuple[Row, ...] = ()
    lost: tuple[Lost, ...] = ()
    device: Device | None = None
    host_name: str = ""


def find(store: Store, ask: Ask, arm: ArmAsk) -> Evidence:
    """Look for what `arm` asks. Runs of different builds or devices are never mixed: the newest pair is taken whole."""
    arms = _arms(store, ask, arm)
    jobs, builds = (sorted({row[key] for row in arms}) for key in ("job_id", "build_id"))
    mine = {(row["job_id"], row["arm"]) for row in arms}
    digests = {*(gate.digest for gate in arm.parity), *(gate.digest for gate in arm.checks)}
    runs = [row for row in rows_of(store, RUNS, jobs) if (row["job_id"], row["arm"]) in mine]
    runs.sort(key=lambda row: (row["at"], row["run_id"]))  # oldest first: in a dict by cell the last wins
    # any job's gate is evidence of the build, but only of what is asked for here
    gates, checks = (
        [
            row
            for row in rows_of(store, sql, builds)
            if (row["job_id"], row["arm"]) in mine and row["gate_digest"] in digests
        ]
        for sql in (GATES, CHECKS)
    )
    if not runs and not gates and not checks:
        return Evidence(arms[-1]["build_id"] if arms else None, ask.host)
    newest = max(runs + gates + checks, key=lambda row: float(row["at"]))
    context = (newest["build_id"], newest["device_id"])
    runs, gates, checks = (
        [row for row in rows if (row["build_id"], row["device_id"]) == context] for rows in (runs, gates, checks)
    )
    job = store.job(newest["job_id"])
    device = store.devices(job.job_id)[newest["arm"]]
    valid = [row for row in runs if row["status"] == "valid"]
    # an ordinary session's run replaces a chain's, however old: its neighbours in a table are of ordinary sessions too
    valid.sort(key=lambda row: row["role"] is None)
    lost = [row for row in reversed(runs) if row["status"] != "valid"]
    return Evidence(
        newest["build_id"],
        machine(job, device),
        _measured(store, arm, valid),
        {row["gate_digest"]: row for row in (*gates, *checks)},
        tuple(row for row in (*reversed(gates), *reversed(checks)) if row["status"] == "failed"),
        tuple(_lost(store, lost)),
        device=device,
        host_name=job.host,
    )


def _arms(store: Store, ask: Ask, arm: ArmAsk) -> list[dict[str, Any]]:
    """Return the builds of exactly this tree and configuration, on this device, whichever experiment asked for them."""
    rows = store.rows(
        """SELECT arms.job_id, arms.arm, arms.build_id, arms.cmake FROM arms JOIN jobs USING (job_id)
           WHERE arms.pin = :pin AND arms.tree = :tree AND jobs.protocol = :protocol
             AND CASE WHEN :device_id IS NULL THEN jobs.host = :host ELSE arms.device_id = :device_id END
             AND (:session IS NULL OR (arms.job_id = :session AND arms.arm = :arm))
           ORDER BY jobs.intent_at, arms.job_id""",
        {
            "pin": arm.arm.source.pin,
            "tree": arm.arm.source.tree,
            "host": ask.host,
            "device_id": ask.device_id,
            "protocol": ask.protocol,
            "session": ask.session,
            "arm": arm.arm.name,
        },
    )
    return [row for row in rows if json.loads(row["cmake"]) == dict(arm.arm.cmake)]


def machine(job: Job, device: Device | None) -> str:
    """Say where a job ran: the host's name here, its own, and what computed."""
    own = (job.facts or {}).get("hostname", "")
    known = ", ".join(filter(None, ("" if own == job.host else own, device.label if device else "")))
    return f"{job.host} ({known})" if known else job.host


# -- cells ------------------------------------------------------------------------------------------------------------

Place = tuple[str, str, str, str]
"""Job, chain, role and Cell.key: what a verdict has a mean of."""


def _measured(store: Store, arm: ArmAsk, valid: Sequence[Row]) -> tuple[Measured, ...]:
    judged = _judged(store, valid)
    newest = _newest(store, valid, judged)
    jobs = sorted({row["job_id"] for row in valid})
    inputs = rows_of(store, "SELECT job_id, model_id, path FROM inputs WHERE job_id IN ({marks})", jobs)
    paths = {(row["job_id"], row["model_id"]): row["path"] for row in inputs}
    accepted = {name: _accepted(model, paths, valid) for name, model in arm.models.items()}
    chosen: list[tuple[CellAsk, list[Row]]] = []
    for ask in arm.cells:
        runs = newest.get((ask.key, accepted.get(ask.model, ""), ask.env_digest))
        if runs is not None and runs[-1]["tool"] == ask.cell.tool:
            chosen.append((ask, runs))
    ids = sorted({run["run_id"] for _, runs in chosen for run in runs})
    values, telemetry, flags = (by_run(store, sql, ids) for sql in (VALUES, TELEMETRY, FLAGS))
    return tuple(
        Measured(
            ask,
            runs[-1],
            quantities,
            conditions_of(row for run in runs for row in telemetry[run["run_id"]]),
            tuple(_merged([flags[run["run_id"]] for run in runs])),
        )
        for ask, runs in chosen
        if (quantities := _quantities(runs, ask.key, values, judged))
    )


def _judged(store: Store, runs: Sequence[Row]) -> dict[Place, list[Judged]]:
    """Return the verdicts that have means, by what each is a mean of; of an A/A session the baseline's alone."""
    by_place: dict[Place, list[Judged]] = defaultdict(list)
    for job_id in sorted({run["job_id"] for run in runs if run["role"]}):
        for judged in judgement.recorded(store, job_id):
            if judged.verdict.verdict != "invalid":
                by_place[job_id, judged.chain, BASELINE, judged.comparison.baseline].append(judged)
                if judged.baseline_arm != judged.candidate_arm:
                    by_place[job_id, judged.chain, CANDIDATE, judged.comparison.candidate].append(judged)
    return dict(by_place)


def _newest(store: Store, valid: Sequence[Row], judged: Mapping[Place, Sequence[Judged]]) -> dict[Key, list[Row]]:
    """Return the newest valid run by (Cell.key, model_id, env_digest); of a chain those behind its arm's means."""
    ids = [row["run_id"] for row in valid]
    cells = by_run(store, "SELECT run_id, cell FROM rows WHERE run_id IN ({marks})", ids)
    newest: dict[Key, list[Row]] = {}
    for run in valid:
        for cell in (row["cell"] for row in cells[run["run_id"]]):
            key, place = (cell, run["model_id"], run["env_digest"]), _place(run, cell)
            before = newest.get(key, [])
            if run["role"] is None:
                newest[key] = [run]
            elif any(run["cycle"] in judgement.counted(each.verdict, run["role"]) for each in judged.get(place, ())):
                newest[key] = [*before, run] if before and _place(before[0], cell) == place else [run]
    return newest


def _place(run: Row, cell: str) -> Place:
    return run["job_id"], run["chain"], run["role"], cell


def _accepted(model: Model, paths: Mapping[tuple[str, str], str], valid: Sequence[Row]) -> str:
    """Return the model_id that counts: the recipe's, or of a file what it was in the newest run that read it.

    Args:
        paths: Of each model by (job_id, model_id).
    """
    if not isinstance(model, FileModel):
        return model_id(model)
    ids = [row["model_id"] for row in valid if _is_path(paths.get((row["job_id"], row["model_id"]), ""), model.path)]
    return str(ids[-1]) if ids else "nothing read it"


def _is_path(path: str, planned: str) -> bool:
    return path == planned or (planned.startswith("~/") and path.endswith(planned[1:]))


def _quantities(
    runs: Sequence[Row], cell: str, values: Mapping[str, Sequence[Row]], judged: Mapping[Place, Sequence[Judged]]
) -> dict[str, Number]:
    """Return by metric what one run gave, or the means of a chain's arm."""
    last = runs[-1]
    if last["role"] is None:
        mine = [row for row in values[last["run_id"]] if row["cell"] == cell]
        return {
            row["metric"]: Number(
                row["metric"], row["unit"], row["n"], row["spread"], median=row["value"], of="samples"
            )
            for row in mine
        }
    medians: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        for row in values[run["run_id"]]:
            if row["cell"] == cell:
                medians[row["metric"]][run["cycle"]] = row["value"]
    verdicts = judged[_place(last, cell)]
    of_metric = {each.comparison.metric: each for each in verdicts}  # a metric without a verdict has the cell's first
    return {
        metric: mean_of(of_metric.get(metric, verdicts[0]), last["role"], metric, by_cycle)
        for metric, by_cycle in medians.items()
    }


def mean_of(judged: Judged, role: str, metric: str, medians: Mapping[int, float]) -> Number:
    """Return the mean of one arm over the cycles that count: the only number that a chain gives for an arm.

    Args:
        medians: Of the arm's runs, by cycle.
    """
    cycles = judgement.counted(judged.verdict, role)
    runs = [medians[cycle] for cycle in sorted(set(cycles))]
    mean = statistics.geometric_mean(medians[cycle] for cycle in cycles)
    spread = stats.mad(runs) if len(runs) > 1 else None
    return Number(metric, units.metric(metric).unit, len(runs), spread, mean=mean)


def _merged(flags: Sequence[Sequence[Row]]) -> Iterator[Row]:
    """Yield the flags of one run as they are, those of several runs once a kind.

    Args:
        flags: Of each run.
    """
    if len(flags) == 1:
        yield from flags[0]
        return
    kinds: dict[tuple[bool, str], list[Row]] = {}
    for flag in (flag for of_run in flags for flag in of_run):
        kinds.setdefault((bool(flag["hard"]), flag["kind"]), []).append(flag)
    for of_kind in kinds.values():
        count = len({flag["run_id"] for flag in of_kind})
        reason = first_of(flag["reason"] for flag in of_kind)
        yield {**of_kind[0], "reason": f"in {count} of {len(flags)} runs {reason}"}


# -- what does not count ----------------------------------------------------------------------------------------------


def _lost(store: Store, runs: Sequence[Row]) -> Iterator[Lost]:
    """Yield runs with the cells of the step that each carried out: the one whose arguments it had."""
    steps: dict[str, tuple[RunStep, ...]] = {}
    for job_id in {run["job_id"] for run in runs}:
        try:
            steps[job_id] = tuple(store.job(job_id).plan.runs)
        except ValueError:  # of a dgxlab with other fields: its runs are listed without their cells
            steps[job_id] = ()
    for run in runs:
        argv = json.loads(run["argv"])
        step = next((step for step in steps[run["job_id"]] if _ran(step, run, argv)), None)
        cells = step.cells if step else ()
        keys = tuple((cell.key, step.model, run["env_digest"]) for cell in cells) if step else ()
        yield Lost(run, step.model if step else "", keys, tuple(label(cell) for cell in cells))


def _ran(step: RunStep, run: Row, argv: Sequence[str]) -> bool:
    """Compare arguments; one with a placeholder may have become anything."""
    if (step.arm, step.tool, len(step.argv)) != (run["arm"], run["tool"], len(argv)):
        return False
    return all("{" in planned or planned == word for planned, word in zip(step.argv, argv, strict=True))
