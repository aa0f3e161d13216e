"""The numbered sources of a document: where the numbers of its tables come from, each fact once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from dgxlab import units
from dgxlab.report.cells import text
from dgxlab.report.records import Conditions, Origin, Table
from dgxlab.report.runs import range_of


@dataclass(frozen=True)
class Source:
    """Where numbers come from; several tables can refer to it."""

    title: str
    facts: tuple[tuple[str, ...], ...] = ()  # lines of facts that other sources can have too
    own: tuple[str, ...] = ()  # lines that are listed with this source even if another has the same
    conditions: Conditions = field(default_factory=dict)

    def and_of(self, other: Source) -> Source:
        """Return this source with what another table says of it."""
        facts = tuple(dict.fromkeys((*self.facts, *other.facts)))
        own = tuple(dict.fromkeys((*self.own, *other.own)))
        return Source(self.title, facts, own, range_of([self.conditions, other.conditions]))

    def lines(self, facts: Iterable[str]) -> list[str]:
        """Return the lines of those of its facts that are among `facts`."""
        parts = (" · ".join(fact for fact in line if fact in facts) for line in self.facts)
        return [part for part in parts if part]


@dataclass(frozen=True)
class Block:
    """One source, or without a title the facts that several sources share."""

    numbers: tuple[int, ...]  # of the sources, from 1
    title: str
    lines: tuple[str, ...]


def blocks(sources: Sequence[Source], *, conditions: bool) -> Iterator[Block]:
    """Yield the facts that sources share, the most widely shared first, then each source with what is left.

    Facts are shared only where that spares two repeats of a line or more. The conditions of runs are listed if
    `conditions`.
    """
    holders: dict[str, tuple[int, ...]] = {}
    for number, source in enumerate(sources, 1):
        for fact in dict.fromkeys(fact for line in source.facts for fact in line):
            holders[fact] = (*holders.get(fact, ()), number)
    shared: set[str] = set()
    for numbers in sorted(set(holders.values()), key=lambda numbers: (-len(numbers), numbers)):
        facts = {fact for fact, those in holders.items() if those == numbers}
        lines = sources[numbers[0] - 1].lines(facts)
        if (len(numbers) - 1) * len(lines) > 1:
            shared |= facts
            yield Block(numbers, "", tuple(lines))
    for number, source in enumerate(sources, 1):
        medians = units.conditions(source.conditions) if conditions else ""
        lines = [*source.lines(holders.keys() - shared), *source.own]
        yield Block((number,), source.title, (*lines, *([f"median of a run: {medians}"] if medians else [])))


def sides(table: Table) -> Sequence[Origin]:
    """Return the origin of each arm of a table; empty if it was not measured here."""
    if table.kind in ("imported", "published"):
        return ()
    if table.kind == "arms":
        return table.origins
    if table.kind != "session":
        return (Origin("", table.provenance, table.conditions),)
    first = Origin("baseline" if table.candidate else "both arms", table.provenance, table.conditions)
    return (first, Origin("candidate", table.candidate, table.candidate_conditions)) if table.candidate else (first,)


def sources(table: Table) -> Iterator[tuple[object, Source]]:
    """Yield the sources of a table, each with its identity, which is the same for every table that refers to it."""
    protocol = ", ".join(f"{name} {text(value)}" for name, value in table.protocol.items())
    for side in sides(table):
        origin, experiment = side.provenance, side.provenance.experiment
        title = side.label or f"experiment {experiment}"
        if table.kind == "session":
            title = f"{side.label} {experiment}"
        if table.kind == "arms" and side.label != experiment:
            title = f"{side.label} (experiment {experiment})"
        tree = f"tree {origin.tree[:12]}{' (working tree)' * origin.dirty}"
        facts = (
            *([(f"session {', '.join(origin.sessions)}",)] if origin.sessions else []),
            (f"host {origin.host}", f"backend {origin.backend}", f"pin {origin.pin[:12]}"),
            (tree, f"build {origin.build_id or units.MISSING}"),
            ("series " + (", ".join(map(str, origin.series)) or "none"),),
            *((f"model {model}",) for model in origin.models),
            *([(protocol,)] if protocol else []),
        )
        yield (title, replace(origin, synthetic=(), models=())), Source(title, facts, side.notes, side.conditions)
    for each in table.beside.sources if table.beside else ():
        where = f"{', '.join(each.tools)} · {each.file} line {_ranges(each.lines)}"
        yield each, Source(f"published: {each.doc}", own=(f"host {each.host} · {each.engine}", where))
    if table.sha256:
        lines = (f"sha256 {table.sha256}", table.tool, *(f"{name}: {value}" for name, value in table.told))
        yield table.sha256, Source(f"imported file {table.file}", own=lines)


def _ranges(numbers: Sequence[int]) -> str:
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
