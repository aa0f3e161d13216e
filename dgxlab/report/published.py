"""Tables of published figures only: those of three documents, published gates, and figures that match a pattern."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import resources

from dgxlab import published
from dgxlab.published import Figure, GateResult
from dgxlab.report.beside import UNREMARKABLE, matching, sources
from dgxlab.report.records import Beside, Column, Provenance, Remark, Row, ShownFlag, Table, Value, grouped

GATES = {"tests_passed": "parity", "greedy_md5": "greedy"}

ABOUT = ("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test", "metric")
"""Fields that may distinguish figures, in the order of columns."""


def _document(name: str) -> Table:
    """Return a table of published/tables.json, which refers to figures by their line in published.csv."""
    text = resources.files("dgxlab.published").joinpath("tables.json").read_text(encoding="utf-8")
    content = json.loads(text)[name]
    rows = [
        {key: _at(value["line"]) if isinstance(value, dict) else value for key, value in row.items()}
        for row in content["rows"]
    ]
    columns = [Column(key, label, numeric=key not in content["texts"]) for key, label in content["columns"].items()]
    return _table(
        content["form"],
        content["title"],
        columns,
        rows,
        content["settings"],
        leads=content["leads"],
        extra=[Remark((label,), text) for label, text in content["remarks"].items()],
        also=[_at(line) for line in content["used"]],
        noted=content["noted"],
    )


def _at(line: int) -> Figure:
    return published.figures()[line - 2]


def gates() -> Table:
    """Return a table of every published gate."""
    rows: list[dict[str, Value]] = []
    for gate in published.gates():
        about = {"gate": f"{GATES[gate.metric]}: {gate.test}", "result": gate.value, "pin": gate.pin}
        rows.append({**about, "model": gate.model, "source": gate.source_doc, "notes": gate.notes})
    columns = [Column(key, key) for key in rows[0]]
    return _table("gates", "Published gates", columns, rows, {}, also=published.gates())


TABLES: Mapping[str, Callable[[], Table]] = {
    **{name: partial(_document, name) for name in ("steps", "concurrency", "kernel_bytes")},
    "gates": gates,
}
"""By name, the tables that form=published can show."""


def series(pattern: str) -> Table:
    """Return a table of every figure that has all words of a pattern; values common to all have no column."""
    figures = matching(published.figures(), pattern, "figure")
    leads = [name for name in ABOUT if len({getattr(figure, name) for figure in figures}) > 1] or ["metric"]
    rows: list[dict[str, Value]] = [
        {**{name: getattr(figure, name) for name in leads}, "value": figure, "unit": figure.unit, "notes": figure.notes}
        for figure in figures
    ]
    columns = [Column(name, name.removesuffix("_doc")) for name in leads]
    columns += [Column("value", "value", numeric=True), Column("unit", "unit"), Column("notes", "notes")]
    alike = {name: getattr(figures[0], name) for name in ("model", "quant", "test", "metric") if name not in leads}
    settings = {name: value for name, value in alike.items() if value}
    title = f"Published figures: {pattern}"
    return _table("published", title, columns, rows, settings, leads=len(leads), noted=False)


def _table(
    form: str,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    settings: Mapping[str, Value],
    *,
    leads: int = 1,
    extra: Iterable[Remark] = (),
    also: Sequence[Figure | GateResult] = (),
    noted: bool = True,
) -> Table:
    """Return a table of published figures, whose first columns, `leads` of them, distinguish rows.

    Entries of `also` are used but not shown as numbers. The notes of figures are remarks if `noted`, as are `extra`.
    """
    figures: list[tuple[str, Figure]] = []
    for row in rows:
        values = [(column.key, row[column.key]) for column in columns[:leads]]
        name = ", ".join(f"{key} {value}" if isinstance(value, int) else str(value) for key, value in values)
        for column in columns:
            if isinstance(value := row.get(column.key), Figure):
                figures.append((f"{column.label.partition(' (')[0]} at {name}", value))
    notes = grouped((figure.notes, where) for where, figure in figures if noted and figure.notes not in UNREMARKABLE)
    every = (*(figure for _, figure in figures), *also)
    host = ", ".join(dict.fromkeys(entry.host for entry in every))
    remarks = (*(Remark(tuple(labels), text) for text, labels in notes.items()), *extra)
    return Table(
        form,
        title,
        tuple(columns),
        tuple(rows),
        Provenance("published", host=host),
        settings,
        flags=tuple(ShownFlag((label,), True, figure.excess) for label, figure in figures if figure.excess),
        beside=Beside(sources(every), remarks=remarks),
        kind="published",
    )
