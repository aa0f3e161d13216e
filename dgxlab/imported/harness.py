"""A kernel's own harness: JSON lines, a row a case, whose values are named with their unit or as the record does.

Every row has `kernel`, `time_us` (a sample, or a list of them) and what tells cases apart: `case`, or `m`, `n`, `k`, or
`rows`, `cols`. Other values: `flops` or `tflops`, `bandwidth_gb_s` or `gbps`, `clock`, and whatever ends in a unit, as
`sm_clock_mhz` does. All the rest is a label; of a truth value, as in `"cold": true`, its name. GB/s are 10^9 bytes a
second, in `bandwidth_gb_s` too: only test-backend-ops divides by 2^30, and the record does as it does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from dgxlab.imported.reading import Reading, Refused, Row, Values, finite_at, shared
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

_GB = Fraction(10**9, 2**30)
SYNONYMS = {
    "tflops": ("flops", Fraction(10**12)),
    "gflops": ("flops", Fraction(10**9)),
    "bandwidth_gb_s": ("bandwidth_gb_s", _GB),
    "gbps": ("bandwidth_gb_s", _GB),
    "clock": ("clock_mhz", Fraction(1)),
}
"""What else a value is called: its name in the record, and how many of that one's unit it counts in."""

SHAPE = ("case", "m", "n", "k", "rows", "cols")

MADE_ON = ("gpu", "host", "driver", "cuda", "arch", "commit", "date")
"""What is said of the file where all of its rows agree on it."""


def unit(name: str) -> str:
    """Return the unit of a value, "" for a name that belongs to no value."""
    name = SYNONYMS[name][0] if name in SYNONYMS else name
    if name in METRICS:
        return METRICS[name].unit
    ends = [end for end in UNITS if name.endswith(end)]
    return UNITS[max(ends, key=len)] if ends else ""


def lines(text: str) -> Reading:
    """Read one row a line: values from names with a unit, lists sample by sample; all the rest says what was measured.

    Values of a row that says `"passed": false` are discarded.

    Raises:
        Refused: if a row is broken, is no harness's, or has a value that is no finite number, that cannot be below 0
            and is, or that it says twice.
    """
    found = list(json_lines(text))
    for line in found:
        _is_a_harness(line)
    same = shared([line.columns for line in found], MADE_ON) if found else {}
    return Reading(tuple(_row(line, same) for line in found), same)


def _is_a_harness(line: Line) -> None:
    """Refuse a row without what makes it one: JSON lines are what many programs print.

    Raises:
        Refused: if so.
    """
    lacking = [name for name in ("kernel", "time_us") if name not in line.columns]
    lacking += [] if any(name in line.columns for name in SHAPE) else [f"any of {', '.join(SHAPE)}"]
    if lacking:
        raise Refused(f"a row without {' and '.join(lacking)}: no harness's, nor of a tool of llama.cpp", line.number)


def _row(line: Line, same: Mapping[str, Any]) -> Row:
    why = "it did not pass" if line.columns.get("passed") is False else ""
    values: dict[str, Values] = {}
    for name, said in line.columns.items():
        if unit(name):
            metric, factor = SYNONYMS.get(name, (name, Fraction(1)))
            if metric in values:
                raise Refused(f"{metric} is there twice, once as {name}", line.number)
            values[metric] = Values(metric, unit(name), _samples(name, said, factor, line.number), why)
    params = {name: said for name, said in line.columns.items() if not unit(name) and name not in same}
    return Row(_label(params), params, tuple(values.values()))


def _samples(name: str, said: Any, factor: Fraction, number: int) -> tuple[float, ...]:
    samples = said if isinstance(said, list) else [said]
    if not samples:
        raise Refused(f"{name} is an empty list", number)
    found = [finite_at(name, sample, number) for sample in samples]
    if (name in METRICS or name in SYNONYMS) and min(found) < 0:
        raise Refused(f"{name} is {min(found):g}, below 0", number)
    return tuple(_scaled(name, value, factor, number) for value in found)


def _scaled(name: str, value: float, factor: Fraction, number: int) -> float:
    """Return the number that is printed in decimals times a factor, rounded once.

    Raises:
        Refused: if it is too large.
    """
    try:
        scaled = float(Fraction(Decimal(repr(value))) * factor)
    except OverflowError:
        scaled = math.inf
    if math.isinf(scaled):
        raise Refused(f"{name} is {value:g}, too large", number)
    return scaled


def _label(params: Mapping[str, Any]) -> str:
    return " ".join(said for name, value in params.items() if (said := _said(name, value)))


def _said(name: str, value: Any) -> str:
    """Name a parameter; of a truth value the name says all, and `passed` is said by the values."""
    if value is None or name == "passed" or isinstance(value, (dict, list)) or value is False:
        return ""
    return name if value is True else f"{name}={value}"
