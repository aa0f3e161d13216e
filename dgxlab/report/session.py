"""One session of two arms as the record has it: its plan, what ran, what failed, and where that came from."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dgxlab.compare import Difference, differing
from dgxlab.errors import GateFailed
from dgxlab.judgement import Judged, gate_name
from dgxlab.model import (
    BASELINE,
    BURN_IN,
    CANDIDATE,
    PROTOCOL,
    Arm,
    Cell,
    ChainStep,
    CheckStep,
    GateStep,
    ModelStep,
    Plan,
)
from dgxlab.plan import is_flag
from dgxlab.report.evidence import GATES, VALUES, Row, machine, mean_of, rows_of
from dgxlab.report.records import Column, Failure, Number, Provenance, SessionTable, columns, some
from dgxlab.report.tables import (
    MODEL_GATES,
    check_columns,
    check_row,
    env_text,
    origin,
    parity_columns,
    parity_row,
    synthetic,
)
from dgxlab.store import gate_digest
from dgxlab.tools.parity import unlike

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

Medians = Mapping[tuple[str, str, str, str], Mapping[int, float]]
"""What the runs of chains gave, by chain, role, Cell.key and metric, then by cycle."""

WORDS = {"ab": "A/B", "screen": "screen", "noise": "A/A"}
"""What a session of a kind is called."""

CASES = 3
"""Failing cases named of a gate."""

ENDS = {
    "intended": "recorded, and nothing has been heard from the host yet",
    "running": "it has not ended",
    "lost": "it started and will never report its end",
    "cancelled": "it was cancelled",
    "failed": "it ended with an error",
}
"""What a session that is not done says of itself, by its state."""

RUNS = """SELECT run_id, chain, role, cycle, position, arm, tool, status, reason,
                 json_extract(inflated(before), '$.pinned') AS pinned
          FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ? ORDER BY position"""


class ChainSession:
    """One session: its plan, what ran, and where that came from."""

    def __init__(self, store: Store, job: Job, plan: Plan) -> None:
        self.store = store
        self.job = job
        self.plan = plan
        self.ended = job.ended or job.state == "lost"
        self.runs = store.rows(RUNS, (job.job_id,))
        self._devices = store.devices(job.job_id)
        built = store.rows("SELECT arm, build_id FROM arms WHERE job_id = ?", (job.job_id,))
        self._builds = {str(row["arm"]): str(row["build_id"]) for row in built}
        chain = next(plan.chains)
        self.baseline = plan.arm(chain.baseline.arm)
        self.candidate = None if chain.candidate.arm == chain.baseline.arm else plan.arm(chain.candidate.arm)

    @property
    def what(self) -> str:
        """Say what is compared: `A/B of w4a16 against stock`."""
        word = WORDS[self.plan.kind]
        if self.candidate is None:
            return f"{word} of {self.baseline.name} against itself"
        return f"{word} of {self.candidate.name} against {self.baseline.name}"

    def origin(self, arm: Arm, models: Iterable[str] = (), cells: Iterable[Cell] = ()) -> Provenance:
        """Return where an arm's numbers come from, of these models and cells."""
        steps = [step for step in self.plan.steps if isinstance(step, ModelStep) and step.arm == arm.name]
        made = {step.model for step in steps if synthetic(step.recipe)}
        device, build = self._devices.get(arm.name), self._builds.get(arm.name)
        host = machine(self.job, device)
        return origin(arm, [self.job.job_id], build, host, device, cells=cells, synthetic=made.intersection(models))

    def of_chains(self, chains: Sequence[ChainStep]) -> list[Row]:
        """Return the runs that made the chains, the last of each place, burn-in left out."""
        ids = {chain.id for chain in chains}
        last = {_place(run): run for run in self.runs if run["role"] != BURN_IN}
        return [run for run in last.values() if run["chain"] in ids]

    def medians(self, chains: Sequence[ChainStep]) -> Medians:
        """Return what the runs that made the chains gave."""
        places = {run["run_id"]: _place(run) for run in self.of_chains(chains) if run["status"] == "valid"}
        by_comparison: dict[tuple[str, str, str, str], dict[int, float]] = defaultdict(dict)
        for row in rows_of(self.store, VALUES, list(places)):
            chain, role, cycle = places[row["run_id"]]
            by_comparison[chain, role, row["cell"], row["metric"]][cycle] = row["value"]
        return by_comparison

    def progress(self) -> Iterator[str]:
        """Yield how far each chain is."""
        for chain in self.plan.chains:
            mine = [run for run in self.runs if run["chain"] == chain.id]
            closed = max((run["cycle"] for run in mine if run["role"] == BASELINE), default=None)
            if closed is None:
                far = f"{BURN_IN}, run {len(mine)}" if mine else "not begun"
            else:
                far = f"{closed} of {max(chain.cycles, closed)} cycles" if chain.cycles else f"{closed} cycles"
            name = " ".join(filter(None, (chain.baseline.tool, chain.baseline.model)))
            yield f"{chain.id} {name}: {far}"

    # -- gates --------------------------------------------------------------------------------------------------------

    def _parity(self) -> list[tuple[GateStep, Row | None]]:
        """Return every parity gate of the plan with its row, None where it was not run."""
        rows = rows_of(self.store, GATES, sorted(set(self._builds.values())))
        mine = [row for row in rows if row["job_id"] == self.job.job_id]
        gates: list[tuple[GateStep, Row | None]] = []
        for step in self.plan.steps:  # a gate and its repetition after the chains are told apart by their order
            if isinstance(step, GateStep):
                wanted = (step.arm, gate_digest(step.gate, step.env))
                row = next((row for row in mine if (row["arm"], row["gate_digest"]) == wanted), None)
                if row is not None:
                    mine.remove(row)
                gates.append((step, row))
        return gates

    def _checks(self) -> list[tuple[CheckStep, Row | None]]:
        """Return every gate on a model with its row, None where it was not run."""
        rows = self.store.rows("SELECT * FROM checks WHERE job_id = ?", (self.job.job_id,))
        by_step = {row["step"]: row for row in rows}
        return [(step, by_step.get(step.id)) for step in self.plan.steps if isinstance(step, CheckStep)]

    def gate_tables(self) -> list[SessionTable]:
        """Return the tables of all gates, none where there are none."""
        lead = columns("arm when")
        made = []
        if gates := self._parity():
            rows = [{**_lead(step), **parity_row(step.gate, row), "env": env_text(step.env)} for step, row in gates]
            made.append(self._gate_table("Gates", (*lead, *parity_columns(rows)), rows))
        if checks := self._checks():
            rows = [{**_lead(step), **check_row(step.gate, step.env, row)} for step, row in checks]
            models = {step.gate.model for step, _ in checks}
            made.append(self._gate_table(MODEL_GATES, (*lead, *check_columns(rows)), rows, models))
        return made

    def _gate_table(
        self, title: str, columns: tuple[Column, ...], rows: Iterable[Row], models: Iterable[str] = ()
    ) -> SessionTable:
        candidate = self.origin(self.candidate, models) if self.candidate else None
        return SessionTable(
            "gates", title, columns, tuple(rows), self.origin(self.baseline, models), candidate=candidate
        )

    # -- what does not count ------------------------------------------------------------------------------------------

    def failures(self) -> list[Failure]:
        """Return how the session ended, if not well, its gates that failed and its runs that do not count.

        Runs that were repeated in their place are among them.
        """
        steps: list[tuple[GateStep | CheckStep, Row | None]] = [*self._checks(), *self._parity()]
        gates = [
            failed_gate(row, f" of {step.arm} {_when(step)} the chains")
            for step, row in steps
            if row is not None and row["status"] == "failed"
        ]
        last = {_place(run): run["run_id"] for run in self.runs}
        runs = [
            Failure(
                self.job.job_id,
                f"{run['chain']} {run['tool']}: {run['role']} {run['cycle']}",
                run["status"],
                run["reason"],
                again=last[_place(run)] != run["run_id"],
            )
            for run in self.runs
            if run["status"] != "valid"
        ]
        return [*failed_session(self.job, [*gates, *runs]), *gates, *runs]


def _place(run: Row) -> tuple[str, str, int]:
    return run["chain"], run["role"], run["cycle"]


def _lead(step: GateStep | CheckStep) -> dict[str, str]:
    return {"arm": step.arm, "when": _when(step)}


def _when(step: GateStep | CheckStep) -> str:
    return "after" if step.id.endswith(":after") else "before"


def older(protocol: int) -> str:
    """Mark a verdict that may be shown beside newer ones, ` (protocol 2)`; "" for one of this protocol."""
    return "" if protocol == PROTOCOL else f" (protocol {protocol})"


def means_of(judged: Judged, medians: Medians) -> tuple[Number | None, Number | None]:
    """Return the means of both arms, None where there is no verdict."""
    if judged.verdict.verdict == "invalid":
        return None, None

    def mean(role: str, cell: str) -> Number:
        metric = judged.comparison.metric
        return mean_of(judged, role, metric, medians[judged.chain, role, cell, metric])

    return mean(BASELINE, judged.comparison.baseline), mean(CANDIDATE, judged.comparison.candidate)


def failed_gate(gate: Row, whose: str = "", *, again: bool = False) -> Failure:
    """Say why a gate failed, given its row of `evidence.GATES` or `CHECKS`.

    Args:
        whose: Follows the gate's name where one session has several of it.
        again: It was run again later, and passed.
    """
    reasons = json.loads(gate["reasons"])
    if "failed" in gate:
        reasons += some(json.loads(gate["failed"]), CASES)
        if gate["printed"] and gate["demanded"]:
            reasons += filter(None, [unlike(json.loads(gate["printed"]), json.loads(gate["demanded"]))])
    return Failure(gate["job_id"], f"gate {gate_name(gate)}{whose}", "failed", "; ".join(reasons), again, "gate")


def failed_session(job: Job | None, listed: Iterable[Failure], *, gate_listed: bool = False) -> list[Failure]:
    """Say how a session ended, unless it is done or what ended it is listed anyway.

    Args:
        gate_listed: A gate of it alone ended it, and is among those listed.
    """
    if job is not None and job.rejected:
        return [Failure(job.job_id, "session", "rejected", job.rejected, kind="session")]
    if job is None or job.state == "done":
        return []
    reasons = [failure.reason for failure in listed if failure.session == job.job_id]
    if (reasons and job.error in ("", *reasons)) or (gate_listed and job.exit_code == GateFailed.exit_code):
        return []
    return [Failure(job.job_id, "session", job.state, job.error or ENDS[job.state], kind="session")]


# -- what is compared -------------------------------------------------------------------------------------------------


def differences(plan: Plan) -> Iterator[Difference]:
    """Yield in what the candidate's arm differs from the baseline's; nothing for an arm that is compared with itself.

    A plan holds more than the experiments' own differences: a series of the same name may have other patches.
    """
    chain = next(plan.chains)
    one, two = plan.arm(chain.baseline.arm), plan.arm(chain.candidate.arm)
    yield from differing("pin", {"": one.source.pin[:12]}, {"": two.source.pin[:12]})
    yield from differing("series", {"": _series(one)}, {"": _series(two)})
    yield from differing("cmake", one.cmake, two.cmake)
    yield from differing("env", one.env, two.env)
    yield from differing("models", _models(plan, one), _models(plan, two))
    for each in plan.chains:
        yield from _of_runs(each, one, two)


def _of_runs(chain: ChainStep, one: Arm, two: Arm) -> Iterator[Difference]:
    """Yield what differs in how a chain's programs are called, beyond what the arms say already."""
    name = f"{chain.id} {chain.baseline.tool}"
    before = {key: value for key, value in chain.baseline.env.items() if one.env.get(key) != value}
    after = {key: value for key, value in chain.candidate.env.items() if two.env.get(key) != value}
    yield from differing("env", before, after, name)
    flags, others = _flags(chain.baseline.argv), _flags(chain.candidate.argv)
    mine = " ".join(flag for flag in flags if flag not in others)
    theirs = " ".join(flag for flag in others if flag not in flags)
    yield from differing("arguments", {name: mine}, {name: theirs})


def _series(arm: Arm) -> str:
    return ", ".join(f"{ref.name}@{ref.digest[:12]}" for ref in arm.source.series)


def _models(plan: Plan, arm: Arm) -> dict[str, str]:
    return {step.model: step.path for step in plan.steps if isinstance(step, ModelStep) and step.arm == arm.name}


def _flags(argv: Sequence[str]) -> list[str]:
    """Return a program's arguments, each flag with its values; its own path is no argument."""
    flags: list[str] = []
    for word in argv[1:]:
        if is_flag(word) or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags
