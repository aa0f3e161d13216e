"""One session of two arms as the record has it: its plan, what ran, and where that came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dgxlab import stats
from dgxlab.judgement import Judged
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
from dgxlab.report.checks import TITLE, check_row, failed_check, used_columns
from dgxlab.report.conditions import Row, rows_of
from dgxlab.report.evidence import GATES, machine, mean_of, samples_of
from dgxlab.report.failures import failed_gate
from dgxlab.report.numbers import Mean
from dgxlab.report.records import Column, Failure, Provenance, SessionTable
from dgxlab.report.tables import GATE_COLUMNS, backend_of, env_text, gate_row, synthetic
from dgxlab.store import gate_digest

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

Medians = Mapping[tuple[str, str, str, str], Mapping[int, float]]
"""What the runs of chains gave, by chain, role, Cell.key and metric, then by cycle."""

WORDS = {"ab": "A/B", "screen": "screen", "noise": "A/A"}
"""What a session of a kind is called."""

AT_TEMPERATURE = ("at shared temperature", "each at its own temperature")
"""How the arms of an ordinary chain are compared, and those of blocks: by turns they heat one another."""

CHAIN_RUNS = """SELECT run_id, chain, role, cycle, position, arm, tool, status, reason,
                       json_extract(inflated(before), '$.pinned') AS pinned
                FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ? ORDER BY position"""


class Session:
    """One session: its plan, what ran, and where that came from."""

    def __init__(self, store: Store, job: Job, plan: Plan) -> None:
        self.store = store
        self.job = job
        self.plan = plan
        self.ended = job.ended or job.state == "lost"
        self.devices = store.devices(job.job_id)
        self.host = machine(job, next(iter(self.devices.values()), None))
        self.runs = store.rows(CHAIN_RUNS, (job.job_id,))
        built = store.rows("SELECT arm, build_id FROM arms WHERE job_id = ?", (job.job_id,))
        self.builds = {str(row["arm"]): str(row["build_id"]) for row in built}
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
        return Provenance(
            experiment=arm.name,
            sessions=(self.job.job_id,),
            pin=arm.source.pin,
            series=arm.source.series,
            tree=arm.source.tree,
            build_id=self.builds.get(arm.name),
            host=machine(self.job, self.devices.get(arm.name)),
            dirty=arm.source.dirty,
            synthetic=tuple(sorted(made.intersection(models))),
            device=self.devices.get(arm.name),
            backend=backend_of(arm.cmake, cells),
        )

    def of_chains(self, chains: Sequence[ChainStep]) -> list[Row]:
        """Return the runs that made the chains, the last of each place, burn-in left out."""
        ids = {chain.id for chain in chains}
        last = {(run["chain"], run["role"], run["cycle"]): run for run in self.runs if run["role"] != BURN_IN}
        return [run for (chain, _, _), run in last.items() if chain in ids]

    def medians(self, chains: Sequence[ChainStep]) -> Medians:
        """Return what the runs that made the chains gave."""
        runs = [run for run in self.of_chains(chains) if run["status"] == "valid"]
        places = {run["run_id"]: (run["chain"], run["role"], run["cycle"]) for run in runs}
        found: dict[tuple[str, str, str, str], dict[int, float]] = defaultdict(dict)
        for (run_id, cell), told in samples_of(self.store, list(places)).items():
            chain, role, cycle = places[run_id]
            for (metric, _), samples in told.items():
                found[chain, role, cell, metric][cycle] = stats.median(samples)
        return found

    def progress(self) -> list[str]:
        """Say how far each chain is."""
        return [f"{chain.id} {_named(chain)}: {self._far(chain)}" for chain in self.plan.chains]

    def _far(self, chain: ChainStep) -> str:
        mine = [run for run in self.runs if run["chain"] == chain.id]
        closed = max((run["cycle"] for run in mine if run["role"] == BASELINE), default=None)
        if closed is None:
            return f"{BURN_IN}, run {len(mine)}" if mine else "not begun"
        return f"{closed} of {max(chain.cycles, closed)} cycles" if chain.cycles else f"{closed} cycles"

    # -- gates --------------------------------------------------------------------------------------------------------

    def gates(self) -> list[tuple[GateStep, Row | None]]:
        """Return every gate step with what came of it, None where it was not run."""
        steps = [step for step in self.plan.steps if isinstance(step, GateStep)]
        of_builds = rows_of(self.store, GATES, sorted(set(self.builds.values())))
        mine = [row for row in of_builds if row["job_id"] == self.job.job_id]
        found: list[tuple[GateStep, Row | None]] = []
        for step in steps:  # a gate and its repetition after the chains are told apart by their order
            wanted = (step.arm, gate_digest(step.gate, step.env))
            row = next((row for row in mine if (row["arm"], row["gate_digest"]) == wanted), None)
            if row is not None:
                mine.remove(row)
            found.append((step, row))
        return found

    def gate_tables(self) -> list[SessionTable]:
        """Return the tables of all gates, none where there are none."""
        gates = self.gates()
        if not gates:
            return self._check_tables()
        rows = [
            {
                "arm": step.arm,
                "when": _when(step),
                **gate_row(step.gate.op, step.gate.backend, row),
                "env": env_text(step.env),
            }
            for step, row in gates
        ]
        columns = [Column("arm", "arm"), Column("when", "when"), *GATE_COLUMNS]
        if any(row.get("env") for row in rows):
            columns.insert(4, Column("env", "env"))
        return [
            SessionTable(
                "gates",
                "Gates",
                tuple(columns),
                tuple(rows),
                self.origin(self.baseline),
                candidate=self.origin(self.candidate) if self.candidate else None,
            ),
            *self._check_tables(),
        ]

    def checks(self) -> list[tuple[CheckStep, Row | None]]:
        """Return every gate on a model with what came of it, None where it was not run."""
        found = self.store.rows("SELECT * FROM checks WHERE job_id = ?", (self.job.job_id,))
        rows = {row["step"]: row for row in found}
        return [(step, rows.get(step.id)) for step in self.plan.steps if isinstance(step, CheckStep)]

    def _check_tables(self) -> list[SessionTable]:
        checks = self.checks()
        if not checks:
            return []
        rows = [{"arm": step.arm, "when": _when(step), **check_row(step.gate, step.env, row)} for step, row in checks]
        columns = (Column("arm", "arm"), Column("when", "when"), *used_columns(rows))
        models = {step.gate.model for step, _ in checks}
        candidate = self.origin(self.candidate, models) if self.candidate else None
        origin = self.origin(self.baseline, models)
        return [SessionTable("gates", TITLE, columns, tuple(rows), origin, candidate=candidate)]

    def failed_gates(self) -> list[Failure]:
        """Return the gates that failed, and why."""
        on_models = [
            failed_check(step.gate, row, f" of {step.arm} {_when(step)} the chains")
            for step, row in self.checks()
            if row is not None and row["status"] == "failed"
        ]
        return on_models + [
            failed_gate(row, f" of {step.arm} {_when(step)} the chains")
            for step, row in self.gates()
            if row is not None and row["status"] == "failed"
        ]

    def failed_runs(self) -> list[Failure]:
        """Return the runs that do not count, those that were done again in their place too."""
        last = {(run["chain"], run["role"], run["cycle"]): run["run_id"] for run in self.runs}
        return [
            Failure(
                self.job.job_id,
                f"{run['chain']} {run['tool']}: {run['role']} {run['cycle']}",
                run["status"],
                run["reason"],
                again=last[run["chain"], run["role"], run["cycle"]] != run["run_id"],
            )
            for run in self.runs
            if run["status"] != "valid"
        ]


def older(protocol: int) -> str:
    """Mark a verdict that may stand beside newer ones, ` (protocol 2)`; "" for one of this protocol."""
    return "" if protocol == PROTOCOL else f" (protocol {protocol})"


def _when(step: GateStep | CheckStep) -> str:
    return "after" if step.id.endswith(":after") else "before"


def _named(chain: ChainStep) -> str:
    return " ".join(filter(None, (chain.baseline.tool, chain.baseline.model)))


def means_of(judged: Judged, medians: Medians) -> tuple[Mean | None, Mean | None]:
    """Return the means of both arms, None where there is no verdict."""
    if judged.verdict.verdict == "invalid":
        return None, None

    def mean(role: str, cell: str) -> Mean:
        metric = judged.comparison.metric
        return mean_of(judged, role, metric, medians[judged.chain, role, cell, metric])

    return mean(BASELINE, judged.comparison.baseline), mean(CANDIDATE, judged.comparison.candidate)
