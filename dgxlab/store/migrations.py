"""Bring a database to the current schema, in order, all or nothing.

Imported only when there is something to migrate: importing sqlite_utils takes as long as all the rest of a command.
A migration that was released is never edited; a later one changes what it made, and adds 1 to `schema.VERSION`.
"""

# ruff: noqa: S608 - names of tables and columns are our own, values are always bound

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sqlite_utils import Database, Migrations

from dgxlab.errors import SpecError
from dgxlab.model import Device
from dgxlab.store.backups import backup
from dgxlab.store.connect import schema_of, transaction
from dgxlab.store.records import device_row
from dgxlab.store.schema import (
    APPEND_ONLY,
    APPLICATION_ID,
    CASE_LISTS,
    CHAIN_RUNS,
    CHECKS,
    DEVICES,
    EVIDENCE,
    EXPECTATIONS,
    IMPORTED,
    IMPORTS,
    JOBS,
    OWN_NOISE,
    PUBLISHED,
    REBUILT,
    REINDEXED,
    REJECTIONS,
    SEALS,
    TELEMETRY,
    VERDICTS,
    VERSION,
)
from dgxlab.store.seals import Seals, seal_all

MIGRATIONS = Migrations("dgxlab")


@MIGRATIONS()
def m001_jobs(db: Database) -> None:
    """Hosts, experiments and jobs."""
    _run(db, JOBS)


@MIGRATIONS()
def m002_evidence(db: Database) -> None:
    """What jobs found: arms, inputs, cells, gates, expectations, runs, rows, samples."""
    _run(db, EVIDENCE)


@MIGRATIONS()
def m003_append_only(db: Database) -> None:
    """Refuse to change or delete evidence."""
    _make_append_only(db, APPEND_ONLY)


@MIGRATIONS()
def m004_telemetry(db: Database) -> None:
    """The conditions of each run."""
    _run(db, TELEMETRY.values())
    _make_append_only(db, TELEMETRY)


@MIGRATIONS()
def m005_chains(db: Database) -> None:
    """The places of runs in A/B chains, and what the chains say."""
    _run(db, (CHAIN_RUNS, VERDICTS))
    _make_append_only(db, ("chain_runs",))


@MIGRATIONS()
def m006_from_elsewhere(db: Database) -> None:
    """What documents publish, and the output of tools that dgxlab did not start."""
    _run(db, (*PUBLISHED.values(), IMPORTS, *IMPORTED.values()))
    _make_append_only(db, IMPORTED)
    _make_append_only(db, PUBLISHED, settled=("line",))
    _make_append_only(db, ("imports",), settled=("name", "at", "content"))


@MIGRATIONS()
def m007_checks(db: Database) -> None:
    """Gates on a whole model."""
    _run(db, CHECKS)
    _make_append_only(db, ("checks",))


@MIGRATIONS()
def m008_devices(db: Database) -> None:
    """Numbers belong to the device that gave them, and a gate to the list of its cases; all that is there is sealed."""
    _run(db, (DEVICES, CASE_LISTS))
    devices = _devices_of_arms(db)
    _run(db, (f"DROP VIEW {view}" for view in ("builds", "models")))
    for table, changes in REBUILT.items():
        _rebuild(db, table, changes)
    _run(db, ("DROP TABLE hosts", "DROP TABLE expectations", *REINDEXED, *EVIDENCE[-2:], EXPECTATIONS))
    for row in devices:
        db.execute("UPDATE arms SET device_id = :device_id WHERE (job_id, arm) = (:job_id, :arm)", row)
    _make_append_only(db, (*(table for table in REBUILT if table not in ("jobs", "verdicts")), "devices", "case_lists"))
    _run(db, (f"DROP TRIGGER flags_no_{action}" for action in ("update", "delete")))
    _make_append_only(db, ("flags",), settled=("reason",))  # which a merge settles
    db.execute(SEALS)
    seal_all(db.conn)


@MIGRATIONS()
def m009_rejections(db: Database) -> None:
    """Jobs whose evidence is set aside; what a gate of one recorded is expected no more."""
    left_out = "WHERE job_id NOT IN (SELECT job_id FROM rejections) AND status"
    _run(db, (REJECTIONS, "DROP VIEW expectations", EXPECTATIONS.replace("WHERE status", left_out)))
    _make_append_only(db, ("rejections",), settled=("reason", "at"))


@MIGRATIONS()
def m010_own_noise(db: Database) -> None:
    """Verdicts get the interval of `same` and the chain's noise floor; their seals change by that, and by no edit."""
    seals = Seals(db.conn)
    seals.writing("verdicts", ("job_id",), db.execute("SELECT DISTINCT job_id FROM verdicts").fetchall())
    _run(db, OWN_NOISE)
    seals.close()


def _devices_of_arms(db: Database) -> list[dict[str, str]]:
    """Record the device of every arm, and return it by job_id and arm."""
    found = []
    sql = "SELECT job_id, arm, arms.cmake, jobs.facts FROM arms JOIN jobs USING (job_id)"
    for job_id, arm, cmake, facts in db.execute(sql).fetchall():
        device = device_row(Device.of(json.loads(facts), json.loads(cmake)))
        db.table("devices").insert(device, ignore=True)
        found.append({"job_id": job_id, "arm": arm, "device_id": device["device_id"]})
    return found


def _rebuild(db: Database, table: str, changes: Mapping[str, str]) -> None:
    """Make a table anew from its changed text, with the rows, indexes and constraints that it has.

    New columns get "" or 0 where they take no NULL. Triggers are gone afterwards, and indexes on columns that are gone.
    """
    (text,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
    for old, new in {f"TABLE {table} ": f"TABLE new_{table} ", **changes}.items():
        text = text.replace(old, new)
    of_table = "SELECT sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL"
    indexes = [sql for (sql,) in db.execute(of_table, (table,)).fetchall()]
    before = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
    db.execute(text)
    columns = db.execute(f"SELECT name, type, \"notnull\" FROM pragma_table_info('new_{table}')").fetchall()
    fill = {name: "NULL" if not needed else "0" if kind == "INTEGER" else "''" for name, kind, needed in columns}
    values = [name if name in before else value for name, value in fill.items()]
    db.execute(f"INSERT INTO new_{table} ({','.join(fill)}) SELECT {','.join(values)} FROM {table} ORDER BY rowid")
    db.execute(f"DROP TABLE {table}")
    db.execute(f"ALTER TABLE new_{table} RENAME TO {table}")
    _run(db, (sql for sql in indexes if before <= fill.keys() or "host_id" not in sql))


def upgrade(connection: sqlite3.Connection, path: Path, *, stop_before: str | None = None) -> None:
    """Apply every migration that is missing, in one transaction, after a backup of what is there.

    Args:
        connection: With isolation_level None; foreign keys are off while it works and on afterwards.
        path: Its file, beside which the backup goes.
        stop_before: Name of a migration to stop at, which leaves the schema of an older version.

    Raises:
        SpecError: if the result breaks a foreign key; the database is then as it was.
    """
    if 0 < _version(connection) < VERSION:
        backup(connection, path)
    connection.execute("PRAGMA foreign_keys = OFF")  # has no effect inside a transaction
    try:
        with transaction(connection, path):
            if _version(connection) < VERSION:  # else another process was faster
                _apply(connection, path, stop_before)
    finally:
        connection.execute("PRAGMA foreign_keys = ON")


def schema(number: int) -> dict[tuple[str, str], str]:
    """Return what a database of that version has, as `connect.schema_of`."""
    stop_before = MIGRATIONS._migrations[number].name if number < VERSION else None
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        upgrade(connection, Path(":memory:"), stop_before=stop_before)
        return schema_of(connection)


def _apply(connection: sqlite3.Connection, path: Path, stop_before: str | None) -> None:
    db = Database(connection)
    MIGRATIONS.apply(db, stop_before=stop_before)
    broken = connection.execute("PRAGMA foreign_key_check").fetchall()
    if broken:
        raise SpecError(f"migrating {path} breaks {len(broken)} foreign keys, the first in table {broken[0][0]}")
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS.applied(db))}")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _make_append_only(db: Database, tables: Iterable[str], settled: Sequence[str] = ()) -> None:
    """Refuse every change; of columns that `schema.UPSERT` settles, only the deletion."""
    for table in tables:
        fixed = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[1] not in settled]
        for action in ("UPDATE", "DELETE"):
            sentence = f"{table} is append-only: a correction is a new row"
            of = f" OF {','.join(fixed)}" if settled and action == "UPDATE" else ""
            db.execute(
                f"CREATE TRIGGER {table}_no_{action.lower()} BEFORE {action}{of} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{sentence}'); END"
            )


def _run(db: Database, statements: Iterable[str]) -> None:
    for statement in statements:
        db.execute(statement)
