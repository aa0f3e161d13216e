"""Rows with named columns, however a tool encodes them: SQL statements, JSON lines, a JSON array, csv, markdown."""

# ruff: noqa: S608 - statements are read, never executed

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator

from dgxlab.tools.reading import Line, Refused
from dgxlab.tools.rows import decode

# Values are quoted, but a quote inside a value is not escaped.
STATEMENT = re.compile(r"([a-z0-9_, ]+)\) VALUES \('(.*)'\);\s*")
WHERE = re.compile(r": line ([0-9]+) column [0-9]+ \(char [0-9]+\)$")


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
            raise Refused(f"a broken row: no whole INSERT INTO {table} ... VALUES (...);", number)
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
                raise Refused(f"a broken row: {WHERE.sub('', why)}", number)
            yield Line(number, row)
        elif '":' in line:
            raise Refused("a broken row: something stands before its {, or it has none", number)


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
        where = WHERE.search(why)
        raise Refused(f"broken JSON: {WHERE.sub('', why)}", starts[0] - 1 + int(where[1]) if where else starts[0])
    number = starts[0]
    for row in rows:
        if not isinstance(row, dict):
            raise Refused(f"{json.dumps(row)[:40]} stands where a row should", starts[0])
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
            yield Line(number, _csv_row(line, header, number))


def _csv_row(line: str, header: list[str], number: int) -> dict[str, str]:
    try:
        (cells,) = csv.reader([line], strict=True)
    except (csv.Error, ValueError) as error:
        raise Refused(f"a broken row: {error}", number) from error
    if not line.startswith('"') or not line.endswith('"') or len(cells) != len(header):
        raise Refused(f"a broken row: {len(cells)} columns below a header of {len(header)}", number)
    return dict(zip(header, cells, strict=True))


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
                raise Refused("a broken row: something stands before it", number)
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
