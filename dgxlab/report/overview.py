"""The latest of everything in one screen: a line a session, a gate, a verdict."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dgxlab import judgement
from dgxlab.model import about
from dgxlab.report.checks import gate_of
from dgxlab.report.numbers import Value
from dgxlab.report.records import Column, Glance, Overview
from dgxlab.report.session import WORDS, older
from dgxlab.report.tables import standing
from dgxlab.report.verdicts import summary
from dgxlab.store import REJECTED

if TYPE_CHECKING:
    from dgxlab.store import Store

SESSIONS_SHOWN, GATES_SHOWN, VERDICTS_SHOWN = 6, 3, 3
"""Lines; with what stands around them a screen of 30 lines."""

NEWEST = """SELECT job_id, kind, name, host, iif(reason IS NULL, state, 'rejected') AS state,
                   coalesce(reason, error) AS error,
                   (SELECT count(*) FROM runs WHERE runs.job_id = jobs.job_id AND status = 'valid') AS valid,
                   (SELECT count(*) FROM runs WHERE runs.job_id = jobs.job_id) AS runs
            FROM jobs LEFT JOIN rejections USING (job_id) ORDER BY intent_at DESC, job_id DESC LIMIT ?"""

LATEST_GATES = f"""WITH every AS (
                      SELECT gate_id, build_id, gate_digest, at, op || ' on ' || backend AS what, NULL AS gate,
                             arm, passed, total, status, overridden, reasons, job_id FROM gates
                      UNION ALL
                      SELECT check_id, build_id, gate_digest, at, '', gate, arm, NULL, NULL, status, 0, reasons,
                             job_id FROM checks),
                  ranked AS (
                      SELECT *, row_number() OVER (PARTITION BY build_id, device_id, gate_digest
                                                   ORDER BY at DESC, gate_id DESC) AS place
                      FROM every JOIN arms USING (job_id, arm, build_id) WHERE job_id NOT IN ({REJECTED}))
                  SELECT * FROM ranked WHERE place = 1 ORDER BY at DESC, gate_id DESC"""  # noqa: S608 - our own
"""The newest of each gate on each build and device."""


def overview(store: Store) -> Overview:
    """Return the newest sessions, gates and verdicts, and how many there are."""
    counts = {name: _count(store, sql) for name, sql in COUNTS.items()}
    counts |= {name: count for name, sql in ELSEWHERE.items() if (count := _count(store, sql))}
    tables = (_sessions(store, counts["sessions"]), _gates(store), _verdicts(store))
    return Overview(store.path.name, tuple(table for table in tables if table.rows), counts)


COUNTS: Mapping[str, str] = {
    "sessions": "SELECT count(*) AS n FROM jobs",
    "experiments": "SELECT count(DISTINCT name) AS n FROM experiments",
    "builds": "SELECT count(DISTINCT build_id) AS n FROM arms",
    "runs": "SELECT count(*) AS n FROM runs",
    "samples": "SELECT count(*) AS n FROM samples",
}

ELSEWHERE: Mapping[str, str] = {
    "imported files": "SELECT count(*) AS n FROM imports",
}
"""What was not measured here; left out where there is none."""


def _count(store: Store, sql: str) -> int:
    return int(store.rows(sql)[0]["n"])


def _sessions(store: Store, every: int) -> Glance:
    rows = [_session(row) for row in store.rows(NEWEST, (SESSIONS_SHOWN,))]
    columns = (
        Column("session", "session"),
        Column("kind", "kind"),
        Column("host", "host"),
        Column("runs", "runs that count", numeric=True),
        Column("state", "state"),
    )
    return Glance("Sessions", columns, tuple(rows), every - len(rows))


def _session(row: Mapping[str, Any]) -> dict[str, Value]:
    error = f": {row['error']}" if row["error"] else ""
    counted = f"{row['valid']} of {row['runs']}" if row["runs"] else None
    return {
        "session": row["job_id"],
        "kind": WORDS.get(row["kind"], row["kind"]),
        "host": row["host"],
        "runs": counted,
        "state": row["state"] + error,
    }


def _gates(store: Store) -> Glance:
    found = store.rows(LATEST_GATES)
    rows: list[dict[str, Value]] = [
        {
            "gate": about(gate_of(row)) if row["gate"] else row["what"],
            "arm": row["arm"],
            "build": row["build_id"],
            "count": None if row["total"] is None else f"{row['passed']}/{row['total']}",
            "status": standing(row) + (f": {why}" if (why := "; ".join(json.loads(row["reasons"]))) else ""),
            "session": row["job_id"],
        }
        for row in found[:GATES_SHOWN]
    ]
    columns = (
        Column("gate", "gate"),
        Column("arm", "experiment"),
        Column("build", "build"),
        Column("count", "passed/total", numeric=True),
        Column("status", "status"),
        Column("session", "session"),
    )
    return Glance("Gates", columns, tuple(rows), len(found) - len(rows))


def _verdicts(store: Store) -> Glance:
    """Return a line a session that has ended; of the others nobody is told anything."""
    found = store.rows(
        """SELECT job_id, kind, protocol FROM jobs WHERE job_id IN (SELECT job_id FROM verdicts)
           ORDER BY intent_at DESC, job_id DESC"""
    )
    rows: list[dict[str, Value]] = []
    for row in found[:VERDICTS_SHOWN]:
        words = [verdict["verdict"] for verdict in store.verdicts(row["job_id"])]
        word = summary(row["kind"], judgement.whole(words), words) + older(row["protocol"])
        rows.append({"session": row["job_id"], "verdict": word})
    columns = (Column("session", "session"), Column("verdict", "verdict"))
    return Glance("Verdicts", columns, tuple(rows), len(found) - len(rows))
