"""Verdicts in the record: computed from a job's own rows, written, read, and compared when computed again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dgxlab import stats
from dgxlab.chains import Comparison
from dgxlab.errors import UsageError
from dgxlab.judgement.verdicts import ENDS, NOT_PROMOTED, Judged, counted, gate_name, judge
from dgxlab.model import PROTOCOL, Noise, canonical
from dgxlab.stats import Verdict
from dgxlab.store import Store

Row = dict[str, Any]

OF_JUDGED = ("chain", "promoted", "baseline", "candidate", "baseline_arm", "candidate_arm", "model_id")
OF_VERDICT = (
    *("verdict", "effect", "confidence", "mde", "p", "spread", "k_to_settle", "cycles", "valid_cycles", "better"),
    *("screen", "noise"),
)
"""Columns that are fields of the same name."""

REL, ABS = 1e-9, 1e-12  # allowed error: another machine's logarithm may differ in its last digit


def record(store: Store, job_id: str) -> None:
    """Compute the verdicts of a job and replace the stored ones.

    A job that may still run has no verdicts; those of a lost job are deleted if it turns out to run.
    """
    from dgxlab.judgement import fleets

    with store.transaction():
        _record(store, job_id)
        fleets.record_again(store, job_id)


def record_all(store: Store) -> None:
    """Compute all verdicts again."""
    from dgxlab.judgement import fleets

    with store.transaction():
        for job in store.jobs():
            _record(store, job.job_id)
        fleets.record_again(store)


def _record(store: Store, job_id: str) -> None:
    store.replace("verdicts", "job_id", job_id, _rows(store, job_id))


def reject(store: Store, job_id: str, because: str) -> None:
    """Reject a job for the reason `because`: its rows stay in the record, its numbers, gates and verdicts are not used.

    Raises UsageError if it was rejected before, or there is no such job.
    """
    with store.transaction():
        if before := store.job(job_id).rejected:
            raise UsageError(f"session {job_id} was rejected before: {before}", next=f"dgxlab report {job_id}")
        store.put("rejections", {"job_id": job_id, "reason": because, "at": time.time()})
        record(store, job_id)


def recorded(store: Store, job_id: str) -> list[Judged]:
    """Return the stored verdicts of a job, in the order of its plan."""
    return [_judged(row) for row in store.verdicts(job_id)]


def session_verdict(words: Sequence[str]) -> str:
    """Return one word for a session, given the words of its verdicts: one of stats.VERDICTS, or `mixed`.

    `mixed` means that some comparisons are faster and some slower. `same` requires that all are.
    """
    if not words or "invalid" in words:
        return "invalid"
    if "faster" in words and "slower" in words:
        return "mixed"
    different = next((word for word in ("slower", "faster") if word in words), "")
    return different or ("same" if set(words) == {"same"} else "inconclusive")


def reasons(verdict: Verdict) -> tuple[str, ...]:
    """Return the reasons of a verdict, without those about single cycles, which `verdict.flaws` has too."""
    flaws = {*stats.not_counted(verdict.flaws)}
    return tuple(reason for reason in verdict.reasons if reason not in flaws)


def noises(store: Store, device_id: str, cells: Collection[str], model_id: str) -> list[Noise]:
    """Return the run-to-run noise on a device for each cell and metric, from its latest A/A session (`of_itself`)."""
    return [
        Noise(cell, metric, sigma, verdict.valid_cycles, session)
        for (cell, metric), (session, verdict) in of_itself(store, device_id, cells, model_id).items()
        if (sigma := stats.sigma(verdict)) is not None
    ]


def of_itself(
    store: Store, device_id: str, cells: Collection[str], model_id: str
) -> dict[tuple[str, str], tuple[str, Verdict]]:
    """Return the latest A/A session on a device, and its verdict, for each cell and metric.

    `cells` are by Cell.key; those without an A/A session are left out. `model_id` is "" for cells without a model.
    """
    rows = store.rows(
        """SELECT * FROM verdict_list
           WHERE baseline_arm = candidate_arm AND NOT screen AND spread > 0 AND protocol = ?
           AND device_id = ? AND coalesce(model_id, '') = ?
           ORDER BY intent_at, job_id""",
        (PROTOCOL, device_id, model_id),
    )
    return {(row["cell"], row["metric"]): (row["job_id"], _judged(row).verdict) for row in rows if row["cell"] in cells}


def check(store: Store) -> list[str]:
    """Return a sentence for each verdict that is missing, superfluous, or not the one that its runs give.

    The wording of reasons is not compared, since versions may differ in it. The rows of runs must have been checked.
    """
    jobs = store.rows(
        """SELECT job_id FROM jobs WHERE job_id IN (SELECT job_id FROM verdicts) OR EXISTS (
               SELECT 1 FROM json_each(inflated(jobs.plan), '$.steps') AS step
               WHERE json_extract(step.value, '$.kind') = 'chain') ORDER BY job_id"""
    )
    return [sentence for row in jobs for sentence in _check_job(store, row["job_id"])]


def _rows(store: Store, job_id: str) -> list[Row]:
    rows = []
    for position, judged in enumerate(judge(store, job_id)):
        verdict, comparison = judged.verdict, judged.comparison
        row = {"job_id": job_id, "position": position, "metric": comparison.metric}
        row |= {"cell": comparison.baseline, "candidate_cell": comparison.candidate}
        row |= {name: getattr(judged, name) for name in OF_JUDGED}
        row |= {name: getattr(verdict, name) for name in OF_VERDICT}
        row |= zip(("ci_low", "ci_high"), verdict.ci or (None, None), strict=True)
        row |= zip(("same_low", "same_high"), verdict.same_ci or (None, None), strict=True)
        row |= {f"noise_{name}": getattr(judged.noise, name, None) for name in ("sigma", "cycles", "session")}
        row |= {"flaws": canonical(verdict.flaws), "reasons": canonical(verdict.reasons)}
        rows.append(row)
    return rows


def _judged(row: Mapping[str, Any]) -> Judged:
    comparison = Comparison(row["cell"], row["candidate_cell"], row["metric"])
    noise = None
    if row["noise_sigma"] is not None:
        noise = Noise(row["cell"], row["metric"], row["noise_sigma"], row["noise_cycles"], row["noise_session"])
    verdict = Verdict(
        **{**{name: row[name] for name in OF_VERDICT}, "screen": bool(row["screen"])},
        ci=None if row["ci_low"] is None else (row["ci_low"], row["ci_high"]),
        same_ci=None if row["same_low"] is None else (row["same_low"], row["same_high"]),
        flaws={int(cycle): flaw for cycle, flaw in json.loads(row["flaws"]).items()},
        reasons=tuple(json.loads(row["reasons"])),
    )
    of_judged = {**{name: row[name] for name in OF_JUDGED}, "promoted": bool(row["promoted"])}
    return Judged(comparison=comparison, verdict=verdict, noise=noise, **of_judged)


def _check_job(store: Store, job_id: str) -> Iterator[str]:
    written, computed = (
        {(row["chain"], row["cell"], row["metric"]): row for row in rows}
        for rows in (store.verdicts(job_id), _rows(store, job_id))
    )
    state = store.job(job_id).state
    for key in {**computed, **written}:
        verdict = f"the verdict of job {job_id} in {key[0]} on {key[2]} of cell {key[1]}"
        if key not in written:
            yield f"{verdict} is missing: the job is {state}"
        elif key not in computed:
            yield (
                f"{verdict} is of no planned comparison" if state in ENDS else f"{verdict} was written while it runs"
            )
        elif differ := [
            f"{name} {written[key][name]} where its runs give {value}"
            for name, value in computed[key].items()
            if not same(name, written[key][name], value)
        ]:
            yield f"{verdict} has {', '.join(differ)}"


def same(name: str, written: Any, computed: Any) -> bool:
    """Return whether a column of a verdict has the value that was computed again."""
    if name == "reasons":
        return True
    if name == "flaws":
        return set(json.loads(written)) == set(json.loads(computed))
    if isinstance(written, float) and isinstance(computed, float):
        return math.isclose(written, computed, rel_tol=REL, abs_tol=ABS)
    return bool(written == computed)
