"""Verdicts in the record: written, read, computed again.

`judge` computes verdicts from runs, gates and the way the job ended; `record` writes them down, `recorded` reads them.
They depend on nothing but the job itself, so they can be computed again at any time, which is what `check` does.
"""

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
from dgxlab.model import PROTOCOL, NoiseFloor, canonical
from dgxlab.stats import Verdict
from dgxlab.store import Store

Row = dict[str, Any]

OF_JUDGED = ("chain", "promoted", "baseline", "candidate", "baseline_arm", "candidate_arm", "model_id")
OF_VERDICT = (
    *("verdict", "effect", "confidence", "mde", "p", "spread", "k_to_settle", "cycles", "valid_cycles", "better"),
    *("screen", "noise"),
)
"""Columns that are fields of the same name."""

REL, ABS = 1e-9, 1e-12
"""By how much a number may be off: another machine's logarithm may differ in its last digit."""


def record(store: Store, job_id: str) -> None:
    """Write what the chains of a job say; harmless to repeat, and nothing for a job without chains.

    A job that runs again after it was taken for lost loses its verdicts.

    Raises:
        UsageError: if there is no such job.
    """
    with store.transaction():
        store.put_verdicts(job_id, _rows(store, job_id))


def reject(store: Store, job_id: str, because: str) -> None:
    """Set a job's evidence aside, for good: it stays in the record, and no number, gate or verdict of it counts.

    Raises:
        UsageError: if it was rejected before, or there is no such job.
    """
    with store.transaction():
        if before := store.job(job_id).rejected:
            raise UsageError(f"session {job_id} was rejected before: {before}", next=f"dgxlab report {job_id}")
        store.put("rejections", {"job_id": job_id, "reason": because, "at": time.time()})
        record(store, job_id)


def recorded(store: Store, job_id: str) -> list[Judged]:
    """Return the verdicts of a job as they were written."""
    return [_judged(row) for row in store.verdicts(job_id)]


def whole(words: Sequence[str]) -> str:
    """Return the word for a session, given those on its comparisons; `mixed` where some are faster and some slower."""
    if not words or "invalid" in words:
        return "invalid"
    if "faster" in words and "slower" in words:
        return "mixed"
    some = next((word for word in ("slower", "faster") if word in words), "")
    return some or ("same" if set(words) == {"same"} else "inconclusive")


def reasons(verdict: Verdict) -> tuple[str, ...]:
    """Return why a verdict, without what its `flaws` say too."""
    flaws = {f"cycle {cycle} does not count: {flaw}" for cycle, flaw in verdict.flaws.items()}
    return tuple(reason for reason in verdict.reasons if reason not in flaws)


def held_back(verdict: Verdict) -> str:
    """Return the first reason why a faster candidate is not promoted, "" where there is none."""
    return next((reason for reason in verdict.reasons if reason.startswith(NOT_PROMOTED)), "")


def noise_floors(store: Store, device_id: str, cells: Collection[str], model_id: str) -> list[NoiseFloor]:
    """Return how much metrics of these cells differ from run to run on a device.

    Each is of the latest A/A session. Those of another protocol measured otherwise.

    Args:
        cells: Cell.key.
        model_id: "" for cells that read no model.
    """
    rows = store.rows(
        """SELECT * FROM verdict_list
           WHERE baseline_arm = candidate_arm AND NOT screen AND spread > 0 AND protocol = ?
           AND device_id = ? AND coalesce(model_id, '') = ?
           ORDER BY intent_at, job_id""",
        (PROTOCOL, device_id, model_id),
    )
    floors = {}
    for row in rows:
        sigma = stats.noise_floor(_judged(row).verdict)
        if sigma is not None and row["cell"] in cells:
            cell, metric = row["cell"], row["metric"]
            floors[cell, metric] = NoiseFloor(cell, metric, sigma, row["valid_cycles"], row["job_id"])
    return list(floors.values())


def check(store: Store) -> list[str]:
    """Return a sentence for each verdict that is missing, or is not what its runs say.

    Sentences are not compared: a later version may put the same into other words. Expects evidence that is sound.
    """
    jobs = store.rows(
        """SELECT job_id FROM jobs WHERE job_id IN (SELECT job_id FROM verdicts) OR EXISTS (
               SELECT 1 FROM json_each(inflated(jobs.plan), '$.steps') AS step
               WHERE json_extract(step.value, '$.kind') = 'chain') ORDER BY job_id"""
    )
    return [sentence for row in jobs for sentence in _check_job(store, row["job_id"])]


def _rows(store: Store, job_id: str) -> list[Row]:
    """Return the verdicts of a job as the record keeps them."""
    rows = []
    for position, judged in enumerate(judge(store, job_id)):
        verdict, noise = judged.verdict, judged.noise
        low, high = verdict.ci or (None, None)
        same_low, same_high = verdict.same_ci or (None, None)
        row = {
            "job_id": job_id,
            "position": position,
            **{name: getattr(judged, name) for name in OF_JUDGED},
            **{name: getattr(verdict, name) for name in OF_VERDICT},
            "cell": judged.comparison.baseline,
            "candidate_cell": judged.comparison.candidate,
            "metric": judged.comparison.metric,
            "ci_low": low,
            "ci_high": high,
            "same_low": same_low,
            "same_high": same_high,
            "noise_sigma": noise.sigma if noise else None,
            "noise_cycles": noise.cycles if noise else None,
            "noise_session": noise.session if noise else None,
            "flaws": canonical(verdict.flaws),
            "reasons": canonical(verdict.reasons),
        }
        rows.append(row)
    return rows


def _judged(row: Mapping[str, Any]) -> Judged:
    comparison = Comparison(row["cell"], row["candidate_cell"], row["metric"])
    floor = None
    if row["noise_sigma"] is not None:
        floor = NoiseFloor(row["cell"], row["metric"], row["noise_sigma"], row["noise_cycles"], row["noise_session"])
    verdict = Verdict(
        **{**{name: row[name] for name in OF_VERDICT}, "screen": bool(row["screen"])},
        ci=None if row["ci_low"] is None else (row["ci_low"], row["ci_high"]),
        same_ci=None if row["same_low"] is None else (row["same_low"], row["same_high"]),
        flaws={int(cycle): flaw for cycle, flaw in json.loads(row["flaws"]).items()},
        reasons=tuple(json.loads(row["reasons"])),
    )
    of_judged = {**{name: row[name] for name in OF_JUDGED}, "promoted": bool(row["promoted"])}
    return Judged(comparison=comparison, verdict=verdict, noise=floor, **of_judged)


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
            yield f"{verdict} is none of its claims" if state in ENDS else f"{verdict} was written while it runs"
        elif differ := [
            f"{name} {written[key][name]} where its runs give {value}"
            for name, value in computed[key].items()
            if not _same(name, written[key][name], value)
        ]:
            yield f"{verdict} has {', '.join(differ)}"


def _same(name: str, written: Any, computed: Any) -> bool:
    if name == "reasons":
        return True
    if name == "flaws":
        return set(json.loads(written)) == set(json.loads(computed))
    if isinstance(written, float) and isinstance(computed, float):
        return math.isclose(written, computed, rel_tol=REL, abs_tol=ABS)
    return bool(written == computed)
