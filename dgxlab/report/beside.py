"""Published figures set beside what was measured: in rows or columns of their own, which say what they are.

Nothing is computed from both: no ratio, no mean, no share of a roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from dgxlab import published, units
from dgxlab.model import Param
from dgxlab.published import Figure
from dgxlab.report.ask import OP_ORDER
from dgxlab.report.citation import REMARKABLE, Beside, Remark, fitting, label, sources
from dgxlab.report.failures import some
from dgxlab.report.numbers import Value
from dgxlab.report.query import Query
from dgxlab.report.records import Column, Table
from dgxlab.report.series import Cell, Series, selected

Shown = TypeVar("Shown", bound=Table)

Placed = list[tuple[Series, str, Figure]]

LEFT = 3
"""Figures named that have no place in a table; the rest are counted."""


def rows_beside(wanted: Query, table: Shown, column_of: Callable[[Cell], str | None]) -> Shown:
    """Return a table with a row for each series whose figures are of its columns.

    Args:
        column_of: Key of the column that a cell belongs into; None for a cell that has none.

    Raises:
        UsageError: if something is asked for that was not published.
    """
    if not wanted.published:
        return table
    lead = table.columns[0].key
    placed: Placed = []
    left: list[Figure] = []
    rows: list[Mapping[str, Value]] = []
    labels = {column.key: column.label for column in table.columns}
    found = selected(wanted.form, wanted.published)
    for series in found:
        row: dict[str, Value] = {}
        for (cell, _), figure in series.figures.items():
            if key := column_of(cell):
                row[key] = figure
                placed.append((series, labels[key], figure))
            else:
                left.append(figure)
        if row:
            rows.append({lead: series.label, **row, "published": True})
    return _with(table, table.columns, (*table.rows, *rows), placed, found[0].shared, _left(left, "columns"))


def columns_beside(
    found: Sequence[Series], table: Shown, lead_of: Callable[[Cell], Mapping[str, Value] | None]
) -> Shown:
    """Return a table with columns for each series, and a row for each of its cells that nobody measured.

    Args:
        found: What is asked for; nothing changes without any.
        lead_of: What stands in the leading columns of a cell's row; None for a cell that is not of this table.
    """
    if not found:
        return table
    rows = [dict(row) for row in table.rows]
    columns = list(table.columns)
    placed: Placed = []
    left: list[Figure] = []
    for number, series in enumerate(found):
        for metric in sorted({metric for _, metric in series.figures}):
            key = f"published.{number}.{metric}"
            of_metric = {cell: figure for (cell, name), figure in series.figures.items() if name == metric}
            here = {cell: lead for cell in of_metric if (lead := lead_of(cell)) is not None}
            left += [figure for cell, figure in of_metric.items() if cell not in here]
            if here:
                columns.append(Column(key, " ".join(filter(None, (series.label, units.metric(metric).label))), metric))
            for cell, lead in here.items():
                _row(rows, lead, table)[key] = of_metric[cell]
                where = " ".join(f"{name}={said}" for name, said in lead.items() if said is not None)
                placed.append((series, where, of_metric[cell]))
    return _with(table, columns, rows, placed, found[0].shared, _left(left, "rows"))


def gates_beside(wanted: Query, table: Table) -> Table:
    """Return a table of gates with a row for each that a document reports.

    Raises:
        UsageError: if something is asked for that was not published.
    """
    if not wanted.published:
        return table
    known = published.gates()
    every = {one.line: one for pattern in wanted.published for one in fitting(known, pattern, "gate")}
    found = [one for one in every.values() if one.metric == "tests_passed"]
    greedy = len(every) - len(found)
    rows: list[Mapping[str, Value]] = [
        {"op": one.test, "count": one.value, "status": f"{label(one)}, pin {one.pin}", "published": True}
        for one in found
    ]
    said = (
        [f"{greedy} of the published gates are md5s of greedy tokens: form=published table=gates has them"]
        if greedy
        else []
    )
    return replace(table, rows=(*table.rows, *rows), beside=Beside(sources(found), left=tuple(said)))


def op_lead(name: object, cell: Cell) -> Mapping[str, Value] | None:
    """Return what a published operation says of its row; None where it is another operation than `name`."""
    return dict(_pairs(cell)) if cell[0] == name else None


def is_of_op(cell: Cell, name: object, params: Mapping[str, Param]) -> bool:
    """Tell whether a published operation is this one, in all that it says."""
    return cell[0] == name and _fits(dict(_pairs(cell)), params)


def _fits(said: Mapping[str, Value], known: Mapping[str, object]) -> bool:
    return all(str(known.get(key)) == str(value) for key, value in said.items())


def _pairs(cell: Cell) -> list[tuple[str, Value]]:
    words = [str(word).partition("=") for word in cell[1:]]
    said = {key: value for key, _, value in words}
    ordered = sorted(said, key=lambda key: (key not in OP_ORDER, OP_ORDER.index(key) if key in OP_ORDER else 0))
    return [(key, int(said[key]) if said[key].isdigit() else said[key]) for key in ordered]


def _row(rows: list[dict[str, Value]], lead: Mapping[str, Value], table: Table) -> dict[str, Value]:
    """Return the row that has all of these, a new one where there is none or more than one."""
    measured = [row for row in rows if "published" not in row and _fits(lead, row)]
    if len(measured) == 1:
        return measured[0]
    made = next((row for row in rows if "published" in row and _fits(lead, row)), None)
    if made is None:
        made = {**lead, "published": True}
        rows.append(made)
    return made


def _left(figures: Sequence[Figure], where: str) -> list[str]:
    if not figures:
        return []
    names = list(dict.fromkeys(f"{figure.test} {figure.metric}" for figure in figures))
    named = ", ".join(some(names, LEFT))
    one = "figure" if len(figures) == 1 else "figures"
    return [f"{len(figures)} published {one} asked for are of none of these {where}: {named}; form=published has them"]


def _with(
    table: Shown,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Value]],
    placed: Placed,
    shared: tuple[str, ...],
    left: Sequence[str],
) -> Shown:
    """Return a table with other columns and rows, and what must be said beneath it of the figures placed in it."""
    implausible = [Remark((f"{series.label} at {place}",), one.excess) for series, place, one in placed if one.excess]
    groups: dict[tuple[str, str], list[str]] = {}
    for series, place, one in placed:
        if one.notes not in (*REMARKABLE, series.variant):
            groups.setdefault((series.label, one.notes), []).append(place)
    remarks = [
        Remark((f"{name} at {', '.join(some(places, LEFT))}",), notes) for (name, notes), places in groups.items()
    ]
    under = Beside(sources([one for _, _, one in placed]), shared, tuple(implausible), tuple(remarks), tuple(left))
    return replace(table, columns=tuple(columns), rows=tuple(rows), beside=under)
