"""Experiments side by side: what each of them measured, and what a table says beneath about where that came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab.errors import UsageError
from dgxlab.model import PROTOCOL, SESSIONS
from dgxlab.report import ask as asking
from dgxlab.report.ask import ArmAsk, Ask, CellAsk
from dgxlab.report.evidence import Evidence, Measured, find
from dgxlab.report.numbers import Value
from dgxlab.report.query import Query
from dgxlab.report.records import ArmsTable, Column, Flag, Origin, Provenance
from dgxlab.report.tables import conditions, env_text, flags, origin_of, provenance, stream_test, unsteady

if TYPE_CHECKING:
    from dgxlab.store import Store


@dataclass(frozen=True)
class ArmCells:
    """One experiment and what was found of it.

    Attributes:
        name: What tables call it.
        ask: It is one of this.
        arm: What it was asked.
        evidence: All that was found.
        cells: Those of `evidence.measured` that are wanted.
    """

    name: str
    ask: Ask
    arm: ArmAsk
    evidence: Evidence
    cells: tuple[Measured, ...]

    @property
    def experiment(self) -> str:
        """Its own name."""
        return self.arm.arm.name

    def origin(self) -> Origin:
        """Return where its cells come from."""
        return Origin(
            self.name, provenance(self.experiment, self.arm, self.evidence, self.cells), conditions(self.cells)
        )

    def gates_origin(self) -> Provenance:
        """Return where its gates come from."""
        jobs = {str(row["job_id"]) for row in (*self.evidence.gates.values(), *self.evidence.checks.values())}
        return origin_of(self.experiment, self.arm, self.evidence, jobs)


def find_arms(store: Store, wanted: Query) -> tuple[ArmCells, ...]:
    """Return everything that was measured for each experiment or session that is named.

    Raises:
        UsageError: if one was never measured, or a session is of two arms.
    """
    asks = [asking.of_arm(store, name, wanted.host) for name in wanted.experiment]
    asks += [_of_session(store, session) for session in wanted.session]
    names = [arm.arm.name for ask in asks for arm in ask.arms]
    found = []
    for ask in asks:
        for arm in ask.arms:
            name = arm.arm.name if names.count(arm.arm.name) == 1 else f"{arm.arm.name} in {ask.session}"
            evidence = find(store, ask, arm)
            found.append(ArmCells(name, ask, arm, evidence, evidence.measured))
    return tuple(found)


def _of_session(store: Store, session: str) -> Ask:
    job = store.job(session)
    if job.kind in SESSIONS:
        raise UsageError(f"session {session} compares; its numbers are in form=verdicts", next="dgxlab jobs")
    return asking.of_session(store, job)


def of_tools(found: Sequence[ArmCells], tools: Sequence[str], wanted: Query) -> tuple[ArmCells, ...]:
    """Keep the cells of these tools that are wanted.

    Raises:
        UsageError: if an experiment has none, or a pattern or the model fits none of them.
    """
    kept = [replace(one, cells=tuple(c for c in one.cells if c.ask.cell.tool in tools)) for one in found]
    if wanted.model:
        kept = [replace(one, cells=tuple(c for c in one.cells if c.ask.model == wanted.model)) for one in kept]
    every = [cell for one in kept for cell in one.cells]
    for pattern in wanted.cells:
        if not any(fits(pattern, cell.ask) for cell in every):
            raise UsageError(f"no cell of form={wanted.form} has all of {pattern!r}", next="dgxlab report")
    if wanted.cells:
        kept = [
            replace(one, cells=tuple(c for c in one.cells if any(fits(pattern, c.ask) for pattern in wanted.cells)))
            for one in kept
        ]
    for one in kept:
        if not one.cells:
            of = f" of model {wanted.model}" if wanted.model else ""
            raise UsageError(f"{one.name} has nothing measured{of} for form={wanted.form}", next="dgxlab report")
    return tuple(kept)


def by_environment(found: Sequence[ArmCells]) -> tuple[ArmCells, ...]:
    """Set an experiment beside itself where a cell was measured in several environments, which the names then say."""
    return tuple(part for one in found for part in _environments(one))


def _environments(one: ArmCells) -> Iterator[ArmCells]:
    cells = [(cell.ask.key, cell.ask.model) for cell in one.cells]
    if len(set(cells)) == len(cells):
        yield one
        return
    shared = common([cell.ask.env for cell in one.cells])
    for digest in dict.fromkeys(cell.ask.env_digest for cell in one.cells):
        cells_of = tuple(cell for cell in one.cells if cell.ask.env_digest == digest)
        own = {name: value for name, value in cells_of[0].ask.env.items() if name not in shared}
        yield replace(one, name=" ".join(filter(None, (one.name, env_text(own)))), cells=cells_of)


def fits(pattern: str, ask: CellAsk) -> bool:
    """Tell whether a cell has all words of a pattern: of its name, values of its parameters, or `key=value`."""
    cell = ask.cell
    every = {**cell.params, **cell.fixed}
    known = {*asking.label(cell).split(), *map(str, every.values()), *(f"{k}={v}" for k, v in every.items())}
    if cell.tool == "llama-bench":
        known.update(stream_test(cell.params).split())
    return known.issuperset(pattern.split())


# -- tables -----------------------------------------------------------------------------------------------------------


def side_by_side(
    form: str,
    title: str,
    found: Sequence[ArmCells],
    columns: Iterable[Column],
    rows: Iterable[Mapping[str, Value]],
    *,
    settings: Mapping[str, Value] | None = None,
    notes: Iterable[str] = (),
) -> ArmsTable:
    """Return a table about experiments, with the provenance of each and what speaks against its runs."""
    origins = tuple(one.origin() for one in found)
    return ArmsTable(
        form,
        title,
        tuple(columns),
        tuple(rows),
        origins[0].provenance,
        settings or {},
        flags=tuple(sorted((flag for one in found for flag in _flags(one)), key=lambda flag: not flag.hard)),
        origins=origins,
        notes=(*notes, *_devices(found), *_older(found)),
    )


def _devices(found: Sequence[ArmCells]) -> Iterator[str]:
    """Yield which numbers come from which device, where they come from several."""
    labels = {one.name: one.evidence.device.label for one in found if one.evidence.device}
    if len({one.evidence.device for one in found if one.evidence.device}) > 1:
        yield "different devices, whose ratio is not one of builds alone: " + ", ".join(
            f"{name} on {label}" for name, label in labels.items()
        )


def _older(found: Sequence[ArmCells]) -> Iterator[str]:
    """Yield which experiments were measured as it is not done any more."""
    for name, protocol in dict.fromkeys((one.experiment, one.ask.protocol) for one in found):
        if protocol != PROTOCOL:
            yield f"{name} was measured by protocol {protocol}, not {PROTOCOL}: dgxlab run measures it again"


def _flags(one: ArmCells) -> list[Flag]:
    said = (*flags(one.cells), *unsteady(one.cells, one.origin().provenance))
    return [replace(f, labels=tuple(f"{one.name} {label}" for label in f.labels) or (one.name,)) for f in said]


def common(settings: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return what all of them say alike."""
    first, *others = settings or [{}]
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}


def in_order(cells: Iterable[Measured], key: Callable[[CellAsk], object]) -> list[CellAsk]:
    """Return the cells of all arms, each once."""
    return list({key(cell.ask): cell.ask for cell in cells}.values())
