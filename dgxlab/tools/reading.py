"""Imported files of a tool's output: from bytes to text, and from text to rows, unless the file is refused."""

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from dgxlab.tools.rows import Refused, column, decode, number, plain, positive

T = TypeVar("T")

GZIP = b"\x1f\x8b"
LARGEST = 64 << 20  # bytes of output that one file may hold: a log of a million cases is smaller
ORIGIN = ("job_id", "run_id", "arm", "build_id", "pin", "tree", "series", "dirty", "env", "device_id")
"""The columns that `dgxlab export` adds to a row: where it was measured."""

_FRACTION = re.compile(r"-?[0-9]{1,40}\.[0-9]{1,40}")
_WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Values:
    """The values of one metric in a row, in the order printed."""

    metric: str
    unit: str
    values: tuple[float, ...]
    discarded: str = ""  # why they do not count, "" for values that do


@dataclass(frozen=True)
class Row:
    """One parsed row: what was measured, and the values."""

    label: str  # the measured thing, for people
    params: Mapping[str, Any]  # the measured thing for programs, with all settings that differ between rows
    values: tuple[Values, ...]


@dataclass(frozen=True)
class Reading:
    """The parsed content of a file."""

    rows: tuple[Row, ...]  # in the order of the file; each has a value
    provenance: Mapping[str, Any]  # common to all rows: program, source, device
    notes: tuple[str, ...] = ()  # sentences about content that is not a value


@dataclass(frozen=True)
class Line:
    """One row as it is in the file: the number of the line on which it begins, and its columns."""

    number: int
    columns: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return the value in the column `name` as text; raises Refused if the row has no such column."""
        return str(column(self.columns, name))


@dataclass(frozen=True)
class Format:
    """A format of a tool's output: how to recognise it, and how to parse it."""

    make: Callable[[Any], Reading]  # takes the rows, or the text if there is no `rows`; raises Refused
    words: str  # every text of this format contains these; quick to search for
    signs: str  # a regex that matches texts of this format only
    rows: Callable[[str], Iterable[Line]] | None = None
    """Yields the rows of a text, if they have all columns that the tool prints."""
    texts: tuple[str, ...] | None = None
    """If the format quotes all values, the columns whose values remain texts; None for JSON, which has types."""
    profiler: bool = False  # whether a profiler writes it: other times in such a text are wrong
    summary: Callable[[Path], str] | None = None  # returns a text for a binary file; raises Refused
    binary: bytes = b""  # the first bytes of such a binary file

    def fits(self, text: str) -> bool:
        """Return whether a text seems to be of this format."""
        return self.words in text and bool(re.search(self.signs, text, re.MULTILINE))

    def read(self, text: str) -> Reading:
        """Parse a text; raises Refused if it cannot be read exactly."""
        return self.make(list(self.lines(text)) if self.rows else text)

    def lines(self, text: str) -> Iterator[Line]:
        """Yield the rows of a text, with numbers except in columns of `texts`; raises Refused if a row is broken."""
        for line in self.rows(text) if self.rows else ():
            columns = line.columns
            if self.texts is not None:
                columns = {k: v if k in self.texts else _number(v) for k, v in columns.items()}
            yield Line(line.number, columns)


def _number(text: str) -> float | str:
    return float(text) if _FRACTION.fullmatch(text) else number_or_text(text)


@contextmanager
def at_line(number: int) -> Iterator[None]:
    """Give a Refused that is raised inside the context this line number, unless it has one."""
    try:
        yield
    except Refused as error:
        raise Refused(str(error), error.line or number) from error


def each_line(lines: Iterable[Line], make: Callable[[Line], T]) -> Iterator[T]:
    """Yield `make(line)` for each line; a Refused that it raises gets the line's number."""
    for line in lines:
        with at_line(line.number):
            yield make(line)


def value(metric: str, unit: str, columns: Mapping[str, Any], *, above_0: bool = True) -> Values:
    """Return the number in the column `metric` as the metric's only value.

    Raises Refused if there is no finite number, or, with `above_0`, none above 0.
    """
    return Values(metric, unit, ((positive if above_0 else number)(columns, metric),))


def whole(columns: Mapping[str, Any], name: str) -> int:
    """Return a row's whole number in the column `name`, 0 or above; raises Refused if it has none."""
    size = number(columns, name)
    if size < 0 or size != int(size):
        raise Refused(f"{name} is {columns[name]}, not a whole number")
    return int(size)


@lru_cache(maxsize=4096)
def number_or_text(text: str) -> int | str:
    """Return a text such as `12` as an int, any other text (`012`, `1.0`) unchanged."""
    return int(text) if _WHOLE.fullmatch(text) else text


def shared(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Return the columns in `names` that all rows have with the same value, with that value."""
    first = rows[0] if rows else {}
    return {
        name: first[name]
        for name in names
        if name in first and all(name in row and row[name] == first[name] for row in rows)
    }


def span(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return {"test_time": "FIRST to LAST"} of rows; one time if all are equal, {} if no row has a time."""
    times = sorted({str(row["test_time"]) for row in rows if row.get("test_time")})
    return {"test_time": " to ".join(dict.fromkeys((times[0], times[-1])))} if times else {}


def unpacked(raw: bytes) -> bytes:
    """Return a file's content, unpacked if it is gzip; raises Refused if empty, larger than LARGEST or damaged."""
    content = raw
    if raw.startswith(GZIP):
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(raw)).read(LARGEST + 1)
        except EOFError as error:
            raise Refused("it is a gzip archive that was cut short") from error
        except (OSError, zlib.error) as error:
            raise Refused(f"it is a damaged gzip archive: {error}") from error
    if len(content) > LARGEST:
        raise Refused(f"it holds more than {LARGEST >> 20} MiB, which no benchmark prints")
    if not content.strip():
        raise Refused("it is empty")
    return content


def decoded(content: bytes) -> str:
    r"""Return bytes as text without terminal colours, with lines that end in \n; raises Refused if not UTF-8 text."""
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Refused("it is UTF-16, as PowerShell writes it: `iconv -f UTF-16 -t UTF-8` makes it readable", 1)
    if content.startswith(b"SQLite format 3\0"):
        raise Refused("it is an SQLite database, not the output of a tool")
    if (at := content.find(b"\0")) >= 0:
        raise Refused("it is binary", content.count(b"\n", 0, at) + 1)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused("it is not UTF-8 text", content.count(b"\n", 0, error.start) + 1) from error
    return plain(text).replace("\r\n", "\n")


# -- rows with columns: SQL statements, JSON lines, a JSON array, csv, markdown ----------------------------------------

# Values are quoted, but a quote inside a value is not escaped.
_STATEMENT = re.compile(r"([a-z0-9_, ]+)\) VALUES \('(.*)'\);\s*")
_POSITION = re.compile(r": line ([0-9]+) column [0-9]+ \(char [0-9]+\)$")


def statement_columns(statement: str) -> dict[str, str] | None:
    """Return the columns of the rest of an INSERT statement, `NAMES) VALUES ('...');`; None if it is not complete."""
    match = _STATEMENT.fullmatch(statement)
    if not match:
        return None
    names, values = match[1].split(", "), match[2].split("', '")
    whole = len(names) == len(values) == len(set(names))
    return dict(zip(names, values, strict=True)) if whole else None


def sql(text: str, table: str) -> Iterator[Line]:
    """Yield the rows of INSERT statements for a table, which are not executed; raises Refused if one is incomplete."""
    insert = f"INSERT INTO {table} ("
    for at, line in enumerate(text.split("\n"), 1):
        parts = line.split(insert)
        if len(parts) == 1 and "VALUES ('" not in line and "');" not in line:
            continue  # the table's definition, or a diagnostic
        columns = statement_columns(parts[1]) if len(parts) == 2 else None
        if not columns:
            raise Refused(f"a broken row: no whole INSERT INTO {table} ... VALUES (...);", at)  # noqa: S608 - read, never executed
        yield Line(at, columns)


def json_lines(text: str) -> Iterator[Line]:
    """Yield the lines that are JSON objects; other lines are diagnostics. Raises Refused if an object is broken."""
    for at, line in enumerate(text.split("\n"), 1):
        if line.startswith("{"):
            row, why = decode(line)
            if why:
                raise Refused(f"a broken row: {_POSITION.sub('', why)}", at)
            yield Line(at, row)
        elif '":' in line:
            raise Refused("a broken row: its { is missing, or text comes before it", at)


def json_array(text: str) -> Iterator[Line]:
    """Yield the objects of the only JSON array, which begins with a line `[`; raises Refused if it is broken."""
    lines = text.split("\n")
    starts = [at for at, line in enumerate(lines, 1) if line == "["]
    ends = [at for at, line in enumerate(lines, 1) if line == "]"]
    if len(starts) != 1:
        raise Refused(f"{len(starts) or 'no'} JSON arrays begin in it, not one", starts[1] if starts else 1)
    if len(ends) != 1 or ends[0] < starts[0]:
        raise Refused("its JSON array does not end: the file was cut short", len(lines))
    rows, why = decode("\n".join(lines[starts[0] - 1 : ends[0]]))
    if why:
        where = _POSITION.search(why)
        raise Refused(f"broken JSON: {_POSITION.sub('', why)}", starts[0] - 1 + int(where[1]) if where else starts[0])
    at = starts[0]
    for row in rows:
        if not isinstance(row, dict):
            raise Refused(f"{json.dumps(row)[:40]} is no row", starts[0])
        at = next((n for n in range(at + 1, ends[0]) if lines[n - 1].strip() == "{"), starts[0])
        yield Line(at, row)


def csv_rows(text: str, first: str) -> Iterator[Line]:
    """Yield the csv rows below the header whose first column is `first`; raises Refused if a row does not fit it."""
    header: list[str] = []
    for at, line in enumerate(text.split("\n"), 1):
        if line.replace('"', "").startswith(f"{first},"):
            names = line.replace('"', "").split(",")
            if header and names != header:
                raise Refused("a second header with other columns", at)
            header = names
        elif line.startswith('"') or '","' in line:
            try:
                (cells,) = csv.reader([line], strict=True)
            except (csv.Error, ValueError) as error:
                raise Refused(f"a broken row: {error}", at) from error
            if not line.startswith('"') or not line.endswith('"') or len(cells) != len(header):
                raise Refused(f"a broken row: {len(cells)} columns below a header of {len(header)}", at)
            yield Line(at, dict(zip(header, cells, strict=True)))


def markdown(text: str, last: str) -> Iterator[Line]:
    """Yield the rows of markdown tables with the last column `last`; raises Refused if a row and its header differ."""
    header: list[str] = []
    for at, line in enumerate(text.split("\n"), 1):
        shown = line.rstrip()
        if not shown.startswith("|"):
            if shown.endswith("|") and shown.count("|") > 2:
                raise Refused("a broken row: text comes before it", at)
            continue
        if not shown.endswith("|"):
            raise Refused("a broken row: it does not end in |", at)
        cells = [cell.strip() for cell in shown[1:-1].split("|")]
        if cells[-1] == last:
            header = cells
        elif len(cells) != len(header):
            raise Refused(f"a broken row: {len(cells)} columns below a header of {len(header)}", at)
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            yield Line(at, dict(zip(header, cells, strict=True)))
