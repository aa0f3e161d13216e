"""Rows that a tool prints: decoded strictly, matched with cells, their numbers taken as printed or refused.

Anything may have written into the text. Parsers of benchmark output never raise, and a missing value is never 0.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

from dgxlab.model import Cell, CellResult

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Bounded, so that no text is a number too large to convert; \d would take digits of every script.
NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?")

PARAM = re.compile(r"(?:^|,)(\w+)=(\[[^\]]*\]|[^,]*)")

ROUNDING = 1e-5
"""Relative; the tools print six digits at least, some from single precision."""

TRUTH = {"true": 1, "false": 0}
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
"""What the tools take on the command line, and the number they print for it."""


class Refused(ValueError):
    """Output that must not become numbers; the message follows a cell's label or a file's name in a sentence.

    Attributes:
        line: Where in a file, from 1; None where no line is to blame.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True)
class Parsed:
    """All that one run's output says of its cells.

    Attributes:
        results: In the order of the cells; a cell with a problem has none.
        problems: A sentence for each thing that is missing, doubled, broken or not a positive number.
    """

    results: tuple[CellResult, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class PrintedRow:
    """The columns of one row as printed, and the parameters that tell which cell it belongs to."""

    printed: Mapping[str, Any]
    params: Mapping[str, Any]


def plain(text: str) -> str:
    """Return the text without terminal colours."""
    return ANSI.sub("", text)


def decode(text: str) -> tuple[Any, str]:
    """Decode JSON strictly, without NaN and repeated keys: return its value and "", or None and the reason."""
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        return None, str(error)
    return value, ""


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"{token} is not a number")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            raise ValueError(f"{key} is there twice")
        row[key] = value
    return row


def json_rows(text: str, program: str) -> tuple[list[dict[str, Any] | None], list[str]]:
    """Decode the lines that start with `{`; every other line is a diagnostic.

    Returns:
        One entry a row in the order printed, None for a broken one, and a sentence for each broken row.
    """
    rows: list[dict[str, Any] | None] = []
    problems: list[str] = []
    # Only \n ends a line: str.splitlines would also cut at characters that a file name may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("{"):
            row, why = decode(line)
            rows.append(row)
            problems += [f"line {number} of {program}'s output is a broken row: {why}"] if why else []
    return rows, problems


def match_rows(
    cells: Sequence[Cell],
    rows: Sequence[PrintedRow],
    read: Callable[[Cell, PrintedRow], CellResult],
    problems: Sequence[str] = (),
) -> Parsed:
    """Give every cell the one row that belongs to it; a row that belongs to no cell is ignored.

    Args:
        cells: What the run was to measure.
        rows: What the tool printed, in any order.
        read: Turns a cell's row into its result, or raises Refused.
        problems: What is already known to be wrong.
    """
    results: list[CellResult] = []
    sentences = list(problems)
    for cell in cells:
        mine = [row for row in rows if belongs(cell, row)]
        try:
            if len(mine) != 1:
                raise Refused(f"{len(mine)} rows belong to it, not one" if mine else "it has no row")
            results.append(read(cell, mine[0]))
        except Refused as error:
            sentences.append(f"{cell.label}: {error}")
    return Parsed(tuple(results), tuple(sentences))


def belongs(cell: Cell, row: PrintedRow) -> bool:
    """Return whether the row carries every one of the cell's parameters."""
    return all(name in row.params and equal(name, wanted, row.params[name]) for name, wanted in cell.params.items())


def equal(name: str, wanted: object, printed: object) -> bool:
    """Compare two values of a parameter: as numbers where both are numbers, else as text; true is 1."""
    return _comparable(name, wanted) == _comparable(name, printed)


def _comparable(name: str, value: object) -> Decimal | str:
    text = str(value)
    known = TRUTH.get(text.lower(), FLASH_ATTN.get(text) if name == "flash_attn" else None)
    if known is not None:
        return Decimal(known)
    return Decimal(text) if NUMBER.fullmatch(text) else text


def case_params(op_params: str) -> dict[str, str]:
    """Split `type_a=q4_0,m=16,bs=[1,1]` at the commas outside brackets; words without `=` are left out."""
    return dict(PARAM.findall(op_params))


def number(row: PrintedRow, column: str) -> float:
    """Return the finite number in a column.

    Raises:
        Refused: if the column is missing or holds anything else.
    """
    if column not in row.printed:
        raise Refused(f"its row has no {column}")
    return finite(row.printed[column], column)


def positive(row: PrintedRow, column: str) -> float:
    """Return the finite number above 0 in a column; raises Refused as `number` does."""
    value = number(row, column)
    if value <= 0:
        raise Refused(f"{column} is {_excerpt(row.printed[column])}, not above 0")
    return value


def finite(value: object, name: str) -> float:
    """Return a printed value as a finite number.

    Raises:
        Refused: if it is not one.
    """
    if isinstance(value, (int, float, str)) and not isinstance(value, bool) and NUMBER.fullmatch(str(value)):
        result = float(value)
        if math.isfinite(result):
            return result
    raise Refused(f"{name} is {_excerpt(value)}, not a number")


def speed(tokens: float, seconds: float) -> float:
    """Return tokens per second.

    Raises:
        Refused: if that is not a finite number above 0.
    """
    result = tokens / seconds if seconds > 0 else math.inf
    if not 0 < result < math.inf:
        raise Refused(f"{tokens:g} tokens in {seconds:g} s is no speed")
    return result


def agree(name: str, value: float, printed: float) -> float:
    """Return the recomputed value if the printed, rounded one says the same.

    Raises:
        Refused: if they differ by more than rounding.
    """
    if not math.isclose(value, printed, rel_tol=ROUNDING, abs_tol=1e-6):
        raise Refused(f"{name} is {printed:g}, but its tokens and time give {value:g}")
    return value


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
