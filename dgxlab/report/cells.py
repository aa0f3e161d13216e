"""Texts of a table's cells: one unit and one number of decimals a column."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal

from dgxlab import units
from dgxlab.published import Figure
from dgxlab.report.records import Column, Glance, Number, Table, Value
from dgxlab.stats import VERDICTS, Verdict
from dgxlab.store import alias

OUTCOMES = {
    **dict.fromkeys(VERDICTS, "open"),
    **dict.fromkeys(("faster", "passed", "promoted"), "good"),
    **dict.fromkeys(("slower", "failed", "invalid", "lost", "rejected"), "bad"),
}
"""By verdict, or how something ended, whether it is good, bad or open: its colour on a page and on a terminal."""

OUTCOME = re.compile(rf"(?:[^:]+: )??({'|'.join(OUTCOMES)})(?=[,:;\s]|$)")
"""The outcome that a text begins with, or that follows a name and a colon."""

SCALED = {unit: Decimal(repr(n)) for metric in units.METRICS.values() for unit, n in metric.scales.items()}
"""By display unit, its size in the metric's stored unit: 1e9 for GFLOPS, which are stored as FLOPS."""


def layout(
    table: Table | Glance, columns: Sequence[Column] | None = None
) -> tuple[list[str], list[str], list[list[str]]]:
    """Return the texts of a table: the headers, the delimiter row (`---:` or `---`), and the cells of each row.

    The numbers of a column share a unit and a number of decimals. Only `columns` are shown, all by default.
    """
    columns = table.columns if columns is None else columns
    numbers = [value for row in table.rows for value in row.values() if isinstance(value, Number)]
    mixed = {_is_of_runs(value) for value in numbers if value.spread is not None} == {True, False}
    headers: list[str] = []
    body: list[list[str]] = [[] for _ in table.rows]
    for column in columns:
        values = [row.get(column.key) for row in table.rows]
        style = None
        if column.metric:
            measured = [value.middle for value in values if isinstance(value, Number)]
            published = [value.value * float(SCALED[value.unit]) for value in values if isinstance(value, Figure)]
            style = units.style(_metric(column.metric, column.unit), measured or published)
        unit = style.unit if style else ""
        headers.append(" ".join(filter(None, (column.label, f"({unit})" if column.label and unit else unit))))
        for cells, value in zip(body, values, strict=True):
            shown = alias(value) if column.key == "session" and isinstance(value, str) else text(value, style)
            of_runs = mixed and isinstance(value, Number) and _is_of_runs(value) and value.spread is not None
            cells.append(shown.replace(")", " runs)") if of_runs else shown)
    rules = ["---:" if column.numeric or column.metric else "---" for column in columns]
    return headers, rules, body


def _is_of_runs(number: Number) -> bool:
    return number.mean is not None or number.of == "runs"


def _metric(name: str, unit: str) -> units.Metric:
    """Return a metric by name; one that only an imported file has is shown in its own unit."""
    known = name in units.METRICS or name in units.COMPUTED
    return units.metric(name) if known else units.Metric(name, unit, "", name)


def text(value: Value, style: units.Style | None = None) -> str:
    """Return the text of a cell; a dash if the value is missing. `style` is the unit and the decimals of its column."""
    if value is None or value == "":
        return units.MISSING
    if isinstance(value, Number):
        style = style or units.style(_metric(value.metric, value.unit), [value.middle])
        shown = style.value(value.middle)
        if value.spread is None:
            return shown if value.n in (1, None) else f"{shown} ({value.n})"
        return f"{shown} ± {style.spread(value.spread)} ({units.MISSING if value.n is None else value.n})"
    if isinstance(value, Figure):
        shown = value.text
        if style and value.unit != style.unit:  # every digit of it: 817 GFLOPS are 0.817 TFLOPS
            factor = SCALED[value.unit] / SCALED[style.unit]
            numbers = (value.value, 0.0 if value.stddev is None else value.stddev)
            middle, stddev = (float(Decimal(repr(number)) * factor) for number in numbers)
            shown = replace(value, value=middle, stddev=None if value.stddev is None else stddev).text
        return f"{shown} †" if value.excess else shown
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def effect_text(verdict: Verdict) -> str:
    """Return what follows a verdict's word: ` -3.10 % (-3.50 to -2.70)`, or `: WHY` if it has no effect."""
    if verdict.effect is None:
        return "".join(f": {reason}" for reason in verdict.reasons[:1])
    around = f" ({units.interval(verdict.interval)})" if verdict.interval else ""
    return f" {units.change(verdict.effect)} %{around}"


def legend(numbers: Iterable[Number], *, marked: bool = False) -> str:
    """Return a sentence on how to read these numbers: what they are, what ± is, what is in brackets; "" for none.

    `marked` says whether some are marked with a hard event.
    """
    numbers = list(numbers)
    spread = [number for number in numbers if number.spread is not None]
    of = {number.of for number in spread}
    parts = []
    if any(number.value is not None for number in spread):
        count = f"number of values, {units.MISSING} where the file does not say"
        parts.append(f"as the tool printed it ± its own spread ({count})")
    if "samples" in of:
        parts.append("median of a run's samples ± their scaled MAD (number of samples)")
    if "runs" in of:
        parts.append("median of a session's runs ± their scaled MAD (number of runs)")
    if "values" in of:
        parts.append("median of the values that the tool printed ± their scaled MAD (number of values)")
    if any(number.mean is not None for number in spread):
        parts.append("geometric mean of a chain's runs in the cycles that count ± their scaled MAD (number of runs)")
    if any(number.of == "kernels" for number in numbers):
        parts.append("a group of kernels: sum of their medians (number of samples)")
    if len(spread) < len(numbers):
        parts.append("a number alone is a single value")
    if marked:
        parts.append("a run with a hard event was disturbed: no verdict uses it, and a table only if there is no other")
    return "; ".join(parts)
