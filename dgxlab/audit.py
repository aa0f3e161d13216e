"""Check the record against its own sources: jobs against their plans, samples against the tools' rows, verdicts.

Plans are read as plain JSON, not decoded: an older dgxlab's plan has other fields.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import Any, get_type_hints

from dgxlab import judgement
from dgxlab import store as stores
from dgxlab.errors import CheckFailed, command
from dgxlab.ingest import SAMPLE, samples_of
from dgxlab.judgement import fleets, tries
from dgxlab.model import (
    ARM,
    FILES,
    Cell,
    CellResult,
    Check,
    Device,
    Source,
    Toolchain,
    build_id,
    digest,
    events,
    from_json,
    model_id,
)
from dgxlab.model.checks import Cases, Launched
from dgxlab.model.events import HOST
from dgxlab.model.experiment import Recipe
from dgxlab.model.parts import Texts
from dgxlab.model.wire import decoder
from dgxlab.store import Store, gate_digest
from dgxlab.tools import BENCHES, judge_check

Row = Mapping[str, Any]
_Labels = dict[str, str]  # a cell's label in plans, by Cell.key; of several labels, the alphabetically first

PLACEHOLDER = re.compile(r"\{([a-z]+(?::[\w.-]+)?)\}")

JSON_COLUMNS = (
    *("plan", "facts", "series", "cmake", "toolchain", "recipe", "env", "argv", "raw", "gate", "inputs", "commands"),
    *("contents", "readings", "reasons", "flaky", "failed", "before", "after", "binaries", "libraries"),
)

_KINDS = {"jobs": "job", "arms": "build", "inputs": "model", "checks": "gate", "gates": "gate", "runs": "run"}
# by table, the types of its columns, which are named like the fields of the event that the row comes from
FIELD_TYPES = {table: get_type_hints(events.EVENTS[event], include_extras=True) for table, event in _KINDS.items()}
FIELD_TYPES["checks"] |= {"reasons": Texts, "kind": str}
FIELD_TYPES["gates"] |= {"reasons": Texts, **get_type_hints(Cases), **get_type_hints(Launched)}


def check(store: Store) -> list[str]:
    """Return a sentence for each problem of a database; verdicts, then tries and fleets if there is no other.

    Raises SpecError if the database is too damaged to be read.
    """
    problems = [*stores.check(store), *_measured(store)]
    problems = problems or judgement.check(store)  # verdicts cannot be checked on unsound evidence
    return problems or [*tries.check(store), *fleets.check(store)]  # nor tries and fleets on unsound verdicts


def merge(into: Store, other: Path) -> dict[str, int]:
    """Add every row of `other` that `into` lacks, compute all verdicts again, and check the result.

    Returns the number of rows added, by table.

    Raises:
        CheckFailed: if they contradict each other, or one of them or the result has problems; nothing was changed.
        SpecError: if `other` is not a dgxlab database, or of a newer dgxlab.
    """
    with stores.merging(into, other) as counts:
        judgement.record_all(into)
        into.seal()
        if problems := check(into):
            message = f"{into.path} and {other} together are not sound, nothing was merged: {problems[0]}"
            raise CheckFailed(message, next=command("dgxlab", "db", "check", other))
    return counts


def _measured(store: Store) -> Iterator[str]:
    labels: _Labels = {}
    for job in store.rows("SELECT * FROM jobs ORDER BY job_id"):
        try:
            checked = _Job(store, job)
            yield from chain(checked.itself(), checked.arms_and_inputs(), checked.gates(), checked.checks())
            yield from checked.runs(labels)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            yield f"job {job['job_id']} cannot be compared with its plan: {error!r}"
    known = {row["cell"]: row["label"] for row in store.rows("SELECT cell, label FROM cells")}
    for cell in sorted(known.keys() | labels.keys()):
        if known.get(cell) != labels.get(cell):
            yield f"cell {cell} is called {known.get(cell)!r}, and {labels.get(cell)!r} by the plans that measured it"


class _Job:
    """One job checked against its plan, its facts, and the tools' rows, parsed again; each method yields sentences."""

    def __init__(self, store: Store, job: Row) -> None:
        self.store = store
        self.job = _decoded("jobs", job)
        self.job_id = str(job["job_id"])
        self.plan = self.job["plan"]
        self.facts = self.job["facts"] or {}
        self.gpus = [gpu["uuid"] for gpu in self.facts.get("details", {}).get("gpus", [])]
        self.planned_arms = {arm["name"]: arm for arm in self.plan["arms"]}
        self.steps = {_stem(step["id"]): step for step in self.plan["steps"]}
        self.models = {(step["arm"], step["model"]): step for step in self.plan["steps"] if step["kind"] == "model"}
        self.inputs = {row["model_id"]: row for row in self._rows("inputs", "job_id")}
        self.root = ""

    def itself(self) -> Iterator[str]:
        job, plan, facts = self.job, self.plan, self.facts
        planned = ("job_id", "kind", "name", "protocol", *(["experiment"] if job["experiment"] else []))
        yield from self._differ(f"job {self.job_id}", job, {name: plan[name] for name in planned}, "its plan")
        columns = ("host_id", "boot_id") if facts else ()
        yield from self._differ(f"job {self.job_id}", job, {name: facts[name] for name in columns}, "its facts")
        if (job["state"] == "done") != (job["exit_code"] == 0):
            yield f"job {self.job_id} is {job['state']} with exit code {job['exit_code']}"
        for spec in plan.get("specs", ()):
            if not self.store.experiment(digest(spec)):
                yield f"the experiment {digest(spec)} of job {self.job_id} is missing"

    def arms_and_inputs(self) -> Iterator[str]:
        for row in self._rows("arms", "job_id"):
            name = f"arm {row['arm']} of job {self.job_id}"
            arm = self.planned_arms[row["arm"]]
            source = arm["source"]
            wanted = {name: source[name] for name in ("pin", "tree", "series")}
            wanted |= {"commit_id": source["commit"], "dirty": int(source["dirty"]), "cmake": arm["cmake"]}
            yield from self._differ(name, row, wanted, "its plan")
            built = Source(row["pin"], row["tree"], row["commit_id"])
            wanted = {"build_id": build_id(built, row["cmake"], Toolchain(**row["toolchain"]))}
            wanted |= {"device_id": Device.of(self.facts, row["cmake"]).id, "toolchain": self.facts["toolchain"]}
            yield from self._differ(name, row, wanted, "its facts")
        for identity, row in self.inputs.items():
            recipes = [step["recipe"] for (_, model), step in self.models.items() if model == row["name"]]
            files = (row["contents"] or {}).get("files", {})
            prefix = model_id(decoder(Recipe)(row["recipe"]), files) if row["recipe"] else "file-"
            if row["recipe"] not in recipes or not identity.startswith(prefix):
                yield f"model {identity} of job {self.job_id} is not the plan's {row['name']}"

    def gates(self) -> Iterator[str]:
        for row in self._rows("gates", "gate_id"):
            # the step whose output is the row's raw file
            name, step = f"gate {row['gate_id']}", self.steps.get(PurePosixPath(row["raw"]["stdout"]["path"]).stem)
            if step is None or step["kind"] != "gate":
                yield f"{name} belongs to no step of its plan"
                continue
            gate = step["gate"]
            wanted = {"arm": step["arm"], "op": gate["op"], "backend": gate["backend"], "env": step["env"]}
            wanted |= {"expected": gate["expect"]["total"] if gate["expect"] else None}
            wanted |= {"expected_cases": gate.get("cases"), "overridden": int(gate.get("overridden", False))}
            wanted |= {"argv": self._filled(step["argv"], row), "gate_digest": gate_digest(gate, step["env"])}
            yield from self._differ(name, row, wanted, "its plan")
            # whether the status is what its counts and reasons say
            failed, flaky = row["status"] == "failed", row["status"] == "flaky"
            forgiven = row["total"] if flaky else row["passed"]
            clean = row["total"] and forgiven == row["total"] == (row["expected"] or row["total"]) and not row["failed"]
            clean = clean and gate["unsupported"] in (None, row["unsupported"])
            clean = clean and (row["rc"] == 0 or flaky) and row["cases"] == (row["expected_cases"] or row["cases"])
            if failed != bool(row["reasons"]) or (not failed and not clean):
                yield f"{name} is {row['status']}, which is not what its counts, exit status and reasons say"
            if not failed and flaky != bool(row["flaky"]):
                yield f"{name} is {row['status']} with flaky cases {_short(row['flaky'])}"

    def checks(self) -> Iterator[str]:
        for row in self._rows("checks", "check_id"):
            name, step = f"gate {row['check_id']}", self.steps.get(_stem(row["step"]))
            if step is None or step["kind"] != "check":
                yield f"{name} belongs to no step of its plan"
                continue
            commands = {command["role"]: command for command in step["commands"]}
            wanted = {"arm": step["arm"], "gate": step["gate"], "env": commands[ARM]["env"]}
            wanted |= {"gate_digest": gate_digest(step["gate"], commands[ARM]["env"])}
            read = {c["model"]: self._model(step["arm"], c["model"]) for c in step["commands"] if c["model"]}
            read |= from_json(Check, step["gate"]).sources(step["files"])
            wanted |= {"inputs": read, "seconds": sum(command["seconds"] for command in row["commands"])}
            yield from self._differ(name, row, wanted, "its plan")
            if [*map(str, judge_check(from_json(Check, row["gate"]), row["readings"]))] != row["reasons"]:
                yield f"{name} is not what its readings say"
            for launched in row["commands"]:
                planned = commands[launched["role"]]
                wanted = {"argv": self._filled(planned["argv"], row, planned["model"]), "env": planned["env"]}
                reading = row["readings"][launched["role"]]
                if "problem" not in reading and not reading.get("failed"):
                    wanted["rc"] = 0
                yield from self._differ(f"the {launched['role']} of {name}", launched, wanted, "its plan")

    def runs(self, labels: _Labels) -> Iterator[str]:
        places = {row["run_id"]: row for row in self._rows("chain_runs", "run_id")}
        raws = _by_run(self._rows("rows", "run_id", decode=False))
        samples = _by_run(self._rows("samples", "run_id", decode=False))
        known: dict[int, dict[str, Cell]] = {}
        runs = sorted(self._rows("runs", "run_id"), key=lambda row: int(row["run_id"].rpartition("/")[2]))
        for position, row in enumerate(runs):
            name, step = f"run {row['run_id']}", self._run_step(row, places.get(row["run_id"]))
            if step is None:
                yield f"{name} belongs to no step of its plan"
                continue
            if id(step) not in known:
                known[id(step)] = {cell.key: cell for cell in (Cell(**each) for each in step["cells"])}
            measured = raws.get(row["run_id"], [])
            cells = known[id(step)] | _parts(row, measured, known[id(step)])
            for key, cell in cells.items():
                labels[key] = min(cell.label, labels.get(key, cell.label))
            wanted = {"arm": step["arm"], "tool": step["tool"], "env": step["env"], "position": position}
            wanted |= {"argv": self._filled(step["argv"], row, step["model"]), "env_digest": digest(row["env"], 16)}
            wanted |= {"model_id": self._model(step["arm"], step["model"]) if step["model"] else None}
            if row["status"] == "valid":
                wanted |= {"rc": 0, "signal": None}
            yield from self._differ(name, row, wanted, "its plan")
            for state in (row["before"], row["after"]):
                uuids = [gpu["uuid"] for gpu in state.get("gpus") or ()]
                if state.get("boot_id", self.job["boot_id"]) != self.job["boot_id"] or not set(uuids) <= set(self.gpus):
                    yield f"{name} saw another machine than its job"
            refused = BENCHES[row["tool"]].apart and bool(measured and row["reason"])
            if row["status"] == "valid" and ({each["cell"] for each in measured} == cells.keys()) == refused:
                yield f"{name} is valid and has not every row of its plan, or a reason without one missing"
            yield from _row_problems(row, measured, samples.get(row["run_id"], []), cells)
        for table in ("telemetry", "flags"):
            for row in self._rows(table, "run_id", "DISTINCT device", decode=False):
                if row["device"] not in (HOST, *self.gpus):
                    yield f"{table} of job {self.job_id} is of {row['device']}, which its facts do not have"

    def _rows(self, table: str, key: str, columns: str = "*", *, decode: bool = True) -> list[dict[str, Any]]:
        where = "job_id = ?1" if key == "job_id" else f"{key} > ?1 || '/' AND {key} < ?1 || '0'"
        sql = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {key}"  # noqa: S608 - names of our own
        rows = self.store.rows(sql, (self.job_id,))
        return [_decoded(table, row) for row in rows] if decode else rows

    def _run_step(self, row: Row, place: Row | None) -> Any:
        """Return the plan's step of a run: by its place in a chain, else by its raw file; None if there is none."""
        stem = PurePosixPath(row["raw"]["stdout"]["path"]).stem
        once, _, _ = stem.rpartition("-")  # for a repeated run, the name without the number
        if place:
            held = self.steps.get(_stem(place["chain"]))
            named = f"{_stem(place['chain'])}-{place['role']}-{place['cycle']}" in (stem, once)
            role = "candidate" if place["role"] == "candidate" else "baseline"
            return held[role] if held and held["kind"] == "chain" and named else None
        step = self.steps.get(stem) or self.steps.get(once)
        return step if step and step["kind"] == "run" else None

    def _model(self, arm: str, name: str) -> str:
        recipe = self.models[arm, name]["recipe"]
        rows = (key for key, row in self.inputs.items() if row["name"] == name and row["recipe"] == recipe)
        return next(rows, "")

    def _filled(self, argv: Sequence[str], row: Row, model: str = "") -> list[str]:
        """Return a plan's argv with its placeholders replaced; the job's root is taken from its first program."""
        stem = _stem(row.get("step", ""))
        words = row["argv"] if "argv" in row else row["commands"][0]["argv"]
        if not self.root:
            roots = (re.search(rf"(/.*?)/(?:builds/{row['build_id']}|jobs/{self.job_id})/", word) for word in words)
            self.root = next((match[1] for match in roots if match), "")
        folder = f"{self.root}/jobs/{self.job_id}"
        known = {"bin": f"{self.root}/builds/{row['build_id']}/bin", "text": f"{folder}/raw/{stem}.txt"}
        known |= {"logits": f"{folder}/{stem}.logits", "files": f"{folder}/{stem or FILES}"}
        known |= {"python": words[0], "agent": f"{folder}/agent.pyz"}  # only the host knows its Python
        if model:
            known[f"model:{model}"] = self.inputs[self._model(row["arm"], model)]["path"]
        return [PLACEHOLDER.sub(lambda match: known[match[1]], word) for word in argv]

    def _differ(self, name: str, row: Row, wanted: Row, origin: str) -> Iterator[str]:
        for column, value in wanted.items():
            if row[column] != value:
                yield f"{name} has {column} {_short(row[column])}, and {origin} has {_short(value)}"


def _parts(run: Row, rows: Sequence[Row], cells: Mapping[str, Cell]) -> dict[str, Cell]:
    if {row["cell"] for row in rows} <= cells.keys():
        return {}
    bench = BENCHES[run["tool"]]
    parsed = bench.parse("\n".join(bench.printed(row["raw"]) for row in rows), list(cells.values()))
    return {cell.key: cell for cell in parsed.parts}


def _row_problems(run: Row, rows: Sequence[Row], samples: Sequence[Row], cells: Mapping[str, Cell]) -> Iterator[str]:
    bench, results = BENCHES[run["tool"]], []
    cold: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        if sample["discarded"]:
            cold[sample["cell"], sample["metric"]].append(sample["value"])
    for row in rows:
        if row["cell"] not in cells:
            yield f"run {run['run_id']} has a row of cell {row['cell']}, which its plan does not have"
            return
        parsed = bench.parse("\n".join([bench.printed(row["raw"])] * bench.rounds), [cells[row["cell"]]])
        if parsed.problems:
            yield f"a row of run {run['run_id']} cannot be read again: {parsed.problems[0]}"
            return
        measurements = parsed.results[0].measurements
        if bench.rounds > 1:  # only the row of the last round is kept
            measurements = tuple(replace(m, discarded=tuple(cold[row["cell"], m.metric])) for m in measurements)
        results.append(CellResult(row["cell"], measurements))
    if set(map(itemgetter(*SAMPLE), samples)) != set(samples_of(run["run_id"], results)):
        yield f"the samples of run {run['run_id']} are not what the tool's rows give"


def _decoded(table: str, row: Row) -> dict[str, Any]:
    """Return a row with its JSON decoded and validated as `ingest` validates an event: reports trust it."""
    values = {k: json.loads(v) if k in JSON_COLUMNS and v is not None else v for k, v in row.items()}
    for name, kind in FIELD_TYPES.get(table, {}).items():
        if values.get(name) is not None and not (table == "jobs" and name not in JSON_COLUMNS):
            try:
                from_json(kind, bool(values[name]) if name == "reused" else values[name])
            except ValueError as error:
                raise ValueError(f"{name} of {table}: {error}") from error
    return values


def _by_run(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {run_id: list(group) for run_id, group in groupby(rows, itemgetter("run_id"))}


def _stem(step: str) -> str:
    return step.replace(":", "-")


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
