"""Put a report together: what was asked for, what the record has of it, and what it has not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dgxlab import judgement
from dgxlab.errors import UsageError
from dgxlab.judgement import gate_name
from dgxlab.model import SESSIONS, Device, Experiment, Source, canonical
from dgxlab.report import ask as asking
from dgxlab.report.ask import ArmAsk, Ask
from dgxlab.report.evidence import Evidence, Key, find
from dgxlab.report.records import Failure, Glance, Missing, Overview, Report, SessionReport, Value, columns, some
from dgxlab.report.session import WORDS, failed_gate, failed_session, older
from dgxlab.report.tables import status_of, tables
from dgxlab.report.verdicts import summary, verdicts
from dgxlab.store import alias

if TYPE_CHECKING:
    from dgxlab.store import Store

LABELS = 3
"""Cells named in a failure; the rest are counted. What was not measured at all is listed in full."""


def collect(store: Store, experiment: str | None = None, *, job_id: str | None = None) -> Report:
    """Return the report of an experiment's newest state, or of one session alone.

    Where the session is of two arms, the report is about its verdicts and nothing else.

    Args:
        experiment: Name; the newest session decides spec, tree and host, and each cell has its newest valid run on
            exactly that build, whichever session measured it.
        job_id: A session; only what it measured itself.

    Raises:
        UsageError: if neither or both are given, or there is no such session.
    """
    if (experiment is None) == (job_id is None):
        raise UsageError("a report is about one experiment or one session", next="dgxlab jobs")
    job = store.job(job_id) if job_id is not None else asking.newest_job(store, str(experiment))
    if job.kind in SESSIONS:
        return verdicts(store, job)
    return _collect(store, asking.of_newest(store, job) if job_id is None else asking.of_session(store, job))


def collect_session(store: Store, job_id: str) -> SessionReport:
    """Return the report of a session of two arms.

    Raises:
        UsageError: if there is no such session.
    """
    return verdicts(store, store.job(job_id))


def collect_experiment(store: Store, experiment: Experiment, source: Source, device: Device) -> Report:
    """Return the report of an experiment at hand on a tree and device, also when it never needed a session."""
    return _collect(store, asking.of_experiment(store, experiment, source, device))


def _collect(store: Store, ask: Ask) -> Report:
    arms = [(arm, find(store, ask, arm)) for arm in ask.arms]
    failures = [failure for arm, evidence in arms for failure in _failures(arm, evidence)]
    job_id = ask.job and ask.job.job_id
    gate_listed = any(row["job_id"] == job_id for _, evidence in arms for row in evidence.failed)
    return Report(
        ask.title,
        ask.hypothesis,
        tuple(table for arm, evidence in arms for table in tables(arm.arm.name, arm, evidence)),
        tuple(missing for arm, evidence in arms for missing in _missing(arm, evidence, ask)),
        (*failed_session(ask.job, failures, gate_listed=gate_listed), *_rejected(store, ask), *failures),
    )


def _rejected(store: Store, ask: Ask) -> Iterator[Failure]:
    """Yield the other sessions that built these trees and were rejected: what they measured is left out."""
    trees = canonical([[arm.arm.source.pin, arm.arm.source.tree] for arm in ask.arms])
    rows = store.rows(
        """SELECT DISTINCT job_id, reason FROM rejections JOIN arms USING (job_id)
           WHERE json_array(pin, tree) IN (SELECT value FROM json_each(?)) ORDER BY job_id""",
        (trees,),
    )
    for row in rows:
        if ask.session is None and not (ask.job and ask.job.job_id == row["job_id"]):
            yield Failure(row["job_id"], "session", "rejected", row["reason"], kind="session")


def _absent(arm: ArmAsk, evidence: Evidence) -> dict[Key, asking.CellAsk]:
    """Return the cells without a valid run."""
    measured = {cell.ask.place for cell in evidence.measured}
    return {ask.place: ask for ask in arm.cells if ask.place not in measured}


def _missing(arm: ArmAsk, evidence: Evidence, ask: Ask) -> list[Missing]:
    """List the cells without a valid run, those with the same reason together, in the order planned."""
    reasons: dict[Key, str] = {}
    for lost in reversed(evidence.lost):
        reasons.update(dict.fromkeys(lost.keys, f"{lost.run['status']} in {alias(lost.run['job_id'])}"))
    unfinished = ask.job is not None and not ask.job.ended and ask.job.state != "lost"
    default = "the session has not ended" if unfinished else "not measured"
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, cell in _absent(arm, evidence).items():
        group = groups.setdefault((cell.cell.tool, cell.model, reasons.get(key, default)), [])
        group.append(asking.label(cell.cell))
    return [
        Missing(arm.arm.name, tool, model, tuple(labels), reason) for (tool, model, reason), labels in groups.items()
    ]


def _failures(arm: ArmAsk, evidence: Evidence) -> Iterator[Failure]:
    """Yield gates that failed, runs that should have given a cell of this arm, and runs whose cells are not known."""
    for row in evidence.failed:
        yield failed_gate(row, again=evidence.gates[row["gate_digest"]]["status"] != "failed")
    asked = {ask.place for ask in arm.cells}
    absent = _absent(arm, evidence)
    for lost in evidence.lost:
        if lost.keys and asked.isdisjoint(lost.keys):
            continue
        what = " ".join(filter(None, (lost.run["tool"], lost.model)))
        what += f": {', '.join(some(lost.labels, LABELS))}" if lost.labels else ""
        again = bool(lost.keys) and absent.keys().isdisjoint(lost.keys)
        yield Failure(lost.run["job_id"], what, lost.run["status"], lost.run["reason"], again)


# -- the newest of everything -----------------------------------------------------------------------------------------

SESSIONS_SHOWN, GATES_SHOWN, VERDICTS_SHOWN = 6, 3, 3
"""Lines: the whole overview is a screen of 30 lines."""

COUNTS: Mapping[str, str] = {
    "sessions": "SELECT count(*) AS n FROM jobs",
    "experiments": "SELECT count(DISTINCT name) AS n FROM experiments",
    "builds": "SELECT count(DISTINCT build_id) AS n FROM arms",
    "runs": "SELECT count(*) AS n FROM runs",
    "samples": "SELECT count(*) AS n FROM samples",
    "imported files": "SELECT count(*) AS n FROM imports",
}
ELSEWHERE = ("imported files",)
"""What was not measured here; left out where there is none."""


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
    rows: list[dict[str, Value]] = []
    for row in store.rows(
        """SELECT job_id, kind, host, iif(reason IS NULL, state, 'rejected') AS state, coalesce(reason, error) AS error,
                  (SELECT count(*) FROM runs WHERE runs.job_id = jobs.job_id AND status = 'valid') AS valid,
                  (SELECT count(*) FROM runs WHERE runs.job_id = jobs.job_id) AS runs
           FROM jobs LEFT JOIN rejections USING (job_id) ORDER BY intent_at DESC, job_id DESC LIMIT ?""",
        (SESSIONS_SHOWN,),
    ):
        rows.append(
            {
                "session": row["job_id"],
                "kind": WORDS.get(row["kind"], row["kind"]),
                "host": row["host"],
                "runs": f"{row['valid']} of {row['runs']}" if row["runs"] else None,
                "state": row["state"] + (f": {row['error']}" if row["error"] else ""),
            }
        )
    shown = columns("session kind host runs state", "runs", runs="runs that count")
    return Glance("Sessions", shown, tuple(rows), every - len(rows))


def _gates(store: Store) -> Glance:
    newest = store.rows("SELECT * FROM gate_list WHERE newest AND NOT rejected ORDER BY at DESC, key DESC")
    rows: list[dict[str, Value]] = [
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
    """Return a line for each session that has ended; nothing is shown of the others."""
    sessions = store.rows(
        "SELECT DISTINCT job_id, kind, protocol FROM verdict_list ORDER BY intent_at DESC, job_id DESC"
    )
    rows: list[dict[str, Value]] = []
    for row in sessions[:VERDICTS_SHOWN]:
        words = [verdict["verdict"] for verdict in store.verdicts(row["job_id"])]
        word = summary(row["kind"], judgement.whole(words), words) + older(row["protocol"])
        rows.append({"session": row["job_id"], "verdict": word})
    return Glance("Verdicts", columns("session verdict"), tuple(rows), len(sessions) - len(rows))
