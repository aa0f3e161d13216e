"""Markdown from a report's records: each table, its notes beneath it, and all sources once at the end.

Every expression in every template is escaped: a cell cannot forge a row, a link or HTML.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from dgxlab import units
from dgxlab.errors import UsageError
from dgxlab.report.cells import layout, legend, text
from dgxlab.report.records import (
    Beside,
    Column,
    Failure,
    Number,
    Overview,
    Page,
    Report,
    Row,
    Table,
    some,
)
from dgxlab.report.sources import Source, blocks, sides, sources
from dgxlab.report.tables import of_arms
from dgxlab.store import alias

if TYPE_CHECKING:
    import jinja2

SPECIAL = re.compile(r"[\\|`*<>\[\]~&]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=(?i:www))\.")
"""Characters to escape: they could start markup inside a line, or form a link's address.

An underscore between letters or digits cannot, and MUL_MAT stays readable. All are ASCII punctuation, which a backslash
makes literal in CommonMark.
"""

WIDTH = 120  # max length of a line outside of tables, unless a word is longer

NO_LEADS = ("count", "found", "verdict")
"""Columns that no longer name a row, though they are no metric: the first values in tables of gates and verdicts."""

BRIEF = ("verdict", "effect", "interval", "baseline", "candidate", "promoted")
"""Columns of verdicts that are shown without --wide, after those that name a row."""

ASIDE: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "steps": (("step",), ("notes",)),
    "levers": (("lever",), ("hypothesis", "why")),
    "tries": (("try",), ("because", "why")),
    "gates": (("arm", "gate", "op", "when"), ("found", "engaged", "flaky")),
    "imported": (("file",), ("told",)),
}
"""By form, the columns that name a row, and the columns of long texts; without --wide these become notes beneath."""

DETAILS = ("against", "sizes", "asked")
"""Columns of gates that are left out without --wide, and with it become notes beneath: the table would be too wide."""

ARITHMETIC = "this shows that the arithmetic is right, not how good a model is"

_Part = tuple[str, str]  # a word in bold, "" for none, and the text after it


def render(report: Report, *, wide: bool = False) -> str:
    """Return a whole report as markdown, with one newline at its end; `wide` shows all columns and failures."""
    return _render("report.md.j2", report=report, sheet=_Sheet(report.tables, report.failures, wide=wide))


def render_page(page: Page, *, wide: bool = False, columns: tuple[str, ...] = ()) -> str:
    """Return the tables of a form as markdown, with headings if there are several.

    `wide` shows all columns, `columns` only those with these keys or labels. Raises UsageError if no table has a column
    of `columns`.
    """
    return _render("form.md.j2", page=page, sheet=_Sheet(page.tables, wide=wide, columns=columns))


def render_overview(overview: Overview) -> str:
    """Return the overview as markdown."""
    return _render("overview.md.j2", overview=overview)


def escape(plain: str) -> str:
    """Return text that is literal in one table cell or line: markup is escaped, control characters become blanks."""
    flat = "".join(" " if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp") else char for char in plain)
    return SPECIAL.sub(r"\\\g<0>", flat.strip())


def _render(template: str, **values: Any) -> str:
    page = _environment().get_template(template).render(**values)
    page = re.sub(r"\n{3,}", "\n\n", page).strip("\n") + "\n"
    return "".join(line if line.startswith(("|", "#")) else _folded(line) for line in page.splitlines(keepends=True))


def _folded(line: str) -> str:
    """Break a long line at blanks, so that it stays one paragraph or list item in markdown."""
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


class _Sheet:
    """The tables of a document, laid out for the templates, with numbered sources and what was left out.

    With `columns` (keys or labels) only these are shown; UsageError if no table has a column of such a name.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        failures: Sequence[Failure] = (),
        *,
        wide: bool = False,
        columns: tuple[str, ...] = (),
    ) -> None:
        every = {column.key: column.label for table in tables for column in table.columns}
        for name in columns:
            if name not in every and name not in every.values():
                known = ", ".join(label or key for key, label in every.items())
                raise UsageError(f"there is no column {name!r}; there are {known}", next="dgxlab report --help")
        numbered: dict[object, Source] = {}
        self.tables, numbers = [], []
        for table in tables:
            chosen, moved = _choose(table, columns, wide=wide)
            refs = {}
            for key, source in sources(table):
                numbered[key] = numbered[key].and_of(source) if key in numbered else source
                refs[list(numbered).index(key) + 1] = key
            parts = [layout(table, part) for part in ([chosen] if columns else _parts(table, chosen))]
            line, items = list(_line(table, moved)), list(_items(table, wide=wide))
            shown = {"title": table.title, "parts": parts, "line": line, "refs": list(refs), "beneath": items}
            self.tables.append(shown)
            numbers += [row.get(column.key) for column in chosen for row in table.rows]
        self.sources = list(blocks([*numbered.values()], conditions=not wide))  # else beneath each table
        self.ends = [] if wide else [failure for failure in failures if failure.kind == "session"]
        self.failures = failures if wide else []
        self.omitted = "" if wide else _omitted(tables, failures)
        marked = any(flag.hard for table in tables if table.kind != "published" for flag in table.flags)
        self.legend = legend((number for number in numbers if isinstance(number, Number)), marked=marked)


def _omitted(tables: Sequence[Table], failures: Sequence[Failure]) -> str:
    """Return how much is shown with --wide alone, and what lists it; "" for nothing."""
    cycles = {(table.provenance.sessions, each.chain, each.cycle) for table in tables for each in table.discards}
    counts = Counter({("cycle", "discarded"): len(cycles)})
    runs = [failure for failure in failures if failure.kind != "session"]
    counts.update((run.kind, run.status + " (counted later)" * run.again) for run in runs)
    flags = [flag for table in tables for flag in table.flags if not (flag.hard or flag.plain)]
    counts["flag", ""] = len(flags)
    parts = [f"{count} {noun}{'s' * (count > 1)} {what}".rstrip() for (noun, what), count in counts.items() if count]
    sessions = {name for table in tables if table.discards for name in table.provenance.sessions}
    sessions |= {run.session for run in runs} | {name for flag in flags for name in flag.sessions}
    where = [f"dgxlab report {alias(session)} --wide" for session in sorted(sessions)]
    return f"{', '.join(parts)}: see {', '.join(where)}" if parts else ""


def _choose(table: Table, names: Sequence[str], *, wide: bool) -> tuple[list[Column], Row]:
    """Return the columns to show, and the values that are the same in all rows and so need no column."""
    _, aside = _aside(table, wide=wide)
    columns, moved = [column for column in table.columns if column.key not in aside], {}
    if not wide:
        leads = list(takewhile(lambda column: not column.metric and column.key not in NO_LEADS, columns))
        values = {column.key: [row.get(column.key) for row in table.rows] for column in leads}
        alike = [column for column in leads if values[column.key] == values[column.key][:1] * len(table.rows)]
        alike = [column for column in alike if values[column.key][0] not in (None, "")]
        if len(table.rows) == 1:
            alike = alike[1:] if len(leads) > 3 else []  # a single row of many parameters would be too wide
        if len(leads) == len(columns) or len(alike) == len(leads):
            alike = []  # without numbers there are no leading columns, and rows must stay distinguishable
        alike = [column for column in alike if not {column.key, column.label} & {*names}]
        moved = {column.label: table.rows[0][column.key] for column in alike}
        columns = [column for column in columns if column not in alike and column.key not in DETAILS]
        filled = {key for row in table.rows for key, value in row.items() if value not in (None, "")}
        columns = [column for column in columns if column.metric or column.key in filled]
        if table.kind == "session" and table.form == "verdicts":
            columns = [column for column in columns if column in leads or column.key in BRIEF]
    if names:
        columns = [each for name in names for each in table.columns if name in (each.key, each.label)]
    return columns, moved


def _aside(table: Table, *, wide: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that name a row, and the columns whose texts become notes beneath the table."""
    names, texts = ASIDE.get(table.form, ((), ()))
    if wide:
        texts = (*texts, "env", *DETAILS) if table.form == "gates" else ()
    return names, texts


def _parts(table: Table, chosen: list[Column]) -> list[list[Column]]:
    """Split the columns of a session's verdicts in two tables, as --wide shows more than fit."""
    leads = list(takewhile(lambda column: column.key not in BRIEF, chosen))
    brief = [column for column in chosen if column.key in BRIEF]
    rest = [column for column in chosen[len(leads) :] if column not in brief]
    split = rest and table.kind == "session" and table.form == "verdicts"
    return [[*leads, *brief], [*leads, *rest]] if split else [chosen]


def _line(table: Table, moved: Row) -> Iterator[_Part]:
    settings = {**moved, **table.settings}
    beside = table.beside or Beside(())
    not_here = ", not measured here"
    if table.form != "gates":
        not_here += ": without n, and without spread where there is no ±"
    if table.kind == "published":
        yield "published", not_here
    if table.kind == "imported":
        yield "imported", ", not measured by dgxlab"
    if settings:
        shared = ", ".join(f"{name} {text(value)}" for name, value in settings.items())
        measured = "every measured row" if table.beside and table.kind != "published" else "every row"
        whose = {"verdicts": "both arms", "tries": "in all"}.get(table.form, measured)
        yield "", f"{whose}: {shared}"
    if table.differ:
        yield "", "; ".join(of_arms(name, *values) for name, values in table.differ.items())
    arms = [origin.provenance for origin in sides(table)]
    if any(arm.dirty for arm in arms):
        yield "working tree", "as it was on the disk"
    if synthetic := list(dict.fromkeys(name for arm in arms for name in arm.synthetic)):
        yield "synthetic model", ", ".join(synthetic) + (f": {ARITHMETIC}" if table.form == "gates" else "")
    if beside.sources and table.kind != "published":
        yield "published", not_here + (f" · all of {' '.join(beside.shared)}" if beside.shared else "")
    if beside.excess or (table.kind == "published" and table.flags):
        yield "", "† cannot be true"


def _items(table: Table, *, wide: bool) -> Iterator[_Part]:
    for because in table.because:
        yield because.verdict, f"{_labels(because.labels)}: {'; '.join(because.reasons)}"
    for each in table.discards if wide else ():
        of = f" for {_labels(each.labels)}" if each.labels else ""
        yield "", f"cycle {each.cycle} of {each.chain} does not count{of}: {each.reason}"
    for flag in table.flags:
        where = _labels(flag.labels, "every run after the burn-in" if table.kind == "session" else "every row")
        if table.kind == "published":
            yield "", f"† {where}: {flag.reason}"
        elif flag.hard:
            yield "hard event", f"in {where}: {flag.reason}"
        elif wide or flag.plain:
            yield "", f"flag in {where}: {flag.reason}"
    names, aside = _aside(table, wide=wide)
    heads = {column.key: f"{column.label} " for column in table.columns if column.key in ("env", "flaky", *DETAILS)}
    texts: dict[str, list[str]] = {}
    for row in table.rows:
        name = " ".join(str(row[key]) for key in names if row.get(key))
        long = (heads.get(key, "") + str(row[key]) for key in aside if row.get(key))
        texts.setdefault("; ".join(long), []).append(name)
    yield from (("", f"{_labels(rows)}: {long}") for long, rows in texts.items() if long)
    yield from (("", note) for note in table.notes)
    for origin in sides(table) if wide else ():
        if medians := units.conditions(origin.conditions):
            yield "", f"{origin.label}: ".removeprefix(": ") + f"median of a run: {medians}"
    beside = table.beside or Beside(())
    yield from (("", f"† {_labels(remark.labels)}: {remark.text}") for remark in beside.excess)
    yield from (("", f"{_labels(remark.labels)}: {remark.text}") for remark in beside.remarks)
    yield from (("", sentence) for sentence in beside.left)


def _labels(labels: Sequence[str], every: str = "every row") -> str:
    return ", ".join(some(labels)) if labels else every
