"""What the record has on one arm, build and device: the newest valid run of each cell, gates, failures.

A run that a hard event disturbed is taken only for a cell without any other. For a session's chain with a verdict, a
cell's number is the mean of the arm, which the verdict compares.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

from dgxlab import judgement, units
from dgxlab.errors import SpecError
from dgxlab.judgement.names import CellAsk
from dgxlab.model import BASELINE, CANDIDATE, Device, RunStep, canonical, model_read
from dgxlab.model.reasons import says_not_engaged
from dgxlab.report.ask import Ask, label, of_session
from dgxlab.report.records import Conditions, Number, Row, grouped, labels_of, some
from dgxlab.report.runs import FLAGS, VALUES, RecordRow, by_kind, by_run, conditions_of, mean_of, medians_of
from dgxlab.store import FLAWED, RECORDED, REJECTED, UNCOUNTED
from dgxlab.tools import BENCHES, metric_label

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

MINE = """WITH mine AS MATERIALIZED (
    SELECT job_id, arm, build_id, device_id, arms.pin, arms.tree, intent_at FROM arms JOIN jobs USING (job_id)
    WHERE arms.pin = :pin AND arms.tree = :tree AND cmake = :cmake AND protocol = :protocol AND {mine})
"""
"""The jobs that built one tree in one configuration, for any experiment; `mine` says where, or in which session."""

RUNS = f"""{MINE} SELECT run_id, job_id, arm, build_id, device_id, tool, coalesce(model_id, '') AS model_id, path,
                         recipe, contents, env_digest, argv, started AS at, status, reason, chain, role, cycle,
                         run_id IN ({FLAWED}) AS flawed
           FROM mine JOIN runs USING (job_id, arm, build_id) LEFT JOIN inputs USING (job_id, model_id)
           LEFT JOIN chain_runs USING (run_id)
           WHERE NOT EXISTS (SELECT 1 FROM ({UNCOUNTED}) AS u WHERE u.job_id = mine.job_id)
           ORDER BY started, run_id"""  # noqa: S608 - our own; a list of all uncounted jobs would be read for each arm

NEWEST = f"{MINE} SELECT build_id FROM mine ORDER BY intent_at DESC, job_id DESC LIMIT 1"  # noqa: S608 - our own

OF_GATES = f"""gates.*, device_id, e.job_id AS recorded_by, {RECORDED} AS recorded, printed.lines AS printed,
               demanded.lines AS demanded"""
LISTED = """JOIN devices USING (device_id) LEFT JOIN expectations AS e USING (pin, tree, gate_digest, compute_cap)
            LEFT JOIN case_lists AS printed ON printed.cases = gates.cases AND status = 'failed'
            LEFT JOIN case_lists AS demanded ON demanded.cases = expected_cases AND status = 'failed'"""
"""Joins the printed and the expected cases of a failed gate."""

GATES = f"""{MINE} SELECT {OF_GATES} FROM mine JOIN gates USING (job_id, arm, build_id) {LISTED}
            WHERE gates.job_id NOT IN ({REJECTED}) ORDER BY at, gate_id"""  # noqa: S608 - our own

CHECKS = f"""{MINE} SELECT checks.*, device_id FROM mine JOIN checks USING (job_id, arm, build_id)
             WHERE job_id NOT IN ({REJECTED}) ORDER BY at, check_id"""  # noqa: S608 - our own

GATED = "SELECT 1 FROM gate_list WHERE build_id = ? AND NOT rejected LIMIT 1"

ROWS = "SELECT cell FROM rows WHERE run_id = ?"

HOSTS = """SELECT job_id, host, nullif(json_extract(facts, '$.hostname'), host) AS own FROM jobs
           WHERE job_id IN (SELECT value FROM json_each(?)) ORDER BY intent_at, job_id"""


@dataclass(frozen=True)
class Measured:
    """A cell with its newest valid run and its numbers; of a chain, the arm's last run, and means over its runs."""

    ask: CellAsk
    run: RecordRow  # its row of RUNS
    quantities: Mapping[str, Number]  # by metric
    conditions: Conditions = field(default_factory=dict)
    flags: tuple[RecordRow, ...] = ()  # rows of FLAGS; of a chain, one row for each kind


Lost = tuple[RecordRow, tuple[CellAsk, ...]]
"""A run that does not count as a whole, with its cells that do not; () if its plan cannot be read."""


@dataclass(frozen=True)
class Evidence:
    """What the record has for an `Ask`, all of one build on one device."""

    ask: Ask
    name: str  # the arm's name in tables, unique in its table
    build_id: str | None = None  # the newest build with evidence
    device: Device | None = None
    hosts: Mapping[str, str] = field(default_factory=dict)  # by job, oldest first: its names and the device
    contents: Mapping[str, str] = field(default_factory=dict)  # `inputs.contents` by model, where it is known
    measured: tuple[Measured, ...] = ()  # in the order asked
    gates: Mapping[str, RecordRow] = field(default_factory=dict)  # the newest of each expected gate, by its digest
    failed: tuple[RecordRow, ...] = ()  # every failed gate, newest first, parity gates before others
    lost: tuple[Lost, ...] = ()  # newest first
    gated: bool = True  # whether any gate ran on the build, for any experiment

    @property
    def experiment(self) -> str:
        """The arm's own name; `name` may say more to distinguish it."""
        return self.ask.arm.name

    @property
    def host(self) -> str:
        """Where the newest job ran: the host's name in hosts.yaml, its own name, and the device."""
        return [self.ask.host, *self.hosts.values()][-1]

    @property
    def absent(self) -> list[CellAsk]:
        """The cells that were asked for and have no valid run."""
        measured = {cell.ask.identity for cell in self.measured}
        return [ask for ask in self.ask.cells if ask.identity not in measured]

    @property
    def runs(self) -> list[RecordRow]:
        """The runs of the cells that were asked for: those that do not count, then those that measured them."""
        asked = {ask.identity for ask in self.ask.cells}
        lost = [run for run, asks in reversed(self.lost) if not asked.isdisjoint(ask.identity for ask in asks)]
        return [*lost, *(cell.run for cell in self.measured)]


def doubts(arms: Mapping[str, Evidence]) -> tuple[str, ...]:
    """Return notes on builds that no gate checked, and on gates that have failed since cells were measured.

    The arms are by the name that they have in the notes, "" for a single one.
    """
    pairs: list[tuple[str, str]] = []
    for name, arm in arms.items():
        if not arm.gated:
            pairs.append(("no gate checked this build", name))
        for gate in arm.gates.values():
            before = [label(cell.ask.cell) for cell in arm.measured if cell.run["at"] < gate["at"]]
            if before and gate["status"] == "failed":
                why = f"measured before gate {judgement.gate_name(gate)} failed"
                pairs += [(why, f"{name} {each}".strip()) for each in labels_of(before, len(arm.measured)) or [""]]
    return tuple(": ".join(filter(None, (", ".join(some(of)), why))) for why, of in grouped(pairs).items())


def arms_of_job(store: Store, job: Job) -> dict[str, Evidence]:
    """Return the arms of a job by name, with host, build, device and models, but without results.

    An arm that was not built has None as its build_id.
    """
    rows = store.rows("SELECT arm, build_id FROM arms WHERE job_id = ?", (job.job_id,))
    builds, devices = {row["arm"]: row["build_id"] for row in rows}, store.devices(job.job_id)
    inputs = store.rows("SELECT name, contents FROM inputs WHERE job_id = ? AND contents IS NOT NULL", (job.job_id,))
    contents = {row["name"]: row["contents"] for row in inputs}
    asks = {ask.arm.name: ask for ask in of_session(store, job)}
    return {
        name: Evidence(ask, name, builds.get(name), device, _hosts(store, {job.job_id}, device), contents)
        for name, ask in asks.items()
        for device in [devices.get(name)]
    }


def engaged_rows(ask: Ask, runs: Collection[RecordRow]) -> list[Row]:
    """Return the rows of an arm's `engaged` gates, given its runs; a valid one had the markers of its tool.

    One without fails a gate, unless another run of the same tool and model is valid.
    """
    valid = {(run["tool"], run["model_id"]) for run in runs if run["status"] == "valid"}
    lost = [run for run in runs if (run["tool"], run["model_id"]) not in valid]
    rows: list[Row] = []
    for marker, tools in grouped((marker, tool) for tool, each in ask.markers.items() for marker in each).items():
        proved = {tool for tool, _ in valid}.intersection(tools)
        unproved = [run for run in lost if run["tool"] in tools]
        without = [
            run["reason"] for run in unproved if says_not_engaged(run["reason"]) and repr(marker) in run["reason"]
        ]
        if without:
            row = {"found": "; ".join(dict.fromkeys(without)), "status": "failed"}
        elif proved and proved.issuperset(run["tool"] for run in unproved):
            of_tools = ", ".join(tool for tool in tools if tool in proved)
            row = {"found": f"{marker!r} on stderr of each valid run of {of_tools}", "status": "passed"}
        else:
            row = {"asked": f"{marker!r} on stderr", "status": "not run"}
        rows.append({"gate": "engaged", **row})
    return rows


def find_evidence(store: Store, ask: Ask) -> Evidence:
    """Return what the record has for an ask, all from the newest build and device that it has anything of."""
    of_arm = {"pin": ask.arm.source.pin, "tree": ask.arm.source.tree, "cmake": canonical(ask.arm.cmake)}
    of_ask = {key: getattr(ask, key) for key in ("protocol", "device_id", "host", "session")}
    params = {**of_arm, **of_ask, "arm": ask.arm.name}
    mine = "device_id = :device_id" if ask.device_id else "host = :host"  # no OR: devices and sessions have an index
    mine += " AND job_id = :session AND arm = :arm" if ask.session else ""
    runs, gates, checks = (store.rows(sql.format(mine=mine), params) for sql in (RUNS, GATES, CHECKS))
    # gates of any job are evidence for the build, but only the expected ones matter here
    gates, checks = ([row for row in rows if row["gate_digest"] in ask.gates] for rows in (gates, checks))
    gates = [row for row in gates if store.judged_alike(row, ask.gates[row["gate_digest"]][0])]
    if not (every := runs + gates + checks):
        built = store.rows(NEWEST.format(mine=mine), params)
        return Evidence(ask, ask.arm.name, built[0]["build_id"] if built else None)
    newest = max(every, key=lambda row: float(row["at"]))
    context = (newest["build_id"], newest["device_id"])
    runs, gates = ([row for row in rows if (row["build_id"], row["device_id"]) == context] for rows in (runs, gates))
    device = store.devices(newest["job_id"])[newest["arm"]]
    valid = [row for row in runs if row["status"] == "valid"]
    measured = tuple(_measured(store, ask, store.proved(valid, ask.markers)))
    shown = {cell.run["run_id"] for cell in measured}
    repeated = {row["run_id"] for row in valid if row["flawed"] and row["role"] is None} - shown
    return Evidence(
        ask,
        ask.arm.name,
        newest["build_id"],
        device,
        _hosts(store, {row["job_id"] for row in (*runs, *gates, *checks)}, device),
        {cell.ask.model: cell.run["contents"] for cell in measured if cell.run["contents"]},
        measured,
        {row["gate_digest"]: row for row in (*gates, *checks)},
        tuple(row for row in (*reversed(gates), *reversed(checks)) if row["status"] == "failed"),
        tuple(_lost(store, [row for row in reversed(runs) if row["reason"] or row["run_id"] in repeated])),
        any(ask.markers.values()) or bool(store.rows(GATED, (newest["build_id"],))),
    )


def _hosts(store: Store, jobs: Collection[str], device: Device | None) -> dict[str, str]:
    """Return `Evidence.hosts` of these jobs: one machine may have several names in hosts.yaml."""
    hosts = {}
    for row in store.rows(HOSTS, (json.dumps(list(jobs)),)):
        known = ", ".join(filter(None, (row["own"], device.label if device else "")))
        hosts[row["job_id"]] = f"{row['host']} ({known})" if known else row["host"]
    return hosts


def _measured(store: Store, ask: Ask, valid: Sequence[RecordRow]) -> Iterator[Measured]:
    accepted = {name: model_read(model, valid) for name, model in ask.models.items()}
    asked = [(cell, (cell.cell.key, accepted.get(cell.model, ""), cell.identity[2])) for cell in ask.cells]
    of_chains = by_run(store, VALUES, [run["run_id"] for run in valid if run["role"] is not None])
    ordinary = [run for run in valid if run["role"] is None]
    sound, flawed = ([run for run in ordinary if run["flawed"] == mark] for mark in (0, 1))
    # prefer an ordinary run to a chain's, whatever its age: the other rows of a table are ordinary runs too
    newest = dict(_of_chains(store, ask.arm.name, valid, of_chains)) | _newest(store, sound, {key for _, key in asked})
    newest = _newest(store, flawed, {key for _, key in asked} - newest.keys()) | newest
    chosen = []
    for cell, key in asked:
        runs, numbers = newest.get(key, ([], {}))
        if runs and runs[-1]["tool"] == cell.cell.tool:
            chosen.append((cell, runs, numbers))
    flags = by_run(store, FLAGS, [run["run_id"] for _, runs, _ in chosen for run in runs])
    conditions = cache(lambda *runs: conditions_of(store, runs))  # one run may have all cells
    for cell, runs, numbers in chosen:
        merged = [flag for run in runs for flag in flags[run["run_id"]]]
        if len(runs) > 1:
            counts = [(of_kind, len({flag["run_id"] for flag in of_kind}), why) for of_kind, why in by_kind(merged)]
            merged = [{**first, "reason": f"in {n} of {len(runs)} runs {why}"} for (first, *_), n, why in counts]
        yield Measured(cell, runs[-1], numbers, conditions(*(run["run_id"] for run in runs)), tuple(merged))


_Key = tuple[str, str, str]  # Cell.key, model_id, env_digest
_Counted = tuple[list[RecordRow], dict[str, Number]]  # runs, and by metric what they measured
BATCH = 4  # runs whose samples are read at once: the newest have all cells, unless some were not measured for long


def _newest(store: Store, runs: Sequence[RecordRow], asked: Collection[_Key]) -> dict[_Key, _Counted]:
    """Return the newest of ordinary runs, given oldest first, with each cell; reads until all are found."""
    newest: dict[_Key, _Counted] = {}
    for end in range(len(runs), 0, -BATCH):
        batch = runs[max(0, end - BATCH) : end][::-1]
        values = by_run(store, VALUES, [run["run_id"] for run in batch])
        for run in batch:
            of_cell = grouped((row["cell"], row) for row in values[run["run_id"]])
            for cell, rows in of_cell.items():
                numbers = {row["metric"]: Number.of_row(row) for row in rows}
                newest.setdefault((cell, run["model_id"], run["env_digest"]), ([run], numbers))
        if newest.keys() >= set(asked):
            break
    return newest


def _of_chains(
    store: Store, arm: str, valid: Sequence[RecordRow], values: Mapping[str, Sequence[RecordRow]]
) -> Iterator[tuple[_Key, _Counted]]:
    """Yield by (Cell.key, model_id, env_digest), oldest first, the runs of one side that count and each metric's mean.

    Both sides may have the same build. Of a session that `arm` is part of, only its own runs are taken.
    """
    own = {run["job_id"] for run in valid if run["arm"] == arm}
    mine = (run for run in valid if run["arm"] == arm or run["job_id"] not in own)
    of_chains = (run for run in mine if run["role"] in (BASELINE, CANDIDATE))
    chains = grouped(((run["job_id"], run["chain"], run["role"]), run) for run in of_chains)
    for (job_id, chain, role), runs in chains.items():
        by_cell = grouped(
            (judged.comparison.baseline if role == BASELINE else judged.comparison.candidate, judged)
            for judged in judgement.recorded(store, job_id)
            if judged.chain == chain
            and judged.verdict.verdict != "invalid"
            # for an A/A session only the baseline's mean
            and (role == BASELINE or judged.baseline_arm != judged.candidate_arm)
        )
        for cell, verdicts in by_cell.items():
            cycles = {cycle for judged in verdicts for cycle in judgement.counted(judged.verdict, role)}
            counted = [run for run in runs if run["cycle"] in cycles]
            medians = medians_of(row for run in counted for row in values[run["run_id"]] if row["cell"] == cell)
            of_metric = {judged.comparison.metric: judged for judged in verdicts}
            means = {  # a metric without a verdict takes the cell's first verdict
                metric: mean_of(of_metric.get(metric, verdicts[0]), role, metric, by_cycle)
                for (_, _, _, metric), by_cycle in medians.items()
            }
            if means:
                yield (cell, counted[-1]["model_id"], counted[-1]["env_digest"]), (counted, means)


def _lost(store: Store, runs: Sequence[RecordRow]) -> Iterator[Lost]:
    """Yield runs, each with the cells of its step that have no number; the step is found by the arguments.

    A run without a reason was disturbed, and others are shown in its place: it has all of its cells.
    """
    steps: dict[str, tuple[RunStep, ...]] = {}
    for job_id in {run["job_id"] for run in runs}:
        try:
            steps[job_id] = tuple(store.job(job_id).plan.runs)
        except SpecError:  # the plan is from a dgxlab with other fields: list its runs without cells
            steps[job_id] = ()
    disturbed = [run["run_id"] for run in runs if not run["reason"]]
    values, flags = by_run(store, VALUES, disturbed), by_run(store, FLAGS, disturbed)
    for run in runs:
        step = next((step for step in steps[run["job_id"]] if _ran(step, run, json.loads(run["argv"]))), None)
        asked = [CellAsk(cell, step.model, step.env) for cell in step.cells] if step else []
        if not run["reason"]:
            why = [flag["reason"] for flag in flags[run["run_id"]] if flag["hard"]]
            if told := [text for ask in asked for text in _told(ask, values[run["run_id"]])]:
                why.append(f"measured {', '.join(some(told))}")
            yield {**run, "status": "disturbed", "reason": "; ".join(why)}, tuple(asked)
            continue
        counted = run["status"] == "valid"
        measured = {row["cell"] for row in store.rows(ROWS, (run["run_id"],))} if counted else set()
        status = "refused" if counted else run["status"]
        yield {**run, "status": status}, tuple(ask for ask in asked if ask.cell.key not in measured)


def _told(ask: CellAsk, values: Iterable[RecordRow]) -> Iterator[str]:
    """Yield what a run measured of a cell, each metric that chains compare: `pp512 2169 t/s`."""
    for row in values:
        if row["cell"] == ask.cell.key and row["metric"] in BENCHES[ask.cell.tool].compared:
            style = units.style(units.metric(row["metric"]), [row["value"]])
            words = (label(ask.cell), metric_label(ask.cell.tool, row["metric"]), style.value(row["value"]), style.unit)
            yield " ".join(filter(None, words))


def _ran(step: RunStep, run: RecordRow, argv: Sequence[str]) -> bool:
    """Return whether a run has a step's arguments; one with a placeholder matches anything."""
    if (step.arm, step.tool, len(step.argv)) != (run["arm"], run["tool"], len(argv)):
        return False
    return all("{" in planned or planned == word for planned, word in zip(step.argv, argv, strict=True))
