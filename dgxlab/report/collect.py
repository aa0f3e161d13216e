"""Assemble a report: what was asked for, what the record has of it, and what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dgxlab.judgement import gate_name
from dgxlab.model import SESSIONS, Device, Experiment, Source, canonical
from dgxlab.report import ask as asking
from dgxlab.report.ask import Ask
from dgxlab.report.evidence import Evidence, find_evidence
from dgxlab.report.profile import by_group, profiles
from dgxlab.report.records import Failure, Glance, Missing, Overview, Report, Row, columns, grouped, some
from dgxlab.report.session import WORDS, failed_gate, failed_session, older
from dgxlab.report.tables import status_of, tables
from dgxlab.report.verdicts import collect_session, summary
from dgxlab.store import FLAWED, alias

if TYPE_CHECKING:
    from dgxlab.store import Job, Store


def collect(store: Store, name: str) -> Report:
    """Return the report of an experiment: its newest session decides spec, tree and device, one of its own if any.

    Each cell has its newest valid run on that build, from any session, preferably an undisturbed one. If `name` is a
    comparison's, the report is of its verdicts only. Raises UsageError if there is no session.
    """
    job = asking.newest_job(store, name)
    if job.kind in SESSIONS and job.name == name:
        return collect_session(store, job.job_id)
    return _collect(store, f"Experiment {name}", [asking.of_newest(store, job, name)], job)


def collect_job(store: Store, job_id: str) -> Report:
    """Return the report of what one session measured itself. Raises UsageError if there is no such session."""
    job = store.job(job_id)
    if job.kind in SESSIONS:
        return collect_session(store, job.job_id)
    return _collect(store, f"Session {job.job_id}", asking.of_session(store, job), job)


def collect_experiment(store: Store, experiment: Experiment, source: Source, device: Device) -> Report:
    """Return the report of an experiment on a tree and device, from whichever sessions measured it."""
    asks = [asking.of_experiment(experiment, source, device)]
    return _collect(store, f"Experiment {experiment.name}", asks, asking.newest_on(store, experiment, device))


def _collect(store: Store, title: str, asks: Sequence[Ask], job: Job | None) -> Report:
    arms = [find_evidence(store, ask) for ask in asks]
    failures = [failure for arm in arms for failure in _failures(arm)]
    gate_listed = any(job and row["job_id"] == job.job_id for arm in arms for row in arm.failed)
    unfinished = job is not None and not job.ended and job.state != "lost"
    default = "the session has not ended" if unfinished else ""
    if job and job.rejected and asks[0].session is not None:  # its gates and runs do not count, but there were some
        return Report(title, asks[0].hypothesis, (), (), tuple(failed_session(job, failures, gate_listed=gate_listed)))
    return Report(
        title,
        asks[0].hypothesis,
        tuple(table for arm in arms for table in (*tables(arm), *map(by_group, profiles(store, arm)))),
        tuple(missing for arm in arms for missing in _missing(arm, default)),
        (
            *failed_session(job, failures, gate_listed=gate_listed),
            *(_rejected(store, asks, job) if asks[0].session is None else ()),
            *failures,
        ),
        tuple(
            str(cell.run["job_id"]) for arm in arms for cell in arm.measured if any(flag["hard"] for flag in cell.flags)
        ),
    )


def _rejected(store: Store, asks: Sequence[Ask], job: Job | None) -> Iterator[Failure]:
    """Yield the rejected sessions, other than `job`, that built these trees: the report leaves out their results."""
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
    why = {
        ask.identity: f"{run['status']} in {alias(run['job_id'])}" for run, asks in reversed(arm.lost) for ask in asks
    }
    groups = grouped(
        ((ask.cell.tool, ask.model, why.get(ask.identity, default)), asking.label(ask.cell)) for ask in arm.absent
    )
    return [
        Missing(arm.experiment, tool, model, tuple(labels), reason) for (tool, model, reason), labels in groups.items()
    ]


def _failures(arm: Evidence) -> Iterator[Failure]:
    for row in arm.failed:
        yield failed_gate(row, again=arm.gates[row["gate_digest"]]["status"] != "failed")
    asked = {ask.identity for ask in arm.ask.cells}
    counted = {cell.ask.identity: float(cell.run["at"]) for cell in arm.measured if not cell.run["flawed"]}
    for run, asks in arm.lost:
        places = [ask.identity for ask in asks]
        if places and asked.isdisjoint(places):
            continue
        what = " ".join(filter(None, (run["tool"], *{ask.model for ask in asks})))
        what += f": {', '.join(some([asking.label(ask.cell) for ask in asks]))}" if asks else ""
        again = bool(places) and all(counted.get(place, 0.0) > run["at"] for place in asked.intersection(places))
        yield Failure(run["job_id"], what, run["status"], run["reason"], again)


SHOWN = 3  # rows of each table of the overview, twice as many for sessions: it fits on a screen of 30 lines

COUNTS = """SELECT (SELECT count(*) FROM jobs) AS sessions,
                   (SELECT count(DISTINCT name) FROM experiments) AS experiments,
                   (SELECT count(DISTINCT build_id) FROM arms) AS builds, (SELECT count(*) FROM runs) AS runs,
                   (SELECT count(*) FROM samples) AS samples, (SELECT count(*) FROM imports) AS "imported files\""""

KIND = "iif(kind = 'ab' AND json_array_length(inflated(plan), '$.arms') = 1, 'noise', kind)"
"""`Plan.shown_kind`, also of a plan from a dgxlab with other fields."""

SESSIONS_LISTED = f"""SELECT job_id AS session, {KIND} AS kind, name, host, intent_at AS at, protocol,
                            (SELECT sum(status = 'valid' AND run_id NOT IN ({FLAWED})) || ' of ' || count(*) FROM runs
                             WHERE runs.job_id = jobs.job_id) AS runs,
                            CASE WHEN reason IS NOT NULL THEN 'rejected: ' || reason
                                 WHEN error <> '' THEN state || ': ' || error ELSE state END AS state,
                            (SELECT json_group_array(verdict) FROM verdicts
                             WHERE verdicts.job_id = jobs.job_id) AS verdicts,
                            (SELECT json_group_array(note) FROM notes WHERE notes.job_id = jobs.job_id) AS notes
                     FROM jobs LEFT JOIN rejections USING (job_id)
                     WHERE host = coalesce(:host, host) AND (:kind IS NULL OR {KIND} = :kind) AND intent_at >= :since
                     AND (:experiment IS NULL OR name = :experiment
                          OR EXISTS (SELECT 1 FROM arms WHERE arms.job_id = jobs.job_id AND arm = :experiment))
                     ORDER BY intent_at DESC, job_id DESC LIMIT :most"""  # noqa: S608 - our own

GATES = """SELECT *, max(at) FROM gate_list WHERE NOT rejected
           GROUP BY build_id, device_id, gate_digest, arm ORDER BY at DESC, key DESC"""
"""The newest result of each gate of each experiment: what one expects may fail where another's passes on its build."""


def sessions(
    store: Store,
    *,
    host: str | None = None,
    experiment: str | None = None,
    kind: str | None = None,
    since: float = 0.0,
    most: int = -1,
) -> list[dict[str, Any]]:
    """Return the sessions of a record, the newest first, with what became of them.

    An `experiment` is measured alone or as an arm; `since` is in Unix seconds; `most` is -1 for all.
    """
    asked = {"host": host, "experiment": experiment, "kind": kind, "since": since, "most": most}
    rows = store.rows(SESSIONS_LISTED, asked)
    for row in rows:
        words = json.loads(row.pop("verdicts"))
        row |= {"alias": alias(row["session"]), "notes": json.loads(row["notes"])}
        row["verdict"] = summary(row["kind"], words) if words else ""
    return rows


def overview(store: Store) -> Overview:
    """Return the newest sessions, gates and verdicts of a database, and how many sessions, runs and samples it has."""
    (counts,) = store.rows(COUNTS)
    if not counts["imported files"]:
        del counts["imported files"]
    every, names = sessions(store), ("session", "host", "runs", "state")
    listed: list[Row] = [
        {"kind": WORDS.get(row["kind"], row["kind"]), **{name: row[name] for name in names}}
        for row in every[: 2 * SHOWN]
    ]
    newest, judged = store.rows(GATES), [row for row in every if row["verdict"]]
    gates: list[Row] = [
        {
            "gate": gate_name(row),
            "arm": row["arm"],
            "build": row["build_id"],
            "count": None if row["total"] is None else f"{row['passed']}/{row['total']}",
            "status": ": ".join(filter(None, (status_of(row), "; ".join(json.loads(row["reasons"]))))),
            "session": row["job_id"],
        }
        for row in newest[:SHOWN]
    ]
    lines: list[Row] = [
        {"session": row["session"], "verdict": row["verdict"] + older(row["protocol"])} for row in judged[:SHOWN]
    ]
    of_sessions = columns("session kind host runs state", "runs", runs="runs that count")
    of_gates = columns("gate arm build count status session", "count", arm="experiment", count="passed/total")
    glances = (
        Glance("Sessions", of_sessions, tuple(listed), counts["sessions"] - len(listed)),
        Glance("Gates", of_gates, tuple(gates), len(newest) - len(gates)),
        Glance("Verdicts", columns("session verdict"), tuple(lines), len(judged) - len(lines)),
    )
    return Overview(store.path.name, tuple(glance for glance in glances if glance.rows), counts)
