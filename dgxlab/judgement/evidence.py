"""What a job left of its chains, as the agent saw it while it held them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dgxlab import stats
from dgxlab.agent.slots import Slot, flaw
from dgxlab.model import BASELINE, BURN_IN, ChainStep, CheckStep, GateStep, Plan, about, check_from_json
from dgxlab.store import Job, Store

ENDS = {
    "done": "the job ended",
    "failed": "the job failed",
    "cancelled": "the job was cancelled",
    "lost": "the job was lost",
}
"""How a job came to its end, by its state; in other states it has none."""


@dataclass(frozen=True)
class Run:
    """One run of a chain.

    Attributes:
        chain: ChainStep.id.
        model_id: None where it read no model.
        failed: Why it failed as a process, "" where it did not.
        slot: Its place, and what it gave.
        unsettled: That it was the last of a burn-in that had not settled, "" where it was not.
        clock: Median of the SM clock of the one GPU that it had, in MHz; None where there were more, or none was told.
        power: Median of what its GPUs drew, in W, all of them together; None where none was told.
    """

    chain: str
    model_id: str | None
    failed: str
    slot: Slot
    unsettled: str
    clock: float | None
    power: float | None


@dataclass(frozen=True)
class Gate:
    """A gate that failed or was flaky.

    Attributes:
        after: Whether it was asked after the chains.
        sentence: Which, for which arm, and why.
    """

    arm: str
    after: bool
    sentence: str


class Evidence:
    """What is known of the chains of one job that has ended.

    Attributes:
        plan: The job's.
        runs: Every run of a chain, in the order in which they ran.
        failed: The gates that failed.
        flaky: Those in which a case failed that passed in every rerun.
        ending: How the job ended, in words.
    """

    def __init__(self, store: Store, job: Job) -> None:
        self.plan: Plan = job.plan
        self.runs = tuple(_runs(store, job.job_id))
        asked = list(_gates(store, job.job_id))
        self.failed, self.flaky = (
            tuple(gate for gate, status in asked if status == wanted) for wanted in ("failed", "flaky")
        )
        self._asked_after = [gate.arm for gate, _ in asked if gate.after]
        self.ending = ENDS[job.state]
        if job.error and job.state in ("failed", "lost"):
            self.ending += f": {job.error}"

    def of(self, step: ChainStep) -> list[Run]:
        """Return the runs that count of a chain: of those in one place the last, of its burn-in none."""
        places = {(run.slot.role, run.slot.cycle): run for run in self.runs if run.chain == step.id}
        return [run for (role, _), run in places.items() if role != BURN_IN]

    def slots(self, step: ChainStep) -> list[Slot]:
        """Return everything that ran in a chain, its burn-in too, in the order in which it ran."""
        return [run.slot for run in self.runs if run.chain == step.id]

    def last(self, step: ChainStep) -> Run | None:
        """Return what ran last of a chain; None where it was not begun."""
        return next((run for run in reversed(self.runs) if run.chain == step.id), None)

    def unsettled(self, step: ChainStep) -> str:
        """Return that a chain began before its baseline had settled, "" where it had."""
        return next((run.unsettled for run in self.runs if run.chain == step.id and run.unsettled), "")

    def model_id(self, step: ChainStep) -> str | None:
        """Return what the baseline of a chain read; None for nothing, or where it never ran."""
        return next((run.model_id for run in self.runs if run.chain == step.id and run.slot.role == BASELINE), None)

    def gated_after(self, step: ChainStep) -> bool:
        """Tell whether every gate was asked that the plan has for a chain's arms after its chains."""
        last = max(index for index, other in enumerate(self.plan.steps) if isinstance(other, ChainStep))
        wanted = [other.arm for other in self.plan.steps[last:] if isinstance(other, (GateStep, CheckStep))]
        return all(self._asked_after.count(arm) >= wanted.count(arm) for arm in step.arms)


def _runs(store: Store, job_id: str) -> Iterator[Run]:
    values: defaultdict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in _about_runs(store, job_id, "cell, metric, value FROM samples", "discarded IS NULL"):
        values[row["run_id"]][row["cell"], row["metric"]].append(row["value"])
    hard = _grouped(_about_runs(store, job_id, "flags.reason AS value FROM flags", "hard", order="device, kind"))
    unsettled = _grouped(_about_runs(store, job_id, "flags.reason AS value FROM flags", "kind = 'unsettled'"))
    clocks, powers = (
        _grouped(_about_runs(store, job_id, "median AS value FROM telemetry", f"name = '{name}'"))
        for name in ("clocks.sm", "power.draw")
    )
    places = "chain, role, cycle, status, reason, model_id, seconds FROM chain_runs"
    for row in _about_runs(store, job_id, places, order="position"):
        run_id = row["run_id"]
        counted = values[run_id] if row["status"] == "valid" else {}
        medians = {key: stats.median(samples) for key, samples in counted.items()}
        wrong = flaw(row["status"], row["reason"], hard[run_id])
        clock = clocks[run_id][0] if len(clocks[run_id]) == 1 else None
        failed = row["reason"] if row["status"] == "failed" else ""
        power = sum(powers[run_id]) if powers[run_id] else None
        slot = Slot(row["role"], row["cycle"], medians, wrong, row["seconds"])
        yield Run(row["chain"], row["model_id"], failed, slot, "".join(unsettled[run_id]), clock, power)


def _about_runs(
    store: Store, job_id: str, columns_from: str, where: str = "true", *, order: str = "run_id"
) -> list[dict[str, Any]]:
    sql = f"SELECT run_id, {columns_from} JOIN runs USING (run_id) WHERE job_id = ? AND {where} ORDER BY {order}"
    return store.rows(sql, (job_id,))


def _grouped(rows: Iterable[dict[str, Any]]) -> defaultdict[str, list[Any]]:
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for row in rows:
        found[row["run_id"]].append(row["value"])
    return found


def _gates(store: Store, job_id: str) -> Iterator[tuple[Gate, str]]:
    """Yield the gates of a job with their status; keys end in the number of the journal's line."""
    placed = store.rows("SELECT run_id FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ?", (job_id,))
    first = min((_line(row["run_id"]) for row in placed), default=None)
    for row in _asked(store, job_id):
        after = first is not None and _line(row["key"]) > first
        when = "after" if after else "before"
        why = "; ".join(json.loads(row["reasons"]) or json.loads(row.get("flaky", "[]")))
        how = "was flaky" if row["status"] == "flaky" else "failed"
        sentence = f"gate {row['name']} {how} for {row['arm']} {when} the chains: {why}"
        yield Gate(row["arm"], after, sentence), row["status"]


def _asked(store: Store, job_id: str) -> Iterator[dict[str, Any]]:
    """Yield the gates of both kinds, each with its key and what it is called."""
    for row in store.rows("SELECT * FROM gates WHERE job_id = ? ORDER BY at, gate_id", (job_id,)):
        yield {**row, "key": row["gate_id"], "name": f"{row['op']} on {row['backend']}"}
    for row in store.rows("SELECT * FROM checks WHERE job_id = ? ORDER BY at, check_id", (job_id,)):
        yield {**row, "key": row["check_id"], "name": about(check_from_json(json.loads(row["gate"])))}


def _line(key: str) -> int:
    return int(key.rsplit("/", 1)[1])
