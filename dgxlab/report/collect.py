"""Put a report together: what was asked for, what the store has of it, and what it has not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab.errors import UsageError
from dgxlab.model import Experiment, Source
from dgxlab.report import ask as asking
from dgxlab.report.ask import ArmAsk, Ask, CellAsk
from dgxlab.report.evidence import Evidence, Key, Lost, find
from dgxlab.report.records import Failure, Missing, Report, Table
from dgxlab.report.tables import tables

if TYPE_CHECKING:
    from dgxlab.store import Store

LABELS = 3
"""Cells named in a failure; the rest are counted. What was not measured at all is listed in full."""

CASES = 3
"""Failing cases named of a gate."""


def collect(store: Store, experiment: str | None = None, *, job_id: str | None = None) -> Report:
    """Return the report of an experiment's newest state, or of one session alone.

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
    ask = asking.of_session(store, job_id) if job_id is not None else asking.of_name(store, str(experiment))
    return _collect(store, ask)


def collect_experiment(store: Store, experiment: Experiment, source: Source, host_id: str) -> Report:
    """Return the report of an experiment at hand on a tree and machine, also when it never needed a session."""
    return _collect(store, asking.of_experiment(store, experiment, source, host_id))


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
    made = [table for arm in found for table in _titled(tables(arm.name, arm.arm, arm.evidence), arm, found)]
    failures = [failure for arm in found for failure in (*_failed_gates(arm), *_lost_runs(arm))]
    return Report(
        ask.title,
        ask.hypothesis,
        tuple(made),
        tuple(missing for arm in found for missing in _missing(arm, ask)),
        (*_session(ask, failures), *failures),
    )


def _titled(made: Iterable[Table], arm: _Found, found: Sequence[_Found]) -> list[Table]:
    """Name the arm in each title where there are two."""
    return [replace(table, title=f"{arm.name}: {table.title}") if len(found) > 1 else table for table in made]


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
    failures = []
    for gate in found.evidence.failed_gates:
        newest = found.evidence.gates[gate["gate_digest"]]
        reasons = [*json.loads(gate["reasons"]), *_some(json.loads(gate["failed"]), CASES)]
        what = f"gate {gate['op']} on {gate['backend']}"
        again = newest["status"] != "failed"
        failures.append(Failure(gate["job_id"], what, "failed", "; ".join(reasons), again))
    return failures


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
    return f"{words}: {', '.join(_some(lost.labels, LABELS))}" if lost.labels else words


def _session(ask: Ask, failures: Sequence[Failure]) -> list[Failure]:
    """Say how the newest session stands, unless it is done or what ended it is listed anyway."""
    job = ask.job
    if job is None or job.state == "done":
        return []
    if any(failure.session == job.job_id and _explains(failure, job.error) for failure in failures):
        return []
    words = {
        "intended": "recorded, and nothing has been heard from the host yet",
        "running": "it has not ended",
        "lost": "it started and will never report its end",
        "cancelled": "it was cancelled",
        "failed": "it ended with an error",
    }
    return [Failure(job.job_id, "session", job.state, job.error or words[job.state])]


def _explains(failure: Failure, error: str) -> bool:
    """Tell whether a session's error only repeats a run's reason, or says that a gate failed which is listed."""
    return error in ("", failure.reason) or error.startswith(f"{failure.what} failed")


def _some(items: Sequence[str], most: int) -> list[str]:
    rest = len(items) - most
    return [*items[:most], f"and {rest} more"] if rest > 0 else list(items)


def _key(ask: CellAsk) -> Key:
    return (ask.key, ask.model, ask.env_digest)
