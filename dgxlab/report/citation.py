"""Where published figures come from, and what stands beneath a table that has some."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dgxlab.errors import UsageError
from dgxlab.published import Figure, GateResult, peaks_of

Entry = TypeVar("Entry", Figure, GateResult)

SPOKEN = ("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test", "metric", "notes")
"""What of a figure a pattern's words are looked for in."""

REMARKABLE = ("", "approx")
"""Notes that are not repeated beneath a table: the second is in the number."""


@dataclass(frozen=True)
class Source:
    """Where some of a table's figures were published, and where they stand in the record.

    Attributes:
        doc: The document.
        host: The machine, in its words.
        engine: With its version.
        tools: What measured them.
        file: Of the record.
        lines: Of that file.
    """

    doc: str
    host: str
    engine: str
    tools: tuple[str, ...]
    file: str
    lines: tuple[int, ...]


@dataclass(frozen=True)
class Remark:
    """What is said about figures of a table beside their numbers."""

    labels: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Beside:
    """What stands beneath a table that has published figures beside measured ones.

    Attributes:
        sources: Of all of them.
        shared: What all of them are about: engine, version, model and the like.
        excess: Which of them cannot be true, and why.
        remarks: In the order of the figures.
        left: Which were asked for and have no place in it, in sentences.
    """

    sources: tuple[Source, ...]
    shared: tuple[str, ...] = ()
    excess: tuple[Remark, ...] = ()
    remarks: tuple[Remark, ...] = ()
    left: tuple[str, ...] = ()


def fitting(known: Sequence[Entry], pattern: str, what: str) -> list[Entry]:
    """Return the figures that have all words of a pattern, each somewhere in what they say; case does not matter.

    Args:
        known: Those of the kind that is asked for.
        what: That kind, in words.

    Raises:
        UsageError: if there is none, with the sources that have some.
    """
    documents = {short(one).casefold() for one in known}
    words = pattern.casefold().split()
    found = [one for one in known if all(_says(one, word, whole=word in documents) for word in words)]
    if not found:
        sources = ", ".join(sorted({short(one) for one in known}))
        raise UsageError(
            f"no published {what} has all of {pattern!r}; there are {sources}", next="dgxlab report --help"
        )
    return found


def _says(one: Figure | GateResult, word: str, *, whole: bool) -> bool:
    """Tell whether a figure says a word; one that names a document is no mention of it in another's notes."""
    if whole:
        return word == short(one).casefold()
    return word in " ".join(getattr(one, name) for name in SPOKEN).casefold()


def short(one: Figure | GateResult) -> str:
    """Name a figure's document: `seed000`, `docs/BENCHMARK.md`."""
    name = re.split(r"@| \(", one.source_doc)[0]
    seed, colon, _ = name.partition(":")
    return seed if colon else name


def label(one: Figure | GateResult) -> str:
    """Say that something was published, about which machine and where: `published, GB10 (seed000)`."""
    peaks = peaks_of(one.host)
    return f"published, {peaks.gpu if peaks else one.host} ({short(one)})"


def by_notes(placed: Iterable[tuple[str, Figure | GateResult]]) -> Mapping[str, tuple[str, ...]]:
    """Return which places have the same notes, by these."""
    found: dict[str, tuple[str, ...]] = {}
    for place, one in placed:
        if one.notes not in REMARKABLE:
            found[one.notes] = (*found.get(one.notes, ()), place)
    return found


def sources(entries: Iterable[Figure | GateResult]) -> tuple[Source, ...]:
    """Return where entries come from, those of one document, machine and engine together."""
    groups: dict[tuple[str, str, str], list[Figure | GateResult]] = {}
    for entry in sorted(entries, key=lambda entry: entry.line):
        engine = f"{entry.engine}, pin {entry.pin}" if entry.pin else entry.engine
        groups.setdefault((entry.source_doc, entry.host, engine), []).append(entry)
    return tuple(_source(origin, found) for origin, found in groups.items())


def _source(origin: tuple[str, str, str], found: Sequence[Figure | GateResult]) -> Source:
    file = "published_gates.csv" if isinstance(found[0], GateResult) else "published.csv"
    return Source(*origin, tuple(dict.fromkeys(e.tool for e in found)), file, tuple(e.line for e in found))
