"""Migrate a database to the current schema, in order, in one transaction.

Imported only when there is something to migrate: importing sqlite_utils takes as long as the rest of a command.
A migration that was released is never edited; a later one changes what it made, and adds 1 to `schema.VERSION`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from sqlite_utils import Database, Migrations

from dgxlab.errors import SpecError
from dgxlab.store.connect import backup, schema_of, transaction
from dgxlab.store.schema import APPLICATION_ID, VERSION
from dgxlab.store.seals import seal_all, sealed_anew

MIGRATIONS = Migrations("dgxlab")
SQL = Path(__file__).parent / "sql"


APPEND_ONLY = (
    *("arms", "case_lists", "chain_runs", "checks", "devices", "flags", "gates", "imports", "inputs", "readings"),
    *("rejections", "rows", "run_numbers", "runs", "samples", "sensors"),
)
SETTLED = {"flags": ("reason",), "imports": ("name", "at", "content"), "rejections": ("reason", "at")}
"""By append-only table, the columns that a merge settles, as `schema.UPSERT` says."""


def _add(name: str, *append_only: str) -> None:
    """Add a migration that runs its file in sql/ and makes tables append-only."""

    def migrate(db: Database) -> None:
        _run(db, name[:4])
        _make_append_only(db, append_only)

    MIGRATIONS(name=name)(migrate)


@MIGRATIONS()
def m012_views(db: Database) -> None:
    """Make a database of version 12, the oldest that is migrated: those before it were before the first release."""
    _run(db, "m012")
    _make_append_only(db, APPEND_ONLY)
    seal_all(db.conn)


@MIGRATIONS()
def m013_contents(db: Database) -> None:
    """Add `inputs.contents`, what the headers of models say, and update the seals of jobs with models."""
    with sealed_anew(db.conn):
        _run(db, "m013")


_add("m014_notes", "notes")
_add("m015_tries", "tries", "try_sessions", "try_ends")
_add("m016_fleets", "fleets")
_add("m017_indexes")


def _make_append_only(db: Database, tables: Iterable[str]) -> None:
    """Add triggers that refuse deletes, and updates of all columns but those in SETTLED."""
    for table in tables:
        settled = SETTLED.get(table, ())
        fixed = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[1] not in settled]
        for action in ("UPDATE", "DELETE"):
            name = "telemetry" if table == "readings" else table
            of = f" OF {','.join(fixed)}" if settled and action == "UPDATE" else ""
            db.execute(
                f"CREATE TRIGGER {table}_no_{action.lower()} BEFORE {action}{of} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{name} is append-only: a correction is a new row'); END"
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
                last = max(_number(migration.name) for migration in MIGRATIONS.applied(db))
                connection.execute(f"PRAGMA user_version = {last}")
        if older:
            with contextlib.suppress(sqlite3.OperationalError):  # optional: needs space, and no other user
                connection.execute("VACUUM")
    finally:
        connection.execute("PRAGMA foreign_keys = ON")


def _number(name: str) -> int:
    return int(name[1:4])


def schema(number: int) -> dict[tuple[str, str], str]:
    """Return what `connect.schema_of` gives for a database of version `number`."""
    later = (migration.name for migration in MIGRATIONS._migrations if _number(migration.name) > number)
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        upgrade(connection, Path(":memory:"), stop_before=next(later, None))
        return schema_of(connection)
