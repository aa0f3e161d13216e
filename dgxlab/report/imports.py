"""Tables of imported files: a tool's output from elsewhere, never mixed with dgxlab's measurements."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dgxlab import stats, units
from dgxlab.errors import UsageError
from dgxlab.imported import rows_of
from dgxlab.report.ask import Query, has_words
from dgxlab.report.records import Column, Number, Provenance, Table, Value, columns, grouped
from dgxlab.tools.reading import Row as FileRow
from dgxlab.tools.reading import Values

if TYPE_CHECKING:
    from dgxlab.store import Store

SPREADS = {"avg_ts": "stddev_ts"}  # the metric with the spread of a metric; for other metrics it is `NAME error`
REPETITIONS = {"avg_ts": "samples_ns"}  # the metric with the single values of a metric, which some files have
MOST = 8  # max metrics shown as columns for a file with one row; more are shown as rows
COUNTS = ("cases", "runs", "kB")  # units of counts and settings: they are shown as plain numbers
FILES = "SELECT * FROM imports ORDER BY at, import_id"


def imports(store: Store, wanted: Query) -> tuple[Table, ...]:
    """Return a table for each file that the query names, or else one table that lists all files."""
    if not wanted.file:
        return (_every(store),)
    return tuple(_of_file(store, find_import(store, name), wanted.cells) for name in wanted.file)


def find_import(store: Store, name: str) -> Mapping[str, Any]:
    """Return the row of the imported file with this name or id prefix; blanks in the name may differ.

    Raises UsageError if there is none, or more than one.
    """
    known = store.rows(FILES)
    files = [row for row in known if row["name"].split() == name.split() or row["import_id"].startswith(name)]
    if len(files) == 1:
        return files[0]
    if files:
        ids = ", ".join(row["import_id"] for row in files)
        raise UsageError(f"{len(files)} imported files are {name!r}: {ids}", next="dgxlab report --form imported")
    some = [f"{row['name']!r} ({row['import_id']})" for row in known[:3]]
    more = f" and {len(known) - 3} more" if len(known) > 3 else ""
    others = f"; there are {', '.join(some)}{more}" if some else ""
    raise UsageError(f"{store.path} has no imported file {name!r}{others}", next="dgxlab report --form imported")


def _every(store: Store) -> Table:
    rows: list[dict[str, Value]] = [
        {
            "file": row["name"],
            "id": row["import_id"],
            "tool": f"{row['tool']} ({row['format']})",
            "rows": len(rows_of(store, row["import_id"])),
            "size": units.size(row["size"]),
            "imported": _day(row["at"]),
            "told": "; ".join(f"{name} {value}" for name, value in _told(row) if name != "settings"),
        }
        for row in store.rows(FILES)
    ]
    if not rows:
        raise UsageError(f"{store.path} has no imported file", next="dgxlab import --help")
    labels = {"id": "sha256 begins", "tool": "printed by", "told": "what it says of itself"}
    shown = columns("file id tool rows size imported told", "rows size", **labels)
    return Table("imported", "Imported files", shown, tuple(rows), Provenance("imported"), kind="imported")


def _of_file(store: Store, file: Mapping[str, Any], patterns: Sequence[str]) -> Table:
    known = rows_of(store, file["import_id"])
    for pattern in patterns:
        if not any(has_words(pattern, row.label, row.params) for row in known):
            raise UsageError(f"no row of {file['name']} has all of {pattern!r}", next="dgxlab report --form imported")
    shown = [
        row for row in known if not patterns or any(has_words(pattern, row.label, row.params) for pattern in patterns)
    ]
    rows: list[dict[str, Value]] = [{"row": row.label, **dict(_numbers(row))} for row in shown]
    reasons = ((reason, row.label) for row in shown for reason in {each.discarded for each in row.values})
    units_of = {each.metric: each.unit for row in known for each in _by_metric(row)}
    metrics = {name: unit for name, unit in units_of.items() if any(row.get(name) is not None for row in rows)}
    columns = [Column("row", "measured"), *(_column(name, unit) for name, unit in metrics.items())]
    if len(rows) == 1 and len(metrics) > MOST:
        rows = [{"row": name, "value": rows[0][name], "unit": unit.strip("1")} for name, unit in metrics.items()]
        columns = [Column("row", shown[0].label), Column("value", "value", numeric=True), Column("unit", "unit")]
    notes = [f"does not count: {', '.join(labels)}: {why}" for why, labels in grouped(reasons).items() if why]
    return Table(
        "imported",
        f"{file['name']}: {file['tool']}",
        tuple(columns),
        tuple(rows),
        Provenance("imported"),
        kind="imported",
        notes=(*json.loads(file["notes"]), *notes),
        file=file["name"],
        sha256=file["sha256"],
        tool=f"{file['tool']} ({file['format']}), imported {_day(file['at'])}",
        told=tuple(_told(file)),
    )


def _by_metric(row: FileRow) -> list[Values]:
    return sorted(row.values, key=lambda each: each.metric)


def _numbers(row: FileRow) -> Iterator[tuple[str, Value]]:
    counted = {each.metric: each for each in _by_metric(row) if not each.discarded}
    for name, each in counted.items():
        if name in (*SPREADS.values(), *REPETITIONS.values()) or name.endswith(" error"):
            continue
        values = [value + 0.0 for value in each.values]  # -0.0, which some tools print, becomes 0.0
        first = values[0]
        error = counted.get(SPREADS.get(name, f"{name} error"))
        if each.unit in COUNTS:
            yield name, int(first) if first.is_integer() else first
        elif error is None or len(values) > 1:
            spread = stats.mad(values) if len(values) > 1 else None
            yield name, Number(name, each.unit, len(values), spread, median=stats.median(values), of="values")
        else:
            repetitions = counted.get(REPETITIONS.get(name, ""))
            count = len(repetitions.values) if repetitions else None
            yield name, Number(name, each.unit, count, error.values[0], value=first)


def _column(name: str, unit: str) -> Column:
    if unit in COUNTS:
        # llama.cpp divides by 1024 and prints kB
        shown = f"{name} ({'KiB' if name == 'memory_kb' else unit})" if unit == "kB" else name
        return Column(name, shown, numeric=True)
    known = units.METRICS.get(name)
    return Column(name, known.label if known else name, name, unit="" if unit == "1" else unit)


def _told(file: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in json.loads(file["provenance"]).items():
        yield name, ", ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at))
