"""A job's journal into the store, each line exactly once.

A journal is read in pieces, again and again, by any number of clients. Its lines carry sequence numbers and the store
remembers which comes next, so a line that is there already is passed over, whatever piece it comes in. One call is one
transaction: all of a piece or nothing of it, and so never half a run. A piece of many runs then costs one flush of
the disk and not one a run; following a live job, a piece is what arrived meanwhile, most often one run.

A run whose numbers exceed the peaks of its GPU is kept and gets a soft flag (`guard`).
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from dgxlab import judgement
from dgxlab.errors import RemoteError, command, one_line
from dgxlab.ingest.guard import Extremes, Guard, beyond
from dgxlab.model import CANDIDATE, CellResult, Device, canonical, case_digest, events, to_json
from dgxlab.model.events import HOST, Event
from dgxlab.store import ROOFLINE, Job, Store, device_row, gate_digest
from dgxlab.tools import judge_check
from dgxlab.units import metric as metric_of

__all__ = ["COLD", "SAMPLE", "beyond", "ingest", "samples_of"]

COLD = "cold: the tool's first repetition"
"""Why a discarded sample of a measurement does not count."""

SAMPLE = ("run_id", "cell", "metric", "ordinal", "value", "unit", "discarded")
TELEMETRY = ("device", "name", "unit", "n", "median", "min", "max")
FLAG = ("device", "kind", "hard", "reason")


def ingest(store: Store, job_id: str, lines: Iterable[bytes]) -> list[Event]:
    """Fold lines of a job's journal into the store.

    `lines` is read to its end before the database is locked, so it may come slowly.

    Args:
        store: Where to.
        job_id: A job that was intended.
        lines: Lines with their newline, in order, overlapping what was read before or not; a last one without newline
            is torn and left for the next time.

    Returns:
        The events that were new, whether the store keeps them or not.

    Raises:
        RemoteError: if a line is no event, contradicts the store, or one is missing before it; nothing was changed.
        UsageError: if no such job was intended.
    """
    pieces = _read(job_id, lines)
    with store.transaction():
        fold = _Fold(store, store.job(job_id))
        new = [event for event, length in pieces if fold.line(event, length)]
        fold.finish()
    return new


def _read(job_id: str, lines: Iterable[bytes]) -> list[tuple[Event, int]]:
    """Parse lines to events, each with its length in bytes."""
    pieces: list[tuple[Event, int]] = []
    torn = False
    for line in lines:
        try:
            if torn:
                raise ValueError("it has no end")
            if not (torn := not line.endswith(b"\n")):
                pieces.append((events.read(json.loads(line)), len(line)))
        except (ValueError, RecursionError) as error:
            number = pieces[-1][0].seq + 1 if pieces else None
            raise _unusable(job_id, number, str(error) or type(error).__name__) from error
    return pieces


def _unusable(job_id: str, seq: int | None, cause: str) -> RemoteError:
    line = "the first line that was read" if seq is None else f"line {seq + 1}"
    mend = command("dgxlab", "session", "reject", job_id, "--because", "its journal cannot be used")
    return RemoteError(f"{line} of the journal of {job_id} cannot be used: {one_line(cause)}", next=mend)


def _taken(event: object, *names: str) -> dict[str, Any]:
    return {name: getattr(event, name) for name in names}


def _texts(event: object, *names: str) -> dict[str, str]:
    return {name: canonical(getattr(event, name)) for name in names}


class _Fold:
    """Folds the lines of one call; how far the journal is read is written once, by `finish`."""

    def __init__(self, store: Store, job: Job) -> None:
        self.store = store
        self.job = job
        self.facts: Mapping[str, Any] = job.facts or {}
        self.seq = job.journal_seq
        self.bytes = job.journal_bytes
        self.lines = store.rows("SELECT journal_lines FROM jobs WHERE job_id = ?", (job.job_id,))[0]["journal_lines"]
        self.cells: set[str] = set()
        self.guard = Guard(store)
        plan = json.loads(job.plan_json)
        self.sources = {arm["name"]: arm["source"] for arm in plan["arms"]}
        self.chains = {step["id"]: step for step in plan["steps"] if step["kind"] == "chain"}

    def line(self, event: Event, length: int) -> bool:
        """Fold one line in if it is the next one; tell whether it was."""
        if event.seq > self.seq:
            raise RemoteError(
                f"the journal of {self.job.job_id} jumps from line {self.seq} to line {event.seq + 1}",
                next=f"dgxlab attach {self.job.job_id}",
            )
        if event.seq == self.lines:
            self.lines += 1
            self.bytes += length
        if event.seq < self.seq:
            return False
        self.seq += 1
        # other events are for those who watch, or of a newer agent, and only counted
        fold = getattr(self, f"on_{event.event}", None)
        try:
            if fold:
                fold(event)
        except (LookupError, ValueError, sqlite3.IntegrityError) as error:
            cause = f"there is no {error}" if isinstance(error, LookupError) else str(error)
            raise _unusable(self.job.job_id, event.seq, f"{event.event}: {cause}") from error
        return True

    def finish(self) -> None:
        """Write how far the journal was read, and what it then says; a piece with nothing new writes nothing."""
        if (self.seq, self.bytes) != (self.job.journal_seq, self.job.journal_bytes):
            read = {"journal_bytes": self.bytes, "journal_lines": self.lines, "journal_seq": self.seq}
            self.store.update_job(self.job.job_id, **read)
        if self.chains and self.seq != self.job.journal_seq:
            judgement.record(self.store, self.job.job_id)

    # -- one method an event that the store keeps ---------------------------------------------------------------------

    def on_job(self, event: events.JobEvent) -> None:
        """The agent has begun: who it is and what the host looks like."""
        if (event.job_id, event.plan_digest) != (self.job.job_id, self.job.plan_digest):
            raise ValueError(f"it is of job {event.job_id} with plan {event.plan_digest[:16]}")
        self.facts = to_json(event.facts)
        told = _taken(event, "boot_id", "agent_version", "protocol")
        self.store.update_job(self.job.job_id, host_id=event.facts.host_id, facts=canonical(self.facts), **told)
        self.store.set_state(self.job.job_id, "running")

    def on_build(self, event: events.BuildEvent) -> None:
        """An arm has its build. What it was made from is the plan's word: a reused build was stamped by another job."""
        source = self.sources[event.arm]
        for name, value in (("pin", event.source.pin), ("tree", event.source.tree)):
            if value != source[name]:
                raise ValueError(f"its {name} is {value}, the plan says {source[name]}")
        row = _taken(event, "arm", "build_id", "cmake_cache", "log", "seconds", "reused")
        row |= _texts(event, "cmake", "toolchain", "binaries", "libraries")
        row |= {"pin": source["pin"], "tree": source["tree"], "commit_id": source["commit"]}
        row |= {"series": canonical(source["series"]), "dirty": source["dirty"]}
        device = device_row(Device.of(self.facts, event.cmake))
        self.store.put("devices", device)
        self.store.put("arms", {"job_id": self.job.job_id, "device_id": device["device_id"], **row})

    def on_model(self, event: events.ModelEvent) -> None:
        """A model is there; one that two arms share is told twice and kept once."""
        row = _taken(event, "model_id", "name", "path", "size", "digest", "seconds", "reused")
        row["recipe"] = None if event.recipe is None else canonical(event.recipe)
        self.store.put("inputs", {"job_id": self.job.job_id, **row})

    def on_gate(self, event: events.GateEvent) -> None:
        """A parity gate was judged."""
        gate = event.gate
        names = ("arm", "build_id", "rc", "passed", "total", "unsupported", "status", "seconds", "cases")
        row = _taken(event, *names) | _texts(event, "reasons", "flaky", "failed", "argv", "env", "raw")
        row |= {"op": gate.op, "backend": gate.backend, "gate_digest": gate_digest(to_json(gate), event.env)}
        row |= {"expected": gate.expect.total if gate.expect else None, "at": event.t}
        row |= {"expected_cases": gate.cases or None, "overridden": int(gate.overridden)}
        if event.case_list is not None:
            if case_digest(event.case_list) != event.cases:
                raise ValueError(f"its cases are not the list {event.cases}")
            self.store.put("case_lists", {"cases": event.cases, "lines": canonical(event.case_list)})
        self.store.put("gates", {"gate_id": self._key(event), "job_id": self.job.job_id, **row})

    def on_check(self, event: events.CheckEvent) -> None:
        """A gate on a model was judged."""
        reasons = judge_check(event.gate, event.readings)
        if bool(reasons) != (event.status == "failed"):
            raise ValueError(f"it {event.status}, and its readings say: {'; '.join(reasons) or 'passed'}")
        row = _taken(event, "arm", "build_id", "kind", "status", "seconds")
        row |= _texts(event, "gate", "inputs", "env", "commands", "readings", "reasons", "raw")
        row |= {"step": event.id, "gate_digest": gate_digest(to_json(event.gate), event.env), "at": event.t}
        self.store.put("checks", {"check_id": self._key(event), "job_id": self.job.job_id, **row})

    def on_run(self, event: events.RunEvent) -> None:
        """One launch of a benchmark, valid or not, with every raw value."""
        run_id = self._key(event)
        names = ("arm", "build_id", "tool", "position", "env_digest", "rc", "signal", "started", "seconds", "status")
        row = _taken(event, *names, "reason") | _texts(event, "argv", "env", "before", "after", "raw")
        row["model_id"] = event.model_id or None
        self.store.put("runs", {"run_id": run_id, "job_id": self.job.job_id, **row})
        for key, cell in event.cells.items():
            if key in self.cells:
                continue
            if cell.key != key:
                raise ValueError(f"cell {key} is not the digest of its parameters")
            texts = _texts(cell, "params", "fixed")
            self.store.put("cells", {"cell": key, "tool": cell.tool, "label": cell.label, **texts})
            self.cells.add(key)
        rows = [(run_id, result.cell, canonical(result.raw)) for result in event.results]
        self.store.put_many("rows", ("run_id", "cell", "raw"), rows)
        self.store.put_many("samples", SAMPLE, samples_of(run_id, event.results))
        for table, columns, told in (("telemetry", TELEMETRY, event.telemetry), ("flags", FLAG, event.flags)):
            values = [(run_id, *(getattr(each, name) for name in columns)) for each in told]
            self.store.put_many(table, ("run_id", *columns), values)
        extremes = (
            Extremes(result.cell, m.metric, min(m.samples), max(m.samples), result.raw)
            for result in event.results
            for m in sorted(result.measurements, key=lambda each: each.metric)
        )
        if reason := self.guard.implausible({**row, "job_id": self.job.job_id}, extremes):
            flag = {"device": HOST, "kind": ROOFLINE, "hard": 0, "reason": reason}
            self.store.put("flags", {"run_id": run_id, **flag})
        if event.chain is not None:
            step = self.chains.get(event.chain)
            if step is None or step["candidate" if event.role == CANDIDATE else "baseline"]["arm"] != event.arm:
                raise ValueError(f"the plan has no {event.role} {event.cycle} of {event.chain} with arm {event.arm}")
            self.store.put("chain_runs", {"run_id": run_id, **_taken(event, "chain", "role", "cycle")})

    def on_error(self, event: events.ErrorEvent) -> None:
        """Something failed; the last one told is why the job ended as it did."""
        self.store.update_job(self.job.job_id, error=event.message, next=event.next, details=event.details)

    def on_end(self, event: events.EndEvent) -> None:
        """The job is over, and this is the last word on it."""
        ended = {"state": event.status, "exit_code": event.exit_code, "finished_at": event.t}
        self.store.update_job(self.job.job_id, **ended)

    def _key(self, event: Event) -> str:
        return f"{self.job.job_id}/{event.seq}"


def samples_of(run_id: str, results: Iterable[CellResult]) -> list[tuple[Any, ...]]:
    """Return rows of samples, the discarded ones first: that is the order in which they were measured."""
    rows = []
    for result in results:
        for m in result.measurements:
            if metric_of(m.metric).unit != m.unit:
                raise ValueError(f"{m.metric} is not in {m.unit}")
            for ordinal, value in enumerate((*m.discarded, *m.samples)):
                reason = COLD if ordinal < len(m.discarded) else None
                rows.append((run_id, result.cell, m.metric, ordinal, value, m.unit, reason))
    return rows
