"""Markdown out of records. Every expression in every template is escaped: a cell cannot forge a row, a link or HTML."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

from dgxlab import units
from dgxlab.published import Figure
from dgxlab.report.failures import some
from dgxlab.report.published import PublishedTable
from dgxlab.report.records import (
    ArmsTable,
    Column,
    Glance,
    Mean,
    Overview,
    Page,
    Provenance,
    Quantity,
    Report,
    SessionReport,
    SessionTable,
    Table,
    Value,
)

if TYPE_CHECKING:
    import jinja2

SPECIAL = re.compile(r"[\\|`*<>\[\]~&]|(?<![^\W_])_|_(?![^\W_])")
"""What could start markup inside a line; an underscore between letters or digits cannot, and MUL_MAT stays readable.

All are ASCII punctuation, which a backslash makes literal in CommonMark.
"""


LABELS = 3
"""Rows or runs that a sentence beneath a table names; the rest are counted."""


TEMPLATES = (
    (PublishedTable, "published_table.md.j2"),
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
    """Return the tables of a form; a heading stands above each where there are several."""
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
    middles = [cell.median if isinstance(cell, Quantity) else cell.mean for cell in cells if _is_measured(cell)]
    return units.style(units.metric(column.metric), middles)


def _is_measured(value: Value) -> TypeGuard[Quantity | Mean]:
    return isinstance(value, (Quantity, Mean))


def _header(column: Column, style: units.Style | None) -> str:
    if style is None:
        return column.label
    return f"{column.label} ({style.unit})" if column.label else style.unit


def _text(value: Value, style: units.Style | None = None) -> str:
    if value is None or value == "":
        return units.MISSING
    if isinstance(value, Quantity):
        style = style or units.style(units.metric(value.metric), [value.median])
        return style.quantity(value.median, value.spread)
    if isinstance(value, Mean):
        style = style or units.style(units.metric(value.metric), [value.mean])
        return style.value(value.mean)
    if isinstance(value, Figure):
        return f"{value.text} †" if value.excess else value.text
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _settings(settings: Mapping[str, Value]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in settings.items())


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


def _spreads(table: Table) -> bool:
    """Tell whether any number in the table has a spread, which then is explained beneath it."""
    return any(isinstance(v, Quantity) and v.spread is not None for row in table.rows for v in row.values())


def _means(table: Table) -> bool:
    """Tell whether any number in the table is a mean, which then is explained beneath it."""
    return any(isinstance(v, Mean) for row in table.rows for v in row.values())


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
        series=_series,
        labels=_labels,
        counted=lambda count, name: f"{count} {name.removesuffix('s') if count == 1 else name}",
        ranges=_ranges,
        means=_means,
        spreads=_spreads,
        template=_template,
        conditions=units.conditions,
    )
    return environment
