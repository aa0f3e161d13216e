"""Migrate a database to the current schema, in order, in one transaction.

Imported only when there is something to migrate: importing sqlite_utils takes as long as the rest of a command.
A migration that was released is never edited; a later one changes what it made, and adds 1 to `schema.VERSION`.
"""

# ruff: noqa: S608 - names of tables and columns are our own, values are always bound

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from sqlite_utils import Database, Migrations

from dgxlab.errors import SpecError
from dgxlab.model import Device
from dgxlab.store.connect import backup, schema_of, transaction
from dgxlab.store.records import device_row
from dgxlab.store.schema import APPLICATION_ID, DEFLATED, VERSION, add_functions
from dgxlab.store.seals import Seals, seal_all, sealed_anew

MIGRATIONS = Migrations("dgxlab")
SQL = Path(__file__).parent / "sql"


def _add(name: str, append_only: Iterable[str] = (), settled: Mapping[str, Sequence[str]] | None = None) -> None:
    """Add a migration that runs its file in sql/ and makes tables append-only, except the columns in `settled`."""

    def migrate(db: Database) -> None:
        if (SQL / f"{name[:4]}.sql").exists():
            _run(db, name[:4])
        _make_append_only(db, append_only)
        for table, columns in (settled or {}).items():
            _make_append_only(db, (table,), columns)

    MIGRATIONS(name=name)(migrate)


HOST = "host_id TEXT NOT NULL REFERENCES hosts (host_id) ON DELETE RESTRICT,"

OF_DEVICES: Mapping[str, Mapping[str, str]] = {
    "arms": {
        "build_id TEXT NOT NULL,": "build_id TEXT NOT NULL,\n        "
        "device_id TEXT NOT NULL REFERENCES devices (device_id) ON DELETE RESTRICT,"
    },
    "jobs": {"host_id TEXT REFERENCES hosts (host_id) ON DELETE RESTRICT,": "host_id TEXT,"},
    "gates": {
        HOST: "overridden INTEGER NOT NULL CHECK (overridden IN (0, 1)),\n        cases TEXT,",
        "expected INTEGER,": "expected INTEGER,\n        expected_cases TEXT,",
    },
    "checks": {HOST: ""},
    "runs": {HOST: ""},
    "verdicts": {"host_id TEXT REFERENCES hosts (host_id) ON DELETE RESTRICT,": ""},
}
"""By table, what m008 changes in its text: a device is known by (job_id, arm), and a host by the jobs that it did.

gates.cases is the digest of what was printed and expected_cases of what was demanded, both NULL where it is not known;
overridden: the command line changed what the gate demands.
"""

_add("m001_jobs")
_add("m002_evidence")  # arms, inputs, cells, gates, expectations, runs, rows, samples
_add("m003_append_only", ("arms", "inputs", "gates", "runs", "rows", "samples"))
_add("m004_telemetry", ("telemetry", "flags"))
_add("m005_chains", ("chain_runs",))
_add(
    "m006_from_elsewhere",
    ("imported_rows", "imported"),
    {"published": ("line",), "published_gates": ("line",), "imports": ("name", "at", "content")},
)
_add("m007_checks", ("checks",))


@MIGRATIONS()
def m008_devices(db: Database) -> None:
    """Add devices, which results refer to in place of hosts, the lists of gates' cases, and seals of everything."""
    _run(db, "m008")
    devices = []
    sql = "SELECT job_id, arm, arms.cmake, jobs.facts FROM arms JOIN jobs USING (job_id)"
    for job_id, arm, cmake, facts in db.execute(sql).fetchall():
        device = device_row(Device.of(json.loads(facts), json.loads(cmake)))
        db.table("devices").insert(device, ignore=True)
        devices.append((device["device_id"], job_id, arm))
    for view in ("builds", "models"):
        db.execute(f"DROP VIEW {view}")
    for table, changes in OF_DEVICES.items():
        _rebuild(db, table, changes)
    for table in ("hosts", "expectations"):
        db.execute(f"DROP TABLE {table}")
    _run(db, "m008_views")
    db.conn.executemany("UPDATE arms SET device_id = ? WHERE (job_id, arm) = (?, ?)", devices)
    for action in ("update", "delete"):
        db.execute(f"DROP TRIGGER flags_no_{action}")
    _make_append_only(db, ("arms", "gates", "checks", "runs", "devices", "case_lists"))
    _make_append_only(db, ("flags",), settled=("reason",))  # a merge settles it
    seal_all(db.conn)


_add("m009_rejections", settled={"rejections": ("reason", "at")})


@MIGRATIONS()
def m010_own_noise(db: Database) -> None:
    """Add the interval of `same` and the chain's noise floor to verdicts, and update the seals of those jobs."""
    _run_changing(db, "m010", "verdicts", "job_id")


@MIGRATIONS()
def m011_small(db: Database) -> None:
    """Deflate long texts, store each name of telemetry once, and drop tables that repeat what imported files say."""
    with sealed_anew(db.conn):
        add_functions(db.conn)
        db.execute("DROP INDEX rows_cell")  # not used by any query
        for table in ("case_lists", "jobs", "rows", "runs"):
            _rebuild(db, table, {}, deflated=DEFLATED[table])
        _run(db, "m011")
        _make_append_only(db, ("case_lists", "rows", "runs", "run_numbers", "sensors"))
        _make_append_only(db, ("readings",), name="telemetry")


_add("m012_views")  # the joins of reports, also for readers with other programs


@MIGRATIONS()
def m013_contents(db: Database) -> None:
    """Add `inputs.contents`, what the headers of models say, and update the seals of jobs with models."""
    with sealed_anew(db.conn):
        _run(db, "m013")


_add("m014_notes", ("notes",))
_add("m015_tries", ("tries", "try_sessions", "try_ends"))
_add("m016_fleets", ("fleets",))
_add("m017_indexes")


@MIGRATIONS()
def m018_changes(db: Database) -> None:
    """Add `tries.change`, what a try changes in what it is compared with, and update the seals of tries."""
    _run_changing(db, "m018", "tries", "try_id")


def _run_changing(db: Database, name: str, table: str, key: str) -> None:
    """Run a script that changes a table, and update the seals of all its rows, which are by `key`."""
    seals = Seals(db.conn)
    seals.writing(table, (key,), db.execute(f"SELECT DISTINCT {key} FROM {table}").fetchall())
    _run(db, name)
    seals.close()


def _rebuild(db: Database, table: str, changes: Mapping[str, str], *, deflated: Collection[str] = ()) -> None:
    """Recreate a table from its changed SQL, with its rows, indexes and constraints.

    New NOT NULL columns get "" or 0. Triggers are dropped, and indexes on dropped columns.
    """
    (text,) = db.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
    text = text.replace('"', "")  # SQLite quotes the name of a renamed table
    for old, new in {f"TABLE {table} ": f"TABLE new_{table} ", **changes}.items():
        text = text.replace(old, new)
    for name in deflated:
        text = re.sub(rf"( {name}) TEXT NOT NULL CHECK .*?(,?)$", r"\1 BLOB NOT NULL\2", text, flags=re.MULTILINE)
    of_table = "SELECT sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL"
    indexes = [sql for (sql,) in db.execute(of_table, (table,)).fetchall()]
    before = {row[1] for row in db.execute(f"PRAGMA table_info({table})")}
    db.execute(text)
    columns = db.execute(f"SELECT name, type, \"notnull\" FROM pragma_table_info('new_{table}')").fetchall()
    fill = {name: "NULL" if not needed else "0" if kind == "INTEGER" else "''" for name, kind, needed in columns}
    values = [f"deflated({n})" if n in deflated else n if n in before else value for n, value in fill.items()]
    db.execute(f"INSERT INTO new_{table} ({','.join(fill)}) SELECT {','.join(values)} FROM {table} ORDER BY rowid")
    db.execute(f"DROP TABLE {table}")
    db.execute(f"ALTER TABLE new_{table} RENAME TO {table}")
    for sql in indexes:
        if before <= fill.keys() or "host_id" not in sql:
            db.execute(sql)


def _make_append_only(db: Database, tables: Iterable[str], settled: Sequence[str] = (), name: str = "") -> None:
    """Add triggers that refuse deletes and updates, except updates of columns that `schema.UPSERT` settles."""
    for table in tables:
        fixed = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[1] not in settled]
        for action in ("UPDATE", "DELETE"):
            sentence = f"{name or table} is append-only: a correction is a new row"
            of = f" OF {','.join(fixed)}" if settled and action == "UPDATE" else ""
            db.execute(
                f"CREATE TRIGGER {table}_no_{action.lower()} BEFORE {action}{of} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{sentence}'); END"
            )


def _run(db: Database, name: str) -> None:
    """Execute the statements of a file, which all end a line; SQLite's executescript would commit."""
    statement = ""
    for line in (SQL / f"{name}.sql").read_text().splitlines(keepends=True):
        if statement or not line.startswith("--"):
            statement += line
        if sqlite3.complete_statement(statement):
            db.execute(statement.strip().removesuffix(";"))
            statement = ""


def upgrade(connection: sqlite3.Connection, path: Path, *, stop_before: str | None = None) -> None:
    """Apply the missing migrations in one transaction, after a backup of `path`; `stop_before` names the first to omit.

    Raises SpecError if the result breaks a foreign key; the database is then as it was.
    """

    def version() -> int:
        return int(connection.execute("PRAGMA user_version").fetchone()[0])

    if older := 0 < version() < VERSION:
        backup(connection, path)
    connection.execute("PRAGMA foreign_keys = OFF")  # has no effect inside a transaction
    try:
        with transaction(connection, path):
            if version() < VERSION:  # else another process has migrated it
                db = Database(connection)
                MIGRATIONS.apply(db, stop_before=stop_before)
                if broken := connection.execute("PRAGMA foreign_key_check").fetchall():
                    first = f"the first in table {broken[0][0]}"
                    raise SpecError(f"migrating {path} breaks {len(broken)} foreign keys, {first}")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {len(MIGRATIONS.applied(db))}")
        if older:
            with contextlib.suppress(sqlite3.OperationalError):  # optional: needs space, and no other user
                connection.execute("VACUUM")
    finally:
        connection.execute("PRAGMA foreign_keys = ON")


def schema(number: int) -> dict[tuple[str, str], str]:
    """Return what `connect.schema_of` gives for a database of version `number`."""
    stop_before = MIGRATIONS._migrations[number].name if number < VERSION else None
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        upgrade(connection, Path(":memory:"), stop_before=stop_before)
        return schema_of(connection)
