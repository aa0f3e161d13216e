"""Rows into a file that was not there: JSON lines, csv or SQLite, by its suffix, whole or not at all."""

from __future__ import annotations

import csv
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dgxlab.errors import UsageError, command
from dgxlab.exported.rows import TABLES, Exported


def write(path: Path, tools: Sequence[Exported]) -> None:
    """Write the rows of one tool, into SQLite of several.

    Raises:
        UsageError: if the file is there already, cannot be written, or its suffix says no format; or if several tools
            are to go into one that holds the rows of one.
    """
    encode = SUFFIXES.get(path.suffix)
    if not encode:
        names = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise UsageError(f"{path.name} says no format: name it {names}", next="dgxlab export --help")
    if path.exists():
        raise UsageError(f"{path} is there already, and nothing is written over", next=command("ls", "-l", path))
    if len(tools) > 1 and encode is not _sqlite:
        names = " and ".join(each.tool for each in tools)
        raise UsageError(
            f"one {path.suffix} file holds the rows of one tool, and there are {names}: name one with --tool",
            next=command("dgxlab", "export", path, "--tool", tools[0].tool),
        )
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".dgxlab-export-") as folder:
            made = Path(folder) / path.name
            encode(made, tools)
            os.link(made, path)  # unlike a rename it fails where another program made the file meanwhile
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", next=command("ls", "-ld", path.parent)) from error


def _jsonl(path: Path, tools: Sequence[Exported]) -> None:
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for each in tools for row in each.rows)
    path.write_text("".join(lines), encoding="utf-8")


def _csv(path: Path, tools: Sequence[Exported]) -> None:
    rows = [_flat(row) for each in tools for row in each.rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _columns(rows), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _sqlite(path: Path, tools: Sequence[Exported]) -> None:
    connection = sqlite3.connect(path)
    try:
        with connection:
            for each in tools:
                rows = [_flat(row) for row in each.rows]
                names = _columns(rows)
                typed = ", ".join(f'"{name}" {_affinity([row.get(name) for row in rows])}' for name in names)
                table = TABLES[each.tool].name
                connection.execute(f"CREATE TABLE {table} ({typed})")
                connection.executemany(
                    f"INSERT INTO {table} VALUES ({','.join('?' * len(names))})",  # noqa: S608 - a name of ours
                    [[row.get(name) for name in names] for row in rows],
                )
    finally:
        connection.close()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without its lists, which no column holds."""
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _affinity(values: Sequence[Any]) -> str:
    if any(isinstance(value, str) for value in values):
        return "TEXT"
    return "REAL" if any(isinstance(value, float) for value in values) else "INTEGER"


SUFFIXES: Mapping[str, Callable[[Path, Sequence[Exported]], None]] = {
    ".sqlite": _sqlite,
    ".jsonl": _jsonl,
    ".csv": _csv,
}
"""By what a file's name ends in."""
