"""Tables of published figures alone: nothing is computed from them, and no measured number is in their tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dgxlab import published
from dgxlab.errors import UsageError
from dgxlab.published import Figure
from dgxlab.report.records import Column, Flag, Provenance, Row, Source, Table, Value, grouped

SEARCHED = ("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test", "metric", "notes")
"""Fields of a figure in which the words of a pattern are searched."""

ABOUT = SEARCHED[:-1]
"""Fields that may distinguish figures, in the order of columns."""


def series(pattern: str) -> Table:
    """Return a table of every figure that has all words of a pattern; values common to all have no column.

    Raises UsageError if there are none.
    """
    figures = _matching(pattern)
    leads = [name for name in ABOUT if len({getattr(figure, name) for figure in figures}) > 1] or ["metric"]
    rows: list[dict[str, Value]] = [
        {**{name: getattr(figure, name) for name in leads}, "value": figure, "unit": figure.unit, "notes": figure.notes}
        for figure in figures
    ]
    columns = [Column(name, name.removesuffix("_doc")) for name in leads]
    columns += [Column("value", "value", numeric=True), Column("unit", "unit"), Column("notes", "notes")]
    alike = {name: getattr(figures[0], name) for name in ("model", "quant", "test", "metric") if name not in leads}
    hosts = ", ".join(dict.fromkeys(figure.host for figure in figures))
    return Table(
        "published",
        f"Published figures: {pattern}",
        tuple(columns),
        tuple(rows),
        Provenance("published", (), "", (), "", None, hosts),
        {name: value for name, value in alike.items() if value},
        flags=tuple(
            _impossible(leads, row, figure) for row, figure in zip(rows, figures, strict=True) if figure.excess
        ),
        kind="published",
        published=_sources(figures),
    )


def _impossible(leads: Sequence[str], row: Row, figure: Figure) -> Flag:
    where = ", ".join(str(row[name]) for name in leads)
    return Flag((f"value at {where}",), True, figure.excess)


def _matching(pattern: str) -> list[Figure]:
    """Return the figures that have all words of a pattern, ignoring case.

    A word that is a document's name is compared with the figure's document only.
    """
    documents = {figure: _document(figure) for figure in published.figures()}
    folded = {name.casefold() for name in documents.values()}

    def has(figure: Figure, word: str) -> bool:
        if word in folded:
            return word == documents[figure].casefold()
        return word in " ".join(getattr(figure, name) for name in SEARCHED).casefold()

    words = pattern.casefold().split()
    if figures := [figure for figure in documents if all(has(figure, word) for word in words)]:
        return figures
    known = ", ".join(sorted({*documents.values()}))
    raise UsageError(f"no published figure has all of {pattern!r}; there are {known}", next="dgxlab report --help")


def _document(figure: Figure) -> str:
    """Return the short name of a figure's document: `seed000`, `docs/BENCHMARK.md`."""
    name = figure.source_doc.partition("@")[0].partition(" (")[0]
    seed, colon, _ = name.partition(":")
    return seed if colon else name


def _sources(figures: Sequence[Figure]) -> tuple[Source, ...]:
    """Return the sources of figures, one for each document, machine and engine."""
    groups: Mapping[tuple[str, str, str], list[Figure]] = grouped(
        ((each.source_doc, each.host, f"{each.engine}, pin {each.pin}" if each.pin else each.engine), each)
        for each in figures
    )
    return tuple(
        Source(*source, tuple(dict.fromkeys(each.tool for each in group)), tuple(each.line for each in group))
        for source, group in groups.items()
    )
