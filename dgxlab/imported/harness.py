"""A kernel's own harness: JSON lines whose values are named with their unit, as time_us, or as the record does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dgxlab.imported.reading import Reading, Refused, Row, Values, finite_at
from dgxlab.imported.tables import Line, json_lines
from dgxlab.units import METRICS

UNITS = {
    "_ns": "ns",
    "_us": "us",
    "_ms": "ms",
    "_s": "s",
    "_mhz": "MHz",
    "_mib": "MiB",
    "_kb": "kB",
    "_gb_s": "GB/s",
    "_w": "W",
    "_c": "°C",
}
"""By the end of a name; where one is the end of another, the longer counts."""


def unit(name: str) -> str:
    """Return the unit of a value, "" for a name that belongs to no value."""
    if name in METRICS:
        return METRICS[name].unit
    ends = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(ends, key=len)] if ends else ""


def lines(text: str) -> Reading:
    """Read one row a line: values from names with a unit, lists sample by sample; all the rest says what was measured.

    Values of a row that says `"passed": false` are discarded.

    Raises:
        Refused: if a row is broken, has no value, or one that is no finite number or cannot be below 0 and is.
    """
    return Reading(tuple(_row(line) for line in json_lines(text)), {})


def _row(line: Line) -> Row:
    why = "it did not pass" if line.columns.get("passed") is False else ""
    values = tuple(
        Values(name, unit(name), _samples(name, said, line.number), why)
        for name, said in line.columns.items()
        if unit(name)
    )
    if not values:
        raise Refused("a row without a value: none of its names ends in a unit, as time_us does", line.number)
    params = {name: said for name, said in line.columns.items() if not unit(name)}
    return Row(_label(params) or "measurement", params, values)


def _samples(name: str, said: Any, number: int) -> tuple[float, ...]:
    samples = said if isinstance(said, list) else [said]
    if not samples:
        raise Refused(f"{name} is an empty list", number)
    found = tuple(finite_at(name, sample, number) for sample in samples)
    if name in METRICS and min(found) < 0:
        raise Refused(f"{name} is {min(found):g}, below 0", number)
    return found


def _label(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={said}" for name, said in params.items() if not isinstance(said, (dict, list, bool)))
