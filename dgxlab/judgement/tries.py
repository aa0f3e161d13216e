"""Tries: the ledger of a loop, and what became of each try, computed from its sessions in the record.

A ledger is the tries with one baseline experiment on one host. A try is measured in stages, each an ordinary session: a
screen, a chain, and the held-out cells. `state_of` gives the next stage or the end, given the sessions so far: the loop
asks it after every session, and `check` asks it again.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgxlab import series, stats
from dgxlab.errors import AGAIN, BuildFailed, ConditionsError, GateFailed, RemoteError, UsageError, command
from dgxlab.judgement import gate_name, names, recorded
from dgxlab.judgement.verdicts import Judged, doubts
from dgxlab.model import Session, Source
from dgxlab.model.plan import CANDIDATE
from dgxlab.model.reasons import says_not_engaged
from dgxlab.stats import Ended, Screened
from dgxlab.store import Job, Store, alias

SCREEN, CHAIN, HELD_OUT = STAGES = ("screen", "chain", "held-out")
KINDS = {SCREEN: "screen", CHAIN: "ab", HELD_OUT: "ab"}  # of the job that measures a stage


@dataclass(frozen=True)
class RecordedTry:
    """A row of the view `try_list`; None in the fields of its end while it has not ended."""

    number: int  # its place in the ledger, from 1
    try_id: str
    baseline: str
    host: str
    at: float  # when it began, unix seconds
    because: str
    pin: str
    tree: str
    diff_digest: str
    lines: int  # how many lines it changes in what `diff_over` names
    diff_over: str  # what its change is over: baseline, parent, or pin for tries of an older dgxlab
    parent: str | None  # the promoted try that it is compared with, None for the baseline
    ended: str | None  # a value of `Ended`
    why: str | None
    p: float | None
    level: float | None
    wealth: float | None
    after: str | None  # the test before it in the ledger
    seconds: float | None
    rejected: bool  # whether one of its sessions was

    @property
    def promoted(self) -> bool:
        """Whether it may be what later tries are compared with."""
        return self.ended == Ended.PROMOTED.value and not self.rejected


@dataclass(frozen=True)
class TryState:
    """How far a try is: the stage to measure next, or how it ended."""

    next: str = ""
    ended: Ended | None = None
    why: str = ""  # why it ended, or why a stage that was measured must be measured again
    p: float | None = None  # of a test; None if the try has no chain to judge
    level: float | None = None
    wealth: float | None = None  # before the test


def ledger(store: Store, baseline: str = "", host: str = "") -> list[RecordedTry]:
    """Return the tries with this baseline on this host, "" for any, in order."""
    rows = store.rows(
        "SELECT * FROM try_list WHERE ? IN ('', baseline) AND ? IN ('', host) ORDER BY baseline, host, number",
        (baseline, host),
    )
    return [RecordedTry(**{**row, "rejected": bool(row["rejected"])}) for row in rows]


def find(tries: Sequence[RecordedTry], text: str) -> RecordedTry:
    """Return the only try with this number, id, or last six characters of its id; UsageError if there is none."""
    fits = [each for each in tries if text in (str(each.number), each.try_id, alias(each.try_id))]
    if len(fits) != 1:
        ids = "\n".join(each.try_id for each in fits)
        message = f"{len(fits)} tries are called {text!r}" if fits else f"no try is called {text!r}"
        several = len({each.baseline for each in fits}) > 1
        mend = f"{AGAIN} with {command('--of', fits[0].baseline)}" if several else "dgxlab tries list"
        raise UsageError(message, next=mend, details=ids)
    return fits[0]


def diff_of(store: Store, try_id: str) -> str:
    """Return the changes of a try over its pin, as `git diff --binary` prints them."""
    return str(store.rows("SELECT diff FROM tries WHERE try_id = ?", (try_id,))[0]["diff"])


def change_of(store: Store, try_id: str) -> str:
    """Return what a try changes in what it is compared with; over its pin if `diff_over` of its row says so."""
    rows = store.rows("SELECT coalesce(change, diff) AS change FROM tries WHERE try_id = ?", (try_id,))
    return str(rows[0]["change"])


def sessions_of(store: Store, try_id: str) -> dict[str, Job]:
    """Return the newest session of each measured stage, the stages in order."""
    rows = store.rows(
        """SELECT stage, job_id FROM try_sessions JOIN jobs USING (job_id) WHERE try_id = ?
           ORDER BY intent_at, job_id""",
        (try_id,),
    )
    newest = {row["stage"]: row["job_id"] for row in rows}
    return {stage: store.job(newest[stage]) for stage in STAGES if stage in newest}


def held_out(store: Store) -> set[str]:
    """Return the sessions of held-out cells, and the names of their arms, which a loop must not see."""
    rows = store.rows("SELECT job_id FROM try_sessions WHERE stage = ?", (HELD_OUT,))
    jobs = [store.job(row["job_id"]) for row in rows]
    return {job.job_id for job in jobs} | {arm.name for job in jobs for arm in job.plan.arms}


def put_session(store: Store, try_id: str, stage: str, job_id: str) -> None:
    """Record that a session measures a stage of a try; a second call changes nothing."""
    with store.transaction():
        if not store.rows("SELECT 1 FROM try_sessions WHERE (try_id, job_id) = (?, ?)", (try_id, job_id)):
            store.put("try_sessions", {"try_id": try_id, "job_id": job_id, "stage": stage})


def begin(
    store: Store, of: tuple[str, str], because: str, source: Source, *, diff: str, change: str, parent: str | None
) -> str:
    """Record a new try of a ledger, a baseline and a host, and return its id.

    `diff` is what it changes in its pin: the source can be made from both. `change` is what it changes in what it is
    compared with; its lines are counted.
    """
    baseline, host = of
    try_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{baseline}-{secrets.token_hex(3)}"
    about = {"try_id": try_id, "baseline": baseline, "host": host, "at": time.time(), "because": because}
    built = {"pin": source.pin, "tree": source.tree, "diff_digest": _digest(diff), "diff": diff}
    store.put("tries", {**about, **built, "change": change, "lines": series.changed_lines(change), "parent": parent})
    return try_id


def end(store: Store, which: RecordedTry, state: TryState, seconds: float) -> None:
    """Record how a try ended, after `seconds` of work."""
    assert state.ended
    decided = {"ended": state.ended.value, "why": state.why, "seconds": seconds, "at": time.time()}
    test = {"p": state.p, "level": state.level, "wealth": state.wealth, "after": last_test(store, which)}
    store.put("try_ends", {"try_id": which.try_id, **decided, **test})


def last_test(store: Store, which: RecordedTry) -> str | None:
    """Return the id of the newest test in the ledger of a try, None before the first."""
    rows = store.rows(
        """SELECT try_id FROM try_ends JOIN tries USING (try_id)
           WHERE baseline = ? AND host = ? AND p IS NOT NULL AND try_id <> ? ORDER BY try_ends.at DESC LIMIT 1""",
        (which.baseline, which.host, which.try_id),
    )
    return str(rows[0]["try_id"]) if rows else None


def tests_until(store: Store, after: str | None) -> list[bool]:
    """Return whether each test of a ledger up to the try `after` was promoted, in order.

    Each test names the one before it, so that it can be checked also where two copies of a ledger were merged.
    """
    ends = {row["try_id"]: row for row in store.rows("SELECT try_id, ended, after FROM try_ends WHERE p IS NOT NULL")}
    promoted: list[bool] = []
    while after in ends and len(promoted) <= len(ends):
        promoted.append(ends[after]["ended"] == Ended.PROMOTED.value)
        after = ends[after]["after"]
    return promoted[::-1]


def state_of(store: Store, try_id: str, promoted: Sequence[bool]) -> TryState:
    """Compute how far a try is, given whether each earlier test of its ledger was promoted."""
    done, judged = sessions_of(store, try_id), dict[str, list[Judged]]()
    test: dict[str, Any] = {}
    for stage in STAGES:
        if stage not in done:
            return TryState(stage, **test)
        ended, why = _fault(store, done[stage], stage)
        verdicts = judged[stage] = recorded(store, done[stage].job_id)
        if ended:
            return TryState(ended=ended, why=why, **test)
        if stage == SCREEN and _wandered(store, done[stage]):
            continue  # a screen drops and never keeps: without a verdict it drops nothing
        if why := why or _unusable(verdicts):
            return TryState(stage, why=why, **test)
        if stage == SCREEN:
            if stats.dropped(list(map(_screened, verdicts)), effect := wanted(store, done[stage])):
                return TryState(ended=Ended.SCREEN, why=f"no cell can have {100 * effect:g} %, or one is slower")
            continue
        alpha = stats.level(promoted)
        shown, held_out = ([each.verdict for each in judged.get(of, ())] for of in (CHAIN, HELD_OUT))
        test = {"p": stats.p_faster(shown), "level": alpha, "wealth": stats.wealth(promoted)}
        decided = stats.decide(shown, alpha, held_out)
        if decided is Ended.PROMOTED and (wrong := doubts(store, done[stage].job_id)):
            return TryState(ended=Ended.GATE, why=wrong[0], **test)
        if decided is not Ended.PROMOTED or stage == HELD_OUT or not _spec(store, done[stage]).get("holdout"):
            return TryState(ended=decided, why=_because(decided, judged[stage], **test), **test)
    raise AssertionError  # the last stage has ended


def wanted(store: Store, job: Job) -> float:
    """Return the effect that the baseline of a session wants to detect, a share."""
    return float(_spec(store, job).get("session", {}).get("effect", Session.effect))


def told(store: Store, try_id: str) -> Mapping[str, Any]:
    """Return a try as JSON: how it ended, its verdicts with effects, its gates; of held-out cells only how many."""
    which, jobs = find(ledger(store), try_id), sessions_of(store, try_id)
    shown = [job.job_id for stage, job in jobs.items() if stage != HELD_OUT]
    rows = store.rows(
        """SELECT label AS cell, metric, verdict, effect, ci_low, ci_high FROM verdict_list
           WHERE job_id = ? ORDER BY position""",
        shown[-1:] or ("",),
    )
    named = names.of_verdicts(store, shown[-1]) if shown else []
    cells = [{"name": name, **row} for name, row in zip(named, rows, strict=True)]
    gates = store.rows("SELECT * FROM gate_list WHERE job_id = ? ORDER BY at, key", shown[-1:] or ("",))
    built = "SELECT arm, build_id, reused, seconds FROM arms WHERE job_id = ? ORDER BY rowid"
    builds = store.rows(built, shown[:1] or ("",))  # later stages reuse those of the first
    hidden = [verdict["verdict"] for verdict in store.verdicts(jobs[HELD_OUT].job_id)] if HELD_OUT in jobs else []
    return {
        **{name: value for name, value in vars(which).items() if name not in ("at", "after")},
        "promoted": which.promoted,
        "cells": cells,
        "regressed": [cell["name"] for cell in cells if cell["verdict"] == "slower"],
        "gates": [{"gate": gate_name(row), "arm": row["arm"], "status": row["status"]} for row in gates],
        "builds": [{**row, "reused": bool(row["reused"])} for row in builds],
        "held_out": {"cells": len(hidden), "slower": hidden.count("slower")} if hidden else None,
        "sessions": shown,
    }


def check(store: Store) -> Iterator[str]:
    """Yield a sentence for each try that is not what its sessions give; the verdicts must have been checked.

    Of a try with a rejected session only its place in the ledger is checked.
    """
    by_id = {each.try_id: each for each in ledger(store)}
    for each in by_id.values():
        name, after = f"try {each.try_id}", by_id.get(each.after or "")
        if _digest(diff_of(store, each.try_id)) != each.diff_digest:
            yield f"{name} has another diff than its digest says"
        for stage, job in sessions_of(store, each.try_id).items():
            if job.kind != KINDS[stage] or job.plan.arms[-1].source.tree != each.tree or job.host != each.host:
                yield f"{name} has session {job.job_id} as its {stage}, which measures something else"
        if each.ended is None:
            continue
        if after and (after.baseline, after.host) != (each.baseline, each.host):
            yield f"{name} follows a try of another ledger"
        if not each.rejected:
            yield from _check_end(store, each, name)


def _check_end(store: Store, which: RecordedTry, name: str) -> Iterator[str]:
    current = state_of(store, which.try_id, tests_until(store, which.after))
    ended = current.ended.value if current.ended else f"not at its end but before its {current.next}"
    if ended != which.ended:
        yield f"{name} ended as {which.ended}, and its sessions give {ended}"
    for column in ("p", "level", "wealth"):
        written, computed = getattr(which, column), getattr(current, column)
        if (written is None) != (computed is None) or not math.isclose(written or 0.0, computed or 0.0, rel_tol=1e-6):
            yield f"{name} has {column} {written}, and its sessions give {computed}"


def _fault(store: Store, job: Job, stage: str) -> tuple[Ended | None, str]:
    """Return how a session's failure ends the try, and why; no end if it did not fail, or not because of the try."""
    if not job.exit_code:
        return None, "" if job.state == "done" else f"session {job.job_id} is {job.state}"
    arm, details = job.plan.arms[-1].name, [line for line in job.details.splitlines()[:1] if line not in job.error]
    why = ": ".join([job.error, *details])
    runs = store.rows("SELECT * FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ?", (job.job_id,))
    gates = store.rows("SELECT arm FROM gate_list WHERE job_id = ? AND status = 'failed'", (job.job_id,))
    guilty = None
    if job.exit_code == BuildFailed.exit_code:
        built = store.devices(job.job_id)
        guilty = Ended.BUILD if all(other.name in built for other in job.plan.arms[:-1]) else None
    elif job.exit_code == GateFailed.exit_code:
        idle = {row["role"] for row in runs if says_not_engaged(row["reason"])}
        only = {row["arm"] for row in gates} == {arm} if gates else idle == {CANDIDATE}
        guilty = Ended.GATE if only else None
    elif job.exit_code in (RemoteError.exit_code, ConditionsError.exit_code):
        crashed = {row["role"] for row in runs if row["status"] == "failed"}  # perhaps in some cycles alone
        guilty = (Ended.SCREEN if stage == SCREEN else Ended.CHAIN) if crashed == {CANDIDATE} else None
    return guilty, why


def _wandered(store: Store, job: Job) -> bool:
    """Return whether a screen has no verdict because of its values alone: its two baselines are too far apart."""
    runs = store.rows(
        """SELECT status, hard FROM chain_runs JOIN runs USING (run_id) LEFT JOIN flags USING (run_id)
           WHERE job_id = ? AND role <> 'burn-in'""",
        (job.job_id,),
    )
    undisturbed = bool(runs) and all(row["status"] == "valid" and not row["hard"] for row in runs)
    return job.exit_code == ConditionsError.exit_code and undisturbed


def _unusable(verdicts: Sequence[Judged]) -> str:
    """Return why the verdicts of a session cannot be used; "" if they can."""
    if not verdicts:
        return "it has no verdict"
    return next((each.verdict.reasons[0] for each in verdicts if each.verdict.effect is None), "")


def _because(decided: Ended, judged: Sequence[Judged], p: float, level: float, **_: float) -> str:
    slower = sum(each.verdict.verdict == "slower" for each in judged)
    if decided is Ended.OVERFITTED:
        return f"{slower} of {len(judged)} held-out cells are slower"
    if slower:
        return f"{slower} of {len(judged)} cells are slower"
    return f"p = {p:.2g}, {'at most' if p <= level else 'above'} the ledger's level {level:.2g}"


def _screened(judged: Judged) -> Screened:
    verdict, noise = judged.verdict, judged.noise
    assert noise
    assert verdict.effect is not None
    return Screened(verdict.effect, verdict.better, noise.sigma, noise.cycles)


def _spec(store: Store, job: Job) -> Mapping[str, Any]:
    experiment = store.experiment(job.plan.baseline)
    assert experiment
    spec: Mapping[str, Any] = json.loads(experiment["spec"])
    return spec


def _digest(diff: str) -> str:
    return hashlib.sha256(diff.encode(errors="surrogateescape")).hexdigest()[:16]
