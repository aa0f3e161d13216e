"""What a reader sees of a document's tables: columns, the line and items beneath each, and all sources once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import takewhile

from dgxlab import units
from dgxlab.errors import UsageError
from dgxlab.published import Figure
from dgxlab.report.evidence import range_of
from dgxlab.report.imports import ImportedTable
from dgxlab.report.published import PublishedTable
from dgxlab.report.records import (
    ArmsTable,
    Beside,
    Column,
    Conditions,
    Failure,
    Glance,
    Number,
    Provenance,
    Remark,
    SessionTable,
    Source,
    Table,
    Value,
    some,
)
from dgxlab.report.tables import of_arms
from dgxlab.store import alias

LABELS = 3
"""Rows or runs that a sentence beneath a table names; the rest are counted."""

FEW = 3
"""Leading columns that a table of one row may have."""

NO_LEADS = ("count", "found", "verdict")
"""Keys of the first columns of gates and verdicts that do not tell rows apart; elsewhere a metric begins those."""

BRIEF = ("verdict", "effect", "interval", "baseline", "candidate", "promoted")
"""Keys of a table of verdicts, beyond its leading columns, unless all of it is shown."""

ASIDE: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "steps": (("step",), ("notes",)),
    "levers": (("lever",), ("hypothesis", "why")),
    "gates": (("gate", "when"), ("found",)),
    "imported": (("file",), ("told",)),
}
"""By form the keys of a row's name, and of long texts that are items beneath the table unless all of it is shown."""

DETAILS = ("against", "sizes", "asked")
"""Keys of gates that are left out unless all of it is shown."""

SCALED = {scale.unit: Decimal(repr(scale.factor)) for metric in units.METRICS.values() for scale in metric.scales}
"""How many of a metric's own unit make one of each that a column may be in."""

ARITHMETIC = "this shows that the arithmetic is right, not how good a model is"

Part = tuple[str, str]
"""A word in bold, "" for none, and the text after it."""


@dataclass(frozen=True)
class View:
    """How much is shown.

    Attributes:
        wide: Everything; else what decides.
        columns: Keys or labels of the columns, in this order; () for the usual ones.
    """

    wide: bool = False
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shown:
    """One table as it is written.

    Attributes:
        headers, rules, body: Of markdown.
        line: Beneath it; `refs` are the numbers of its sources, at the end of that line.
        items: Beneath that.
    """

    title: str
    headers: list[str]
    rules: list[str]
    body: list[list[str]]
    line: list[Part]
    refs: list[int]
    items: list[Part]


@dataclass
class Note:
    """One numbered source: what it is, facts about it, and what was sampled over all tables that name it."""

    title: str
    facts: dict[str, None]
    conditions: Conditions = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """What is written below the title."""
        sampled = units.conditions(self.conditions)
        return [*self.facts, *([f"median of a run: {sampled}"] if sampled else [])]


class Sheet:
    """The tables of one document.

    Attributes:
        tables: In order.
        notes: The sources of all of them, the first is [1].
        ends: How sessions ended that did not end well.
        failures: What else failed or does not count, where all of it is shown.
        omitted: What is left out, counted.
        legend: What the numbers are.
    """

    def __init__(self, tables: Sequence[Table], view: View = View(), failures: Iterable[Failure] = ()) -> None:
        """Lay the tables out.

        Raises:
            UsageError: if no table has a column that the view names.
        """
        _check_columns(tables, view)
        self._view = view
        self._numbered: dict[object, Note] = {}
        failures = list(failures)
        self.tables = [self._shown(table) for table in tables]
        self.notes = list(self._numbered.values())
        self.ends = [] if view.wide else [failure for failure in failures if failure.kind == "session"]
        self.failures = failures if view.wide else []
        self.omitted = "" if view.wide else ", ".join(_omitted(tables, failures))
        numbers = [row.get(c.key) for table in tables for c in _choose(table, view)[0] for row in table.rows]
        self.legend = legend(number for number in numbers if isinstance(number, Number))

    def _shown(self, table: Table) -> Shown:
        columns, moved = _choose(table, self._view)
        refs = [self._number(key, note) for key, note in _sources(table)]
        return Shown(
            table.title,
            *layout(table, columns),
            list(_line(table, moved)),
            list(dict.fromkeys(refs)),
            list(_items(table, self._view)),
        )

    def _number(self, key: object, note: Note) -> int:
        known = self._numbered.setdefault(key, note)
        known.facts |= note.facts
        known.conditions = range_of([known.conditions, note.conditions])
        return list(self._numbered).index(key) + 1


def _check_columns(tables: Sequence[Table], view: View) -> None:
    every = {column.key: column.label for table in tables for column in table.columns}
    for name in view.columns:
        if name not in every and name not in every.values():
            known = ", ".join(label or key for key, label in every.items())
            raise UsageError(f"there is no column {name!r}; there are {known}", next="dgxlab report --help")


def _omitted(tables: Sequence[Table], failures: Sequence[Failure]) -> Iterator[str]:
    compared = [table for table in tables if isinstance(table, SessionTable)]
    cycles = {(table.provenance.sessions, each.chain, each.cycle) for table in compared for each in table.discards}
    counts = Counter({"cycle discarded": len(cycles)})
    for failure in failures:
        if failure.kind != "session":
            counts[f"{failure.kind} {failure.status}" + " (counted later)" * failure.again] += 1
    counts["flag"] = sum(not flag.hard for table in tables for flag in table.flags)
    for what, count in counts.items():
        noun, _, rest = what.partition(" ")
        if count:
            yield " ".join(filter(None, (f"{count} {noun}{'s' * (count > 1)}", rest)))


# -- columns and cells ------------------------------------------------------------------------------------------------


def _choose(table: Table, view: View) -> tuple[list[Column], dict[str, Value]]:
    """Return the columns that are shown, and what is the same in every row and so has none."""
    columns, moved = list(table.columns), {}
    if not view.wide:
        leads = list(takewhile(lambda column: not column.metric and column.key not in NO_LEADS, columns))
        alike = [column for column in leads if _is_alike(table.rows, column.key)]
        if len(table.rows) == 1:
            alike = alike[1:] if len(leads) > FEW else []  # a single row of many parameters would be too wide
        if len(leads) == len(columns) or len(alike) == len(leads):
            alike = []  # without numbers nothing leads, and something must tell rows apart
        alike = [column for column in alike if not {column.key, column.label} & {*view.columns}]
        moved = {column.label: table.rows[0][column.key] for column in alike}
        _, aside = ASIDE.get(table.form, ((), ()))
        columns = [column for column in columns if column not in alike and column.key not in (*aside, *DETAILS)]
        columns = [column for column in columns if column.metric or _is_known(table.rows, column.key)]
        if isinstance(table, SessionTable) and table.form == "verdicts":
            columns = [column for column in columns if column in leads or column.key in BRIEF]
    if view.columns:
        columns = [each for name in view.columns for each in table.columns if name in (each.key, each.label)]
    return columns, moved


def _is_known(rows: Sequence[Mapping[str, Value]], key: str) -> bool:
    return any(row.get(key) not in (None, "") for row in rows)


def _is_alike(rows: Sequence[Mapping[str, Value]], key: str) -> bool:
    values = [row.get(key) for row in rows]
    return values[0] not in (None, "") and all(value == values[0] for value in values)


def layout(
    table: Table | Glance, shown: Sequence[Column] | None = None
) -> tuple[list[str], list[str], list[list[str]]]:
    """Return header texts, delimiter cells and body texts, in one unit and one number of decimals a column.

    Args:
        shown: Columns of the table; all of them by default.
    """
    columns = table.columns if shown is None else shown
    styles = {column.key: _style(table, column) for column in columns if column.metric}
    numbers = [value for row in table.rows for value in row.values() if isinstance(value, Number)]
    mixed = {value.mean is not None for value in numbers if value.spread is not None} == {True, False}
    headers = [_header(column, styles.get(column.key)) for column in columns]
    rules = ["---:" if column.numeric or column.metric else "---" for column in columns]
    body = [[_cell(row, column, styles.get(column.key), mixed) for column in columns] for row in table.rows]
    return headers, rules, body


def _cell(row: Mapping[str, Value], column: Column, style: units.Style | None, mixed: bool) -> str:
    value = row.get(column.key)
    if column.key == "session" and isinstance(value, str):
        return alias(value)
    if isinstance(value, Number) and mixed and value.mean is not None and value.spread is not None:
        return text(value, style).replace(")", " runs)")
    return text(value, style)


def _style(table: Table | Glance, column: Column) -> units.Style:
    cells = [row.get(column.key) for row in table.rows]
    measured = [cell.middle for cell in cells if isinstance(cell, Number)]
    published = [cell.value * float(SCALED[cell.unit]) for cell in cells if isinstance(cell, Figure)]
    return units.style(_metric(column.metric, column.unit), measured or published)


def _metric(name: str, unit: str) -> units.Metric:
    """Return a metric; one of an imported file that dgxlab does not measure is shown in the unit that it has there."""
    known = name in units.METRICS or name in units.COMPUTED
    return units.metric(name) if known else units.Metric(name, unit, "", name, (units.Scale(unit, 1.0),))


def _header(column: Column, style: units.Style | None) -> str:
    if style is None:
        return column.label
    unit = f"({style.unit})" if column.label and style.unit else style.unit
    return " ".join(filter(None, (column.label, unit)))


def text(value: Value, style: units.Style | None = None) -> str:
    """Write a value; a dash where it is missing."""
    if value is None or value == "":
        return units.MISSING
    if isinstance(value, Number):
        style = style or units.style(_metric(value.metric, value.unit), [value.middle])
        shown = style.value(value.middle)
        if value.spread is None:
            return shown if value.n in (1, None) else f"{shown} ({value.n})"
        return f"{shown} ± {style.spread(value.spread)} ({units.MISSING if value.n is None else value.n})"
    if isinstance(value, Figure):
        shown = value.text if style is None else _in_unit(value, style.unit).text
        return f"{shown} †" if value.excess else shown
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _in_unit(figure: Figure, unit: str) -> Figure:
    """Return a figure in a column's unit, every digit of it: 817 GFLOPS are 0.817 TFLOPS."""
    factor = SCALED[figure.unit] / SCALED[unit] if figure.unit != unit else Decimal(1)
    stddev = None if figure.stddev is None else float(Decimal(repr(figure.stddev)) * factor)
    return replace(figure, unit=unit, value=float(Decimal(repr(figure.value)) * factor), stddev=stddev)


def legend(numbers: Iterable[Number]) -> str:
    """Explain numbers: what they are, what ± is and what is counted in the brackets; "" without any."""
    numbers = list(numbers)
    spread = [number for number in numbers if number.spread is not None]
    of = {number.of for number in spread}
    parts = {
        f"as the tool printed it ± its own spread (number of values, {units.MISSING} where the file does not say)": any(
            number.value is not None for number in spread
        ),
        "median of a run's samples ± their scaled MAD (number of samples)": "samples" in of,
        "median of the values that the tool printed ± their scaled MAD (number of values)": "values" in of,
        "geometric mean of a chain's runs in the cycles that count ± their scaled MAD (number of runs)": any(
            number.mean is not None for number in spread
        ),
        "a number without ± is a single value": len(spread) < len(numbers),
    }
    return "; ".join(part for part, occurs in parts.items() if occurs)


# -- the line and the items beneath a table ---------------------------------------------------------------------------


def _line(table: Table, moved: Mapping[str, Value]) -> Iterator[Part]:
    settings = {**moved, **table.settings}
    if isinstance(table, PublishedTable):
        yield "published", _published(table.form)
    if isinstance(table, ImportedTable):
        yield "imported", ", not measured by dgxlab"
    if settings:
        shared = ", ".join(f"{name} {text(value)}" for name, value in settings.items())
        yield "", f"every {'measured row' if table.beside else 'row'}: {shared}"
    if isinstance(table, SessionTable) and table.differ:
        yield "", "; ".join(of_arms(name, *values) for name, values in table.differ.items())
    sides = [provenance for _, provenance, _, _ in _sides(table)]
    if any(side.dirty for side in sides):
        yield "dirty", "tree"
    if synthetic := list(dict.fromkeys(name for side in sides for name in side.synthetic)):
        yield "synthetic model", ", ".join(synthetic) + (f": {ARITHMETIC}" if table.form == "gates" else "")
    if table.beside and table.beside.sources:
        about = f" · all of {' '.join(table.beside.shared)}" if table.beside.shared else ""
        yield "published", _published(table.form) + about
    if (table.beside and table.beside.excess) or (isinstance(table, PublishedTable) and table.flags):
        yield "", "† cannot be true"


def _published(form: str) -> str:
    how = "" if form == "gates" else ": without n, and without spread where there is no ±"
    return f", not measured here{how}"


def _items(table: Table, view: View) -> Iterator[Part]:
    if isinstance(table, SessionTable):
        for because in table.because:
            yield because.verdict, f"{_labels(because.labels)}: {'; '.join(because.reasons)}"
        for each in table.discards if view.wide else ():
            of = f" for {_labels(each.labels)}" if each.labels else ""
            yield "", f"cycle {each.cycle} of {each.chain} does not count{of}: {each.reason}"
    yield from _flags(table, view)
    names, aside = ASIDE.get(table.form, ((), ()))
    texts: dict[str, list[str]] = {}
    for row in () if view.wide else table.rows:
        name = " ".join(str(row[key]) for key in names if row.get(key))
        texts.setdefault("; ".join(str(row[key]) for key in aside if row.get(key)), []).append(name)
    for long, rows in texts.items():
        if long:
            yield "", f"{_labels(rows)}: {long}"
    if isinstance(table, (ArmsTable, ImportedTable)):
        for note in table.notes:
            yield "", note
    if view.wide:
        for label, _, sampled, _ in _sides(table):
            if medians := units.conditions(sampled):
                yield "", f"{label}: ".removeprefix(": ") + f"median of a run: {medians}"
    yield from _remarks(table)


def _flags(table: Table, view: View) -> Iterator[Part]:
    if isinstance(table, PublishedTable):
        for flag in table.flags:
            yield "", f"† {_labels(flag.labels)}: {flag.reason}"
        return
    every = "every run" if isinstance(table, SessionTable) else "every row"
    for flag in table.flags:
        if flag.hard:
            yield "hard event", f"in {_labels(flag.labels, every)}: {flag.reason}"
        elif view.wide:
            yield "", f"flag in {_labels(flag.labels, every)}: {flag.reason}"


def _remarks(table: Table) -> Iterator[Part]:
    remarks: Sequence[Remark] = table.remarks if isinstance(table, PublishedTable) else ()
    beside = table.beside or Beside(())
    for remark in beside.excess:
        yield "", f"† {_labels(remark.labels)}: {remark.text}"
    for remark in (*beside.remarks, *remarks):
        yield "", f"{_labels(remark.labels)}: {remark.text}"
    for sentence in beside.left:
        yield "", sentence


def _labels(labels: Sequence[str], every: str = "every row") -> str:
    """Name the first of them; none are all."""
    return ", ".join(some(labels, LABELS)) if labels else every


# -- sources ----------------------------------------------------------------------------------------------------------

Side = tuple[str, Provenance, Conditions, Sequence[str]]
"""One arm of a table: its name there, where it comes from, what was sampled, and what else is true of it."""


def _sides(table: Table) -> list[Side]:
    if isinstance(table, (ImportedTable, PublishedTable)):
        return []
    if isinstance(table, ArmsTable):
        return [(each.label, each.provenance, each.conditions, each.notes) for each in table.origins]
    if not isinstance(table, SessionTable):
        return [("", table.provenance, table.conditions, ())]
    protocol = [", ".join(f"{name} {text(value)}" for name, value in table.protocol.items())] if table.protocol else []
    sides: list[Side] = [("baseline" if table.candidate else "both arms", table.provenance, table.conditions, protocol)]
    if table.candidate:
        sides.append(("candidate", table.candidate, table.candidate_conditions, ()))
    return sides


def _sources(table: Table) -> Iterator[tuple[object, Note]]:
    """Yield the sources of a table, each with what tells it from others."""
    for label, provenance, sampled, more in _sides(table):
        experiment = provenance.experiment
        title = f"{label} {experiment}" if isinstance(table, SessionTable) else label or f"experiment {experiment}"
        if isinstance(table, ArmsTable) and label != experiment:
            title = f"{label} (experiment {experiment})"
        yield (
            (title, replace(provenance, synthetic=())),
            Note(title, dict.fromkeys([*_facts(provenance), *more]), sampled),
        )
    published = table.sources if isinstance(table, PublishedTable) else table.beside.sources if table.beside else ()
    for source in published:
        yield source, _of_published(source)
    if isinstance(table, ImportedTable) and table.sha256:
        facts = [f"sha256 {table.sha256}", table.tool, *(f"{name}: {value}" for name, value in table.told)]
        yield table.sha256, Note(f"imported file {table.file}", dict.fromkeys(facts))


def _facts(origin: Provenance) -> Iterator[str]:
    yield f"session {', '.join(origin.sessions) or units.MISSING}"
    yield f"host {origin.host} · backend {origin.backend}"
    build = origin.build_id or units.MISSING
    yield f"pin {origin.pin[:12]} · tree {origin.tree[:12]}{' (dirty)' * origin.dirty} · build {build}"
    yield "series " + (", ".join(f"{ref.name}@{ref.digest[:12]}" for ref in origin.series) or "none")


def _of_published(source: Source) -> Note:
    facts = [
        f"host {source.host} · {source.engine}",
        f"{', '.join(source.tools)} · {source.file} line {_ranges(source.lines)}",
    ]
    return Note(f"published: {source.doc}", dict.fromkeys(facts))


def _ranges(numbers: Sequence[int]) -> str:
    """Write whole numbers in order: `13, 15 to 18`."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
