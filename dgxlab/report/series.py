"""Published figures by the cells that they are about, in the series in which they stand beside what was measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from dgxlab import published
from dgxlab.published import Figure
from dgxlab.report.citation import fitting, label

Cell = tuple[str | int | None, ...]
"""What a figure is about, in the words of a form: its test, its sizes, its operation."""

STREAM = re.compile(r"(?:pp\d+(?:\+tg\d+)?|tg\d+)(?: @ d\d+)?(?!\S)")
SIZE = re.compile(r"(npp|pp|PP=|ntg|tg|TG=|npl|B=)(\d+)")
SPEEDS = {"S_PP": "speed_pp", "S_TG": "speed_tg"}
NO_VARIANT = re.compile(r"approx|suspect|[-+]?\d+(\.\d+)? ?%")
"""How notes begin that say something of the number, and not of what was measured."""


@dataclass(frozen=True)
class About:
    """What a figure is of.

    Attributes:
        cell: As the form's own cells are named.
        metric: Name in `units`.
        more: What else it says of the test.
    """

    cell: Cell
    metric: str
    more: str = ""


@dataclass(frozen=True)
class Series:
    """Figures that one document states of one engine, model and variant: no two are of the same cell.

    Attributes:
        label: Says that it was published, and what tells it from the others.
        shared: What it has in common with them.
        variant: What was measured, as the notes begin; label or `shared` say it.
        figures: By cell and metric.
    """

    label: str
    shared: tuple[str, ...]
    variant: str
    figures: Mapping[tuple[Cell, str], Figure]


WORDS = ("source_doc", "host", "engine", "pin", "model", "quant", "more", "variant", "again")
"""What tells a series from others: where it was published, what was measured, and how often for the same cell."""

VARIANT = WORDS.index("variant")

Reader = Callable[[Figure], "About | None"]


def op(figure: Figure) -> About | None:
    """Return the operation with its parameters: `MUL_MAT m=4096 k=14336 n=1`, the weights' type among them."""
    name, *params = figure.test.split()
    pairs = [param.partition("=") for param in params]
    if not figure.tool.startswith("test-backend-ops") or not figure.unit.endswith("FLOPS") or not pairs:
        return None
    if not all(equals and value for _, equals, value in pairs):
        return None
    said = {"type_a": figure.quant, **{key: value for key, _, value in pairs}}
    return About((name, *(f"{key}={said[key]}" for key in sorted(said))), "flops")


def stream(figure: Figure) -> About | None:
    """Return the test of llama-bench, whose name stands in the metric or in the test."""
    if figure.tool != "llama-bench" or figure.unit != "t/s":
        return None
    found = STREAM.match(figure.metric) or STREAM.match(figure.test)
    if found is None:
        return None
    return About((found[0],), "avg_ts", figure.test.removeprefix(found[0]).strip())


def batch(figure: Figure) -> About | None:
    """Return prompt, generation and number of sequences of a speed; None for those that it does not say."""
    if figure.metric not in SPEEDS or figure.unit != "t/s":
        return None
    sizes: dict[str, int] = {}
    rest = []
    for word in figure.test.split():
        if found := SIZE.fullmatch(word):
            sizes[found[1].strip("n=").lower()] = int(found[2])
        else:
            rest.append(word)
    many = sizes.get("pl", sizes.get("b"))
    if many is None:
        return None
    return About((sizes.get("pp"), sizes.get("tg"), many), SPEEDS[figure.metric], " ".join(rest))


READERS: Mapping[str, tuple[Reader, ...]] = {
    "ops": (op,),
    "single-stream": (stream,),
    "steps": (op, stream),
    "concurrency": (batch,),
}
"""By form, what its cells are."""


def selected(form: str, patterns: Sequence[str]) -> list[Series]:
    """Return the series of all figures of a form's kind that have all words of a pattern, in the record's order.

    Raises:
        UsageError: if a pattern has none.
    """
    readers = READERS[form]

    def about(figure: Figure) -> About | None:
        return next((found for reader in readers if (found := reader(figure))), None)

    if not patterns:
        return []
    known = [figure for figure in published.figures() if about(figure)]
    found: dict[int, Figure] = {}
    for pattern in patterns:
        found.update({one.line: one for one in fitting(known, pattern, f"figure of form={form}")})
    ordered = sorted(found.values(), key=lambda figure: figure.line)
    return _series([(figure, said) for figure in ordered if (said := about(figure))])


def _series(known: Sequence[tuple[Figure, About]]) -> list[Series]:
    groups: dict[tuple[str, ...], dict[tuple[Cell, str], Figure]] = {}
    for figure, about in sorted(known, key=lambda one: one[1].metric == "flops"):
        place = (about.cell, about.metric)
        groups.setdefault(_group(groups, _words(figure, about), place), {})[place] = figure
    alike = [len({words[at] for words in groups}) == 1 for at in range(len(WORDS))]
    shared = tuple(word for word, same in zip(next(iter(groups)), alike, strict=True) if same and word)[2:]
    names = [_name(words, figures, alike, ("source_doc", "host", "pin")) for words, figures in groups.items()]
    made = []
    for name, (words, figures) in zip(names, groups.items(), strict=True):
        # an engine's version is beneath the table, and in a name where nothing else tells two series apart
        full = name if names.count(name) == 1 else _name(words, figures, alike, ("source_doc", "host"))
        made.append(Series(full, shared, words[VARIANT], figures))
    return sorted(made, key=lambda series: min(figure.line for figure in series.figures.values()))


def _name(
    words: tuple[str, ...], figures: Mapping[tuple[Cell, str], Figure], alike: Sequence[bool], without: Collection[str]
) -> str:
    own = [
        word for kind, word, same in zip(WORDS, words, alike, strict=True) if word and not same and kind not in without
    ]
    return ": ".join(filter(None, (label(next(iter(figures.values()))), " ".join(own))))


def _group(
    groups: Mapping[tuple[str, ...], Mapping[tuple[Cell, str], Figure]], words: tuple[str, ...], place: tuple[Cell, str]
) -> tuple[str, ...]:
    """Return the words of the first series that a figure can stand in: an operation's also in that of its prompts."""
    if words[VARIANT]:
        for other, figures in groups.items():
            if place not in figures and all(mine in ("", theirs) for mine, theirs in zip(words, other, strict=True)):
                return other
    again = 1
    while place in groups.get(words, {}):
        again += 1
        words = (*words[:-1], f"({again})")
    return words


def _words(figure: Figure, about: About) -> tuple[str, ...]:
    """Return WORDS of a figure."""
    variant = figure.notes.partition(";")[0].strip()
    model, quant = ("", "") if about.metric == "flops" else (figure.model, figure.quant)
    said = "" if NO_VARIANT.match(variant) else variant
    return figure.source_doc, figure.host, figure.engine, figure.pin, model, quant, about.more, said, ""
