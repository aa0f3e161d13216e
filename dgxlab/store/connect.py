"""Open results.db, or say in one sentence why not: not ours, too new, on a network disk, locked, full, damaged.

A write begins here too: all of it or nothing, and never past a trigger that another program left.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from dgxlab.agent.boot import settle
from dgxlab.errors import HostBusy, SpecError, command
from dgxlab.store.schema import APPLICATION_ID, SCHEMA, VERSION, add_functions

BUSY_S = 10.0
"""How long a writer waits for another one."""

PATIENCE_S = 600.0
"""How long it waits where it can say so."""

Tell = Callable[[str], None]
"""Is told in a sentence what is waited for."""

OLDEST_SQLITE = (3, 37, 0)
"""The first with STRICT tables."""

NETWORK = frozenset({"nfs", "nfs4", "9p", "cifs", "smb3", "smbfs", "fuse.sshfs", "afs", "fuse.rclone", "fuse.davfs2"})
"""Types in mountinfo where another machine, or a process in between, answers for the locks: neither SQLite's locks nor
its WAL can be trusted there."""

MOUNTINFO = Path("/proc/self/mountinfo")

COPY = re.compile(r"\d{8}T\d{6}\.\d{6}Z-v\d+\.db")
"""What a copy of the database is called."""

KEEP = 7
FRESH_S = 86400.0
"""A copy that is younger than a day is recent enough."""
ABANDONED_S = 3600.0
"""A copy that is not whole after an hour was killed."""

FILE_ERRORS = {
    sqlite3.SQLITE_FULL: "the disk that holds {} is full",
    sqlite3.SQLITE_READONLY: "{} cannot be written",
    sqlite3.SQLITE_CANTOPEN: "{} cannot be opened",
    sqlite3.SQLITE_PERM: "{} cannot be opened",
    sqlite3.SQLITE_IOERR: "the disk that holds {} does not read or write",
}
"""By code of SQLite, what it means for a file."""

INTERNAL = ("sqlite_", "_sqlite_migrations")
"""Beginnings of names of tables that SQLite and sqlite_utils make for themselves."""


class Damaged(SpecError):
    """The file is no database any more, or pages of it are damaged."""


class Locked(HostBusy):
    """Another program holds the database."""


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """Return a connection to the database at `path`, at the current schema, in autocommit mode.

    On a read-only file system it can only be read, and its log is not looked for.

    Raises:
        SpecError: if it cannot be used, with the cause.
        Locked: if others kept it locked for `BUSY_S` seconds.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise SpecError(f"this Python carries SQLite {sqlite3.sqlite_version}; results.db needs 3.37 or newer")
    if create:
        _make(path)
    with named_errors(path):
        connection = plain(path)
        try:
            number = version(connection, path)
            if number == 0 and (not create or copies(path)):
                raise damaged(path, "it is empty")
            _tune(connection, wal=not on_read_only(path))
            if number < VERSION:
                from dgxlab.store import migrations

                migrations.upgrade(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def plain(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """Open an existing file for SQLite as it is, without looking whether it is ours.

    Args:
        immutable: Read the file alone, and make nothing beside it.

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
    # immutable: SQLite asks for no lock and no log, which cannot be made there
    mode = "ro&immutable=1" if immutable or on_read_only(path) else "rw"
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)
    add_functions(connection)
    if _json_is_safe():
        connection.execute("PRAGMA trusted_schema = OFF")  # views and triggers of another program get plain SQL only
    return connection


def on_network(path: Path) -> str | None:
    """Return `type at mount point` when a path lies on a network file system; None where there is no mountinfo."""
    try:
        mounts, real = MOUNTINFO.read_text(errors="replace").splitlines(), str(path.resolve())
    except OSError:
        return None
    best = kind = ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if not right or len(fields) < 5:
            continue
        # the kernel writes a space in a mount point as three octal digits
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        under = point in ("/", real) or real.startswith(point + "/")
        if under and len(point) >= len(best):  # of two mounts on one point the later is on top
            best, kind = point, right.split(" ")[0]
    return f"{kind} at {best}" if kind in NETWORK else None


@cache
def _json_is_safe() -> bool:
    """Tell whether this SQLite lets a CHECK call json_valid where the schema is not trusted; 3.40 does not."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        try:
            connection.execute("CREATE TABLE probe (text CHECK (json_valid(text)))")
        except sqlite3.OperationalError:
            return False
    return True


def on_read_only(path: Path) -> bool:
    """Tell whether a file lies on a read-only file system."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


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
    if number < 1:
        raise damaged(path, f"its schema has the version {number}")
    if number > VERSION:
        raise SpecError(
            f"{path} was written by a newer dgxlab (schema {number}, this one knows {VERSION})",
            next="install that newer dgxlab",
        )
    return int(number)


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path, tell: Tell | None = None) -> Iterator[None]:
    """Write all of a block or nothing of it.

    Args:
        tell: Is told, every `BUSY_S` seconds, that another program holds the database; then this waits for
            `PATIENCE_S` seconds, and without it for `BUSY_S`.

    Raises:
        Locked: if another program holds the database for longer.
        SpecError: if the disk is full, the file is damaged, or a trigger in it is none of dgxlab: it would change what
            is written, or what was.
    """
    with named_errors(path):
        _begin(connection, path, tell)
        try:
            for problem in schema_problems(connection):
                if problem.startswith("trigger") and not problem.endswith("missing"):
                    look = command("dgxlab", "db", "check", path)
                    raise SpecError(f"{path} is not written: its {problem}", next=look)
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # where a disk is full SQLite has rolled back by itself
                with contextlib.suppress(sqlite3.Error):  # the first error is the one to tell; it is undone anyway
                    connection.execute("ROLLBACK")
            raise


def _begin(connection: sqlite3.Connection, path: Path, tell: Tell | None) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with named_errors(path):
                # a deferred transaction that turns into a writer is refused at once, whatever the timeout
                connection.execute("BEGIN IMMEDIATE")
            return
        except Locked as locked:
            if tell is None or time.monotonic() >= deadline:
                raise
            tell(locked.message)


def schema_problems(connection: sqlite3.Connection) -> list[str]:
    """Return a sentence for each table, index, view and trigger that is not what dgxlab makes."""
    actual = schema_of(connection)
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    if not actual or (number == VERSION and schema_digest(actual) == SCHEMA):
        return []
    from dgxlab.store import migrations

    expected = migrations.schema(number)
    return [
        f"{kind} {name} is {'missing' if key not in actual else 'changed' if key in expected else 'none of dgxlab'}"
        for key in sorted(expected.keys() | actual.keys())
        if expected.get(key) != actual.get(key)
        for kind, name in [key]
    ]


def schema_of(connection: sqlite3.Connection) -> dict[tuple[str, str], str]:
    """Return the SQL of whatever the database has, by kind and name; versions of SQLite quote names differently."""
    return {
        (kind, name): sql.replace('"', "")
        for kind, name, of, sql in connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema")
        if sql and (kind == "trigger" or not of.startswith(INTERNAL))
    }


def schema_digest(schema: dict[tuple[str, str], str]) -> str:
    """Return the digest of a schema, for `schema.SCHEMA`."""
    return hashlib.sha256(repr(sorted(schema.items())).encode()).hexdigest()[:16]


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Turn what SQLite says of the file or the disk into our errors; what it says of our SQL is a bug and passes.

    Raises:
        Locked: if the database stayed locked.
        Damaged: if the file is damaged.
        SpecError: if the disk is full, or the file cannot be written.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # what SQLite says of a damaged schema quotes it
        raise damaged(path, f"its schema is no text: {error}") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if isinstance(error, sqlite3.OperationalError) and not hasattr(error, "sqlite_errorcode"):
            code = sqlite3.SQLITE_CORRUPT  # Python itself: a text is no UTF-8
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Locked(f"{path} is locked by another program", next=command("fuser", path)) from error
        if code == sqlite3.SQLITE_CORRUPT:
            raise damaged(path, str(error)) from error
        if code == sqlite3.SQLITE_NOTADB:
            raise damaged(path, str(error), "not an SQLite database") from error
        if code not in FILE_ERRORS:
            raise
        look = command("df", path.parent) if code == sqlite3.SQLITE_FULL else command("ls", "-l", path)
        raise SpecError(f"{FILE_ERRORS[code].format(path)}: {error}", next=look) from error


def copies(path: Path) -> list[Path]:
    """Return the copies of a database that `backups` keeps beside it, the oldest first."""
    files = path.with_name(f"{path.name}.backups").glob("*.db")
    return sorted(file for file in files if COPY.fullmatch(file.name))


def damaged(path: Path, cause: str, what: str = "damaged") -> Damaged:
    """Return the error of a damaged file, with the command that makes it again."""
    return Damaged(f"{path} is {what}: {cause}", next=command("dgxlab", "db", "rebuild", path))


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


def _tune(connection: sqlite3.Connection, *, wal: bool) -> None:
    deadline = time.monotonic() + BUSY_S
    while wal:  # the file remembers it; SQLite does not wait for others here, so we do
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            break
        except sqlite3.OperationalError as error:
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(0.01)
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA cache_size = -65536")  # KiB; with the usual 2 MiB a report reads the same pages again
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA recursive_triggers = ON")  # else REPLACE deletes past the append-only triggers


def is_fresh(path: Path) -> bool:
    """Tell whether the newest copy of a database is younger than a day."""
    return any(time.time() - copy.stat().st_mtime < FRESH_S for copy in copies(path)[-1:])


def backup(connection: sqlite3.Connection, path: Path) -> Path:
    """Copy the database, check that the copy is sound, and keep the newest seven.

    A copy has its name once it is whole: one that was killed halfway would be taken for what there was.

    Raises:
        Damaged: if the copy is damaged, as the database then is.
        SpecError: if the copy cannot be written.
        sqlite3.Error: see `connect.named_errors`.
    """
    folder = path.with_name(f"{path.name}.backups")
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    copy = folder / f"{stamp}-v{number}.db"
    part = folder / f"{copy.stem}-{os.getpid()}.part"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        part.touch(mode=0o600)  # VACUUM INTO takes an empty file as it is, and with it the mode
        connection.execute("VACUUM INTO ?", (str(part),))
        with contextlib.closing(sqlite3.connect(part)) as reader:
            verdict = reader.execute("PRAGMA integrity_check").fetchone()[0]
        if verdict != "ok":
            raise damaged(path, f"so is a copy of it: {verdict}")
        settle(part, copy)
    except OSError as error:
        raise SpecError(f"{path} cannot be copied to {folder}: {error}", next=command("df", path.parent)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    parts = [file for file in folder.glob("*.part*") if time.time() - file.stat().st_mtime > ABANDONED_S]
    for old in (*copies(path)[:-KEEP], *parts):
        old.unlink(missing_ok=True)
    return copy
