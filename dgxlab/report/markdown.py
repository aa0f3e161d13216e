"""Markdown out of records. Every expression in every template is escaped: a cell cannot forge a row, a link or HTML."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Any

from dgxlab.report.records import Overview, Page, Report, Table
from dgxlab.report.shown import Sheet, View, layout, text
from dgxlab.store import alias

if TYPE_CHECKING:
    import jinja2

SPECIAL = re.compile(r"[\\|`*<>\[\]~&]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=(?i:www))\.")
"""What could start markup inside a line, or be taken for the address of a link.

An underscore between letters or digits cannot, and MUL_MAT stays readable.
All are ASCII punctuation, which a backslash makes literal in CommonMark.
"""

WIDTH = 120
"""Characters of a line outside of tables, where its words allow it."""


def render(report: Report, *, wide: bool = False) -> str:
    """Return the whole report as markdown, one newline at its end."""
    return _render("report.md.j2", report=report, sheet=Sheet(report.tables, View(wide), report.failures))


def render_table(table: Table, *, wide: bool = False) -> str:
    """Return one table with its sources, without a heading."""
    return render_page(Page(table.form, (table,)), wide=wide)


def render_page(page: Page, *, wide: bool = False, columns: tuple[str, ...] = ()) -> str:
    """Return the tables of a form; each has a heading where there are several.

    Raises:
        UsageError: if no table has a column of `columns`.
    """
    return _render("form.md.j2", page=page, sheet=Sheet(page.tables, View(wide, columns)))


def render_overview(overview: Overview) -> str:
    """Return the latest of everything."""
    return _render("overview.md.j2", overview=overview)


def escape(plain: str) -> str:
    """Make text literal in one table cell or line: markup escaped, line breaks and control characters made spaces."""
    flat = "".join(" " if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") else char for char in plain)
    return SPECIAL.sub(r"\\\g<0>", flat.strip())


def _render(template: str, **values: Any) -> str:
    page = _environment().get_template(template).render(**values)
    page = re.sub(r"\n{3,}", "\n\n", page).strip("\n") + "\n"
    return "".join(line if line.startswith(("|", "#")) else _folded(line) for line in page.splitlines(keepends=True))


def _folded(line: str) -> str:
    """Break a long line at blanks; it stays one paragraph or list item, whatever word a line begins with."""
    if len(line) <= WIDTH:
        return line
    text_alone = line.lstrip("- ")
    mark = line[: len(line) - len(text_alone)]
    first, *words = text_alone.split()  # two blanks at the end of a line would be a line break
    lines = [mark + first]
    for word in words:
        starts_markup = word[0] in "-+#>=" or word.rstrip(".)").isdigit()
        if len(lines[-1]) + 1 + len(word) > WIDTH and not starts_markup:
            lines.append(" " * len(mark) + word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines) + "\n"


@cache
def _environment() -> jinja2.Environment:
    """Autoescape with our own escaping: `finalize` sees every expression's value before the default one does.

    A macro's result is Markup and passes as it is; None becomes a dash, an undefined name an error.
    """
    import jinja2
    from markupsafe import Markup

    def finalize(value: Any) -> Any:
        return value if isinstance(value, Markup) else Markup(escape(text(value)))  # noqa: S704 - escaped right here

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("dgxlab"),
        autoescape=True,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        alias=alias,
        layout=layout,
        counted=lambda count, name: f"{count} {name.removesuffix('s') if count == 1 else name}",
    )
    return environment
