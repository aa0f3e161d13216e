"""Imported files: what a tool printed elsewhere, never mixed with what dgxlab measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgxlab import stats, units
from dgxlab.errors import UsageError
from dgxlab.report.conditions import Row
from dgxlab.report.numbers import Printed, Quantity, Value
from dgxlab.report.query import Query
from dgxlab.report.records import Column, Provenance, Table

if TYPE_CHECKING:
    from dgxlab.store import Store

FILES = """SELECT import_id, sha256, size, tool, format, provenance, notes, name, at,
                  (SELECT count(*) FROM imported_rows AS r WHERE r.import_id = imports.import_id) AS row_count
           FROM imports ORDER BY at, import_id"""

ROWS = "SELECT position, label, params FROM imported_rows WHERE import_id = ? ORDER BY position"

VALUES = """SELECT position, metric, value, unit, discarded FROM imported WHERE import_id = ?
            ORDER BY position, metric, ordinal"""

SPREADS = {"avg_ts": "stddev_ts"}
"""Which metric is the spread of which, besides those named `X error`."""

REPETITIONS = {"avg_ts": "samples_ns"}
"""Which metric has the values behind which, where the file holds them."""

MOST = 8
"""Metrics that stand in columns where a file has one row; more stand in rows."""

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
    found = [row for row in known if row["name"].split() == name.split() or row["import_id"].startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        ids = ", ".join(row["import_id"] for row in found)
        raise UsageError(f"{len(found)} imported files are {name!r}: {ids}", next="dgxlab report --form imported")
    there = ", ".join(f"{row['name']!r} ({row['import_id']})" for row in known)
    said = f"; there are {there}" if there else ""
    raise UsageError(f"{store.path} has no imported file {name!r}{said}", next="dgxlab report --form imported")


def _every(store: Store) -> ImportedTable:
    found = store.rows(FILES)
    if not found:
        raise UsageError(f"{store.path} has no imported file", next="dgxlab import --help")
    rows: list[dict[str, Value]] = [
        {
            "file": row["name"],
            "id": row["import_id"],
            "tool": f"{row['tool']} ({row['format']})",
            "rows": row["row_count"],
            "size": units.size(row["size"]),
            "imported": _day(row["at"]),
            "told": "; ".join(f"{name} {said}" for name, said in _told(row) if name != "settings"),
        }
        for row in found
    ]
    columns = [
        Column("file", "file"),
        Column("id", "sha256 begins"),
        Column("tool", "printed by"),
        Column("rows", "rows", numeric=True),
        Column("size", "size", numeric=True),
        Column("imported", "imported"),
        Column("told", "what it says of itself"),
    ]
    return ImportedTable("imported", "Imported files", tuple(columns), tuple(rows), NOWHERE)


NOWHERE = Provenance("imported", (), "", (), "", None, "")


def _of_file(store: Store, file: Row, patterns: Sequence[str]) -> ImportedTable:
    known = store.rows(ROWS, (file["import_id"],))
    for pattern in patterns:
        if not any(_fits(pattern, row) for row in known):
            raise UsageError(f"no row of {file['name']} has all of {pattern!r}", next="dgxlab report --form imported")
    shown = [row for row in known if not patterns or any(_fits(pattern, row) for pattern in patterns)]
    values: dict[int, dict[str, list[Row]]] = {}
    for value in store.rows(VALUES, (file["import_id"],)):
        values.setdefault(value["position"], {}).setdefault(value["metric"], []).append(value)
    rows: list[dict[str, Value]] = []
    discarded: dict[str, list[str]] = {}
    for row in shown:
        of_row = values[row["position"]]
        rows.append({"row": row["label"], **dict(_numbers(of_row))})
        for reason in {one["discarded"] for each in of_row.values() for one in each if one["discarded"]}:
            discarded.setdefault(reason, []).append(row["label"])
    units_of = {metric: each[0]["unit"] for of_row in values.values() for metric, each in of_row.items()}
    metrics = {name: unit for name, unit in units_of.items() if any(row.get(name) is not None for row in rows)}
    columns = [Column("row", "measured"), *(_column(name, unit) for name, unit in metrics.items())]
    if len(rows) == 1 and len(metrics) > MOST:
        rows = [{"row": name, "value": rows[0][name], "unit": unit.strip("1")} for name, unit in metrics.items()]
        columns = [
            Column("row", str(shown[0]["label"])),
            Column("value", "value", numeric=True),
            Column("unit", "unit"),
        ]
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


def _numbers(values: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, Value]]:
    """Yield the numbers of a row that count, each with the spread and the repetitions that the file has of it."""
    counted = {name: [one["value"] for one in each] for name, each in values.items() if not each[0]["discarded"]}
    for name, told in counted.items():
        if name in (*SPREADS.values(), *REPETITIONS.values()) or name.endswith(" error"):
            continue
        unit = values[name][0]["unit"]
        spread = counted.get(SPREADS.get(name, f"{name} error"))
        if unit in COUNTS:
            yield name, int(told[0]) if told[0].is_integer() else told[0]
        elif len(told) > 1:
            yield name, Quantity(name, unit, stats.median(told), len(told), stats.mad(told), "values")
        elif spread is None:
            yield name, Quantity(name, unit, told[0], 1, None, "values")
        else:
            repetitions = counted.get(REPETITIONS.get(name, ""))
            yield name, Printed(name, unit, told[0], spread[0], len(repetitions) if repetitions else None)


def _column(name: str, unit: str) -> Column:
    if unit in COUNTS:
        # test-backend-ops divides by 1024 and prints kB
        shown = f"{name} ({'KiB' if name == 'memory_kb' else unit})" if unit == "kB" else name
        return Column(name, shown, numeric=True)
    known = units.METRICS.get(name)
    return Column(name, known.label if known else name, name, unit="" if unit == "1" else unit)


def _fits(pattern: str, row: Row) -> bool:
    params = json.loads(row["params"])
    known = {*row["label"].split(), *map(str, params.values()), *(f"{name}={said}" for name, said in params.items())}
    return known.issuperset(pattern.split())


def _told(file: Row) -> Iterator[tuple[str, str]]:
    """Yield what a file says that holds for all of its rows."""
    told: Mapping[str, Any] = json.loads(file["provenance"])
    for name, said in told.items():
        settings = isinstance(said, dict)
        yield name, ", ".join(f"{key} {value}" for key, value in said.items()) if settings else str(said)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))
