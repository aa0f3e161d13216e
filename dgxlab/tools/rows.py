"""Rows that a tool prints: parsed strictly, and matched with cells; a number is taken as printed or refused.

The text may contain output of other programs. `Benchmark.parse` never raises, and a missing value is never 0.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

from dgxlab.model import Cell, CellResult

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Bounded, so that no text is a number too large to convert; \d would take digits of every script.
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?")
_PARAM = re.compile(r"(?:^|,)(\w+)=(\[[^\]]*\]|[^,]*)")
_ROUNDING = 1e-5  # relative; the tools print six digits at least, some from single precision


class Refused(ValueError):
    """Output that cannot be read as exact numbers; callers put a cell's label or a file's name before the message."""

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line  # line number in the file, from 1; None if not known


@dataclass(frozen=True)
class Parsed:
    """The parsed output of one run."""

    results: tuple[CellResult, ...] = ()  # in the order of the cells; a cell with a problem has none
    problems: tuple[str, ...] = ()  # a sentence for each row or value that is missing, doubled, broken or not above 0
    parts: tuple[Cell, ...] = ()
    """Cells that only the output names, such as the kernels of a profiled cell; they have results too."""


Columns = Mapping[str, Any]  # a row as printed, by column
_Values = tuple[Decimal | str, ...]  # of a row's parameters, as `equal` compares them


def plain(text: str) -> str:
    """Return text without its terminal colours."""
    return _ANSI.sub("", text)


def decode(text: str) -> tuple[Any, str]:
    """Return the value of a JSON text and "", or None and the reason; NaN and repeated keys are refused."""
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique), ""
    except RecursionError:
        return None, "nested too deeply"
    except ValueError as error:
        return None, str(error)


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
    """Return the JSON objects among a program's output lines, None for a broken one, and a sentence per broken one."""
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
    rows: Sequence[Columns],
    read: Callable[[Cell, Columns], CellResult],
    problems: Sequence[str] = (),
    params: Callable[[Columns], Columns] = lambda row: row,
) -> Parsed:
    """Return the result of each cell from its row: the only row that has all parameters of the cell.

    Args:
        read: Returns a cell's result from its row; raises Refused.
        problems: Sentences to put before those on cells without a result.
        params: Returns the parameters of a row.
    """
    results: list[CellResult] = []
    sentences = list(problems)
    of_rows = [(params(row), row) for row in rows]
    # by the names of a cell's parameters: to compare each row with each cell is slow where there are thousands
    found: dict[tuple[str, ...], dict[_Values, list[tuple[Columns, Columns]]]] = {}
    for cell in cells:
        names = tuple(cell.params)
        if names not in found:
            found[names] = defaultdict(list)
            for pair in of_rows:
                if all(name in pair[0] for name in names):
                    found[names][_values(pair[0], names)].append(pair)
        mine = found[names].get(_values(cell.params, names), [])
        try:
            if len(mine) != 1:
                raise Refused(_several(mine) if mine else "it has no row")
            results.append(read(cell, mine[0][1]))
        except Refused as error:
            sentences.append(f"{cell.label}: {error}")
    return Parsed(tuple(results), tuple(sentences))


def _several(mine: Sequence[tuple[Columns, Columns]]) -> str:
    """Return why a cell has no result from rows that all fit it, given each with its parameters."""
    first, row = mine[0]
    # what a row has as a column of its own may be a measured value, or a time
    differ = [name for name in first if name not in row and len({str(params.get(name)) for params, _ in mine}) > 1]
    names = f": they differ in {', '.join(differ)}, so name these too" if differ else ""
    return f"{len(mine)} rows belong to it, not one{names}"


def _values(columns: Columns, names: Sequence[str]) -> _Values:
    return tuple(_comparable(columns[name]) for name in names)


def equal(wanted: object, printed: object) -> bool:
    """Return whether two values of a parameter are equal: as numbers if both are numbers, else as text; true is 1."""
    return _comparable(wanted) == _comparable(printed)


def _comparable(value: object) -> Decimal | str:
    text = {"true": "1", "false": "0"}.get(str(value).lower(), str(value))
    return Decimal(text) if _NUMBER.fullmatch(text) else text


def case_params(op_params: str) -> dict[str, str]:
    """Return the parameters in `type_a=q4_0,m=16,bs=[1,1]` by name; words without `=` are left out."""
    return dict(_PARAM.findall(op_params))


def column(columns: Columns, name: str) -> Any:
    """Return a row's value in the column `name`; raises Refused if it has no such column."""
    if name not in columns:
        raise Refused(f"its row has no {name}")
    return columns[name]


def number(columns: Columns, name: str) -> float:
    """Return a row's finite number in the column `name`; raises Refused if it has none."""
    return finite(column(columns, name), name)


def positive(columns: Columns, name: str) -> float:
    """Return a row's finite number above 0 in the column `name`; raises Refused if it has none."""
    return above_zero(column(columns, name), name)


def above_zero(value: object, name: str) -> float:
    """Return a printed value as a finite number above 0; raises Refused, which calls the value `name`, if it is not."""
    result = finite(value, name)
    if result <= 0:
        raise Refused(f"{name} is {_excerpt(value)}, not above 0")
    return result


def finite(value: object, name: str) -> float:
    """Return a printed value as a finite number; raises Refused, which calls the value `name`, if it is not one."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool) and _NUMBER.fullmatch(str(value)):
        result = float(value)
        if math.isfinite(result):
            return result
    raise Refused(f"{name} is {_excerpt(value)}, not a number")


def speed(tokens: float, seconds: float) -> float:
    """Return tokens per second; raises Refused if that is not a finite number above 0."""
    result = tokens / seconds if seconds > 0 else math.inf
    if not 0 < result < math.inf:
        raise Refused(f"{tokens:g} tokens in {seconds:g} s is no speed")
    return result


def agree(name: str, value: float, printed: float) -> float:
    """Return `value`, recomputed from tokens and time; raises Refused if `printed` differs by more than rounding."""
    if not math.isclose(value, printed, rel_tol=_ROUNDING, abs_tol=1e-6):
        raise Refused(f"{name} is {printed:g}, but its tokens and time give {value:g}")
    return value


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
