"""A database as lines of text, so that git can show what a commit added to the record."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgxlab.store.connect import named_errors, plain, version

LONG = 120
"""Characters of a value above which only its beginning is shown, with a digest of all of it."""


def text(path: Path) -> Iterator[str]:
    """Yield a line for each row of each table, in an order that adding rows does not change; the file is only read.

    Raises:
        SpecError: if it is no database of ours, or damaged.
    """
    # what git hands over has no log beside it, and none may be made
    with named_errors(path), contextlib.closing(plain(path, immutable=True)) as connection:
        yield f"schema {version(connection, path)}"
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name").fetchall()
        for (table,) in tables:
            yield from _rows(connection, table)


def _rows(connection: sqlite3.Connection, table: str) -> Iterator[str]:
    cursor = connection.execute(f'SELECT * FROM "{table}"')  # noqa: S608 - a name from the file itself, quoted
    names = [column[0] for column in cursor.description]
    yield from sorted(f"{table} {_line(dict(zip(names, row, strict=True)))}" for row in cursor)


def _line(row: dict[str, Any]) -> str:
    return json.dumps({name: _short(value) for name, value in row.items() if value is not None}, ensure_ascii=False)


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        return f"{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()[:16]}"
    if isinstance(value, str) and len(value) > LONG:
        return f"{value[:40]}... ({len(value)} characters, sha256 {hashlib.sha256(value.encode()).hexdigest()[:16]})"
    return value
