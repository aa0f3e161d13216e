"""Experiments side by side: their numbers in one table, with the origins beneath it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dgxlab import units
from dgxlab.errors import UsageError
from dgxlab.model import PROTOCOL, SESSIONS
from dgxlab.report import ask as asking
from dgxlab.report.ask import CellAsk, Query
from dgxlab.report.evidence import Evidence, Measured, find, range_of
from dgxlab.report.records import Column, Origin, Row, Table, Value
from dgxlab.report.tables import (
    CONCURRENCY,
    SINGLE_STREAM,
    Form,
    env_text,
    flags,
    leading,
    others_of,
    provenance,
    rank,
    stream_test,
)
from dgxlab.store import alias
from dgxlab.tools import BY_FORM

if TYPE_CHECKING:
    from dgxlab.store import Store

SPEEDS = ("speed_pp", "speed_tg")
"""Metrics of each experiment in a table of concurrency."""


def find_arms(store: Store, wanted: Query) -> list[Evidence]:
    """Return the evidence for each named experiment or session."""
    asks = []
    for name in wanted.experiment:
        asks.append(asking.of_newest(store, asking.job_of_arm(store, name, wanted.host), name))
    for session in wanted.session:
        job = store.job(session)
        if job.kind in SESSIONS:
            raise UsageError(f"session {session} compares; its numbers are in form=verdicts", next="dgxlab jobs")
        asks += asking.of_session(store, job)
    names = [ask.arm.name for ask in asks]
    arms = [find(store, ask) for ask in asks]
    return [
        arm if names.count(arm.name) == 1 else replace(arm, name=f"{arm.name} in {alias(str(arm.ask.session))}")
        for arm in arms
    ]


def of_tools(arms: Sequence[Evidence], tools: Sequence[str], wanted: Query) -> list[Evidence]:
    """Keep the wanted cells of these tools."""

    def fitting(arm: Evidence, patterns: Sequence[str]) -> tuple[Measured, ...]:
        of_model = [cell for cell in arm.measured if wanted.model in ("", cell.ask.model)]
        cells = [cell for cell in of_model if cell.ask.cell.tool in tools]
        return tuple(cell for cell in cells if not patterns or any(_fits(each, cell.ask) for each in patterns))

    for pattern in wanted.cells:
        if not any(fitting(arm, (pattern,)) for arm in arms):
            raise UsageError(f"no cell of form={wanted.form} has all of {pattern!r}", next="dgxlab report")
    kept = [replace(arm, measured=fitting(arm, wanted.cells)) for arm in arms]
    for arm in kept:
        if not arm.measured:
            of = f" of model {wanted.model}" if wanted.model else ""
            raise UsageError(f"{arm.name} has nothing measured{of} for form={wanted.form}", next="dgxlab report")
    return kept


def by_environment(arms: Sequence[Evidence]) -> list[Evidence]:
    """Split an experiment if a cell was measured in several environments; names then include the environment."""
    parts = []
    for arm in arms:
        cells = {(cell.ask.key, cell.ask.model) for cell in arm.measured}
        if len(cells) == len(arm.measured):
            parts.append(arm)
            continue
        shared = common([cell.ask.env for cell in arm.measured])
        for digest in dict.fromkeys(cell.ask.env_digest for cell in arm.measured):
            mine = tuple(cell for cell in arm.measured if cell.ask.env_digest == digest)
            env = env_text({name: value for name, value in mine[0].ask.env.items() if name not in shared})
            parts.append(replace(arm, name=" ".join(filter(None, (arm.name, env))), measured=mine))
    return parts


def _fits(pattern: str, ask: CellAsk) -> bool:
    """Return whether a cell matches all words of a pattern: by its name, parameter values, or `key=value`."""
    cell = ask.cell
    every = {**cell.params, **cell.fixed}
    known = {*asking.label(cell).split(), *map(str, every.values()), *(f"{k}={v}" for k, v in every.items())}
    if cell.tool == BY_FORM["single-stream"]:
        known.update(stream_test(cell.params).split())
    return known.issuperset(pattern.split())


def common(settings: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return the settings with the same value in all of them."""
    first, *others = settings or [{}]
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}


def in_order(cells: Iterable[Measured], key: Callable[[CellAsk], object]) -> list[CellAsk]:
    """Return the cells of all arms, each once."""
    return list({key(cell.ask): cell.ask for cell in cells}.values())


def side_by_side(
    form: str,
    title: str,
    arms: Sequence[Evidence],
    columns: Iterable[Column],
    rows: Iterable[Row],
    *,
    settings: Mapping[str, Value],
    notes: Iterable[str] = (),
) -> Table:
    """Return a table about experiments, with the provenance of each and the flags of its runs."""
    origins = tuple(_origin(arm) for arm in arms)
    caveats = []
    if len({arm.device for arm in arms if arm.device}) > 1:
        caveats.append("the rows are of different devices (see Sources): their ratios are not of builds alone")
    if older := dict.fromkeys(arm.experiment for arm in arms if arm.ask.protocol != PROTOCOL):
        caveats.append(f"measured by an older protocol: {', '.join(older)}; dgxlab run measures again")
    every = [
        replace(flag, labels=tuple(f"{arm.name} {label}" for label in flag.labels) or (arm.name,))
        for arm in arms
        for flag in flags(arm, arm.measured)
    ]
    return Table(
        form,
        title,
        tuple(columns),
        tuple(rows),
        origins[0].provenance,
        settings,
        flags=tuple(sorted(every, key=lambda flag: not flag.hard)),
        kind="arms",
        notes=(*notes, *caveats),
        origins=origins,
    )


def _origin(arm: Evidence) -> Origin:
    envs = dict.fromkeys(env_text(cell.ask.env) for cell in arm.measured)
    notes = [f"ran with {env}" for env in envs if env]
    if arm.ask.protocol != PROTOCOL:
        notes.append(f"measured by protocol {arm.ask.protocol}, not {PROTOCOL}")
    conditions = range_of(cell.conditions for cell in arm.measured)
    return Origin(arm.name, provenance(arm, arm.measured), conditions, tuple(notes))


def single_stream(arms: Sequence[Evidence]) -> Table:
    """Return a row for each experiment and a column for each test."""
    layout = _Layout(SINGLE_STREAM, by_environment(arms))
    rows: dict[tuple[str, str], dict[str, Value]] = {}
    for arm in layout.arms:
        for cell in arm.measured:
            others = layout.others(cell.ask)
            lead = {"arm": arm.name, "model": cell.ask.model, **{key: others.get(key) for key in layout.varying}}
            row = rows.setdefault((arm.name, repr((cell.ask.model, sorted(others.items())))), lead)
            row[stream_test(cell.ask.cell.params)] = cell.quantities.get("avg_ts")
    asks = in_order(layout.cells, lambda ask: stream_test(ask.cell.params))
    asks.sort(key=lambda ask: (not ask.cell.params.get("n_prompt"), rank(SINGLE_STREAM, ask)))
    tests = [stream_test(ask.cell.params) for ask in asks]
    leads = leading(list(rows.values()), ["model"] * layout.models + layout.varying)
    columns = [Column("arm", "experiment"), *leads, *(Column(test, test, "avg_ts") for test in tests)]
    title = "Single stream"
    return side_by_side("single-stream", title, layout.arms, columns, rows.values(), settings=layout.settings)


def concurrency(arms: Sequence[Evidence]) -> Table:
    """Return a row for each number of sequences, and the speeds of each experiment beside each other."""
    layout = _Layout(CONCURRENCY, by_environment(arms))

    def place(ask: CellAsk) -> str:
        return repr((ask.model, sorted(CONCURRENCY.lead(ask).items()), sorted(layout.others(ask).items())))

    rows: dict[str, dict[str, Value]] = {}
    for ask in sorted(in_order(layout.cells, place), key=lambda ask: rank(CONCURRENCY, ask)):
        others = layout.others(ask)
        lead: dict[str, Value] = {"model": ask.model} if layout.models else {}
        rows[place(ask)] = {**lead, **CONCURRENCY.lead(ask), **{key: others.get(key) for key in layout.varying}}
    columns = leading(list(rows.values()), list(next(iter(rows.values()))))
    for number, arm in enumerate(layout.arms):
        for metric in SPEEDS:
            key = f"{metric}.{number}"
            for cell in arm.measured:
                rows[place(cell.ask)][key] = cell.quantities.get(metric)
            label = units.metric(metric).label
            columns.append(Column(key, f"{arm.name} {label}" if len(layout.arms) > 1 else label, metric))
    return side_by_side("concurrency", "Concurrency", layout.arms, columns, rows.values(), settings=layout.settings)


class _Layout:
    """Settings that affect numbers of experiments side by side, beyond the columns of their form."""

    def __init__(self, form: Form, arms: Sequence[Evidence]) -> None:
        self._form = form
        self.arms = arms
        self.cells = [cell for arm in arms for cell in arm.measured]
        self.models = len({cell.ask.model for cell in self.cells}) > 1  # there are several models
        every = [self.others(cell.ask) for cell in self.cells]
        shared = common(every)
        # each of these keys is a column
        self.varying = [key for key in dict.fromkeys(key for each in every for key in each) if key not in shared]
        model: dict[str, Value] = {} if self.models else {"model": self.cells[0].ask.model}
        self.settings = {**model, **shared}

    def others(self, ask: CellAsk) -> dict[str, Value]:
        """Return a number's settings without the environment, which belongs to the experiment and not to the row."""
        return {key: value for key, value in others_of(self._form, ask).items() if key not in ("env", "model")}
