"""Files of a tool's output: from bytes to text, from text to rows, and what a reader gives back or why it refuses."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dgxlab.tools.rows import Refused, agree, decode, finite, plain, speed

GZIP = b"\x1f\x8b"
LARGEST = 64 << 20
"""Bytes of output that one file may hold: a log of a million cases is smaller."""

ORIGIN = ("job_id", "run_id", "arm", "build_id", "pin", "tree", "series", "dirty", "env", "device_id")
"""The columns of where a row comes from, which `dgxlab export` adds."""

WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Values:
    """What a row says of one metric, in the order printed.

    Attributes:
        discarded: Why they do not count, "" for values that do.
    """

    metric: str
    unit: str
    values: tuple[float, ...]
    discarded: str = ""


@dataclass(frozen=True)
class Row:
    """One row of a tool's output.

    Attributes:
        label: What it measured, for people.
        params: The same for programs, and all that the file's rows differ in.
    """

    label: str
    params: Mapping[str, Any]
    values: tuple[Values, ...]


@dataclass(frozen=True)
class Reading:
    """All that a file says.

    Attributes:
        rows: In the order of the file; each has a value.
        provenance: What holds for all rows: who made them, from what, on what.
        notes: A sentence for whatever is there and is no value.
    """

    rows: tuple[Row, ...]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """The columns of one row, and the line that it began on."""

    number: int
    columns: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a column that every row must have.

        Raises:
            Refused: if this one has not.
        """
        if name not in self.columns:
            raise Refused(f"a row without {name}", self.number)
        return str(self.columns[name])


@dataclass(frozen=True)
class Format:
    """A format of a tool's output.

    Attributes:
        make: Makes a reading of the rows, of the text where there is no `rows`; raises Refused.
        words: Every text of this format holds them; quick to look for.
        signs: A regex that is found in a text of this format and in no other.
        rows: Yields the rows of a text, where they have all columns that the tool knows.
        otherwise: Whether a text with JSON lines that fits no format is read as this one, to say what its rows lack.
        texts: Where every value is printed as a text, the columns that are texts; None where JSON tells.
    """

    make: Callable[[Any], Reading]
    words: str
    signs: str
    rows: Callable[[str], Iterable[Line]] | None = None
    texts: tuple[str, ...] | None = None
    otherwise: bool = False

    def fits(self, text: str) -> bool:
        """Return whether a text looks like this format."""
        return self.words in text and bool(re.search(self.signs, text, re.MULTILINE))

    def read(self, text: str) -> Reading:
        """Return all that a text says; raises Refused where it cannot be read exactly."""
        return self.make(list(self.rows(text)) if self.rows else text)


def value(metric: str, unit: str, printed: object, line: int | None, *, above: float | None = None) -> Values:
    """Return one finite value as printed, a text or a JSON number.

    Args:
        above: What it must be more than.

    Raises:
        Refused: if it is none.
    """
    return Values(metric, unit, (finite_at(metric, printed, line, above=above),))


def finite_at(name: str, printed: object, line: int | None, *, above: float | None = None) -> float:
    """Return a finite number as printed; raises Refused as `value` does."""
    if printed is None:
        raise Refused(f"a row without {name}", line)
    try:
        number = finite(printed, name)
    except Refused as error:
        raise Refused(str(error), line) from error
    if above is not None and number <= above:
        raise Refused(f"{name} is {printed}, not above {above:g}", line)
    return number


def whole_at(name: str, printed: object, line: int | None) -> int:
    """Return a whole number that is not below 0, as printed; raises Refused as `value` does."""
    number = finite_at(name, printed, line, above=-1)
    if number != int(number):
        raise Refused(f"{name} is {printed}, not a whole number", line)
    return int(number)


def agree_at(name: str, tokens: float, times: Sequence[float], printed: float, line: int) -> None:
    """Refuse a printed speed that is not the mean of `tokens` in each of the times, in seconds.

    Raises:
        Refused: if so.
    """
    try:
        agree(name, sum(speed(tokens, time) for time in times) / len(times), printed)
    except Refused as error:
        raise Refused(str(error), line) from error


@lru_cache(maxsize=4096)
def number_or_text(text: str) -> int | str:
    """Return a whole number written the usual way as one, anything else as it is."""
    return int(text) if WHOLE.fullmatch(text) else text


def shared(rows: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named columns that every row has, with the same value."""
    first = rows[0]
    return {
        name: first[name]
        for name in names
        if name in first and all(name in row and row[name] == first[name] for row in rows)
    }


def span(texts: Iterable[str]) -> str:
    """Return the first and the last of some times, once where they are the same."""
    ordered = sorted(set(texts))
    return " to ".join(dict.fromkeys((ordered[0], ordered[-1])))


def unpacked(raw: bytes) -> bytes:
    """Return a file's content, unpacked where it is gzip.

    Raises:
        Refused: if there is nothing in it, too much, or half of an archive.
    """
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
    r"""Return the text, its lines ended by \n.

    Raises:
        Refused: if it is not UTF-8 text.
    """
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


def packed(content: bytes) -> bytes:
    """Return what the record keeps of a file: all of it, deflated."""
    return zlib.compress(content, 9)


# -- rows with columns: SQL statements, JSON lines, a JSON array, csv, markdown ----------------------------------------

# Values are quoted, but a quote inside a value is not escaped.
STATEMENT = re.compile(r"([a-z0-9_, ]+)\) VALUES \('(.*)'\);\s*")
POSITION = re.compile(r": line ([0-9]+) column [0-9]+ \(char [0-9]+\)$")


def statement_columns(statement: str) -> dict[str, str] | None:
    """Return the columns of an INSERT, given from its list of names on; None where it is not whole."""
    match = STATEMENT.fullmatch(statement)
    if not match:
        return None
    names, values = match[1].split(", "), match[2].split("', '")
    if len(names) != len(values) or len(set(names)) != len(names):
        return None
    return dict(zip(names, values, strict=True))


def sql(text: str, table: str) -> Iterator[Line]:
    """Yield the rows that are inserted into a table; the statements are read, never executed.

    Raises:
        Refused: if a statement is not whole.
    """
    insert = f"INSERT INTO {table} ("
    for number, line in enumerate(text.split("\n"), 1):
        parts = line.split(insert)
        if len(parts) == 1 and "VALUES ('" not in line and "');" not in line:
            continue  # the table's definition, or a diagnostic
        columns = statement_columns(parts[1]) if len(parts) == 2 else None
        if not columns:
            raise Refused(f"a broken row: no whole INSERT INTO {table} ... VALUES (...);", number)  # noqa: S608 - read, never executed
        yield Line(number, columns)


def json_lines(text: str) -> Iterator[Line]:
    """Yield the objects, one a line; lines that do not start with `{` are diagnostics.

    Raises:
        Refused: if one is broken: cut short, with something in the middle, with NaN, with a key twice.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("{"):
            row, why = decode(line)
            if why:
                raise Refused(f"a broken row: {POSITION.sub('', why)}", number)
            yield Line(number, row)
        elif '":' in line:
            raise Refused("a broken row: its { is missing, or text comes before it", number)


def json_array(text: str) -> Iterator[Line]:
    """Yield the objects of the one array that begins with a `[` on a line of its own.

    Raises:
        Refused: if there is none, or it is broken or cut short.
    """
    lines = text.split("\n")
    starts = [number for number, line in enumerate(lines, 1) if line == "["]
    ends = [number for number, line in enumerate(lines, 1) if line == "]"]
    if len(starts) != 1:
        raise Refused(f"{len(starts) or 'no'} JSON arrays begin in it, not one", starts[1] if starts else 1)
    if len(ends) != 1 or ends[0] < starts[0]:
        raise Refused("its JSON array does not end: the file was cut short", len(lines))
    rows, why = decode("\n".join(lines[starts[0] - 1 : ends[0]]))
    if why:
        where = POSITION.search(why)
        raise Refused(f"broken JSON: {POSITION.sub('', why)}", starts[0] - 1 + int(where[1]) if where else starts[0])
    number = starts[0]
    for row in rows:
        if not isinstance(row, dict):
            raise Refused(f"{json.dumps(row)[:40]} is no row", starts[0])
        number = next((n for n in range(number + 1, ends[0]) if lines[n - 1].strip() == "{"), starts[0])
        yield Line(number, row)


def csv_rows(text: str, first: str) -> Iterator[Line]:
    """Yield the rows below the header whose first column is `first`; lines without a quote are diagnostics.

    Raises:
        Refused: if a row is broken or has not the header's columns.
    """
    header: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.replace('"', "").startswith(f"{first},"):
            names = line.replace('"', "").split(",")
            if header and names != header:
                raise Refused("a second header with other columns", number)
            header = names
        elif line.startswith('"') or '","' in line:
            try:
                (cells,) = csv.reader([line], strict=True)
            except (csv.Error, ValueError) as error:
                raise Refused(f"a broken row: {error}", number) from error
            if not line.startswith('"') or not line.endswith('"') or len(cells) != len(header):
                raise Refused(f"a broken row: {len(cells)} columns below a header of {len(header)}", number)
            yield Line(number, dict(zip(header, cells, strict=True)))


def markdown(text: str, last: str) -> Iterator[Line]:
    """Yield the rows of tables whose last column is called `last`.

    Raises:
        Refused: if a row is not whole or has not the columns of the header above it.
    """
    header: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        text_of = line.rstrip()
        if not text_of.startswith("|"):
            if text_of.endswith("|") and text_of.count("|") > 2:
                raise Refused("a broken row: text comes before it", number)
            continue
        if not text_of.endswith("|"):
            raise Refused("a broken row: it does not end in |", number)
        cells = [cell.strip() for cell in text_of[1:-1].split("|")]
        if cells[-1] == last:
            header = cells
        elif len(cells) != len(header):
            raise Refused(f"a broken row: {len(cells)} columns below a header of {len(header)}", number)
        elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            yield Line(number, dict(zip(header, cells, strict=True)))
