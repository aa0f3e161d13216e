"""Tables of several experiments side by side, with the origin of each beneath."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dgxlab import units
from dgxlab.errors import UsageError, command
from dgxlab.judgement.names import CellAsk, varying_of
from dgxlab.model import PROTOCOL, SESSIONS, Cell
from dgxlab.report import ask as asking
from dgxlab.report.ask import Query
from dgxlab.report.evidence import Evidence, Measured, doubts, find_evidence
from dgxlab.report.records import Column, Origin, Row, Table, Value, grouped
from dgxlab.report.runs import range_of
from dgxlab.report.tables import (
    CEILING,
    CONCURRENCY,
    SINGLE_STREAM,
    Form,
    ceiling_share,
    common,
    env_text,
    flags,
    leading,
    origin_of,
    settings_of,
    sort_key,
)
from dgxlab.store import alias
from dgxlab.tools import BY_FORM
from dgxlab.tools.llama_bench import name_of_test

if TYPE_CHECKING:
    from dgxlab.store import Store


def find_arms(store: Store, wanted: Query) -> list[Evidence]:
    """Return the evidence on each experiment and each arm of each session that a query names.

    Raises UsageError if there is no such experiment or session, or the session compares two arms.
    """
    asks = []
    for name in wanted.experiment:
        asks.append(asking.of_newest(store, asking.job_of_arm(store, name, wanted.host), name))
    for session in wanted.session:
        job = store.job(session)
        if job.kind in SESSIONS:
            message = f"session {session} compares; its numbers are in form=verdicts"
            raise UsageError(message, next=f"dgxlab report --form verdicts {session}")
        asks += asking.of_session(store, job)
    names = [ask.arm.name for ask in asks]
    arms = [find_evidence(store, ask) for ask in asks]
    return [
        arm if names.count(arm.name) == 1 else replace(arm, name=f"{arm.name} in {alias(str(arm.ask.session))}")
        for arm in arms
    ]


def of_forms(store: Store, wanted: Query, *forms: str) -> list[Evidence]:
    """Return the evidence of `find_arms` with only the cells of these forms that match the query's model and patterns.

    Raises UsageError if a pattern selects no cell, or an arm is left without one.
    """
    arms, tools = find_arms(store, wanted), [BY_FORM[form] for form in forms]

    def has(pattern: str, cell: Cell) -> bool:
        test = name_of_test(cell.params) if cell.tool == BY_FORM["single-stream"] else ""
        return asking.has_words(pattern, f"{asking.label(cell)} {test}", {**cell.params, **cell.fixed})

    def fitting(arm: Evidence, patterns: Sequence[str]) -> tuple[Measured, ...]:
        of_model = [cell for cell in arm.measured if wanted.model in ("", cell.ask.model)]
        cells = [cell for cell in of_model if cell.ask.cell.tool in tools]
        return tuple(cell for cell in cells if not patterns or any(has(each, cell.ask.cell) for each in patterns))

    for pattern in wanted.cells:
        if not any(fitting(arm, (pattern,)) for arm in arms):
            labels = list(dict.fromkeys(asking.label(cell.ask.cell) for arm in arms for cell in fitting(arm, ())))
            there = f"; there are {', '.join(labels[:5])}{' and others' * (len(labels) > 5)}" if labels else ""
            message = f"no cell of form={wanted.form} has all of {pattern!r}{there}"
            raise UsageError(message, next=command("dgxlab", "report", *[*wanted.session, *wanted.experiment][:1]))
    kept = [replace(arm, measured=fitting(arm, wanted.cells)) for arm in arms]
    for arm in (arm for arm in kept if not arm.measured):
        of = f" of model {wanted.model}" if wanted.model else ""
        raise UsageError(f"{arm.name} has nothing measured{of} for form={wanted.form}", next="dgxlab report")
    return kept


def by_environment(arms: Sequence[Evidence]) -> list[Evidence]:
    """Split each arm that measured a cell in several environments into one arm for each environment, which names it."""
    parts = []
    for arm in arms:
        if len({cell.ask.identity[:2] for cell in arm.measured}) == len(arm.measured):
            parts.append(arm)
            continue
        shared = common([cell.ask.env for cell in arm.measured])
        for mine in grouped((cell.ask.identity[2], cell) for cell in arm.measured).values():
            env = env_text({name: value for name, value in mine[0].ask.env.items() if name not in shared})
            parts.append(replace(arm, name=" ".join(filter(None, (arm.name, env))), measured=tuple(mine)))
    return parts


def distinct_asks(cells: Iterable[Measured], key: Callable[[CellAsk], object]) -> list[CellAsk]:
    """Return one ask for each value of `key`, in the order of their first appearance."""
    return list({key(cell.ask): cell.ask for cell in cells}.values())


def side_by_side(
    form: str,
    title: str,
    arms: Sequence[Evidence],
    columns: Iterable[Column],
    rows: Iterable[Row],
    *,
    settings: Mapping[str, Value] = {},
    notes: Iterable[str] = (),
) -> Table:
    """Return a table of several experiments, given columns and rows; origins, flags and caveats come from `arms`."""
    origins = []
    for arm in arms:
        envs = dict.fromkeys(env_text(cell.ask.env) for cell in arm.measured)
        remarks = [f"ran with {env}" for env in envs if env]
        if arm.ask.protocol != PROTOCOL:
            remarks.append(f"measured by protocol {arm.ask.protocol}, not {PROTOCOL}")
        conditions = range_of(cell.conditions for cell in arm.measured)
        origins.append(Origin(arm.name, origin_of(arm, arm.measured), conditions, tuple(remarks)))
    caveats = [*doubts({arm.name: arm for arm in arms})]
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
        origins=tuple(origins),
    )


def settings_with_model(form: Form, ask: CellAsk) -> dict[str, Value]:
    """Return a cell's model and its `settings_of`, without the environment, which belongs to the experiment."""
    return {"model": ask.model, **{key: value for key, value in settings_of(form, ask).items() if key != "env"}}


def single_stream(arms: Sequence[Evidence]) -> Table:
    """Return the table of llama-bench's speeds: a row for each experiment, a column for each test."""
    arms = by_environment(arms)
    cells = [cell for arm in arms for cell in arm.measured]
    every = [settings_with_model(SINGLE_STREAM, cell.ask) for cell in cells]
    varying = varying_of(every)
    rows: dict[tuple[str, str], dict[str, Value]] = {}
    for arm in arms:
        for cell in arm.measured:
            others = settings_with_model(SINGLE_STREAM, cell.ask)
            lead = {"arm": arm.name, **{key: others.get(key) for key in ("model", *varying)}}
            row = rows.setdefault((arm.name, repr(sorted(others.items()))), lead)
            test = name_of_test(cell.ask.cell.params)
            row |= {test: cell.quantities.get("avg_ts"), f"{test} {CEILING}": ceiling_share(arm, cell)}
    asks = distinct_asks(cells, lambda ask: name_of_test(ask.cell.params))
    asks.sort(key=lambda ask: (not ask.cell.params.get("n_prompt"), sort_key(SINGLE_STREAM, ask)))
    tests = [name_of_test(ask.cell.params) for ask in asks]
    columns = [Column("arm", "experiment"), *leading(list(rows.values()), varying)]
    for test in tests:
        share = f"{test} {CEILING}"
        columns.append(Column(test, test, "avg_ts"))
        columns += [Column(share, share, numeric=True)] if any(row.get(share) for row in rows.values()) else []
    return side_by_side("single-stream", "Single stream", arms, columns, rows.values(), settings=common(every))


def concurrency(
    arms: Sequence[Evidence], form: Form = CONCURRENCY, metrics: Sequence[str] = ("speed_pp", "speed_tg")
) -> Table:
    """Return a table with a row for each number of sequences, and columns of these metrics for each experiment."""
    arms = by_environment(arms)
    cells = [cell for arm in arms for cell in arm.measured]
    every = [settings_with_model(form, cell.ask) for cell in cells]
    varying = varying_of(every)

    def row_key(ask: CellAsk) -> str:
        return repr(sorted({**form.lead(ask), **settings_with_model(form, ask)}.items()))

    rows: dict[str, dict[str, Value]] = {}
    for ask in sorted(distinct_asks(cells, row_key), key=lambda ask: sort_key(form, ask)):
        others = {key: settings_with_model(form, ask).get(key) for key in varying}
        rows[row_key(ask)] = {**{key: others[key] for key in varying[:1] if key == "model"}, **form.lead(ask), **others}
    columns = leading(list(rows.values()), list(next(iter(rows.values()))))
    for number, arm in enumerate(arms):
        for metric in metrics:
            key = f"{metric}.{number}"
            for cell in arm.measured:
                rows[row_key(cell.ask)][key] = cell.quantities.get(metric)
            label = units.metric(metric).label
            columns.append(Column(key, f"{arm.name} {label}" if len(arms) > 1 else label, metric))
    return side_by_side(form.name, form.name.capitalize(), arms, columns, rows.values(), settings=common(every))
