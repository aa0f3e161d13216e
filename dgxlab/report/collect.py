"""Assemble a report: the requested cells and gates, those in the record, and the missing ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dgxlab import judgement
from dgxlab.errors import UsageError
from dgxlab.judgement import gate_name
from dgxlab.model import SESSIONS, Device, Experiment, Source, canonical
from dgxlab.report import ask as asking
from dgxlab.report.ask import Ask
from dgxlab.report.evidence import Evidence, Key, find
from dgxlab.report.records import Failure, Glance, Missing, Overview, Report, Row, SessionReport, columns, some
from dgxlab.report.session import WORDS, failed_gate, failed_session, older
from dgxlab.report.tables import status_of, tables
from dgxlab.report.verdicts import summary, verdicts
from dgxlab.store import alias

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

LABELS = 3
"""Max cells named in a failure; the rest are counted. Cells that were not measured are listed in full."""


def collect(store: Store, experiment: str | None = None, *, job_id: str | None = None) -> Report:
    """Return the report of an experiment's newest state, or of one session alone.

    For an experiment, the newest session decides spec, tree and host. Each cell has its newest valid run on exactly
    that build, from any session. A session of two arms has a report of its verdicts only.

    Raises:
        UsageError: if neither or both are given, or there is no such session.
    """
    if (experiment is None) == (job_id is None):
        raise UsageError("a report is about one experiment or one session", next="dgxlab jobs")
    job = store.job(job_id) if job_id is not None else asking.newest_job(store, str(experiment))
    if job.kind in SESSIONS:
        return verdicts(store, job)
    if job_id is None:
        return _collect(store, f"Experiment {job.name}", [asking.of_newest(store, job)], job)
    return _collect(store, f"Session {job.job_id}", asking.of_session(store, job), job)


def collect_session(store: Store, job_id: str) -> SessionReport:
    """Return the report of a session of two arms.

    Raises:
        UsageError: if there is no such session.
    """
    return verdicts(store, store.job(job_id))


def collect_experiment(store: Store, experiment: Experiment, source: Source, device: Device) -> Report:
    """Return the report of a given experiment on a tree and device, even if it never needed a session."""
    asks = [asking.of_experiment(experiment, source, device)]
    return _collect(store, f"Experiment {experiment.name}", asks, asking.newest_on(store, experiment, device))


def _collect(store: Store, title: str, asks: Sequence[Ask], job: Job | None) -> Report:
    arms = [find(store, ask) for ask in asks]
    failures = [failure for arm in arms for failure in _failures(arm)]
    gate_listed = any(job and row["job_id"] == job.job_id for arm in arms for row in arm.failed)
    unfinished = job is not None and not job.ended and job.state != "lost"
    default = "the session has not ended" if unfinished else "not measured"
    return Report(
        title,
        asks[0].hypothesis,
        tuple(table for arm in arms for table in tables(arm)),
        tuple(missing for arm in arms for missing in _missing(arm, default)),
        (
            *failed_session(job, failures, gate_listed=gate_listed),
            *(_rejected(store, asks, job) if asks[0].session is None else ()),
            *failures,
        ),
    )


def _rejected(store: Store, asks: Sequence[Ask], job: Job | None) -> Iterator[Failure]:
    """Yield the other, rejected sessions that built these trees: their results are left out."""
    trees = canonical([[ask.arm.source.pin, ask.arm.source.tree] for ask in asks])
    rows = store.rows(
        """SELECT DISTINCT job_id, reason FROM rejections JOIN arms USING (job_id)
           WHERE json_array(pin, tree) IN (SELECT value FROM json_each(?)) AND job_id IS NOT ? ORDER BY job_id""",
        (trees, job and job.job_id),
    )
    for row in rows:
        yield Failure(row["job_id"], "session", "rejected", row["reason"], kind="session")


def _missing(arm: Evidence, default: str) -> list[Missing]:
    """Return the cells without a valid run, grouped by reason, in the planned order."""
    reasons: dict[Key, str] = {}
    for lost in reversed(arm.lost):
        reasons.update(dict.fromkeys(lost.keys, f"{lost.run['status']} in {alias(lost.run['job_id'])}"))
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, cell in arm.absent.items():
        group = groups.setdefault((cell.cell.tool, cell.model, reasons.get(key, default)), [])
        group.append(asking.label(cell.cell))
    return [
        Missing(arm.experiment, tool, model, tuple(labels), reason) for (tool, model, reason), labels in groups.items()
    ]


def _failures(arm: Evidence) -> Iterator[Failure]:
    """Yield failed gates, failed runs of this arm's cells, and failed runs whose cells are unknown."""
    for row in arm.failed:
        yield failed_gate(row, again=arm.gates[row["gate_digest"]]["status"] != "failed")
    asked = {ask.place for ask in arm.ask.cells}
    for lost in arm.lost:
        if lost.keys and asked.isdisjoint(lost.keys):
            continue
        what = " ".join(filter(None, (lost.run["tool"], lost.model)))
        what += f": {', '.join(some(lost.labels, LABELS))}" if lost.labels else ""
        again = bool(lost.keys) and arm.absent.keys().isdisjoint(lost.keys)
        yield Failure(lost.run["job_id"], what, lost.run["status"], lost.run["reason"], again)


SESSIONS_SHOWN, GATES_SHOWN, VERDICTS_SHOWN = 6, 3, 3
"""Lines per table: the overview fits on a screen of 30 lines."""

COUNTS: Mapping[str, str] = {
    "sessions": "SELECT count(*) AS n FROM jobs",
    "experiments": "SELECT count(DISTINCT name) AS n FROM experiments",
    "builds": "SELECT count(DISTINCT build_id) AS n FROM arms",
    "runs": "SELECT count(*) AS n FROM runs",
    "samples": "SELECT count(*) AS n FROM samples",
    "imported files": "SELECT count(*) AS n FROM imports",
}
ELSEWHERE = ("imported files",)
"""Rows for results from elsewhere; left out if there are none."""


def overview(store: Store) -> Overview:
    """Return the newest sessions, gates and verdicts, and how many there are."""
    counts = {name: int(store.rows(sql)[0]["n"]) for name, sql in COUNTS.items()}
    glances = (_sessions(store, counts["sessions"]), _gates(store), _verdicts(store))
    return Overview(
        store.path.name,
        tuple(glance for glance in glances if glance.rows),
        {name: count for name, count in counts.items() if count or name not in ELSEWHERE},
    )


def _sessions(store: Store, every: int) -> Glance:
    rows: list[Row] = [
        {
            "session": row["job_id"],
            "kind": WORDS.get(row["kind"], row["kind"]),
            "host": row["host"],
            "runs": row["runs"],
            "state": ": ".join(filter(None, (row["state"], row["error"]))),
        }
        for row in store.rows(
            """SELECT job_id, kind, host, iif(reason IS NULL, state, 'rejected') AS state,
                      coalesce(reason, error) AS error,
                      (SELECT sum(status = 'valid') || ' of ' || count(*) FROM runs WHERE runs.job_id = jobs.job_id)
                      AS runs
               FROM jobs LEFT JOIN rejections USING (job_id) ORDER BY intent_at DESC, job_id DESC LIMIT ?""",
            (SESSIONS_SHOWN,),
        )
    ]
    shown = columns("session kind host runs state", "runs", runs="runs that count")
    return Glance("Sessions", shown, tuple(rows), every - len(rows))


def _gates(store: Store) -> Glance:
    newest = store.rows("SELECT * FROM gate_list WHERE newest AND NOT rejected ORDER BY at DESC, key DESC")
    rows: list[Row] = [
        {
            "gate": gate_name(row),
            "arm": row["arm"],
            "build": row["build_id"],
            "count": None if row["total"] is None else f"{row['passed']}/{row['total']}",
            "status": ": ".join(filter(None, (status_of(row), "; ".join(json.loads(row["reasons"]))))),
            "session": row["job_id"],
        }
        for row in newest[:GATES_SHOWN]
    ]
    shown = columns("gate arm build count status session", "count", arm="experiment", count="passed/total")
    return Glance("Gates", shown, tuple(rows), len(newest) - len(rows))


def _verdicts(store: Store) -> Glance:
    """Return a line for each session that has ended; results of the others are hidden."""
    sessions = store.rows(
        """SELECT job_id, kind, protocol, json_group_array(verdict) AS words FROM verdict_list
           GROUP BY job_id ORDER BY intent_at DESC, job_id DESC"""
    )
    rows: list[Row] = []
    for row in sessions[:VERDICTS_SHOWN]:
        words = json.loads(row["words"])
        word = summary(row["kind"], judgement.whole(words), words) + older(row["protocol"])
        rows.append({"session": row["job_id"], "verdict": word})
    return Glance("Verdicts", columns("session verdict"), tuple(rows), len(sessions) - len(rows))
