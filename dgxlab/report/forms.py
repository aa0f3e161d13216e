"""Tables by the names of their forms, as documents and `dgxlab report --form` ask for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dgxlab.errors import UsageError
from dgxlab.model import SESSIONS
from dgxlab.report import ask as asking
from dgxlab.report import published
from dgxlab.report.arms import ArmCells, find_arms, of_tools
from dgxlab.report.beside import columns_beside, gates_beside, op_lead, rows_beside
from dgxlab.report.imports import imports
from dgxlab.report.levers import levers
from dgxlab.report.lineage import lineage
from dgxlab.report.query import Query
from dgxlab.report.records import Page, Table
from dgxlab.report.roof import with_roof
from dgxlab.report.series import selected
from dgxlab.report.session import Session
from dgxlab.report.steps import steps
from dgxlab.report.streams import concurrency, single_stream
from dgxlab.report.tables import FORMS as BY_TOOL
from dgxlab.report.tables import tables
from dgxlab.report.verdicts import verdicts

if TYPE_CHECKING:
    from dgxlab.store import Job, Store


OP_TITLE = BY_TOOL["backend-ops"][1]


def page(store: Store, wanted: Query) -> Page:
    """Return what is asked for.

    Raises:
        UsageError: if the record has nothing of it.
    """
    return FORMS[wanted.form](store, wanted)


def _single_stream(store: Store, wanted: Query) -> Page:
    table = single_stream(of_tools(find_arms(store, wanted), ("llama-bench",), wanted))
    tests = {column.key for column in table.columns if column.metric}
    made = rows_beside(wanted, table, lambda cell: test if (test := str(cell[0])) in tests else None)
    return Page(wanted.form, (made,))


def _concurrency(store: Store, wanted: Query) -> Page:
    table = concurrency(of_tools(find_arms(store, wanted), ("batched-bench",), wanted))
    found = selected(wanted.form, wanted.published)
    made = columns_beside(found, table, lambda cell: dict(zip(("PP", "TG", "B"), cell, strict=True)))
    return Page(wanted.form, (made,))


def _ops(store: Store, wanted: Query) -> Page:
    found = of_tools(find_arms(store, wanted), ("backend-ops",), wanted)
    said = selected(wanted.form, wanted.published)
    made: list[Table] = []
    for one in found:
        for table in _tables(one, "ops"):
            cells = [cell for cell in one.cells if OP_TITLE(cell.ask) == table.title]
            roofed = with_roof(table, cells)
            both = columns_beside(said, roofed, partial(op_lead, cells[0].ask.cell.params.get("op_name")))
            made.append(_titled(both, one, len(found)))
    return Page(wanted.form, tuple(made))


def _gates(store: Store, wanted: Query) -> Page:
    made: list[Table] = []
    for session in wanted.session:
        job = store.job(session)
        if job.kind in SESSIONS:
            compared = Session(store, job, asking.plan_of(job))
            made += [replace(table, title=compared.what) for table in compared.gate_tables()]
        else:
            made += _gates_alone(store, replace(wanted, session=(session,)))
    if wanted.experiment:
        made += _gates_alone(store, wanted)
    if not made:
        raise UsageError("no gate was asked for there", next="dgxlab report")
    return Page(wanted.form, (gates_beside(wanted, made[0]), *made[1:]))


def _gates_alone(store: Store, wanted: Query) -> list[Table]:
    return [
        replace(table, title=f"{one.name}: {table.title}")
        for one in find_arms(store, wanted)
        for table in _tables(one, "gates")
    ]


def _tables(one: ArmCells, form: str) -> list[Table]:
    mine = tables(one.experiment, one.arm, replace(one.evidence, measured=one.cells))
    return [table for table in mine if table.form == form]


def _titled(table: Table, one: ArmCells, several: int) -> Table:
    return replace(table, title=f"{one.name}: {table.title}") if several > 1 else table


def _verdicts(store: Store, wanted: Query) -> Page:
    jobs = [store.job(session) for session in wanted.session]
    jobs += [_newest_of_two(store, name, wanted) for name in wanted.experiment]
    made: list[Table] = []
    said: list[str] = []
    for job in jobs:
        if job.kind not in SESSIONS:
            raise UsageError(f"session {job.job_id} compares nothing", next=f"dgxlab report {job.job_id}")
        report = verdicts(store, job)
        if not report.ended:
            raise UsageError(f"session {job.job_id} has not ended and shows nothing before", next="dgxlab jobs")
        said.append(
            report.summary if len(jobs) == 1 else f"{Session(store, job, asking.plan_of(job)).what}: {report.summary}"
        )
        made += [table for table in report.tables if table.form == "verdicts"]
    if not made:
        raise UsageError(f"session {jobs[0].job_id} has no verdict", next=f"dgxlab report {jobs[0].job_id}")
    return Page(wanted.form, tuple(made), " · ".join(said))


def _newest_of_two(store: Store, name: str, wanted: Query) -> Job:
    """Return the newest session that has a verdict on an experiment: its own name's, or one that it is candidate in."""
    found = store.rows(
        """SELECT DISTINCT job_id FROM verdicts JOIN jobs USING (job_id)
           WHERE (jobs.name = :name OR candidate_arm = :name) AND (:baseline = '' OR baseline_arm = :baseline)
             AND (:host = '' OR jobs.host = :host)
           ORDER BY baseline_arm = candidate_arm, intent_at DESC, job_id DESC LIMIT 1""",
        {"name": name, "baseline": wanted.baseline, "host": wanted.host},
    )
    if not found:
        against = f" against {wanted.baseline!r}" if wanted.baseline else ""
        there = f" on {wanted.host!r}" if wanted.host else ""
        raise UsageError(f"{store.path} has no verdict on {name!r}{against}{there}", next="dgxlab report")
    return store.job(found[0]["job_id"])


def _published(_: Store, wanted: Query) -> Page:
    tables = {make.__name__: make for make in published.TABLES}
    absent = [name for name in wanted.table if name not in tables]
    if absent:
        raise UsageError(
            f"there is no published table {absent[0]!r}; there are {', '.join(tables)}",
            next="dgxlab report --form published",
        )
    made = [tables[name]() for name in wanted.table]
    return Page(wanted.form, (*made, *(published.series(pattern) for pattern in wanted.source)))


FORMS: Mapping[str, Callable[[Store, Query], Page]] = {
    "steps": lambda store, wanted: Page(wanted.form, (steps(store, wanted),)),
    "single-stream": _single_stream,
    "concurrency": _concurrency,
    "ops": _ops,
    "gates": _gates,
    "verdicts": _verdicts,
    "levers": lambda store, wanted: Page(wanted.form, (levers(store, wanted),)),
    "provenance": lambda store, wanted: Page(wanted.form, (lineage(store, wanted),)),
    "published": _published,
    "imported": lambda store, wanted: Page(wanted.form, imports(store, wanted)),
}
"""By name, each of `asked.KEYS`."""
