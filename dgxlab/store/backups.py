"""Copies of the database in <name>.backups/ beside it: before a migration, once a day before a job, the newest kept."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from datetime import UTC, datetime
from pathlib import Path

from dgxlab.agent.boot import settle
from dgxlab.errors import SpecError, command
from dgxlab.store.connect import copies, damaged

KEEP = 7
FRESH_S = 86400.0
"""A copy that is younger than a day is recent enough."""
ABANDONED_S = 3600.0
"""A copy that is not whole after an hour was killed."""


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
    _prune(folder, copies(path))
    return copy


def _prune(folder: Path, whole: list[Path]) -> None:
    parts = [file for file in folder.glob("*.part*") if time.time() - file.stat().st_mtime > ABANDONED_S]
    for old in (*whole[:-KEEP], *parts):
        old.unlink(missing_ok=True)
