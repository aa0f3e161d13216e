"""Published figures beside measured numbers, in labelled rows or columns of their own.

Nothing is computed from both: no ratio, no mean, no share of a roofline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import NamedTuple, TypeVar

from dgxlab import published, units
from dgxlab.errors import UsageError
from dgxlab.model import Param
from dgxlab.published import Figure, GateResult, peaks_of
from dgxlab.report.ask import op_params
from dgxlab.report.records import Beside, Column, FigureSource, Remark, Row, Table, Value, grouped, some

_Entry = TypeVar("_Entry", Figure, GateResult)

SEARCHED = ("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test", "metric", "notes")
"""Fields of an entry in which the words of a pattern are searched."""

UNREMARKABLE = ("", "approx")  # notes that are not shown beneath a table: "approx" is already visible in the number
LONG = 40  # max length of a series' name in a table; a longer one is replaced by a letter, which a note explains


def matching(known: Sequence[_Entry], pattern: str, what: str) -> list[_Entry]:
    """Return the published figures or gates that have all words of a pattern, ignoring case.

    A word that is a document's name is compared with the entry's document only. Raises UsageError if there are none;
    the message calls them `what`.
    """
    documents = {_document(entry) for entry in known}
    folded = {name.casefold() for name in documents}

    def has(entry: _Entry, word: str) -> bool:
        if word in folded:
            return word == _document(entry).casefold()
        return word in " ".join(getattr(entry, name) for name in SEARCHED).casefold()

    words = pattern.casefold().split()
    if entries := [entry for entry in known if all(has(entry, word) for word in words)]:
        return entries
    message = f"no published {what} has all of {pattern!r}; there are {', '.join(sorted(documents))}"
    raise UsageError(message, next="dgxlab report --help")


def _document(entry: Figure | GateResult) -> str:
    """Return the short name of a figure's document: `seed000`, `docs/BENCHMARK.md`."""
    name = entry.source_doc.partition("@")[0].partition(" (")[0]
    seed, colon, _ = name.partition(":")
    return seed if colon else name


def label(entry: Figure | GateResult) -> str:
    """Return the label of a published figure or gate, with machine and document: `published, GB10 (seed000)`."""
    peaks = peaks_of(entry.host)
    return f"published, {peaks.gpu if peaks else entry.host} ({_document(entry)})"


def sources(entries: Iterable[Figure | GateResult]) -> tuple[FigureSource, ...]:
    """Return the sources of figures or gates, one for each document, machine and engine."""

    def origin(entry: Figure | GateResult) -> tuple[str, str, str]:
        return entry.source_doc, entry.host, f"{entry.engine}, pin {entry.pin}" if entry.pin else entry.engine

    groups = grouped((origin(entry), entry) for entry in sorted(entries, key=lambda entry: entry.line))
    results = []
    for source, group in groups.items():
        file = "published_gates.csv" if isinstance(group[0], GateResult) else "published.csv"
        tools = tuple(dict.fromkeys(entry.tool for entry in group))
        results.append(FigureSource(*source, tools, file, tuple(entry.line for entry in group)))
    return tuple(results)


_Cell = tuple[tuple[str, Param | None], ...]  # of a figure: keys and values of the leading columns in a form's tables

STREAM = re.compile(r"(?:pp\d+(?:\+tg\d+)?|tg\d+)(?: @ d\d+)?(?!\S)")
SIZE = re.compile(r"(npp|pp|PP=|ntg|tg|TG=|npl|B=)(\d+)")
SPEEDS = {"S_PP": "speed_pp", "S_TG": "speed_tg"}
NO_VARIANT = re.compile(r"approx|suspect|[-+]?\d+(\.\d+)? ?%")
"""Prefix of notes that describe the number and not the measured thing."""


class About(NamedTuple):
    """What a figure is about, as a form names it: a cell, a metric of `units`, and the other words of its test."""

    cell: _Cell
    metric: str
    more: str = ""


def read_op(figure: Figure) -> About | None:
    """Return the operation that a figure measured, such as `MUL_MAT m=4096 k=14336 n=1`; None if it measured none."""
    name, *words = figure.test.split()
    pairs = [word.partition("=") for word in words]
    if not figure.tool.startswith("test-backend-ops") or not figure.unit.endswith("FLOPS") or not pairs:
        return None
    if not all(equals and value for _, equals, value in pairs):
        return None
    params = {"type_a": figure.quant, **{key: int(value) if value.isdigit() else value for key, _, value in pairs}}
    return About((("op", name), *op_params(dict(sorted(params.items()))).items()), "flops")


def read_stream(figure: Figure) -> About | None:
    """Return the test of llama-bench that a figure measured, such as `pp512`; None if it measured none."""
    match = STREAM.match(figure.metric) or STREAM.match(figure.test)
    if figure.tool != "llama-bench" or figure.unit != "t/s" or match is None:
        return None
    return About((("test", match[0]),), "avg_ts", figure.test.removeprefix(match[0]).strip())


def read_batch(figure: Figure) -> About | None:
    """Return the prompt length, generation length and number of sequences of a measured speed; None for another figure.

    The lengths are None if the figure does not give them.
    """
    words = figure.test.split()
    matches = [match for word in words if (match := SIZE.fullmatch(word))]
    sizes = {match[1].strip("n=").lower(): int(match[2]) for match in matches}
    many = sizes.get("pl", sizes.get("b"))
    if figure.metric not in SPEEDS or figure.unit != "t/s" or many is None:
        return None
    rest = " ".join(word for word in words if not SIZE.fullmatch(word))
    return About((("PP", sizes.get("pp")), ("TG", sizes.get("tg")), ("B", many)), SPEEDS[figure.metric], rest)


READERS: Mapping[str, tuple[Callable[[Figure], About | None], ...]] = {
    "ops": (read_op,),
    "single-stream": (read_stream,),
    "steps": (read_op, read_stream),
    "concurrency": (read_batch,),
}
"""By form, the functions that find out which of its cells a figure is about; the first that succeeds is used."""

_CellMetric = tuple[_Cell, str]


class _SeriesKey(NamedTuple):
    """What distinguishes series: the source, what was measured, and a number if the source repeats a cell."""

    source_doc: str
    host: str
    engine: str
    pin: str
    model: str
    quant: str
    more: str
    variant: str  # what was measured, from the beginning of the notes
    again: str = ""


_UNNAMED = {"source_doc", "host"}  # fields of a series that are not part of its name


@dataclass(frozen=True)
class FigureSeries:
    """Published figures that share a row or column: of one document, engine, model and variant, at most one a cell."""

    label: str  # says that it is published, and what distinguishes it
    name: str  # its name in tables: the label, or a letter if that is long
    shared: tuple[str, ...]  # words that all series have, such as the engine: a note has them
    variant: str
    figures: Mapping[_CellMetric, Figure]  # by cell and metric


def matching_series(form: str, patterns: Sequence[str]) -> list[FigureSeries]:
    """Return the published figures that a form can show and that match any of the patterns, grouped into series.

    Raises UsageError if a pattern matches no figure.
    """
    if not patterns:
        return []
    readings = {figure: [reader(figure) for reader in READERS[form]] for figure in published.figures()}
    abouts = {figure: about for figure, each in readings.items() if (about := next(filter(None, each), None))}
    chosen = {figure for pattern in patterns for figure in matching(list(abouts), pattern, f"figure of form={form}")}
    groups: dict[_SeriesKey, dict[_CellMetric, Figure]] = {}
    # operations last: they join the series of their prompts
    for figure in sorted(chosen, key=lambda figure: (abouts[figure].metric == "flops", figure.line)):
        measured = abouts[figure][:2]
        groups.setdefault(_group(groups, _words(figure, abouts[figure]), measured), {})[measured] = figure
    varying = {name for name, *values in zip(_SeriesKey._fields, *groups, strict=True) if len(set(values)) > 1}
    first = next(iter(groups))._asdict()
    shared = tuple(word for name, word in first.items() if word and name not in varying | _UNNAMED)
    short_names = [_name(words, figures, varying - {"pin"}) for words, figures in groups.items()]
    results = []
    letters = (f"published {letter}" for letter in (*ascii_uppercase, *range(len(groups))))
    for words, figures in sorted(groups.items(), key=lambda group: min(figure.line for figure in group[1].values())):
        # an engine's version is beneath the table, and in a name only if needed to distinguish two series
        full = _name(words, figures, varying - {"pin"})
        full = full if short_names.count(full) == 1 else _name(words, figures, varying)
        results.append(FigureSeries(full, next(letters) if len(full) > LONG else full, shared, words.variant, figures))
    return results


def _words(figure: Figure, about: About) -> _SeriesKey:
    variant = figure.notes.partition(";")[0].strip()
    model, quant = ("", "") if about.metric == "flops" else (figure.model, figure.quant)
    variant = "" if NO_VARIANT.match(variant) else variant
    return _SeriesKey(figure.source_doc, figure.host, figure.engine, figure.pin, model, quant, about.more, variant)


def _group(
    groups: Mapping[_SeriesKey, Mapping[_CellMetric, Figure]], words: _SeriesKey, measured: _CellMetric
) -> _SeriesKey:
    """Return the first series that a figure fits into, else a new one; operations join the series of their prompts."""
    if words.variant:
        for other, figures in groups.items():
            if measured not in figures and all(mine in ("", theirs) for mine, theirs in zip(words, other, strict=True)):
                return other
    again = 1
    while measured in groups.get(words, {}):
        again += 1
        words = words._replace(again=f"({again})")
    return words


def _name(words: _SeriesKey, figures: Mapping[_CellMetric, Figure], varying: Set[str]) -> str:
    own = [word for name, word in words._asdict().items() if word and name in varying - _UNNAMED]
    return ": ".join(filter(None, (label(next(iter(figures.values()))), " ".join(own))))


_Placed = list[tuple[FigureSeries, str, Figure]]  # each figure in a table with its series and its position in words


def rows_beside(every: Sequence[FigureSeries], table: Table, column_of: Callable[[Row], str | None]) -> Table:
    """Return a table with a row added for each series that has figures for its columns.

    `column_of` returns the key of the column that a figure belongs to, given the figure's cell; None if there is none.
    """
    if not every:
        return table
    placed: _Placed = []
    left: list[Figure] = []
    rows: list[Row] = []
    labels = {column.key: column.label for column in table.columns}
    for series in every:
        row: dict[str, Value] = {}
        for (cell, _), figure in series.figures.items():
            if key := column_of(dict(cell)):
                row[key] = figure
                placed.append((series, labels[key], figure))
            else:
                left.append(figure)
        if row:
            rows.append({table.columns[0].key: series.name, **row, "published": True})
    return replace(table, rows=(*table.rows, *rows), beside=_notes(every, placed, left, "columns"))


def columns_beside(every: Sequence[FigureSeries], table: Table, op_name: object = None) -> Table:
    """Return a table with columns added for each series, and rows for their cells that were not measured.

    A table of operations gets only figures of `op_name`; a note counts the others. For any other table it is None.
    """
    if not every:
        return table
    rows = [dict(row) for row in table.rows]
    columns = list(table.columns)
    placed: _Placed = []
    left: list[Figure] = []
    for number, series in enumerate(every):
        by_metric = grouped((metric, (dict(cell), figure)) for (cell, metric), figure in series.figures.items())
        for metric in sorted(by_metric):
            head = " ".join(filter(None, (series.name, units.metric(metric).label)))
            column = Column(f"published.{number}.{metric}", head, metric)
            for lead, figure in by_metric[metric]:
                if lead.pop("op", None) != op_name:
                    left.append(figure)
                    continue
                if column not in columns:
                    columns.append(column)
                _row(rows, lead)[column.key] = figure
                where = " ".join(f"{name}={value}" for name, value in lead.items() if value is not None)
                placed.append((series, where, figure))
    return replace(table, columns=tuple(columns), rows=tuple(rows), beside=_notes(every, placed, left, "rows"))


def fits(lead: Row, known: Mapping[str, object]) -> bool:
    """Return whether a measured cell has all the values of a published one, `lead`."""
    return all(str(known.get(key)) == str(value) for key, value in lead.items())


def _row(rows: list[dict[str, Value]], lead: Row) -> dict[str, Value]:
    """Return the only measured row that has all values of `lead`; without one, a row for published figures."""
    fitting = [row for row in rows if fits(lead, row)]
    measured = [row for row in fitting if "published" not in row]
    if len(measured) == 1:
        return measured[0]
    own = next((row for row in fitting if "published" in row), None)
    if own is None:
        own = {**lead, "published": True}
        rows.append(own)
    return own


def _notes(every: Sequence[FigureSeries], placed: _Placed, left: Sequence[Figure], where: str) -> Beside:
    sentences = []
    if left:
        names = list(dict.fromkeys(f"{figure.test} {figure.metric}" for figure in left))
        count = f"{len(left)} published {'figure' if len(left) == 1 else 'figures'}"
        named = ", ".join(some(names))
        sentences.append(f"{count} asked for are of none of these {where}: {named}; form=published has them")
    excess = [
        Remark((f"{series.name} at {position}",), entry.excess) for series, position, entry in placed if entry.excess
    ]
    shown = {series.name: series.label for series, _, _ in placed}
    remarks = [Remark((name,), label) for name, label in shown.items() if name != label]
    groups = grouped(
        ((series.name, entry.notes), position)
        for series, position, entry in placed
        if entry.notes not in (*UNREMARKABLE, series.variant)
    )
    remarks += [Remark((f"{name} at {', '.join(some(places))}",), notes) for (name, notes), places in groups.items()]
    origins = sources(entry for _, _, entry in placed)
    return Beside(origins, every[0].shared, tuple(excess), tuple(remarks), tuple(sentences))
