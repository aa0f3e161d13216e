"""Imported files: what a tool printed elsewhere, never mixed with what dgxlab measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgxlab import stats, units
from dgxlab.errors import UsageError
from dgxlab.imported import rows_of
from dgxlab.report.ask import Query
from dgxlab.report.evidence import Row
from dgxlab.report.records import Column, Number, Provenance, Table, Value
from dgxlab.tools.reading import Row as FileRow
from dgxlab.tools.reading import Values

if TYPE_CHECKING:
    from dgxlab.store import Store

FILES = """SELECT import_id, sha256, size, tool, format, provenance, notes, name, at FROM imports
           ORDER BY at, import_id"""

SPREADS = {"avg_ts": "stddev_ts"}
"""Which metric is the spread of which, besides those named `X error`."""

REPETITIONS = {"avg_ts": "samples_ns"}
"""Which metric has the values behind which, where the file holds them."""

MOST = 8
"""Metrics that have columns where a file has one row; more have rows."""

COUNTS = ("cases", "runs", "kB")
"""Units of what is counted or given, not measured."""


@dataclass(frozen=True)
class ImportedTable(Table):
    """A table of what one file says, or of all files.

    Attributes:
        provenance: Says that it was imported; what the file itself says of that is in `told`.
        file: What it was called.
        sha256: Of the file; "" for the table of all.
        tool: Who printed it, and in which format.
        told: What the file says that holds for all of its rows, by name.
        notes: What is there and is no value, and what does not count, in sentences.
    """

    file: str = ""
    sha256: str = ""
    tool: str = ""
    told: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def imports(store: Store, wanted: Query) -> tuple[ImportedTable, ...]:
    """Return a table for each file that is asked for, or one of all files.

    Raises:
        UsageError: if there is none, or not the one that is asked for.
    """
    if not wanted.file:
        return (_every(store),)
    return tuple(_of_file(store, find_import(store, name), wanted.cells) for name in wanted.file)


def find_import(store: Store, name: str) -> Row:
    """Return the imported file of a name, whose blanks are alike in `Query`, or of an id that begins so.

    Raises:
        UsageError: if there is none, or more than one.
    """
    known = store.rows(FILES)
    files = [row for row in known if row["name"].split() == name.split() or row["import_id"].startswith(name)]
    if len(files) == 1:
        return files[0]
    if files:
        ids = ", ".join(row["import_id"] for row in files)
        raise UsageError(f"{len(files)} imported files are {name!r}: {ids}", next="dgxlab report --form imported")
    names = ", ".join(f"{row['name']!r} ({row['import_id']})" for row in known)
    others = f"; there are {names}" if names else ""
    raise UsageError(f"{store.path} has no imported file {name!r}{others}", next="dgxlab report --form imported")


def _every(store: Store) -> ImportedTable:
    files = store.rows(FILES)
    if not files:
        raise UsageError(f"{store.path} has no imported file", next="dgxlab import --help")
    rows: list[dict[str, Value]] = [
        {
            "file": row["name"],
            "id": row["import_id"],
            "tool": f"{row['tool']} ({row['format']})",
            "rows": len(rows_of(store, row["import_id"])),
            "size": units.size(row["size"]),
            "imported": _day(row["at"]),
            "told": "; ".join(f"{name} {said}" for name, said in _told(row) if name != "settings"),
        }
        for row in files
    ]
    columns = [
        Column(key, label, numeric=key in ("rows", "size"))
        for key, label in {
            "file": "file",
            "id": "sha256 begins",
            "tool": "printed by",
            "rows": "rows",
            "size": "size",
            "imported": "imported",
            "told": "what it says of itself",
        }.items()
    ]
    return ImportedTable("imported", "Imported files", tuple(columns), tuple(rows), NOWHERE)


NOWHERE = Provenance("imported", (), "", (), "", None, "")


def _of_file(store: Store, file: Row, patterns: Sequence[str]) -> ImportedTable:
    known = rows_of(store, file["import_id"])
    for pattern in patterns:
        if not any(_fits(pattern, row) for row in known):
            raise UsageError(f"no row of {file['name']} has all of {pattern!r}", next="dgxlab report --form imported")
    shown = [row for row in known if not patterns or any(_fits(pattern, row) for pattern in patterns)]
    rows: list[dict[str, Value]] = []
    discarded: dict[str, list[str]] = {}
    for row in shown:
        rows.append({"row": row.label, **dict(_numbers(row))})
        for reason in {each.discarded for each in row.values if each.discarded}:
            discarded.setdefault(reason, []).append(row.label)
    units_of = {each.metric: each.unit for row in known for each in _by_metric(row)}
    metrics = {name: unit for name, unit in units_of.items() if any(row.get(name) is not None for row in rows)}
    columns = [Column("row", "measured"), *(_column(name, unit) for name, unit in metrics.items())]
    if len(rows) == 1 and len(metrics) > MOST:
        rows = [{"row": name, "value": rows[0][name], "unit": unit.strip("1")} for name, unit in metrics.items()]
        columns = [Column("row", shown[0].label), Column("value", "value", numeric=True), Column("unit", "unit")]
    notes = [f"does not count: {', '.join(labels)}: {reason}" for reason, labels in discarded.items()]
    return ImportedTable(
        "imported",
        f"{file['name']}: {file['tool']}",
        tuple(columns),
        tuple(rows),
        NOWHERE,
        file=file["name"],
        sha256=file["sha256"],
        tool=f"{file['tool']} ({file['format']}), imported {_day(file['at'])}",
        told=tuple(_told(file)),
        notes=(*json.loads(file["notes"]), *notes),
    )


def _by_metric(row: FileRow) -> list[Values]:
    return sorted(row.values, key=lambda each: each.metric)


def _numbers(row: FileRow) -> Iterator[tuple[str, Value]]:
    """Yield the numbers of a row that count, each with the spread and the repetitions that the file has of it."""
    counted = {each.metric: each for each in _by_metric(row) if not each.discarded}
    for name, each in counted.items():
        if name in (*SPREADS.values(), *REPETITIONS.values()) or name.endswith(" error"):
            continue
        values = [value + 0.0 for value in each.values]  # -0.0, which llama-perplexity prints, becomes 0.0
        first = values[0]
        error = counted.get(SPREADS.get(name, f"{name} error"))
        if each.unit in COUNTS:
            yield name, int(first) if first.is_integer() else first
        elif len(values) > 1:
            yield (
                name,
                Number(name, each.unit, len(values), stats.mad(values), median=stats.median(values), of="values"),
            )
        elif error is None:
            yield name, Number(name, each.unit, 1, median=first, of="values")
        else:
            repetitions = counted.get(REPETITIONS.get(name, ""))
            count = len(repetitions.values) if repetitions else None
            yield name, Number(name, each.unit, count, error.values[0], value=first)


def _column(name: str, unit: str) -> Column:
    if unit in COUNTS:
        # test-backend-ops divides by 1024 and prints kB
        shown = f"{name} ({'KiB' if name == 'memory_kb' else unit})" if unit == "kB" else name
        return Column(name, shown, numeric=True)
    known = units.METRICS.get(name)
    return Column(name, known.label if known else name, name, unit="" if unit == "1" else unit)


def _fits(pattern: str, row: FileRow) -> bool:
    params = row.params
    known = {*row.label.split(), *map(str, params.values()), *(f"{name}={value}" for name, value in params.items())}
    return known.issuperset(pattern.split())


def _told(file: Row) -> Iterator[tuple[str, str]]:
    """Yield what a file says that holds for all of its rows."""
    told: Mapping[str, Any] = json.loads(file["provenance"])
    for name, value in told.items():
        yield name, ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))
