"""Put a report together: what was asked for, what the store has of it, and what it has not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dgxlab.errors import UsageError
from dgxlab.model import SESSIONS, Device, Experiment, Source, canonical
from dgxlab.report import ask as asking
from dgxlab.report.ask import ArmAsk, Ask, CellAsk
from dgxlab.report.checks import failed_check, gate_of
from dgxlab.report.evidence import Evidence, Key, Lost, find
from dgxlab.report.failures import failed_gate, failed_session, some
from dgxlab.report.records import Failure, Missing, Report, SessionReport
from dgxlab.report.tables import tables
from dgxlab.report.verdicts import verdicts

if TYPE_CHECKING:
    from dgxlab.store import Store

LABELS = 3
"""Cells named in a failure; the rest are counted. What was not measured at all is listed in full."""


def collect(store: Store, experiment: str | None = None, *, job_id: str | None = None) -> Report:
    """Return the report of an experiment's newest state, or of one session alone.

    Where the session is of two arms, the report is about its verdicts and nothing else.

    Args:
        store: What was recorded.
        experiment: Name; the newest session decides spec, tree and host, and each cell has its newest valid run on
            exactly that build, whichever session measured it.
        job_id: A session; only what it measured itself.

    Raises:
        UsageError: if neither or both are given, or there is no such session.
    """
    if (experiment is None) == (job_id is None):
        raise UsageError("a report is about one experiment or one session", next="dgxlab jobs")
    job = store.job(job_id) if job_id is not None else asking.newest_job(store, str(experiment))
    if job.kind in SESSIONS:
        return verdicts(store, job)
    return _collect(store, asking.of_newest(store, job) if job_id is None else asking.of_session(store, job))


def collect_session(store: Store, job_id: str) -> SessionReport:
    """Return the report of a session of two arms.

    Raises:
        UsageError: if there is no such session.
    """
    return verdicts(store, store.job(job_id))


def collect_experiment(store: Store, experiment: Experiment, source: Source, device: Device) -> Report:
    """Return the report of an experiment at hand on a tree and device, also when it never needed a session."""
    return _collect(store, asking.of_experiment(store, experiment, source, device))


@dataclass(frozen=True)
class _Found:
    """One arm's ask with its evidence."""

    arm: ArmAsk
    evidence: Evidence

    @property
    def name(self) -> str:
        return self.arm.arm.name

    @property
    def absent(self) -> list[CellAsk]:
        """Cells without a valid run."""
        there = {_key(m.ask) for m in self.evidence.measured}
        return [ask for ask in self.arm.cells if _key(ask) not in there]


def _collect(store: Store, ask: Ask) -> Report:
    found = [_Found(arm, find(store, ask, arm)) for arm in ask.arms]
    made = [table for arm in found for table in tables(arm.name, arm.arm, arm.evidence)]
    failures = [failure for arm in found for failure in (*_failed_gates(arm), *_lost_runs(arm))]
    return Report(
        ask.title,
        ask.hypothesis,
        tuple(made),
        tuple(missing for arm in found for missing in _missing(arm, ask)),
        (*failed_session(ask.job, failures), *_rejected(store, ask), *failures),
    )


def _rejected(store: Store, ask: Ask) -> Iterator[Failure]:
    """Yield the other sessions that built these trees and were set aside: what they measured is left out."""
    trees = canonical([[arm.arm.source.pin, arm.arm.source.tree] for arm in ask.arms])
    found = store.rows(
        """SELECT DISTINCT job_id, reason FROM rejections JOIN arms USING (job_id)
           WHERE json_array(pin, tree) IN (SELECT value FROM json_each(?)) ORDER BY job_id""",
        (trees,),
    )
    for row in found:
        if ask.session is None and not (ask.job and ask.job.job_id == row["job_id"]):
            yield Failure(row["job_id"], "session", "rejected", row["reason"])


# -- what is not there ------------------------------------------------------------------------------------------------


def _missing(found: _Found, ask: Ask) -> list[Missing]:
    """List the cells without a valid run, those with the same reason together, in the order planned."""
    reasons: dict[Key, str] = {}
    for lost in reversed(found.evidence.lost):
        reasons.update(dict.fromkeys(lost.keys, f"{lost.run['status']} in {lost.run['job_id']}"))
    unfinished = ask.job is not None and not ask.job.ended and ask.job.state != "lost"
    default = "the session has not ended" if unfinished else "not measured"
    groups: dict[tuple[str, str, str], list[str]] = {}
    for cell in found.absent:
        groups.setdefault((cell.cell.tool, cell.model, reasons.get(_key(cell), default)), []).append(
            asking.label(cell.cell)
        )
    return [Missing(found.name, tool, model, tuple(labels), reason) for (tool, model, reason), labels in groups.items()]


# -- what does not count ----------------------------------------------------------------------------------------------


def _failed_gates(found: _Found) -> list[Failure]:
    newest = found.evidence.gates
    return [
        failed_gate(gate, again=newest[gate["gate_digest"]]["status"] != "failed")
        for gate in found.evidence.failed_gates
    ] + [
        failed_check(gate_of(row), row, again=found.evidence.checks[row["gate_digest"]]["status"] != "failed")
        for row in found.evidence.failed_checks
    ]


def _lost_runs(found: _Found) -> list[Failure]:
    """List the runs that should have given a cell of this arm, and those of which nobody knows what they should."""
    asked = {_key(ask) for ask in found.arm.cells}
    absent = {_key(ask) for ask in found.absent}
    return [
        Failure(
            lost.run["job_id"],
            _what(lost),
            lost.run["status"],
            lost.run["reason"],
            again=bool(lost.keys) and absent.isdisjoint(lost.keys),
        )
        for lost in found.evidence.lost
        if not (lost.keys and asked.isdisjoint(lost.keys))
    ]


def _what(lost: Lost) -> str:
    words = " ".join(filter(None, (lost.run["tool"], lost.model)))
    return f"{words}: {', '.join(some(lost.labels, LABELS))}" if lost.labels else words


def _key(ask: CellAsk) -> Key:
    return (ask.key, ask.model, ask.env_digest)
