"""Open results.db, or say in one sentence why not: not ours, too new, on a network disk, locked, full, damaged."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from dgxlab.errors import DgxlabError, HostBusy, SpecError, command
from dgxlab.store.mounts import on_network
from dgxlab.store.schema import APPLICATION_ID, VERSION

BUSY_S = 10.0
"""How long a writer waits for another one."""

OLDEST_SQLITE = (3, 37, 0)
"""The first with STRICT tables."""


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """Return a connection to the database at `path`, at the current schema, in autocommit mode.

    Raises:
        SpecError: if it cannot be used, with the cause.
        HostBusy: if others kept it locked for `BUSY_S` seconds.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise SpecError(f"this Python carries SQLite {sqlite3.sqlite_version}; results.db needs 3.37 or newer")
    if create:
        _make(path)
    with named_errors(path):
        connection = plain(path)
        try:
            found = version(connection, path)
            _tune(connection)
            if found < VERSION:
                from dgxlab.store import migrations

                migrations.upgrade(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def plain(path: Path) -> sqlite3.Connection:
    """Open an existing file for SQLite as it is, without looking whether it is ours.

    Raises:
        SpecError: if it is not there, or lies on a network file system.
    """
    if not path.exists():
        raise SpecError(f"there is no database {path}: the first run makes it", next="dgxlab doctor")
    if mount := on_network(path):
        raise SpecError(
            f"{path} lies on a network file system ({mount}), where SQLite's locks cannot be trusted: move it to a "
            "local disk",
            next="df -hl",
        )
    uri = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)


def version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version of a database, 0 for an empty file.

    Raises:
        SpecError: if it is not a dgxlab database, or of a newer dgxlab.
    """
    # one statement, one snapshot: another process may be making the tables at this very moment
    application, number, tables = connection.execute(
        "SELECT application_id, user_version, (SELECT count(*) FROM sqlite_schema)"
        " FROM pragma_application_id, pragma_user_version"
    ).fetchone()
    if (application, number, tables) == (0, 0, 0):
        return 0
    if application != APPLICATION_ID:
        raise SpecError(f"{path} is an SQLite database, but not one of dgxlab", next="dgxlab doctor")
    if number > VERSION:
        raise SpecError(
            f"{path} was written by a newer dgxlab (schema {number}, this one knows {VERSION})",
            next="install that newer dgxlab",
        )
    return int(number)


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite says of the file or the disk into our errors; what it says of our SQL is a bug and passes.

    Raises:
        HostBusy: if the database stayed locked.
        SpecError: if the disk is full, or the file is damaged or cannot be written.
    """
    try:
        yield
    except sqlite3.Error as error:
        known = _explain(error, path)
        if known is None:
            raise
        raise known from error


def _explain(error: sqlite3.Error, path: Path) -> DgxlabError | None:
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return HostBusy(f"{path} was locked by another program for {BUSY_S:.0f} s", next=command("fuser", path))
    copies = path.parent / f"{path.name}.backups"
    sentence = {
        sqlite3.SQLITE_FULL: f"the disk that holds {path} is full",
        sqlite3.SQLITE_READONLY: f"{path} cannot be written",
        sqlite3.SQLITE_CANTOPEN: f"{path} cannot be opened",
        sqlite3.SQLITE_PERM: f"{path} cannot be opened",
        sqlite3.SQLITE_IOERR: f"the disk that holds {path} does not read or write",
        sqlite3.SQLITE_NOTADB: f"{path} is not an SQLite database",
        sqlite3.SQLITE_CORRUPT: f"{path} is damaged" + f", copies are in {copies.name}" * copies.is_dir(),
    }.get(code)
    nexts = {
        sqlite3.SQLITE_FULL: command("df", path.parent),
        sqlite3.SQLITE_NOTADB: "dgxlab doctor",
        sqlite3.SQLITE_CORRUPT: command("dgxlab", "db", "check", path),
    }
    return SpecError(f"{sentence}: {error}", next=nexts.get(code, command("ls", "-l", path))) if sentence else None


def _make(path: Path) -> None:
    """Make an empty file that only its owner can read; one that is there stays as it is."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise SpecError(
            f"cannot make the database {path}: {error.strerror}", next=command("ls", "-ld", path.parent)
        ) from error


def _tune(connection: sqlite3.Connection) -> None:
    _use_wal(connection)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA cache_size = -65536")  # KiB; with the usual 2 MiB a report reads the same pages again
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA recursive_triggers = ON")  # else REPLACE deletes past the append-only triggers


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging, which the file remembers; SQLite does not wait for others here, so we do."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
