"""Open results.db, write to it and copy it; errors are one sentence: too new, locked, full, damaged."""

from __future__ import annotations

import codecs
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
from dgxlab.errors import HostBusy, SpecError, access, command
from dgxlab.project import first_command, root
from dgxlab.store.schema import APPLICATION_ID, SCHEMA, VERSION, add_functions

BUSY_S = 10.0  # max wait of a writer for another writer
PATIENCE_S = 600.0  # max wait of a writer that can tell its user
OLDEST_SQLITE = (3, 37, 0)  # the first with STRICT tables
MOUNTS = Path("/proc/self/mounts")
# file systems with locks by another machine or process: neither SQLite's locks nor its WAL are safe there
NETWORK = frozenset({"nfs", "nfs4", "9p", "cifs", "smb3", "smbfs", "fuse.sshfs", "afs", "fuse.rclone", "fuse.davfs2"})
COPY = re.compile(r"\d{8}T\d{6}\.\d{6}Z-v\d+\.db")
KEEP = 7  # number of backup copies
ABANDONED_S = 3600.0  # age of an incomplete copy whose process was killed
INTERNAL = ("sqlite_", "_sqlite_migrations")  # name prefixes of tables made by SQLite and sqlite_utils
Tell = Callable[[str], None]  # takes a sentence on the reason for waiting

FILE_ERRORS = {
    sqlite3.SQLITE_FULL: "the disk that holds {} is full",
    sqlite3.SQLITE_READONLY: "{} cannot be written",
    sqlite3.SQLITE_CANTOPEN: "{} cannot be opened",
    sqlite3.SQLITE_PERM: "{} cannot be opened",
    sqlite3.SQLITE_IOERR: "the disk that holds {} does not read or write",
}


class Damaged(SpecError):
    """The file is not a database any more, or has damaged pages."""


class Locked(HostBusy):
    """Another program holds the database."""


def connect(path: Path, *, create: bool) -> sqlite3.Connection:
    """Open the database at `path` in autocommit mode, migrated to the current schema; `create` it if it is missing.

    Raises:
        SpecError: if it cannot be used, with the cause.
        Locked: if another program kept it locked for `BUSY_S` seconds.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise SpecError(f"this Python carries SQLite {sqlite3.sqlite_version}; results.db needs 3.37 or newer")
    if create:
        with access(path, "written", SpecError), contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    with named_errors(path):
        connection = open_existing(path)
        try:
            number = version(connection, path)
            if number == 0 and (not create or copies(path)):
                raise damaged(path, "it is empty")
            if not on_read_only(path):
                _use_wal(connection)
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA cache_size = -65536")  # KiB; with 2 MiB a report reads the same pages again
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA recursive_triggers = ON")  # else REPLACE deletes past the append-only triggers
            if number < VERSION:
                from dgxlab.store import migrations

                migrations.upgrade(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _use_wal(connection: sqlite3.Connection) -> None:
    deadline = time.monotonic() + BUSY_S
    while True:  # SQLite does not wait for others here
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def open_existing(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """Open an existing database as it is, without migrating it.

    With `immutable`, it is only read, without a write-ahead log: no file beside it is read or created. Raises SpecError
    if it does not exist, or is on a network file system.
    """
    if not path.exists():
        if path.absolute() == root() / "results.db":
            raise SpecError(f"there is no database {path}: the first run makes it", next=first_command())
        raise SpecError(f"there is no database {path}", next=command("ls", "-l", path.parent))
    if mount := on_network(path):
        unsafe = f"network file system ({mount}), where SQLite's locks cannot be trusted"
        raise SpecError(f"{path} is on a {unsafe}: move it to a local disk", next="df -hl")
    uri = f"{path.absolute().as_uri()}?mode={'ro&immutable=1' if immutable or on_read_only(path) else 'rw'}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_S)
    prepare(connection)
    return connection


def prepare(connection: sqlite3.Connection) -> None:
    """Give a connection our SQL functions; views and triggers of another program get plain SQL only."""
    add_functions(connection)
    if _json_is_safe():
        connection.execute("PRAGMA trusted_schema = OFF")


def on_network(path: Path) -> str | None:
    """Return `nfs4 at /home` if a path is on a network file system; None if it is not, or if MOUNTS cannot be read."""
    try:
        mounts, real = MOUNTS.read_text(errors="replace").splitlines(), str(path.resolve())
    except OSError:
        return None
    best = kind = ""
    for _, written, of, *_ in map(str.split, mounts):
        # the kernel writes a space in a mount point as three octal digits
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), written)
        under = point in ("/", real) or real.startswith(point + "/")
        if under and len(point) >= len(best):  # of two mounts on one point the later is on top
            best, kind = point, of
    return f"{kind} at {best}" if kind in NETWORK else None


@cache
def _json_is_safe() -> bool:
    """Return whether this SQLite lets a CHECK of an untrusted schema call json_valid; 3.40 does not."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        try:
            connection.execute("CREATE TABLE probe (text CHECK (json_valid(text)))")
        except sqlite3.OperationalError:
            return False
    return True


def on_read_only(path: Path) -> bool:
    """Return whether a file is on a read-only file system."""
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version, 0 for an empty file; SpecError if it is of another program or a newer dgxlab."""
    # one statement, one snapshot: another process may be creating the tables
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
        newer = f"{path} was written by a newer dgxlab (schema {number}, this one knows {VERSION})"
        raise SpecError(newer, next="install that newer dgxlab")
    return int(number)


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection, path: Path, tell: Tell | None = None) -> Iterator[None]:
    """Run a block as one transaction: if it raises, nothing is written.

    While another program locks the database, wait `BUSY_S` seconds; with `tell`, wait up to `PATIENCE_S` seconds, and
    call it with a sentence every `BUSY_S` seconds.

    Raises:
        Locked: if another program locks the database for longer.
        SpecError: if the disk is full, the file is damaged, or a trigger in it is not of dgxlab.
    """
    deadline = time.monotonic() + PATIENCE_S
    with named_errors(path):
        try:  # Ctrl-C during BEGIN is raised after it: what it began must end here, or later blocks would be part of it
            while not connection.in_transaction:
                try:
                    with named_errors(path):
                        # a deferred transaction that becomes a writer is refused at once, whatever the timeout
                        connection.execute("BEGIN IMMEDIATE")
                except Locked as locked:
                    if tell is None or time.monotonic() >= deadline:
                        raise
                    tell(locked.message)
            for problem in schema_problems(connection):
                if problem.startswith("trigger") and not problem.endswith("missing"):
                    look = command("dgxlab", "db", "check", path)
                    raise SpecError(f"{path} is not written: its {problem}", next=look)
            yield
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # on a full disk SQLite has already rolled back
                with contextlib.suppress(sqlite3.Error):  # raise the first error; the transaction is undone anyway
                    connection.execute("ROLLBACK")
            raise


def schema_problems(connection: sqlite3.Connection) -> list[str]:
    """Return a sentence for each table, index, view and trigger that differs from dgxlab's schema."""
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
    """Return the SQL of each table, index, view and trigger, by (kind, name), without quotes: SQLite adds some."""
    return {
        (kind, name): sql.replace('"', "")
        for kind, name, of, sql in connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema")
        if sql and (kind == "trigger" or not of.startswith(INTERNAL))
    }


def schema_digest(schema: dict[tuple[str, str], str]) -> str:
    """Return the digest of what `schema_of` gives; `schema.SCHEMA` is that of the current version."""
    return hashlib.sha256(repr(sorted(schema.items())).encode()).hexdigest()[:16]


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """In this block, turn SQLite's errors about the file or the disk into Locked, Damaged or SpecError.

    Errors in our own SQL are bugs and pass unchanged.
    """
    try:
        yield
    except UnicodeDecodeError as error:  # SQLite's message on a damaged schema quotes it
        raise damaged(path, f"its schema is no text: {error}") from error
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if isinstance(error, sqlite3.OperationalError) and not hasattr(error, "sqlite_errorcode"):
            code = sqlite3.SQLITE_CORRUPT  # Python itself: a text is no UTF-8
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise Locked(f"{path} is locked by another program", next=command("fuser", path)) from error
        if code == sqlite3.SQLITE_CORRUPT:
            raise damaged(path, str(error)) from error
        if code == sqlite3.SQLITE_NOTADB and _is_text(path):  # `db rebuild` would put a database in its place
            raise SpecError(f"{path} is not an SQLite database: it is text", next=command("head", path)) from error
        if code == sqlite3.SQLITE_NOTADB:
            raise damaged(path, str(error), "not an SQLite database") from error
        if code not in FILE_ERRORS:
            raise
        look = command("df", path.parent) if code == sqlite3.SQLITE_FULL else command("ls", "-l", path)
        raise SpecError(f"{FILE_ERRORS[code].format(path)}: {error}", next=look) from error


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(1000)
    try:  # the last character may be cut
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False


def damaged(path: Path, cause: str, what: str = "damaged") -> Damaged:
    """Return the error `PATH is WHAT: CAUSE`, with the command that rebuilds the database."""
    return Damaged(f"{path} is {what}: {cause}", next=command("dgxlab", "db", "rebuild", path))


def copies(path: Path) -> list[Path]:
    """Return the files that `backup` has written for a database, the oldest first."""
    files = path.with_name(f"{path.name}.backups").glob("*.db")
    return sorted(file for file in files if COPY.fullmatch(file.name))


def backup(connection: sqlite3.Connection, path: Path) -> Path:
    """Copy the database into PATH.backups/, check that the copy is sound, and delete all but the newest KEEP copies.

    Raises Damaged if the copy, and therefore the database, is damaged, and SpecError if the copy cannot be written.
    """
    folder = path.with_name(f"{path.name}.backups")
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    copy = folder / f"{stamp}-v{number}.db"
    part = folder / f"{copy.stem}-{os.getpid()}.part"  # until it is complete: an interrupted one is not a copy
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
