"""The files of the record: read exactly, or refused with the line and the reason."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dgxlab.errors import SpecError
from dgxlab.published.figure import Figure, GateResult, Published
from dgxlab.store import figure_digest

COLUMNS = (
    *("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test"),
    *("metric", "value", "unit", "stddev", "notes"),
)
"""The first line of both files."""

REQUIRED = ("source_doc", "host", "engine", "tool", "test", "metric", "value")
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?", re.ASCII)

Read = TypeVar("Read", bound=Published)


class _Wrong(Exception):
    """Why a line cannot be read."""


def read_figures(content: bytes, name: str) -> list[Figure]:
    """Read a file of numbers.

    Args:
        content: CSV, UTF-8.
        name: Of the file, for the refusal.

    Raises:
        SpecError: with the line and the reason.
    """
    return _read(content, name, _figure)


def read_gates(content: bytes, name: str) -> list[GateResult]:
    """Read a file of gates.

    Args:
        content: CSV, UTF-8.
        name: Of the file, for the refusal.

    Raises:
        SpecError: with the line and the reason.
    """
    return _read(content, name, _gate)


def _read(content: bytes, name: str, make: Callable[[Mapping[str, str], int], Read]) -> list[Read]:
    made: dict[str, Read] = {}
    reader = csv.reader(io.StringIO(_text(content, name), newline=""), strict=True)
    line = 1  # on which the row begins that is being read
    try:
        for cells in reader:
            if line == 1:
                _look_at_header(cells)
            else:
                one = make(_row(cells), line)
                if (known := made.setdefault(one.figure, one)) is not one:
                    raise _Wrong(f"it says what line {known.line} says")
            line = reader.line_num + 1
    except (_Wrong, csv.Error) as error:
        raise SpecError(f"{name}, line {line}: {error}") from None
    return list(made.values())


def _text(content: bytes, name: str) -> str:
    if not content:
        raise SpecError(f"{name} is empty")
    wrong = re.search(rb"\r(?!\n)|(?<!\n)\Z", content)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"{name}, line {_line(content, error.start)}: it is not UTF-8") from None
    if wrong is not None:
        reason = "a carriage return stands alone" if wrong[0] else "the file ends before the line does"
        raise SpecError(f"{name}, line {_line(content, wrong.start())}: {reason}")
    return text


def _line(content: bytes, position: int) -> int:
    return content.count(b"\n", 0, position) + 1


def _look_at_header(cells: Sequence[str]) -> None:
    if tuple(cells) != COLUMNS:
        found = ",".join(cells)
        raise _Wrong(f"the columns must be {','.join(COLUMNS)}, and they are {found[:200]!r}")


def _row(cells: Sequence[str]) -> dict[str, str]:
    if len(cells) != len(COLUMNS):
        raise _Wrong(f"it has {len(cells)} columns instead of {len(COLUMNS)}")
    row = dict(zip(COLUMNS, cells, strict=True))
    for column, cell in row.items():
        if column in REQUIRED and not cell:
            raise _Wrong(f"it has no {column}")
        if any(unicodedata.category(char)[0] == "C" for char in cell):
            raise _Wrong(f"there is a line break or a control character in {column}")
    return row


def _figure(row: Mapping[str, str], line: int) -> Figure:
    if not row["unit"]:
        raise _Wrong("it has no unit")
    return Figure(**_made(row, _number(row, "value"), line))


def _gate(row: Mapping[str, str], line: int) -> GateResult:
    value = row["value"]
    if row["metric"] == "tests_passed":
        counts = re.fullmatch(r"(\d+)/(\d+)", value, re.ASCII)
        if counts is None or int(counts[1]) > int(counts[2]):
            raise _Wrong(f"the value {value!r} of tests_passed is no passed/total")
    elif row["metric"] == "greedy_md5":
        if not re.fullmatch(r"[0-9a-f]{32}", value):
            raise _Wrong(f"the value {value!r} of greedy_md5 is no md5")
    else:
        raise _Wrong(f"{row['metric']!r} is no metric of a gate: tests_passed or greedy_md5")
    return GateResult(**_made(row, value, line))


def _made(row: Mapping[str, str], value: float | str, line: int) -> dict[str, Any]:
    stddev = _number(row, "stddev") if row["stddev"] else None
    if stddev is not None and stddev < 0:
        raise _Wrong(f"the stddev {row['stddev']} is negative")
    fields = {**row, "value": value, "stddev": stddev}
    return {**fields, "figure": figure_digest(fields), "line": line}


def _number(row: Mapping[str, str], column: str) -> float:
    text = row[column]
    if not NUMBER.fullmatch(text) or not math.isfinite(float(text)):
        raise _Wrong(f"the {column} {text!r} is not a number")
    return float(text)
