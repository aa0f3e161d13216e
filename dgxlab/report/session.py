"""A session of two arms in the record: its plan, runs, failures and provenance."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from dgxlab import judgement
from dgxlab.compare import Difference, differing
from dgxlab.errors import GateFailed
from dgxlab.model import BASELINE, BURN_IN, PROTOCOL, GateStep, ModelStep, ParityGate, Plan
from dgxlab.plan import is_flag
from dgxlab.report.evidence import LISTED, OF_GATES, arms_of_job, engaged_rows
from dgxlab.report.records import Failure, Table, columns, grouped, some
from dgxlab.report.runs import RecordRow
from dgxlab.report.tables import env_text, gate_rows, provenance
from dgxlab.store import FLAWED, REJECTED, alias, gate_digest
from dgxlab.tools.parity import unlike

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

WORDS = {"ab": "A/B", "screen": "screen", "noise": "A/A"}  # names of kinds of sessions for people

ENDS = {
    "intended": "recorded, and nothing has been heard from the host yet",
    "running": "it has not ended",
    "lost": "it started and will never report its end",
    "cancelled": "it ended before everything was measured",
    "failed": "it ended with an error",
}
"""What it means that a session is in a state other than done."""

RUNS = f"""SELECT run_id, chain, role, cycle, position, arm, tool, model_id, status, reason, started, seconds,
                 json_extract(inflated(before), '$.pinned') AS pinned, run_id IN ({FLAWED}) AS flawed
          FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ? ORDER BY position"""  # noqa: S608 - our own

GATES = f"""SELECT {OF_GATES} FROM gates JOIN arms USING (job_id, arm, build_id) {LISTED}
            WHERE gates.job_id = ? AND gates.job_id NOT IN ({REJECTED}) ORDER BY at, gate_id"""  # noqa: S608 - our own


class ChainSession:
    """A session of two arms, read from the store; raises UsageError if its plan cannot be read."""

    def __init__(self, store: Store, job: Job) -> None:
        self.store = store
        self.job = job
        self.plan = job.plan
        self.ended = job.ended or job.state == "lost"
        self.runs = store.rows(RUNS, (job.job_id,))
        chain, arms = next(self.plan.chains), arms_of_job(store, job)
        self.baseline = arms[chain.baseline.arm]
        self.candidate = None if chain.candidate.arm == chain.baseline.arm else arms[chain.candidate.arm]

    @property
    def title(self) -> str:
        """What is compared: `A/B of w4a16 against stock`."""
        candidate, other = (self.candidate, self.baseline.name) if self.candidate else (self.baseline, "itself")
        return f"{WORDS[self.plan.shown_kind]} of {candidate.name} against {other}"

    def of_chains(self, ids: Collection[str]) -> list[RecordRow]:
        """Return the runs of the chains with these ids: the last for each role and cycle, without the burn-in."""
        last = {_place(run): run for run in self.runs if run["role"] != BURN_IN}
        return [run for run in last.values() if run["chain"] in ids]

    def progress(self) -> Iterator[str]:
        """Yield a sentence on how far each chain is."""
        for chain in self.plan.chains:
            mine = [run for run in self.runs if run["chain"] == chain.id]
            closed = max((run["cycle"] for run in mine if run["role"] == BASELINE), default=None)
            if closed is None:
                far = f"{BURN_IN}, run {len(mine)}" if mine else "not begun"
            else:
                far = f"{closed} of {max(chain.cycles, closed)} cycles" if chain.cycles else f"{closed} cycles"
            name = " ".join(filter(None, (chain.baseline.tool, chain.baseline.model)))
            yield f"{chain.id} {name}: {far}"

    def _gates(self) -> list[tuple[GateStep, RecordRow | None]]:
        """Return every gate of the plan with its row, None where it was not run."""
        checks = self.store.rows("SELECT * FROM checks WHERE job_id = ?", (self.job.job_id,))
        parity = self.store.rows(GATES, (self.job.job_id,))
        of_step = grouped((row["step"], row) for row in checks)
        of_gate = grouped(((row["arm"], row["gate_digest"]), row) for row in parity)
        gates: list[tuple[GateStep, RecordRow | None]] = []
        for step in (step for step in self.plan.steps if isinstance(step, GateStep)):
            rows = of_step.get(step.id, [])
            if isinstance(step.gate, ParityGate):  # the order distinguishes it from its repetition after the chains
                rows = of_gate.get((step.arm, gate_digest(step.gate, step.env)), [])
            gates.append((step, rows.pop(0) if rows else None))
        return gates

    def gate_tables(self) -> list[Table]:
        """Return the tables of the gates of both arms."""
        gates, arms = self._gates(), {arm.name: arm.env for arm in self.plan.arms}
        notes = tuple(f"{arm}: env {env_text(env)}" for arm, env in arms.items() if env)
        leads = [  # with what a gate's environment has besides
            {"arm": step.arm, "when": _when(step), "env": env_text(dict(step.env.items() - arms[step.arm].items()))}
            for step, _ in gates
        ]
        engaged = [
            {"arm": arm.name, "when": "during", **row}
            for arm in filter(None, (self.baseline, self.candidate))
            for row in engaged_rows(arm.ask, [run for run in self.runs if run["arm"] == arm.name])
        ]
        results = []
        every = [((step.gate, step.env), row) for step, row in gates]
        for title, asked, heads, rows in gate_rows(every, leads, engaged):
            models = {getattr(gate, "model", "") for gate in asked}
            source = provenance(self.baseline, [self.job.job_id], models)
            candidate = provenance(self.candidate, [self.job.job_id], models) if self.candidate else None
            shown = (*columns("arm when"), *heads)
            about = (title, shown, tuple(rows), source)
            results.append(Table("gates", *about, kind="session", notes=notes, candidate=candidate))
        return results

    def failures(self) -> list[Failure]:
        """Return the session's own failure, its failed gates, and its runs that do not count, also those repeated."""
        gates = [
            failed_gate(row, f" of {step.arm} {_when(step)} the chains")
            for step, row in sorted(self._gates(), key=lambda gate: isinstance(gate[0].gate, ParityGate))
            if row is not None and row["status"] == "failed"
        ]
        last = {_place(run): run for run in self.runs}
        runs = []
        for run in (run for run in self.runs if run["reason"]):
            what = f"{run['chain']} {run['tool']}: {run['role']} {run['cycle']}"
            again = not (last[_place(run)]["reason"] or last[_place(run)]["flawed"])
            status = "refused" if run["status"] == "valid" else run["status"]
            runs.append(Failure(self.job.job_id, what, status, run["reason"], again))
        return [*failed_session(self.job, [*gates, *runs]), *gates, *runs]


def newest_with_verdicts(store: Store, name: str, baseline: str = "", host: str = "") -> tuple[Job | None, Job | None]:
    """Return the newest session with verdicts that has this name or candidate, an A/A only if there is no other.

    `baseline` and `host` must match unless they are "". Returns None if there is no such session. If all verdicts of
    the newest are invalid, and no gate failed, an older session of the same is preferred, and the newest comes second.
    """
    rows = store.rows(
        """SELECT job_id, min(verdict = 'invalid') AS invalid FROM verdict_list
           WHERE :name IN (session, candidate_arm) AND :baseline IN ('', baseline_arm) AND :host IN ('', host)
           GROUP BY job_id ORDER BY baseline_arm = candidate_arm, intent_at DESC, job_id DESC""",
        {"name": name, "baseline": baseline, "host": host},
    )
    newest: Job | None = None
    for row in rows:
        job = store.job(row["job_id"])
        newest = newest or job
        tells = not row["invalid"] or _gate_failed(store, job)
        if tells and (job == newest or _compares_the_same(store, newest, job)):
            return job, None if job == newest else newest
    return newest, None


def _gate_failed(store: Store, job: Job) -> bool:
    failed = "SELECT 1 FROM gate_list WHERE job_id = ? AND status = 'failed'"
    return job.exit_code == GateFailed.exit_code or bool(store.rows(failed, (job.job_id,)))


def _compares_the_same(store: Store, newest: Job, job: Job) -> bool:
    """Return whether a session compares the same as the newest, which may have ended before it had all of it."""
    sql = """SELECT arm, build_id, device_id FROM arms WHERE job_id = :job UNION ALL
             SELECT name, model_id, '' FROM inputs WHERE job_id = :job"""
    had, others = ({tuple(row.values()) for row in store.rows(sql, {"job": of.job_id})} for of in (newest, job))
    return newest.host == job.host and had <= others and newest.plan.compared == job.plan.compared


def invalid_since(store: Store, newer: Job) -> str:
    """Return the note on a newer, invalid session, where an older one of the same is shown."""
    why = (reason for each in judgement.recorded(store, newer.job_id) for reason in judgement.reasons(each.verdict))
    return f"a newer session {alias(newer.job_id)} of the same is invalid: {next(why, newer.state)}"


def _place(run: RecordRow) -> tuple[str, str, int]:
    return run["chain"], run["role"], run["cycle"]


def _when(step: GateStep) -> str:
    return "after" if step.id.endswith(":after") else "before"


def older(protocol: int) -> str:
    """Return ` (protocol 2)` for an older protocol, which marks its verdict beside newer ones; else ""."""
    return "" if protocol == PROTOCOL else f" (protocol {protocol})"


def failed_gate(gate: RecordRow, whose: str = "", *, again: bool = False) -> Failure:
    """Return the failure of a gate, given its row of `gates` or `checks`.

    `whose` is appended to the gate's name; `again` says that the gate passed later.
    """
    reasons = json.loads(gate["reasons"])
    if "failed" in gate:
        reasons += some(json.loads(gate["failed"]))
        if gate["printed"] and gate["demanded"]:
            reasons += filter(None, [unlike(json.loads(gate["printed"]), json.loads(gate["demanded"]))])
    return Failure(
        gate["job_id"], f"gate {judgement.gate_name(gate)}{whose}", "failed", "; ".join(reasons), again, "gate"
    )


def failed_session(job: Job | None, listed: Iterable[Failure], *, gate_listed: bool = False) -> list[Failure]:
    """Return the failure of a session, and its notes; no failure if it is done, or if its cause is shown.

    `listed` are the failures shown; `gate_listed` says whether a failed gate of the session is shown.
    """
    if job is None:
        return []
    notes = [Failure(job.job_id, "session", "noted", note, kind="session") for note in job.notes]
    if job.rejected:
        return [Failure(job.job_id, "session", "rejected", job.rejected, kind="session"), *notes]
    if job.state == "done":
        return notes
    ends = (failure for failure in listed if failure.status != "disturbed")  # such a run ends nothing
    reasons = [failure.reason for failure in ends if failure.session == job.job_id]
    if (reasons and job.error in ("", *reasons)) or (gate_listed and job.exit_code == GateFailed.exit_code):
        return notes
    return [Failure(job.job_id, "session", job.state, job.error or ENDS[job.state], kind="session"), *notes]


def differences(plan: Plan) -> Iterator[Difference]:
    """Yield the differences of the candidate's arm from the baseline's, read from the plan; none for an A/A session.

    A plan can show more than the specs: a series of the same name may have other patches.
    """
    chain = next(plan.chains)
    baseline, candidate = plan.arm(chain.baseline.arm), plan.arm(chain.candidate.arm)
    series = [", ".join(map(str, arm.source.series)) for arm in (baseline, candidate)]
    steps = [step for step in plan.steps if isinstance(step, ModelStep)]
    before, after = ({step.model: step.path for step in steps if step.arm == arm.name} for arm in (baseline, candidate))
    yield from differing("pin", {"": baseline.source.pin[:12]}, {"": candidate.source.pin[:12]})
    yield from differing("series", {"": series[0]}, {"": series[1]})
    if baseline.source.dirty or candidate.source.dirty:  # otherwise pin and series say the same
        yield from differing("tree", {"": baseline.source.tree[:12]}, {"": candidate.source.tree[:12]})
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
