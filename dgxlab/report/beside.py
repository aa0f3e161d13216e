"""Published figures beside what was measured: in rows or columns of their own, which say what they are.

Nothing is computed from both: no ratio, no mean, no share of a roofline.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import TypeVar, Union

from dgxlab import published, units
from dgxlab.errors import UsageError
from dgxlab.model import Param
from dgxlab.published import Figure, GateResult, peaks_of
from dgxlab.report.ask import OP_ORDER, Query
from dgxlab.report.records import Beside, Column, Remark, Source, Table, Value, some

Entry = TypeVar("Entry", Figure, GateResult)
Shown = TypeVar("Shown", bound=Table)

SEARCHED = ("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test", "metric", "notes")
"""Where in a figure a pattern's words are looked for."""

UNREMARKABLE = ("", "approx")
"""Notes that are not repeated beneath a table: the second is in the number."""

LONG = 40
"""Characters of a label in a table; a longer one has a letter there, and is beneath the table."""

LEFT = 3
"""Figures named that have no place in a table; the rest are counted."""


# -- figures and where they come from ---------------------------------------------------------------------------------


def fitting(known: Sequence[Entry], pattern: str, what: str) -> list[Entry]:
    """Return the figures that have all words of a pattern, whatever their case.

    A word that names a document is looked for in figures' own document only.

    Args:
        known: Those of the kind that is asked for.
        what: That kind, in words.

    Raises:
        UsageError: if there is none, with the sources that have some.
    """
    documents = {short(entry).casefold() for entry in known}

    def has(entry: Entry, word: str) -> bool:
        if word in documents:
            return word == short(entry).casefold()
        return word in " ".join(getattr(entry, name) for name in SEARCHED).casefold()

    words = pattern.casefold().split()
    entries = [entry for entry in known if all(has(entry, word) for word in words)]
    if not entries:
        documents = {short(entry) for entry in known}
        raise UsageError(
            f"no published {what} has all of {pattern!r}; there are {', '.join(sorted(documents))}",
            next="dgxlab report --help",
        )
    return entries


def short(entry: Figure | GateResult) -> str:
    """Name a figure's document: `seed000`, `docs/BENCHMARK.md`."""
    name = re.split(r"@| \(", entry.source_doc)[0]
    seed, colon, _ = name.partition(":")
    return seed if colon else name


def label(entry: Figure | GateResult) -> str:
    """Say that something was published, about which machine and where: `published, GB10 (seed000)`."""
    peaks = peaks_of(entry.host)
    return f"published, {peaks.gpu if peaks else entry.host} ({short(entry)})"


def by_notes(placed: Iterable[tuple[str, Figure | GateResult]]) -> Mapping[str, tuple[str, ...]]:
    """Return which places have the same notes, by these."""
    places: dict[str, tuple[str, ...]] = {}
    for place, entry in placed:
        if entry.notes not in UNREMARKABLE:
            places[entry.notes] = (*places.get(entry.notes, ()), place)
    return places


def sources(entries: Iterable[Figure | GateResult]) -> tuple[Source, ...]:
    """Return where entries come from, those of one document, machine and engine together."""
    groups: dict[tuple[str, str, str], list[Figure | GateResult]] = {}
    for entry in sorted(entries, key=lambda entry: entry.line):
        engine = f"{entry.engine}, pin {entry.pin}" if entry.pin else entry.engine
        groups.setdefault((entry.source_doc, entry.host, engine), []).append(entry)
    made = []
    for origin, group in groups.items():
        file = "published_gates.csv" if isinstance(group[0], GateResult) else "published.csv"
        tools = tuple(dict.fromkeys(entry.tool for entry in group))
        made.append(Source(*origin, tools, file, tuple(entry.line for entry in group)))
    return tuple(made)


# -- which cell a figure is about -------------------------------------------------------------------------------------

Cell = tuple[Union[str, int, None], ...]
"""What a figure is about, in the words of a form: its test, its sizes, its operation."""

STREAM = re.compile(r"(?:pp\d+(?:\+tg\d+)?|tg\d+)(?: @ d\d+)?(?!\S)")
SIZE = re.compile(r"(npp|pp|PP=|ntg|tg|TG=|npl|B=)(\d+)")
SPEEDS = {"S_PP": "speed_pp", "S_TG": "speed_tg"}
NO_VARIANT = re.compile(r"approx|suspect|[-+]?\d+(\.\d+)? ?%")
"""How notes begin that describe the number, and not what was measured."""


@dataclass(frozen=True)
class About:
    """What a figure is of: a cell as the form names it, a metric of `units`, and what else it says of the test."""

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
    """Return the test of llama-bench, whose name is in the metric or in the test."""
    if figure.tool != "llama-bench" or figure.unit != "t/s":
        return None
    match = STREAM.match(figure.metric) or STREAM.match(figure.test)
    if match is None:
        return None
    return About((match[0],), "avg_ts", figure.test.removeprefix(match[0]).strip())


def batch(figure: Figure) -> About | None:
    """Return prompt, generation and number of sequences of a speed; None for those that it does not say."""
    if figure.metric not in SPEEDS or figure.unit != "t/s":
        return None
    sizes: dict[str, int] = {}
    rest = []
    for word in figure.test.split():
        if match := SIZE.fullmatch(word):
            sizes[match[1].strip("n=").lower()] = int(match[2])
        else:
            rest.append(word)
    many = sizes.get("pl", sizes.get("b"))
    if many is None:
        return None
    return About((sizes.get("pp"), sizes.get("tg"), many), SPEEDS[figure.metric], " ".join(rest))


READERS: Mapping[str, tuple[Callable[[Figure], About | None], ...]] = {
    "ops": (op,),
    "single-stream": (stream,),
    "steps": (op, stream),
    "concurrency": (batch,),
}
"""By form, what its cells are."""

# -- series -----------------------------------------------------------------------------------------------------------

WORDS = ("source_doc", "host", "engine", "pin", "model", "quant", "more", "variant", "again")
"""What tells a series from others: where it was published, what was measured, and how often for the same cell."""

VARIANT = WORDS.index("variant")


@dataclass(frozen=True)
class Series:
    """Figures that one document states of one engine, model and variant: no two are of the same cell.

    Attributes:
        label: Says that it was published, and what tells it from the others.
        name: What it is called in a table: the label, or a letter where that is long.
        shared: What it has in common with them.
        variant: What was measured, as the notes begin; label or `shared` say it.
        figures: By cell and metric.
    """

    label: str
    name: str
    shared: tuple[str, ...]
    variant: str
    figures: Mapping[tuple[Cell, str], Figure]


Groups = dict[tuple[str, ...], dict[tuple[Cell, str], Figure]]


def selected(form: str, patterns: Sequence[str]) -> list[Series]:
    """Return the series of all figures of a form's kind that have all words of a pattern, in the record's order.

    Raises:
        UsageError: if a pattern has none.
    """
    if not patterns:
        return []
    abouts: dict[int, About] = {}
    known = []
    for figure in published.figures():
        if about := next((about for reader in READERS[form] if (about := reader(figure))), None):
            abouts[figure.line] = about
            known.append(figure)
    chosen: dict[int, Figure] = {}
    for pattern in patterns:
        chosen.update({entry.line: entry for entry in fitting(known, pattern, f"figure of form={form}")})
    groups: Groups = {}
    # operations last: one joins the series of its prompts
    for figure in sorted(chosen.values(), key=lambda figure: (abouts[figure.line].metric == "flops", figure.line)):
        about = abouts[figure.line]
        place = (about.cell, about.metric)
        groups.setdefault(_group(groups, _words(figure, about), place), {})[place] = figure
    alike = [len({words[at] for words in groups}) == 1 for at in range(len(WORDS))]
    shared = tuple(word for word, same in zip(next(iter(groups)), alike, strict=True) if same and word)[2:]
    names = [_name(words, figures, alike, ("source_doc", "host", "pin")) for words, figures in groups.items()]
    made = []
    for name, (words, figures) in zip(names, groups.items(), strict=True):
        # an engine's version is beneath the table, and in a name where nothing else tells two series apart
        full = name if names.count(name) == 1 else _name(words, figures, alike, ("source_doc", "host"))
        made.append(Series(full, full, shared, words[VARIANT], figures))
    made.sort(key=lambda series: min(figure.line for figure in series.figures.values()))
    letters = (f"published {letter}" for letter in (*ascii_uppercase, *range(len(made))))
    return [replace(series, name=next(letters)) if len(series.label) > LONG else series for series in made]


def _words(figure: Figure, about: About) -> tuple[str, ...]:
    """Return WORDS of a figure."""
    variant = figure.notes.partition(";")[0].strip()
    model, quant = ("", "") if about.metric == "flops" else (figure.model, figure.quant)
    variant = "" if NO_VARIANT.match(variant) else variant
    return figure.source_doc, figure.host, figure.engine, figure.pin, model, quant, about.more, variant, ""


def _group(groups: Groups, words: tuple[str, ...], place: tuple[Cell, str]) -> tuple[str, ...]:
    """Return the words of the first series that a figure fits into: an operation's also into that of its prompts."""
    if words[VARIANT]:
        for other, figures in groups.items():
            if place not in figures and all(mine in ("", theirs) for mine, theirs in zip(words, other, strict=True)):
                return other
    again = 1
    while place in groups.get(words, {}):
        again += 1
        words = (*words[:-1], f"({again})")
    return words


def _name(
    words: tuple[str, ...], figures: Mapping[tuple[Cell, str], Figure], alike: Sequence[bool], without: Collection[str]
) -> str:
    own = [
        word for kind, word, same in zip(WORDS, words, alike, strict=True) if word and not same and kind not in without
    ]
    return ": ".join(filter(None, (label(next(iter(figures.values()))), " ".join(own))))


# -- tables with published figures ------------------------------------------------------------------------------------

Placed = list[tuple[Series, str, Figure]]
"""Each figure in a table with its series and its place in words."""


def rows_beside(wanted: Query, table: Shown, column_of: Callable[[Cell], str | None]) -> Shown:
    """Return a table with a row for each series whose figures are of its columns.

    Args:
        column_of: Key of the column that a cell belongs into; None for a cell that has none.

    Raises:
        UsageError: if something is asked for that was not published.
    """
    if not wanted.published:
        return table
    placed: Placed = []
    left: list[Figure] = []
    rows: list[Mapping[str, Value]] = []
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
    notes = _notes(every, placed, left, "columns")
    return replace(table, rows=(*table.rows, *rows), beside=notes)


def columns_beside(
    every: Sequence[Series], table: Shown, lead_of: Callable[[Cell], Mapping[str, Value] | None]
) -> Shown:
    """Return a table with columns for each series, and a row for each of its cells that was not measured.

    Args:
        every: What is asked for; nothing changes without any.
        lead_of: What the leading columns of a cell's row hold; None for a cell that is not of this table.
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
    notes = _notes(every, placed, left, "rows")
    return replace(table, columns=tuple(columns), rows=tuple(rows), beside=notes)


def op_lead(name: object, cell: Cell) -> Mapping[str, Value] | None:
    """Return what a published operation says of its row; None where it is another operation than `name`."""
    if cell[0] != name:
        return None
    params = {key: value for key, _, value in (str(word).partition("=") for word in cell[1:])}
    ordered = [*(key for key in OP_ORDER if key in params), *(key for key in params if key not in OP_ORDER)]
    return {key: int(params[key]) if params[key].isdigit() else params[key] for key in ordered}


def is_of_op(cell: Cell, name: object, params: Mapping[str, Param]) -> bool:
    """Tell whether a published operation is this one, in all that it says."""
    lead = op_lead(name, cell)
    return lead is not None and _fits(lead, params)


def _fits(lead: Mapping[str, Value], known: Mapping[str, object]) -> bool:
    return all(str(known.get(key)) == str(value) for key, value in lead.items())


def _row(rows: list[dict[str, Value]], lead: Mapping[str, Value]) -> dict[str, Value]:
    """Return the measured row that has all of these, or a published one where there is none or more than one."""
    measured = [row for row in rows if "published" not in row and _fits(lead, row)]
    if len(measured) == 1:
        return measured[0]
    own = next((row for row in rows if "published" in row and _fits(lead, row)), None)
    if own is None:
        own = {**lead, "published": True}
        rows.append(own)
    return own


def _notes(every: Sequence[Series], placed: Placed, left: Sequence[Figure], where: str) -> Beside:
    """Return the notes beneath a table.

    Args:
        left: Figures that have no place in it.
        where: What they belong to none of, rows or columns.
    """
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
