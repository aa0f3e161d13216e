"""What a parser of benchmark output gives back, and how a tool's rows find their cells.

Anything may have written into the text: a parser takes a value exactly as printed or refuses it in a sentence.
It never raises, and a value that is missing is never 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from dgxlab.model import Cell, CellResult

# Bounded, so that no text is a number too large to convert; \d would take digits of every script.
NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?")

ROUNDING = 1e-5
"""Relative; the tools print six digits at least, some from single precision."""

TRUTH = {"true": 1, "false": 0}
FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
"""What the tools take on the command line, and the number they print for it."""


class RowError(ValueError):
    """A row that must not become a number; the message follows the cell's label in a sentence."""


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
class Row:
    """One row of a tool.

    Attributes:
        printed: Its columns, as the tool printed them.
        params: The values that tell which cell it belongs to.
    """

    printed: Mapping[str, Any]
    params: Mapping[str, Any]


def match_rows(
    cells: Sequence[Cell],
    rows: Sequence[Row],
    read: Callable[[Cell, Row], CellResult],
    problems: Sequence[str] = (),
) -> Parsed:
    """Give every cell the one row that belongs to it; a row that belongs to no cell is ignored.

    Args:
        cells: What the run was to measure.
        rows: What the tool printed, in any order.
        read: Turns a cell's row into its result, or raises RowError.
        problems: What is already known to be wrong.
    """
    results: list[CellResult] = []
    said = list(problems)
    for cell in cells:
        try:
            results.append(read(cell, _only_row(cell, rows)))
        except RowError as error:
            said.append(f"{cell.label}: {error}")
    return Parsed(tuple(results), tuple(said))


def belongs(cell: Cell, row: Row) -> bool:
    """Say whether the row carries every one of the cell's parameters."""
    return all(name in row.params and equal(name, wanted, row.params[name]) for name, wanted in cell.params.items())


def equal(name: str, wanted: object, printed: object) -> bool:
    """Compare two values of a parameter: as numbers where both are numbers, else as text; true is 1."""
    return _comparable(name, wanted) == _comparable(name, printed)


def number(row: Row, column: str) -> float:
    """Return the finite number in a column.

    Raises:
        RowError: if the column is missing or holds anything else.
    """
    if column not in row.printed:
        raise RowError(f"its row has no {column}")
    return finite(row.printed[column], column)


def positive(row: Row, column: str) -> float:
    """Return the finite number above 0 in a column.

    Raises:
        RowError: if the column is missing or holds anything else.
    """
    value = number(row, column)
    if value <= 0:
        raise RowError(f"{column} is {_excerpt(row.printed[column])}, not above 0")
    return value


def finite(value: object, name: str) -> float:
    """Return a printed value as a finite number.

    Raises:
        RowError: if it is not one.
    """
    if isinstance(value, (int, float, str)) and not isinstance(value, bool) and NUMBER.fullmatch(str(value)):
        result = float(value)
        if math.isfinite(result):
            return result
    raise RowError(f"{name} is {_excerpt(value)}, not a number")


def speed(tokens: float, seconds: float) -> float:
    """Return tokens per second.

    Raises:
        RowError: if that is not a finite number above 0.
    """
    result = tokens / seconds if seconds > 0 else math.inf
    if not 0 < result < math.inf:
        raise RowError(f"{tokens:g} tokens in {seconds:g} s is no speed")
    return result


def agree(name: str, value: float, printed: float) -> float:
    """Return the recomputed value if the printed, rounded one says the same: else the row is not what it seems.

    Raises:
        RowError: if they differ by more than rounding.
    """
    if not math.isclose(value, printed, rel_tol=ROUNDING, abs_tol=1e-6):
        raise RowError(f"{name} is {printed:g}, but its tokens and time give {value:g}")
    return value


def _only_row(cell: Cell, rows: Sequence[Row]) -> Row:
    mine = [row for row in rows if belongs(cell, row)]
    if len(mine) != 1:
        raise RowError(f"{len(mine)} rows belong to it, not one" if mine else "it has no row")
    return mine[0]


def _comparable(name: str, value: object) -> Decimal | str:
    text = str(value)
    known = TRUTH.get(text.lower(), FLASH_ATTN.get(text) if name == "flash_attn" else None)
    if known is not None:
        return Decimal(known)
    return Decimal(text) if NUMBER.fullmatch(text) else text


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
