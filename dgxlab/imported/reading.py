"""What a reader of a tool's output gives back, or why it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dgxlab.agent.parse.parsed import RowError, finite

WHOLE = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")


class Refused(ValueError):
    """Output that must not become numbers; the message follows the file's name in a sentence.

    Attributes:
        line: Where, from 1; None where no line is to blame.
    """

    def __init__(self, reason: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.line = line


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


def value(metric: str, unit: str, printed: object, line: int | None, *, above: float | None = None) -> Values:
    """Return one finite value as printed, a text or a JSON number.

    Args:
        above: What it must be more than.

    Raises:
        Refused: if it is none.
    """
    return Values(metric, unit, (finite_at(metric, printed, line, above=above),))


def finite_at(name: str, printed: object, line: int | None, *, above: float | None = None) -> float:
    """Return a finite number as printed.

    Raises:
        Refused: if it is none.
    """
    if printed is None:
        raise Refused(f"a row without {name}", line)
    try:
        number = finite(printed, name)
    except RowError as error:
        raise Refused(str(error), line) from error
    if above is not None and number <= above:
        raise Refused(f"{name} is {printed}, not above {above:g}", line)
    return number


def whole_at(name: str, printed: object, line: int | None) -> int:
    """Return a whole number that is not below 0, as printed.

    Raises:
        Refused: if it is none.
    """
    number = finite_at(name, printed, line, above=-1)
    if number != int(number):
        raise Refused(f"{name} is {printed}, not a whole number", line)
    return int(number)


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
