"""One session of two arms in the record: its plan, runs, failures and provenance."""

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
    GateStep,
    ModelStep,
    ParityGate,
    Plan,
)
from dgxlab.plan import is_flag
from dgxlab.report.ask import GateAsk
from dgxlab.report.evidence import LISTED, OF_GATES, VALUES, Row, by_run, mean_of
from dgxlab.report.records import Failure, Number, Provenance, Table, columns, some
from dgxlab.report.tables import env_text, gate_columns, gate_rows, origin_of_job, synthetic
from dgxlab.store import REJECTED, gate_digest
from dgxlab.tools.parity import unlike

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

Medians = Mapping[tuple[str, str, str, str], Mapping[int, float]]
"""Medians of chains' runs, by chain, role, Cell.key and metric, then by cycle."""

WORDS = {"ab": "A/B", "screen": "screen", "noise": "A/A"}
"""Names of sessions by kind."""

CASES = 3
"""Max failing cases of a gate that are named."""

ENDS = {
    "intended": "recorded, and nothing has been heard from the host yet",
    "running": "it has not ended",
    "lost": "it started and will never report its end",
    "cancelled": "it was cancelled",
    "failed": "it ended with an error",
}
"""Messages for unfinished sessions, by state."""

RUNS = """SELECT run_id, chain, role, cycle, position, arm, tool, status, reason,
                 json_extract(inflated(before), '$.pinned') AS pinned
          FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ? ORDER BY position"""

GATES = f"""SELECT {OF_GATES} FROM gates JOIN arms USING (job_id, arm, build_id) {LISTED}
            WHERE gates.job_id = ? AND gates.job_id NOT IN ({REJECTED}) ORDER BY at, gate_id"""  # noqa: S608 - our own


class ChainSession:
    """One session: its plan, runs and provenance."""

    def __init__(self, store: Store, job: Job, plan: Plan) -> None:
        self.store = store
        self.job = job
        self.plan = plan
        self.ended = job.ended or job.state == "lost"
        self.runs = store.rows(RUNS, (job.job_id,))
        chain = next(plan.chains)
        self.baseline = plan.arm(chain.baseline.arm)
        self.candidate = None if chain.candidate.arm == chain.baseline.arm else plan.arm(chain.candidate.arm)

    @property
    def what(self) -> str:
        """Return the title of the comparison: `A/B of w4a16 against stock`."""
        word = WORDS[self.plan.kind]
        if self.candidate is None:
            return f"{word} of {self.baseline.name} against itself"
        return f"{word} of {self.candidate.name} against {self.baseline.name}"

    def origin(self, arm: Arm, models: Iterable[str] = (), cells: Iterable[Cell] = ()) -> Provenance:
        """Return the provenance of an arm's numbers, for these models and cells."""
        steps = [step for step in self.plan.steps if isinstance(step, ModelStep) and step.arm == arm.name]
        recipes = {step.model for step in steps if synthetic(step.recipe)}
        return origin_of_job(self.store, self.job, arm, cells=cells, synthetic=recipes.intersection(models))

    def of_chains(self, chains: Iterable[ChainStep]) -> list[Row]:
        """Return the runs in the chains: the last one in each place, without burn-in."""
        ids = {chain.id for chain in chains}
        last = {_place(run): run for run in self.runs if run["role"] != BURN_IN}
        return [run for run in last.values() if run["chain"] in ids]

    def medians(self) -> Medians:
        """Return the medians of the runs in the chains."""
        runs = [run["run_id"] for run in self.of_chains(self.plan.chains) if run["status"] == "valid"]
        by_comparison: dict[tuple[str, str, str, str], dict[int, float]] = defaultdict(dict)
        for rows in by_run(self.store, VALUES, runs).values():
            for row in rows:
                by_comparison[row["chain"], row["role"], row["cell"], row["metric"]][row["cycle"]] = row["value"]
        return by_comparison

    def progress(self) -> Iterator[str]:
        """Yield the progress of each chain."""
        for chain in self.plan.chains:
            mine = [run for run in self.runs if run["chain"] == chain.id]
            closed = max((run["cycle"] for run in mine if run["role"] == BASELINE), default=None)
            if closed is None:
                far = f"{BURN_IN}, run {len(mine)}" if mine else "not begun"
            else:
                far = f"{closed} of {max(chain.cycles, closed)} cycles" if chain.cycles else f"{closed} cycles"
            name = " ".join(filter(None, (chain.baseline.tool, chain.baseline.model)))
            yield f"{chain.id} {name}: {far}"

    def _gates(self) -> list[tuple[GateStep, Row | None]]:
        """Return every gate of the plan with its row, None where it was not run."""
        rows = self.store.rows("SELECT * FROM checks WHERE job_id = ?", (self.job.job_id,))
        checks = {row["step"]: row for row in rows}
        parity = self.store.rows(GATES, (self.job.job_id,))
        gates: list[tuple[GateStep, Row | None]] = []
        for step in self.plan.steps:
            if not isinstance(step, GateStep):
                continue
            if not isinstance(step.gate, ParityGate):
                gates.append((step, checks.get(step.id)))
            else:  # the order distinguishes it from its repetition after the chains
                wanted = (step.arm, gate_digest(step.gate, step.env))
                row = next((row for row in parity if (row["arm"], row["gate_digest"]) == wanted), None)
                if row is not None:
                    parity.remove(row)
                gates.append((step, row))
        return gates

    def gate_tables(self) -> list[Table]:
        """Return the tables of all gates."""
        gates = self._gates()
        asked = [(GateAsk(step.gate, step.env, ""), row) for step, row in gates]
        leads = [{"arm": step.arm, "when": _when(step), "env": env_text(step.env)} for step, _ in gates]
        results = []
        for title, asks, rows in gate_rows(asked, leads):
            models = {getattr(ask.gate, "model", "") for ask in asks}
            source = self.origin(self.baseline, models)
            candidate = self.origin(self.candidate, models) if self.candidate else None
            shown = (*columns("arm when"), *gate_columns(rows))
            results.append(Table("gates", title, shown, tuple(rows), source, kind="session", candidate=candidate))
        return results

    def failures(self) -> list[Failure]:
        """Return the session's failure if it failed, its failed gates and its runs that do not count.

        Repeated runs are included.
        """
        gates = [
            failed_gate(row, f" of {step.arm} {_when(step)} the chains")
            for step, row in sorted(self._gates(), key=lambda gate: isinstance(gate[0].gate, ParityGate))
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


def _when(step: GateStep) -> str:
    return "after" if step.id.endswith(":after") else "before"


def older(protocol: int) -> str:
    """Mark a verdict that may be shown beside newer ones, ` (protocol 2)`; "" for one of this protocol."""
    return "" if protocol == PROTOCOL else f" (protocol {protocol})"


def means_of(judged: Judged, medians: Medians) -> tuple[Number | None, Number | None]:
    """Return the means of both arms, None without a verdict."""
    if judged.verdict.verdict == "invalid":
        return None, None
    metric = judged.comparison.metric
    cells = {BASELINE: judged.comparison.baseline, CANDIDATE: judged.comparison.candidate}
    baseline, candidate = (
        mean_of(judged, role, metric, medians[judged.chain, role, cell, metric]) for role, cell in cells.items()
    )
    return baseline, candidate


def failed_gate(gate: Row, whose: str = "", *, again: bool = False) -> Failure:
    """Return why a gate failed, given its row of `evidence.gate_rows`.

    Args:
        whose: Suffix of the gate's name if a session has it several times.
        again: It was run again later, and passed.
    """
    reasons = json.loads(gate["reasons"])
    if "failed" in gate:
        reasons += some(json.loads(gate["failed"]), CASES)
        if gate["printed"] and gate["demanded"]:
            reasons += filter(None, [unlike(json.loads(gate["printed"]), json.loads(gate["demanded"]))])
    return Failure(gate["job_id"], f"gate {gate_name(gate)}{whose}", "failed", "; ".join(reasons), again, "gate")


def failed_session(job: Job | None, listed: Iterable[Failure], *, gate_listed: bool = False) -> list[Failure]:
    """Return the session's failure, unless it is done or its cause is listed anyway.

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


def differences(plan: Plan) -> Iterator[Difference]:
    """Yield differences of the candidate's arm from the baseline's; none for an A/A session.

    A plan can show more than the experiments: a series of the same name may have other patches.
    """
    chain = next(plan.chains)
    baseline, candidate = plan.arm(chain.baseline.arm), plan.arm(chain.candidate.arm)
    series = [", ".join(f"{ref.name}@{ref.digest[:12]}" for ref in arm.source.series) for arm in (baseline, candidate)]
    steps = [step for step in plan.steps if isinstance(step, ModelStep)]
    before, after = ({step.model: step.path for step in steps if step.arm == arm.name} for arm in (baseline, candidate))
    yield from differing("pin", {"": baseline.source.pin[:12]}, {"": candidate.source.pin[:12]})
    yield from differing("series", {"": series[0]}, {"": series[1]})
    yield from differing("cmake", baseline.cmake, candidate.cmake)
    yield from differing("env", baseline.env, candidate.env)
    yield from differing("models", before, after)
    for each in plan.chains:
        # the programs' arguments, beyond differences of the arms
        name = f"{each.id} {each.baseline.tool}"
        sides = ((each.baseline, baseline), (each.candidate, candidate))
        before, after = ({k: v for k, v in run.env.items() if arm.env.get(k) != v} for run, arm in sides)
        yield from differing("env", before, after, name)
        flags, others = _flags(each.baseline.argv), _flags(each.candidate.argv)
        mine = " ".join(flag for flag in flags if flag not in others)
        theirs = " ".join(flag for flag in others if flag not in flags)
        yield from differing("arguments", {name: mine}, {name: theirs})


def _flags(argv: Sequence[str]) -> list[str]:
    """Return a program's arguments, each flag with its values, without the program's path."""
    flags: list[str] = []
    for word in argv[1:]:
        if is_flag(word) or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    return flags
