"""What the store has on one arm, of one build on one device: the newest valid run of each cell, gates, what failed.

Of a session's chain it is the arm's mean that the verdict is about, where there is a verdict.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dgxlab import judgement, stats, units
from dgxlab.judgement import Judged
from dgxlab.model import BASELINE, CANDIDATE, Device, FileModel, Model, RunStep, model_id
from dgxlab.report.ask import ArmAsk, Ask, CellAsk, label
from dgxlab.report.conditions import Row, conditions_of, flags_of, range_of, rows_of, together
from dgxlab.report.numbers import Mean, Quantity
from dgxlab.store import REJECTED, UNCOUNTED

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

Key = tuple[str, str, str]
"""Cell.key, model name, env_digest: what tells one asked cell from another."""


@dataclass(frozen=True)
class Measured:
    """A cell with its newest valid run."""

    ask: CellAsk
    run: Row
    """Of a chain the last of its arm's."""
    quantities: Mapping[str, Quantity | Mean]
    """By metric."""
    conditions: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest median over devices and runs of each quantity that was sampled during them, by name."""
    flags: tuple[Row, ...] = ()
    """What speaks against the runs."""


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
        host: What the host is called, by the user and by itself, and what computes there.
        device: What computed; None when there is no build.
        measured: In the order asked.
        gates: The newest of each gate, by its digest.
        failed_gates: Every gate asked for that failed on this build and device, newest first.
        checks: The newest of each gate on a model, by its digest.
        failed_checks: The same of gates on a model.
        lost: Every run on this build and device that does not count, newest first.
    """

    build_id: str | None
    host: str
    measured: tuple[Measured, ...] = ()
    gates: Mapping[str, Row] = field(default_factory=dict)
    failed_gates: tuple[Row, ...] = ()
    checks: Mapping[str, Row] = field(default_factory=dict)
    failed_checks: tuple[Row, ...] = ()
    lost: tuple[Lost, ...] = ()
    device: Device | None = None


def find(store: Store, ask: Ask, arm: ArmAsk) -> Evidence:
    """Look for what `arm` asks. Runs of different builds or devices are never mixed: the newest pair is taken whole."""
    arms = _arms(store, ask, arm)
    jobs, builds = (sorted({row[key] for row in arms}) for key in ("job_id", "build_id"))
    mine = {(row["job_id"], row["arm"]) for row in arms}
    runs = [row for row in rows_of(store, RUNS, jobs) if (row["job_id"], row["arm"]) in mine]
    # whoever ran a gate, it says the same of the build; one that is not asked for here says nothing
    digests = {*(gate.digest for gate in arm.gates), *(check.digest for check in arm.checks)}
    wanted = {(*key, digest) for key in mine for digest in digests}
    gates = [row for row in rows_of(store, GATES, builds) if (row["job_id"], row["arm"], row["gate_digest"]) in wanted]
    checks = [
        row for row in rows_of(store, CHECKS, builds) if (row["job_id"], row["arm"], row["gate_digest"]) in wanted
    ]
    runs.sort(key=lambda row: (row["at"], row["run_id"]))  # oldest first: in a dict by cell the last wins
    gates.sort(key=lambda row: (row["at"], row["gate_id"]))
    if not runs and not gates and not checks:
        return Evidence(arms[-1]["build_id"] if arms else None, ask.host)
    newest = max(runs + gates + checks, key=lambda row: float(row["at"]))
    context = (newest["build_id"], newest["device_id"])
    runs, gates, checks = (
        [row for row in found if (row["build_id"], row["device_id"]) == context] for found in (runs, gates, checks)
    )
    job = store.job(newest["job_id"])
    device = store.devices(job.job_id)[newest["arm"]]
    # a chain's runs count where nothing else gave the cell: beside those of an ordinary session they would be another
    # day's, of a session that may have drifted
    valid = [row for row in runs if row["status"] == "valid"]
    valid.sort(key=lambda row: row["role"] is None)
    return Evidence(
        newest["build_id"],
        machine(job, device),
        _measured(store, arm, valid),
        {row["gate_digest"]: row for row in gates},
        tuple(row for row in reversed(gates) if row["status"] == "failed"),
        {row["gate_digest"]: row for row in checks},
        tuple(row for row in reversed(checks) if row["status"] == "failed"),
        lost=_lost(store, [row for row in reversed(runs) if row["status"] != "valid"]),
        device=device,
    )


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

SAMPLES = """SELECT run_id, cell, metric, value, unit FROM samples
             WHERE run_id IN ({marks}) AND discarded IS NULL ORDER BY run_id, cell, metric, ordinal"""


def _arms(store: Store, ask: Ask, arm: ArmAsk) -> list[dict[str, Any]]:
    """Return the builds of exactly this tree and configuration, on this device, whichever experiment asked for them."""
    found = store.rows(
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
    return [row for row in found if json.loads(row["cmake"]) == dict(arm.arm.cmake)]


def machine(job: Job, device: Device | None) -> str:
    """Say where a job ran: the host's name here, its own, and what computed."""
    own = (job.facts or {}).get("hostname", "")
    known = ", ".join(filter(None, ("" if own == job.host else own, device.label if device else "")))
    return f"{job.host} ({known})" if known else job.host


# -- cells ------------------------------------------------------------------------------------------------------------


def _measured(store: Store, arm: ArmAsk, valid: Sequence[Row]) -> tuple[Measured, ...]:
    judged = _judged(store, valid)
    newest = _newest(store, valid, judged)
    inputs = _inputs(store, valid)
    accepted = {name: _accepted(model, inputs, valid) for name, model in arm.models.items()}
    chosen: list[tuple[CellAsk, list[Row]]] = []
    for ask in arm.cells:
        found = newest.get((ask.key, accepted.get(ask.model, ""), ask.env_digest))
        if found is not None and found[-1]["tool"] == ask.cell.tool:
            chosen.append((ask, found))
    runs = sorted({run["run_id"] for _, found in chosen for run in found})
    samples, conditions, flags = samples_of(store, runs), conditions_of(store, runs), flags_of(store, runs)
    return tuple(
        Measured(
            ask,
            found[-1],
            quantities,
            range_of(conditions[run["run_id"]] for run in found),
            tuple(together([flags[run["run_id"]] for run in found])),
        )
        for ask, found in chosen
        if (quantities := _quantities(found, ask.key, samples, judged))
    )


Place = tuple[str, str, str, str]
"""Job, chain, role and Cell.key: what a verdict has a mean of."""


def _judged(store: Store, runs: Sequence[Row]) -> dict[Place, list[Judged]]:
    """Return the verdicts that have means, by what each is a mean of; of an A/A session the baseline's alone."""
    found: dict[Place, list[Judged]] = defaultdict(list)
    for job_id in sorted({run["job_id"] for run in runs if run["role"]}):
        for one in judgement.recorded(store, job_id):
            if one.verdict.verdict != "invalid":
                found[job_id, one.chain, BASELINE, one.comparison.baseline].append(one)
                if one.baseline_arm != one.candidate_arm:
                    found[job_id, one.chain, CANDIDATE, one.comparison.candidate].append(one)
    return dict(found)


def _newest(
    store: Store, valid: Sequence[Row], judged: Mapping[Place, Sequence[Judged]]
) -> dict[tuple[str, str, str], list[Row]]:
    """Return the newest valid run by (Cell.key, model_id, env_digest); of a chain those behind its arm's means."""
    by_id = {row["run_id"]: row for row in valid}
    cells = defaultdict(list)
    for row in rows_of(store, "SELECT run_id, cell FROM rows WHERE run_id IN ({marks})", list(by_id)):
        cells[row["run_id"]].append(row["cell"])
    found: dict[tuple[str, str, str], list[Row]] = {}
    for run_id, run in by_id.items():
        for cell in cells[run_id]:
            key, place = (cell, run["model_id"], run["env_digest"]), _place(run, cell)
            before = found.get(key, [])
            if run["role"] is None:
                found[key] = [run]
            elif any(run["cycle"] in judgement.counted(one.verdict, run["role"]) for one in judged.get(place, ())):
                found[key] = [*before, run] if before and _place(before[0], cell) == place else [run]
    return found


def _place(run: Row, cell: str) -> Place:
    return run["job_id"], run["chain"], run["role"], cell


def _inputs(store: Store, runs: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Return the path of each model by (job_id, model_id)."""
    jobs = sorted({row["job_id"] for row in runs})
    found = rows_of(store, "SELECT job_id, model_id, path FROM inputs WHERE job_id IN ({marks})", jobs)
    return {(row["job_id"], row["model_id"]): row["path"] for row in found}


def _accepted(model: Model, inputs: Mapping[tuple[str, str], str], valid: Sequence[Row]) -> str:
    """Return the model_id that counts: the recipe's, or of a file what it was in the newest run that read it."""
    if not isinstance(model, FileModel):
        return model_id(model)
    ids = [
        str(row["model_id"])
        for row in valid
        if _same_path(model.path, inputs.get((row["job_id"], row["model_id"]), ""))
    ]
    return ids[-1] if ids else "nothing read it"


def _same_path(asked: str, found: str) -> bool:
    return found == asked or (asked.startswith("~/") and found.endswith(asked[1:]))


def samples_of(store: Store, runs: Sequence[str]) -> dict[tuple[str, str], dict[tuple[str, str], list[float]]]:
    """Return the samples that count by run and cell, then by metric and unit."""
    values: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows_of(store, SAMPLES, runs):
        values[row["run_id"], row["cell"]][row["metric"], row["unit"]].append(row["value"])
    return values


def _quantities(
    runs: Sequence[Row],
    cell: str,
    samples: Mapping[tuple[str, str], Mapping[tuple[str, str], Sequence[float]]],
    judged: Mapping[Place, Sequence[Judged]],
) -> dict[str, Quantity | Mean]:
    """Return by metric what one run gave, or the means of a chain's arm."""
    last = runs[-1]
    if last["role"] is None:
        return {
            metric: Quantity(metric, unit, stats.median(values), len(values), _spread(values))
            for (metric, unit), values in samples[last["run_id"], cell].items()
        }
    medians: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        for (metric, _), values in samples[run["run_id"], cell].items():
            medians[metric][run["cycle"]] = stats.median(values)
    verdicts = judged[_place(last, cell)]
    of_metric = {one.comparison.metric: one for one in verdicts}  # a metric without a verdict has the cell's first
    return {
        metric: mean_of(of_metric.get(metric, verdicts[0]), last["role"], metric, values)
        for metric, values in medians.items()
    }


def mean_of(judged: Judged, role: str, metric: str, medians: Mapping[int, float]) -> Mean:
    """Return the mean of one arm over the cycles that count: the only number that a chain gives for an arm.

    Args:
        medians: Of the arm's runs, by cycle.
    """
    cycles = judgement.counted(judged.verdict, role)
    runs = [medians[cycle] for cycle in sorted(set(cycles))]
    mean = statistics.geometric_mean(medians[cycle] for cycle in cycles)
    return Mean(metric, units.metric(metric).unit, mean, len(runs), _spread(runs))


def _spread(values: Sequence[float]) -> float | None:
    return stats.mad(values) if len(values) > 1 else None


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
