"""Published figures beside measured numbers, in labelled rows or columns of their own.

Nothing is computed from both: no ratio, no mean, no share of a roofline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import NamedTuple, TypeVar, Union

from dgxlab import published, units
from dgxlab.errors import UsageError
from dgxlab.model import Param
from dgxlab.published import Figure, GateResult, peaks_of
from dgxlab.report.ask import OP_ORDER, Query
from dgxlab.report.records import Beside, Column, Remark, Row, Source, Table, Value, some

Entry = TypeVar("Entry", Figure, GateResult)

SEARCHED = ("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test", "metric", "notes")
"""Fields of a figure in which a pattern's words are searched."""

UNREMARKABLE = ("", "approx")
"""Notes that are not shown beneath a table: "approx" is already visible in the number."""

LONG = 40
"""Max length of a label in a table; a longer label is replaced by a letter and explained beneath."""

LEFT = 3
"""Max number of figures without a place in the table that are named; the rest are counted."""


def fitting(known: Sequence[Entry], pattern: str, what: str) -> list[Entry]:
    """Return the figures that have all words of a pattern, ignoring case.

    A word that names a document is searched only in the figures' document field.
    """
    documents = {short(entry) for entry in known}
    folded = {name.casefold() for name in documents}

    def has(entry: Entry, word: str) -> bool:
        if word in folded:
            return word == short(entry).casefold()
        return word in " ".join(getattr(entry, name) for name in SEARCHED).casefold()

    words = pattern.casefold().split()
    if entries := [entry for entry in known if all(has(entry, word) for word in words)]:
        return entries
    message = f"no published {what} has all of {pattern!r}; there are {', '.join(sorted(documents))}"
    raise UsageError(message, next="dgxlab report --help")


def short(entry: Figure | GateResult) -> str:
    """Return the short name of a figure's document: `seed000`, `docs/BENCHMARK.md`."""
    name = entry.source_doc.partition("@")[0].partition(" (")[0]
    seed, colon, _ = name.partition(":")
    return seed if colon else name


def label(entry: Figure | GateResult) -> str:
    """Return the label of a published entry, with machine and source: `published, GB10 (seed000)`."""
    peaks = peaks_of(entry.host)
    return f"published, {peaks.gpu if peaks else entry.host} ({short(entry)})"


def sources(entries: Iterable[Figure | GateResult]) -> tuple[Source, ...]:
    """Return the sources of entries, grouped by document, machine and engine."""
    groups: dict[tuple[str, str, str], list[Figure | GateResult]] = {}
    for entry in sorted(entries, key=lambda entry: entry.line):
        engine = f"{entry.engine}, pin {entry.pin}" if entry.pin else entry.engine
        groups.setdefault((entry.source_doc, entry.host, engine), []).append(entry)
    results = []
    for origin, group in groups.items():
        file = "published_gates.csv" if isinstance(group[0], GateResult) else "published.csv"
        tools = tuple(dict.fromkeys(entry.tool for entry in group))
        results.append(Source(*origin, tools, file, tuple(entry.line for entry in group)))
    return tuple(results)


Cell = tuple[Union[str, int, None], ...]
"""A figure's cell in the terms of a form: its test, its sizes, its operation."""

STREAM = re.compile(r"(?:pp\d+(?:\+tg\d+)?|tg\d+)(?: @ d\d+)?(?!\S)")
SIZE = re.compile(r"(npp|pp|PP=|ntg|tg|TG=|npl|B=)(\d+)")
SPEEDS = {"S_PP": "speed_pp", "S_TG": "speed_tg"}
NO_VARIANT = re.compile(r"approx|suspect|[-+]?\d+(\.\d+)? ?%")
"""Prefix of notes that describe the number and not the measured thing."""


class About(NamedTuple):
    """A figure's cell in the form's terms, its metric of `units`, and further words on the test."""

    cell: Cell
    metric: str
    more: str = ""


def op(figure: Figure) -> About | None:
    """Return the operation with its parameters: `MUL_MAT m=4096 k=14336 n=1`, the weights' type among them."""
    name, *params = figure.test.split()
    pairs = [param.partition("=") for param in params]
    if not figure.tool.startswith("test-backend-ops") or not figure.unit.endswith("FLOPS") or not pairs:
        return None
    if not all(equals and value for _, equals, value in pairs):
        return None
    values = {"type_a": figure.quant, **{key: value for key, _, value in pairs}}
    return About((name, *(f"{key}={values[key]}" for key in sorted(values))), "flops")


def stream(figure: Figure) -> About | None:
    """Return the test of llama-bench, named in the metric or in the test."""
    match = STREAM.match(figure.metric) or STREAM.match(figure.test)
    if figure.tool != "llama-bench" or figure.unit != "t/s" or match is None:
        return None
    return About((match[0],), "avg_ts", figure.test.removeprefix(match[0]).strip())


def batch(figure: Figure) -> About | None:
    """Return a speed's prompt length, generation length and number of sequences; None for missing ones."""
    words = figure.test.split()
    matches = [match for word in words if (match := SIZE.fullmatch(word))]
    sizes = {match[1].strip("n=").lower(): int(match[2]) for match in matches}
    many = sizes.get("pl", sizes.get("b"))
    if figure.metric not in SPEEDS or figure.unit != "t/s" or many is None:
        return None
    rest = " ".join(word for word in words if not SIZE.fullmatch(word))
    return About((sizes.get("pp"), sizes.get("tg"), many), SPEEDS[figure.metric], rest)


READERS: Mapping[str, tuple[Callable[[Figure], About | None], ...]] = {
    "ops": (op,),
    "single-stream": (stream,),
    "steps": (op, stream),
    "concurrency": (batch,),
}
"""Parser of a figure's cell, by form."""

WORDS = ("source_doc", "host", "engine", "pin", "model", "quant", "more", "variant", "again")
"""Fields that distinguish series: source, measured thing, and repetition for the same cell."""

VARIANT = WORDS.index("variant")

Words = tuple[str, ...]
Place = tuple[Cell, str]
"""A cell and a metric."""


@dataclass(frozen=True)
class Series:
    """Figures of one document, engine, model and variant, at most one per cell."""

    label: str  # says that it is published, and what distinguishes it
    name: str  # its name in tables: the label, or a letter if that is long
    shared: tuple[str, ...]  # shared with the other series
    variant: str  # the measured thing, from the beginning of the notes
    figures: Mapping[Place, Figure]


def selected(form: str, patterns: Sequence[str]) -> list[Series]:
    """Return the series of a form's figures that match a pattern, in the record's order."""
    if not patterns:
        return []
    readings = {figure: [reader(figure) for reader in READERS[form]] for figure in published.figures()}
    abouts = {figure: about for figure, told in readings.items() if (about := next(filter(None, told), None))}
    chosen = {figure for pattern in patterns for figure in fitting(list(abouts), pattern, f"figure of form={form}")}
    groups: dict[Words, dict[Place, Figure]] = {}
    # operations last: they join the series of their prompts
    for figure in sorted(chosen, key=lambda figure: (abouts[figure].metric == "flops", figure.line)):
        place = abouts[figure][:2]
        groups.setdefault(_group(groups, _words(figure, abouts[figure]), place), {})[place] = figure
    first = next(iter(groups))
    alike = [len({words[at] for words in groups}) == 1 for at in range(len(WORDS))]
    shared = tuple(word for word, same in zip(first, alike, strict=True) if same and word)[2:]
    names = [_name(words, figures, alike, ("source_doc", "host", "pin")) for words, figures in groups.items()]
    results = []
    for name, (words, figures) in zip(names, groups.items(), strict=True):
        # an engine's version is beneath the table, and in a name only if needed to distinguish two series
        full = name if names.count(name) == 1 else _name(words, figures, alike, ("source_doc", "host"))
        results.append(Series(full, full, shared, words[VARIANT], figures))
    results.sort(key=lambda series: min(figure.line for figure in series.figures.values()))
    letters = (f"published {letter}" for letter in (*ascii_uppercase, *range(len(results))))
    return [replace(series, name=next(letters)) if len(series.label) > LONG else series for series in results]


def _words(figure: Figure, about: About) -> Words:
    variant = figure.notes.partition(";")[0].strip()
    model, quant = ("", "") if about.metric == "flops" else (figure.model, figure.quant)
    variant = "" if NO_VARIANT.match(variant) else variant
    return figure.source_doc, figure.host, figure.engine, figure.pin, model, quant, about.more, variant, ""


def _group(groups: Mapping[Words, Mapping[Place, Figure]], words: Words, place: Place) -> Words:
    """Return the words of the first series that a figure fits into; operations may join their prompts' series."""
    if words[VARIANT]:
        for other, figures in groups.items():
            if place not in figures and all(mine in ("", theirs) for mine, theirs in zip(words, other, strict=True)):
                return other
    again = 1
    while place in groups.get(words, {}):
        again += 1
        words = (*words[:-1], f"({again})")
    return words


def _name(words: Words, figures: Mapping[Place, Figure], alike: Sequence[bool], without: Collection[str]) -> str:
    of_words = zip(WORDS, words, alike, strict=True)
    own = [word for kind, word, same in of_words if word and not same and kind not in without]
    return ": ".join(filter(None, (label(next(iter(figures.values()))), " ".join(own))))


Placed = list[tuple[Series, str, Figure]]
"""Each figure in a table with its series and its place in words."""


def rows_beside(wanted: Query, table: Table, column_of: Callable[[Cell], str | None]) -> Table:
    """Return a table with a row for each series that has figures of its columns.

    Args:
        column_of: Returns the key of a cell's column; None if it has none.
    """
    if not wanted.published:
        return table
    placed: Placed = []
    left: list[Figure] = []
    rows: list[Row] = []
    labels = {column.key: column.label for column in table.columns}
    every = selected(wanted.form, wanted.published)
    for series in every:
        row: dict[str, Value] = {}
        for (cell, _), figure in series.figures.items():
            if key := column_of(cell):
                row[key] = figure
                placed.append((series, labels[key], figure))
            else:
                left.append(figure)
        if row:
            rows.append({table.columns[0].key: series.name, **row, "published": True})
    return replace(table, rows=(*table.rows, *rows), beside=_notes(every, placed, left, "columns"))


def columns_beside(every: Sequence[Series], table: Table, lead_of: Callable[[Cell], Row | None]) -> Table:
    """Return a table with columns for each series, and additional rows for cells that were not measured.

    Args:
        every: The selected series; without any the table is unchanged.
        lead_of: Returns the leading columns of a cell's row; None if the cell is not of this table.
    """
    if not every:
        return table
    rows = [dict(row) for row in table.rows]
    columns = list(table.columns)
    placed: Placed = []
    left: list[Figure] = []
    for number, series in enumerate(every):
        for metric in sorted({metric for _, metric in series.figures}):
            key = f"published.{number}.{metric}"
            of_metric = {cell: figure for (cell, name), figure in series.figures.items() if name == metric}
            here = {cell: lead for cell in of_metric if (lead := lead_of(cell)) is not None}
            left += [figure for cell, figure in of_metric.items() if cell not in here]
            if here:
                columns.append(Column(key, " ".join(filter(None, (series.name, units.metric(metric).label))), metric))
            for cell, lead in here.items():
                _row(rows, lead)[key] = of_metric[cell]
                where = " ".join(f"{name}={value}" for name, value in lead.items() if value is not None)
                placed.append((series, where, of_metric[cell]))
    return replace(table, columns=tuple(columns), rows=tuple(rows), beside=_notes(every, placed, left, "rows"))


def op_lead(name: object, cell: Cell) -> Row | None:
    """Return the leading columns for a published operation; None if it is not the operation `name`."""
    if cell[0] != name:
        return None
    params = {key: value for key, _, value in (str(word).partition("=") for word in cell[1:])}
    ordered = [*(key for key in OP_ORDER if key in params), *(key for key in params if key not in OP_ORDER)]
    return {key: int(params[key]) if params[key].isdigit() else params[key] for key in ordered}


def is_of_op(cell: Cell, name: object, params: Mapping[str, Param]) -> bool:
    """Return whether a published operation agrees with this one in all its stated parameters."""
    lead = op_lead(name, cell)
    return lead is not None and _fits(lead, params)


def _fits(lead: Row, known: Mapping[str, object]) -> bool:
    return all(str(known.get(key)) == str(value) for key, value in lead.items())


def _row(rows: list[dict[str, Value]], lead: Row) -> dict[str, Value]:
    """Return the measured row that has all values of `lead`; if none or several, a row for published figures."""
    measured = [row for row in rows if "published" not in row and _fits(lead, row)]
    if len(measured) == 1:
        return measured[0]
    own = next((row for row in rows if "published" in row and _fits(lead, row)), None)
    if own is None:
        own = {**lead, "published": True}
        rows.append(own)
    return own


def _notes(every: Sequence[Series], placed: Placed, left: Sequence[Figure], where: str) -> Beside:
    """Return the notes beneath a table; `left` are figures without a row or column."""
    sentences = []
    if left:
        names = list(dict.fromkeys(f"{figure.test} {figure.metric}" for figure in left))
        count = f"{len(left)} published {'figure' if len(left) == 1 else 'figures'}"
        named = ", ".join(some(names, LEFT))
        sentences.append(f"{count} asked for are of none of these {where}: {named}; form=published has them")
    excess = [Remark((f"{series.name} at {place}",), entry.excess) for series, place, entry in placed if entry.excess]
    groups: dict[tuple[str, str], list[str]] = {}
    for series, place, entry in placed:
        if entry.notes not in (*UNREMARKABLE, series.variant):
            groups.setdefault((series.name, entry.notes), []).append(place)
    shown = {series.name: series.label for series, _, _ in placed}
    remarks = [Remark((name,), label) for name, label in shown.items() if name != label]
    remarks += [
        Remark((f"{name} at {', '.join(some(places, LEFT))}",), notes) for (name, notes), places in groups.items()
    ]
    origins = sources(entry for _, _, entry in placed)
    return Beside(origins, every[0].shared, tuple(excess), tuple(remarks), tuple(sentences))
