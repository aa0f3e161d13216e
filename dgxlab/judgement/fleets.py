"""Verdicts over the devices of a fleet: computed from those of its sessions, written, and compared when computed again.

A fleet is sessions of the same arms, one a device.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dgxlab import stats
from dgxlab.judgement import recorded, same
from dgxlab.judgement.verdicts import Judged
from dgxlab.model import ChainStep, canonical, digest
from dgxlab.stats import Pooled, Verdict
from dgxlab.store import Store

Identity = tuple[str, ...]  # what a comparison is in every session of a pair: the values of KEY
KEY = ("cell", "env", "candidate_cell", "candidate_env", "metric", "model_id")
_Row = dict[str, Any]


def identity(chain: ChainStep, judged: Judged) -> Identity:
    """Return what identifies a comparison of a chain: cells, environments, metric and model."""
    of = judged.comparison
    envs = digest(chain.baseline.env, 16), digest(chain.candidate.env, 16)
    return (of.baseline, envs[0], of.candidate, envs[1], of.metric, judged.model_id or "")


def one_a_device(store: Store, jobs: Mapping[str, str]) -> dict[str, str]:
    """Return the sessions by their hosts; a device with several names counts once, under the first."""
    chosen: dict[str, tuple[str, str]] = {}
    for host, job_id in jobs.items():
        device = next((each.id for each in store.devices(job_id).values()), host)
        chosen.setdefault(device, (host, job_id))
    return dict(chosen.values())


def record(store: Store, session_by_host: Mapping[str, str]) -> None:
    """Record the sessions of different devices as a fleet, with the verdicts over them; one device is no fleet."""
    jobs = one_a_device(store, session_by_host).values()
    if len(jobs) > 1:
        with store.transaction():
            store.put("fleets", {"fleet_id": _id(jobs), "sessions": canonical(sorted(jobs))})
            store.replace("fleet_verdicts", "fleet_id", _id(jobs), _rows(store, jobs))


def record_again(store: Store, job_id: str = "") -> None:
    """Compute the verdicts of all fleets again, or of those that a session belongs to."""
    of_job = "WHERE ?1 IN ('', (SELECT value FROM json_each(sessions) WHERE value = ?1))"
    for row in store.rows(f"SELECT * FROM fleets {of_job}", (job_id,)):  # noqa: S608 - our own
        store.replace("fleet_verdicts", "fleet_id", row["fleet_id"], _rows(store, json.loads(row["sessions"])))


def pooled(store: Store, jobs: Collection[str]) -> dict[Identity, Pooled]:
    """Return the verdicts over the devices of sessions: as recorded, else, if they are no recorded fleet, computed."""
    rows = _written(store, _id(jobs)) or _rows(store, jobs)
    return {tuple(row[name] for name in KEY): _pooled(row) for row in rows}


def check(store: Store) -> Iterator[str]:
    """Yield a sentence for each fleet whose verdicts are not those that its sessions give."""
    for row in store.rows("SELECT * FROM fleets ORDER BY fleet_id"):
        name, sessions = f"fleet {row['fleet_id']}", json.loads(row["sessions"])
        if row["fleet_id"] != _id(sessions):
            yield f"{name} is not named after its sessions"
        elif missing := [job_id for job_id in sessions if store.find_job(job_id) is None]:
            yield f"session {missing[0]} of {name} is missing"
        elif not _same(_written(store, row["fleet_id"]), _rows(store, sessions)):
            yield f"the verdicts over the devices of {name} are not those that its sessions give"


def _id(jobs: Collection[str]) -> str:
    return digest(sorted(jobs), 16)


def _written(store: Store, fleet_id: str) -> list[_Row]:
    return store.rows("SELECT * FROM fleet_verdicts WHERE fleet_id = ? ORDER BY position", (fleet_id,))


def _rows(store: Store, jobs: Collection[str]) -> list[_Row]:
    by_cell: dict[Identity, list[Verdict]] = {}
    for job_id in sorted(jobs):
        chains: dict[str, ChainStep] = {}
        for judged in recorded(store, job_id):
            if judged.verdict.effect is not None:
                chains = chains or {chain.id: chain for chain in store.job(job_id).plan.chains}
                by_cell.setdefault(identity(chains[judged.chain], judged), []).append(judged.verdict)
    estimates = [[each for verdict in of if (each := stats.estimate(verdict))] for of in by_cell.values()]
    over = stats.pool(estimates, [of[0].better for of in by_cell.values()])
    return [
        {
            "fleet_id": _id(jobs),
            "position": position,
            **dict(zip(KEY, key, strict=True)),
            "devices": len(by_cell[key]),
            "verdict": each.verdict,
            "effect": each.effect,
            **dict(zip(("ci_low", "ci_high"), each.ci or (None, None), strict=True)),
            "confidence": each.confidence,
            "between_devices": each.between,
        }
        for position, (key, each) in enumerate(zip(by_cell, over, strict=True))
    ]


def _pooled(row: Mapping[str, Any]) -> Pooled:
    ci = None if row["ci_low"] is None else (row["ci_low"], row["ci_high"])
    confidence, between = row["confidence"], row["between_devices"]
    return Pooled(row["verdict"], row["devices"], row["effect"], ci, between, confidence)


def _same(written: list[_Row], computed: list[_Row]) -> bool:
    return len(written) == len(computed) and all(
        same(name, one[name], value)
        for one, other in zip(written, computed, strict=True)
        for name, value in other.items()
    )
