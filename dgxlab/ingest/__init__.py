"""Write a job's journal into the store, each line exactly once.

Clients read a journal in pieces, and may read a line several times. Lines have sequence numbers, and the store knows
the next one, so lines already stored are skipped. One call is one transaction: all its lines are stored, or none. A run
whose numbers exceed the peaks of its GPU keeps them and gets a soft flag.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from dgxlab import judgement, roofline, synth, units
from dgxlab.errors import RemoteError, command, one_line
from dgxlab.model import CANDIDATE, CellResult, Device, FileModel, ParityGate, canonical, case_digest, events, to_json
from dgxlab.model.events import HOST, Event
from dgxlab.model.experiment import Recipe, root_of
from dgxlab.model.wire import decoder
from dgxlab.roofline import Peaks, Weights
from dgxlab.store import ROOFLINE, Job, Store, device_row, gate_digest
from dgxlab.tools import BENCHES, judge_check
from dgxlab.tools.rows import case_params
from dgxlab.units import metric as metric_of

__all__ = ["COLD", "SAMPLE", "impossible_runs", "ingest", "samples_of"]

COLD = "cold: the tool's first repetition"  # why a discarded sample does not count
SAMPLE = ("run_id", "cell", "metric", "ordinal", "value", "unit", "discarded")  # columns of the table `samples`
TELEMETRY = ("device", "name", "unit", "n", "median", "min", "max")
FLAG = ("device", "kind", "hard", "reason")


def ingest(store: Store, job_id: str, lines: Iterable[bytes]) -> list[Event]:
    """Store lines of a job's journal, and return the events of those that were new, including events for display only.

    Args:
        lines: In order, each with its newline. Lines of earlier calls may come again. An incomplete last line is left
            for the next call. All lines are read before the database is locked, so they may arrive slowly.

    Raises:
        RemoteError: if a line is not an event, contradicts the store, or follows a gap; nothing was changed.
        UsageError: if the store has no such job.
    """
    pieces: list[tuple[Event, int]] = []  # with the length of its line in bytes
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
    with store.transaction():
        fold = _Fold(store, store.job(job_id))
        new = [event for event, length in pieces if fold.line(event, length)]
        fold.finish()
    return new


def _unusable(job_id: str, seq: int | None, cause: str) -> RemoteError:
    line = "the first line that was read" if seq is None else f"line {seq + 1}"
    mend = command("dgxlab", "session", "reject", job_id, "--because", "its journal cannot be used")
    return RemoteError(f"{line} of the journal of {job_id} cannot be used: {one_line(cause)}", next=mend)


def _taken(event: object, *names: str) -> dict[str, Any]:
    return {name: getattr(event, name) for name in names}


def _texts(event: object, *names: str) -> dict[str, str]:
    return {name: canonical(getattr(event, name)) for name in names}


class _Fold:
    """Stores the events of one call, with one method per stored event type."""

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
        """Store an event if it is the next one; return whether it was."""
        if event.seq > self.seq:
            message = f"the journal of {self.job.job_id} jumps from line {self.seq} to line {event.seq + 1}"
            raise RemoteError(message, next=f"dgxlab attach {self.job.job_id}")
        if event.seq == self.lines:
            self.lines += 1
            self.bytes += length
        if event.seq < self.seq:
            return False
        self.seq += 1
        # other events are only for display or from a newer agent: just count them
        fold = getattr(self, f"on_{event.event}", None)
        try:
            if fold:
                fold(event)
        except (LookupError, ValueError, sqlite3.IntegrityError) as error:
            cause = f"there is no {error}" if isinstance(error, LookupError) else str(error)
            raise _unusable(self.job.job_id, event.seq, f"{event.event}: {cause}") from error
        return True

    def finish(self) -> None:
        """Store the journal's position and the job's state; a piece with nothing new writes nothing."""
        if (self.seq, self.bytes) != (self.job.journal_seq, self.job.journal_bytes):
            self.store.update_job(
                self.job.job_id, journal_bytes=self.bytes, journal_lines=self.lines, journal_seq=self.seq
            )
        if self.chains and self.seq != self.job.journal_seq:
            judgement.record(self.store, self.job.job_id)

    def on_job(self, event: events.JobEvent) -> None:
        if (event.job_id, event.plan_digest) != (self.job.job_id, self.job.plan_digest):
            raise ValueError(f"it is of job {event.job_id} with plan {event.plan_digest[:16]}")
        self.facts = to_json(event.facts)
        columns = _taken(event, "boot_id", "agent_version", "protocol")
        self.store.update_job(self.job.job_id, host_id=event.facts.host_id, facts=canonical(self.facts), **columns)
        self.store.set_state(self.job.job_id, "running")

    def on_build(self, event: events.BuildEvent) -> None:
        # take the source from the plan: a reused build was stamped by another job
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
        row = _taken(event, "model_id", "name", "path", "size", "digest", "seconds", "reused")
        for name in ("recipe", "contents"):
            row[name] = None if (value := getattr(event, name)) is None else canonical(value)
        self.store.put("inputs", {"job_id": self.job.job_id, **row})

    def on_gate(self, event: events.GateEvent) -> None:
        """A gate was judged; parity gates have a table of their own."""
        gate = event.gate
        row = _taken(event, "arm", "build_id", "status", "seconds") | _texts(event, "env", "raw")
        row |= {"job_id": self.job.job_id, "gate_digest": gate_digest(to_json(gate), event.env), "at": event.t}
        row["reasons"] = canonical([str(reason) for reason in event.reasons])
        if isinstance(gate, ParityGate):
            command, reading = event.commands[0], event.counts  # of the launch that is judged
            row |= {"gate_id": self._key(event), "op": gate.op, "backend": gate.backend, "rc": command["rc"]}
            row |= {"argv": canonical(command["argv"]), "flaky": canonical(event.flaky)}
            row |= {name: reading[name] for name in ("passed", "total", "unsupported", "cases")}
            row |= {"failed": canonical(reading["failed"]), "expected": gate.expect.total if gate.expect else None}
            row |= {"expected_cases": gate.cases or None, "overridden": int(gate.overridden)}
            if event.case_list is not None:
                if case_digest(event.case_list) != reading["cases"]:
                    raise ValueError(f"its cases are not the list {reading['cases']}")
                self.store.put("case_lists", {"cases": reading["cases"], "lines": canonical(event.case_list)})
            self.store.put("gates", row)
            return
        reasons = judge_check(gate, event.readings)
        if bool(reasons) != (event.status == "failed"):
            says = "; ".join(map(str, reasons)) or "passed"
            raise ValueError(f"its status is {event.status}, and its readings say: {says}")
        row |= {"check_id": self._key(event), "step": event.id, "kind": gate.name}
        self.store.put("checks", row | _texts(event, "gate", "inputs", "commands", "readings"))

    def on_run(self, event: events.RunEvent) -> None:
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
        for table, columns, records in (("telemetry", TELEMETRY, event.telemetry), ("flags", FLAG, event.flags)):
            values = [(run_id, *(getattr(each, name) for name in columns)) for each in records]
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
        self.store.update_job(self.job.job_id, error=event.message, next=event.next, details=event.details)

    def on_end(self, event: events.EndEvent) -> None:
        self.store.update_job(self.job.job_id, state=event.status, exit_code=event.exit_code, finished_at=event.t)

    def _key(self, event: Event) -> str:
        return f"{self.job.job_id}/{event.seq}"


def samples_of(run_id: str, results: Iterable[CellResult]) -> list[tuple[Any, ...]]:
    """Return the rows of `samples` for the results of a run, with the columns SAMPLE, discarded ones first.

    Raises ValueError if a measurement has another unit than its metric.
    """
    rows = []
    for result in results:
        for m in result.measurements:
            if metric_of(m.metric).unit != m.unit:
                raise ValueError(f"{m.metric} is not in {m.unit}")
            for ordinal, value in enumerate((*m.discarded, *m.samples)):
                reason = COLD if ordinal < len(m.discarded) else None
                rows.append((run_id, result.cell, m.metric, ordinal, value, m.unit, reason))
    return rows


# -- numbers that cannot be true ---------------------------------------------------------------------------------------


Row = Mapping[str, Any]

DEVICE = "SELECT names FROM devices JOIN arms USING (device_id) WHERE job_id = ? AND arm = ?"
MODEL = "SELECT path, recipe, contents FROM inputs WHERE job_id = ? AND model_id = ?"
CELL = "SELECT label, params FROM cells WHERE cell = ?"
RUNS = "SELECT run_id, job_id, arm, tool, model_id FROM runs ORDER BY started, run_id"
EXTREMES = """SELECT run_id, cell, metric, min(value) AS least, max(value) AS most, rows.raw
              FROM samples JOIN rows USING (run_id, cell)
              WHERE discarded IS NULL GROUP BY run_id, cell, metric ORDER BY rows.rowid, metric"""


@dataclass(frozen=True)
class Extremes:
    """Minimum and maximum of one metric of a cell in a run, of the samples that count, with the tool's own row."""

    cell: str
    metric: str
    least: float
    most: float
    raw: Row


class Guard:
    """Compares the values of runs with the peaks of their GPUs; reads each device, model and cell only once.

    The flag is not hard, since hard flags discard cycles: the agent did not have this one, and a verdict would then use
    other cycles than the chain on the host. An impossible number is also no condition of the machine: it is a
    repeatable mistake in the kernel or the tool.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._peaks: dict[tuple[str, ...], Peaks | None] = {}
        self._models: dict[tuple[str, str], Row] = {}
        self._cells: dict[str, tuple[str, Row]] = {}
        self._possible: dict[tuple[str, ...], float] = {}

    def implausible(self, run: Row, extremes: Iterable[Extremes]) -> str:
        """Return why a run's numbers are physically impossible; "" if they are possible or cannot be checked.

        `run` is a row of `runs`, of which job_id, arm, tool and model_id are read.
        """
        key = (run["job_id"], run["arm"], run["tool"])
        if key not in self._peaks:
            (row,) = self._store.rows(DEVICE, key[:2])
            self._peaks[key] = roofline.together(json.loads(row["names"]), alone=BENCHES[run["tool"]].one_device)
        if (peaks := self._peaks[key]) is None:
            return ""
        reasons = [why for each in extremes if (why := self._of_cell(run, each, peaks))]
        more = f"; and {len(reasons) - 1} more of this run" if len(reasons) > 1 else ""
        return reasons[0] + more if reasons else ""

    def _of_cell(self, run: Row, extremes: Extremes, peaks: Peaks) -> str:
        """Return why a cell's most demanding sample is impossible, else "": if it is possible, so are the others."""
        metric = units.metric(extremes.metric)
        value, sign = (extremes.least, -1) if metric.better == "lower" else (extremes.most, 1)
        case, kilobytes, model = (str(extremes.raw.get(name, "")) for name in ("op_params", "memory_kb", "model_type"))
        cell = (run["job_id"], run["arm"], run["tool"], run["model_id"] or "", extremes.cell, extremes.metric)
        alike = (*cell, case, kilobytes, model)
        if sign * value <= self._possible.get(alike, -math.inf):
            return ""
        if extremes.cell not in self._cells:
            (row,) = self._store.rows(CELL, (extremes.cell,))
            self._cells[extremes.cell] = row["label"], json.loads(row["params"])
        label, params = self._cells[extremes.cell]
        params = {**case_params(case), **params}
        if BENCHES[run["tool"]].one_device and not str(params.get("backend_name", "")).startswith("CUDA"):
            return ""
        moved = int(kilobytes) * 1024 if kilobytes.isdecimal() else None
        key = (run["job_id"], run["model_id"])
        if run["model_id"] and key not in self._models:
            (self._models[key],) = self._store.rows(MODEL, key)
        weights = _weights(self._models.get(key), model)
        if not run["model_id"] and (served := extremes.raw.get("server")):  # a model of no spec, as vLLM's
            weights = roofline.weights_of(name := PurePosixPath(served["model"]).name, name)
        why = roofline.implausible(metric.name, params, value, peaks, weights=weights, moved=moved)
        if not why:
            self._possible[alike] = sign * value
        return f"{label}: {why}" if why else ""


def impossible_runs(store: Store) -> Iterator[str]:
    """Yield a sentence for each run in the record with physically impossible numbers."""
    guard = Guard(store)
    decode = lru_cache(maxsize=1)(json.loads)  # the row repeats for each metric
    recorded: defaultdict[str, list[Extremes]] = defaultdict(list)
    for row in store.rows(EXTREMES):
        extremes = Extremes(row["cell"], row["metric"], row["least"], row["most"], decode(row["raw"]))
        recorded[row["run_id"]].append(extremes)
    for run in store.rows(RUNS):
        if reason := guard.implausible(run, recorded[run["run_id"]]):
            yield f"run {run['run_id']} is kept, and cannot be true: {reason}"


def _weights(model: Row | None, called: str) -> Weights | None:
    """Return the weights that every token uses: of a recipe, else by a file's header, else estimated from its name."""
    if model is None:
        return None
    if model["recipe"] is not None and (weights := _of_recipe(model["recipe"])):
        return weights
    contents = json.loads(model["contents"] or "{}")
    if contents.get("per_token") and contents["bits"]:
        number = 8 * contents["per_token"] / contents["bits"]
        if 2 * number > contents["parameters"]:  # no experts: theirs may have other bits than the file
            return Weights(number, contents["bits"], roofline.path_of(contents["type"]))
    if model["recipe"] is not None:
        return None
    name = PurePosixPath(model["path"]).name
    return roofline.weights_of(f"{name} {called}", called or name)


@lru_cache(maxsize=64)
def _of_recipe(recipe: str) -> Weights | None:
    try:
        model = decoder(Recipe)(json.loads(recipe))
    except ValueError:  # written by a dgxlab with other fields
        return None
    root, quant = root_of(model), model.quant
    if isinstance(root, FileModel):
        return None
    return Weights(float(synth.active(root)), roofline.bits_of(quant), roofline.path_of(quant))
