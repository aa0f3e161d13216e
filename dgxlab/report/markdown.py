"""Markdown out of records. Every expression in every template is escaped: a cell cannot forge a row, a link or HTML."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from typing import TYPE_CHECKING, Any

from dgxlab import units
from dgxlab.published import Figure
from dgxlab.report.imports import ImportedTable
from dgxlab.report.published import PublishedTable
from dgxlab.report.records import (
    ArmsTable,
    Column,
    Glance,
    Number,
    Overview,
    Page,
    Provenance,
    Report,
    SessionReport,
    SessionTable,
    Table,
    Value,
    some,
)
from dgxlab.report.tables import of_arms

if TYPE_CHECKING:
    import jinja2

SPECIAL = re.compile(r"[\\|`*<>\[\]~&]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=(?i:www))\.")
"""What could start markup inside a line, or be taken for the address of a link.

An underscore between letters or digits cannot, and MUL_MAT stays readable.
All are ASCII punctuation, which a backslash makes literal in CommonMark.
"""

SCALED = {scale.unit: Decimal(repr(scale.factor)) for metric in units.METRICS.values() for scale in metric.scales}
"""How many of a metric's own unit make one of each that a column may be in."""

LABELS = 3
"""Rows or runs that a sentence beneath a table names; the rest are counted."""


TEMPLATES = (
    (PublishedTable, "published_table.md.j2"),
    (ImportedTable, "imported_table.md.j2"),
    (ArmsTable, "arms_table.md.j2"),
    (SessionTable, "session_table.md.j2"),
)
"""By kind of table, its template."""


def render(report: Report) -> str:
    """Return the whole report as markdown, one newline at its end."""
    return _render("session.md.j2" if isinstance(report, SessionReport) else "report.md.j2", report=report)


def render_table(table: Table) -> str:
    """Return one table with its provenance, without a heading."""
    return _render(_template(table), table=table)


def render_page(page: Page) -> str:
    """Return the tables of a form; each has a heading where there are several."""
    return _render("form.md.j2", page=page)


def render_overview(overview: Overview) -> str:
    """Return the latest of everything."""
    return _render("overview.md.j2", overview=overview)


def _template(table: Table) -> str:
    """Return what renders a table of its kind."""
    return next((name for kind, name in TEMPLATES if isinstance(table, kind)), "table.md.j2")


def escape(text: str) -> str:
    """Make text literal in one table cell or line: markup escaped, line breaks and control characters made spaces."""
    flat = "".join(" " if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") else char for char in text)
    return SPECIAL.sub(r"\\\g<0>", flat.strip())


def layout(table: Table | Glance) -> tuple[list[str], list[str], list[list[str]]]:
    """Return header texts, delimiter cells and body texts, in one unit and one number of decimals a column."""
    styles = {column.key: _style(table, column) for column in table.columns if column.metric}
    headers = [_header(column, styles.get(column.key)) for column in table.columns]
    rules = ["---:" if column.numeric or column.metric else "---" for column in table.columns]
    body = [[_text(row.get(column.key), styles.get(column.key)) for column in table.columns] for row in table.rows]
    return headers, rules, body


def _style(table: Table | Glance, column: Column) -> units.Style:
    cells = [row.get(column.key) for row in table.rows]
    measured = [cell.middle for cell in cells if isinstance(cell, Number)]
    published = [cell.value * float(SCALED[cell.unit]) for cell in cells if isinstance(cell, Figure)]
    return units.style(_metric(column.metric, column.unit), measured or published)


def _metric(name: str, unit: str) -> units.Metric:
    """Return a metric; one of an imported file that dgxlab does not measure is shown in the unit that it has there."""
    known = name in units.METRICS or name in units.COMPUTED
    return units.metric(name) if known else units.Metric(name, unit, "", name, (units.Scale(unit, 1.0),))


def _in_unit(figure: Figure, unit: str) -> Figure:
    """Return a figure in a column's unit, every digit of it: 817 GFLOPS are 0.817 TFLOPS."""
    factor = SCALED[figure.unit] / SCALED[unit] if figure.unit != unit else Decimal(1)
    stddev = None if figure.stddev is None else float(Decimal(repr(figure.stddev)) * factor)
    return replace(figure, unit=unit, value=float(Decimal(repr(figure.value)) * factor), stddev=stddev)


def _number(value: Number, style: units.Style) -> str:
    """Write a number with its spread and how many stand behind it; of a single one no spread is known."""
    runs = " run" + "s" * (value.n != 1) if value.mean is not None else ""
    spread = units.MISSING if value.spread is None else style.spread(value.spread)
    count = units.MISSING if value.n is None else value.n
    return f"{style.value(value.middle)} ± {spread} ({count}{runs})"


def _header(column: Column, style: units.Style | None) -> str:
    if style is None:
        return column.label
    unit = f"({style.unit})" if column.label and style.unit else style.unit
    return " ".join(filter(None, (column.label, unit)))


def _text(value: Value, style: units.Style | None = None) -> str:
    if value is None or value == "":
        return units.MISSING
    if isinstance(value, Number):
        return _number(value, style or units.style(_metric(value.metric, value.unit), [value.middle]))
    if isinstance(value, Figure):
        text = value.text if style is None else _in_unit(value, style.unit).text
        return f"{text} †" if value.excess else text
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _settings(settings: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in settings.items())


def _differ(differ: Mapping[str, tuple[Value, Value]]) -> str:
    return "; ".join(of_arms(name, *values) for name, values in differ.items())


def _series(origin: Provenance) -> str:
    return ", ".join(f"{ref.name}@{ref.digest[:12]}" for ref in origin.series) or "none"


def _labels(labels: Sequence[str], every: str = "every row") -> str:
    """Name the first of them; none are all."""
    return ", ".join(some(labels, LABELS)) if labels else every


def _ranges(numbers: Sequence[int]) -> str:
    """Write whole numbers in order: `13, 15 to 18`."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))


def _numbers(table: Table) -> str:
    """Explain the numbers of a table: what they are, what ± is and what is counted in the brackets; "" without any."""
    numbers = [value for row in table.rows for value in row.values() if isinstance(value, Number)]
    means = any(value.mean is not None for value in numbers)
    of = {value.of for value in numbers}
    alone = any(value.spread is None for value in numbers)
    printed = [value for value in numbers if value.value is not None]
    parts = [
        f"as the tool printed it ± its own spread (how many values; {units.MISSING} where the file does not say)"
        * bool(printed),
        "median of a run's samples ± their scaled MAD (how many samples)" * ("samples" in of),
        "median of the values that the tool printed ± their scaled MAD (how many values)" * ("values" in of),
        "geometric mean of a chain's runs in the cycles that count ± their scaled MAD (how many runs)" * means,
        f"{units.MISSING} where there is one, of which no spread is known" * alone,
    ]
    return "; ".join(filter(None, parts))


def _render(template: str, **values: Any) -> str:
    text = _environment().get_template(template).render(**values)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


@cache
def _environment() -> jinja2.Environment:
    """Autoescape with our own escaping: `finalize` sees every expression's value before the default one does.

    A macro's result is Markup and passes as it is; None becomes a dash, an undefined name an error.
    """
    import jinja2
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else Markup(escape(_text(value)))  # noqa: S704 - escaped right here

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dgxlab"),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        layout=layout,
        settings=_settings,
        differ=_differ,
        series=_series,
        labels=_labels,
        counted=lambda count, name: f"{count} {name.removesuffix('s') if count == 1 else name}",
        ranges=_ranges,
        numbers=_numbers,
        template=_template,
        conditions=units.conditions,
    )
    return environment
