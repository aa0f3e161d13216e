"""What the store hands out and takes in: jobs, experiments, the identity of a gate."""

from __future__ import annotations

import calendar
import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dgxlab.errors import UsageError
from dgxlab.model import Check, Device, ParityGate, Plan, canonical, digest, from_json, subject, to_json

RANK = {"intended": 0, "running": 1, "lost": 2, "cancelled": 3, "failed": 3, "done": 3}
"""How far a job has come. `lost` is below the ends: a journal that turns up later may still tell how it ended."""

ENDED = tuple(state for state, rank in RANK.items() if rank == RANK["done"])


@dataclass(frozen=True)
class Job:
    """One job as the store knows it.

    Attributes:
        experiment: Digest of its experiment, None when another client started it and only the plan is known.
        host: Name in hosts.yaml, or "local".
        host_id: None until the agent has reported.
        plan_json: The whole plan; `plan` decodes it.
        intent_at: When it was recorded, before any network call; of one that was found on a host, when it was planned.
            Unix seconds.
        state: intended, running (or ended, unheard of as yet), done, failed, cancelled or lost.
        journal_bytes: Where to go on reading the journal: everything before it is in the store.
        journal_seq: Sequence number of the next line that is wanted.
        facts: The host as the agent found it, None until it has reported.
        finished_at: Unix seconds on the host's clock.
        rejected: Why its evidence was set aside, "" where it was not.
    """

    job_id: str
    kind: str
    name: str
    experiment: str | None
    host: str
    host_id: str | None
    plan_json: str
    plan_digest: str
    intent_at: float
    state: str
    exit_code: int | None
    error: str
    next: str
    details: str
    boot_id: str | None
    agent_version: str | None
    protocol: int
    journal_bytes: int
    journal_seq: int
    dgxlab_version: str
    facts: Mapping[str, Any] | None
    finished_at: float | None
    rejected: str

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Job:
        """Make a job from a row of the jobs table."""
        facts = json.loads(row["facts"]) if row["facts"] else None
        named = {**row, "plan_json": row["plan"], "facts": facts}
        return cls(**{field.name: named[field.name] for field in fields(cls)})

    @property
    def plan(self) -> Plan:
        """The plan it carries out."""
        return from_json(Plan, json.loads(self.plan_json))

    @property
    def subject(self) -> str:
        """What it is about, also of a plan that cannot be decoded; see `model.subject`."""
        plan = json.loads(self.plan_json)
        return subject(plan["kind"], plan["experiment"], plan.get("baseline", ""))

    @property
    def ended(self) -> bool:
        """Whether it reported its end: done, failed or cancelled."""
        return self.state in ENDED


ALIAS = 6
"""Characters at the end of a job's id that name it in tables and on the command line."""


def alias(job_id: str) -> str:
    """Return the short name of a job or session: the end of its id."""
    return job_id[-ALIAS:]


def named(job_ids: Iterable[str], text: str) -> list[str]:
    """Return the ids that a text may mean: the one that it is, or those that begin with it or have it as alias."""
    fitting = [job_id for job_id in job_ids if job_id.startswith(text) or alias(job_id) == text]
    return [text] if text in fitting else fitting


def the_one(job_ids: Sequence[str], text: str, otherwise: str = "", *, next: str = "") -> str:
    """Return the only job id of those that `text` may mean; `otherwise` is said when there is none.

    Raises:
        UsageError: if there is none, or more than one.
    """
    if len(job_ids) == 1:
        return job_ids[0]
    if job_ids:
        raise UsageError(f"{text!r} fits {len(job_ids)} jobs", next="dgxlab jobs", details="\n".join(job_ids))
    raise UsageError(f"no job begins with {text!r} or has this alias{otherwise}", next=next)


def gate_digest(gate: ParityGate | Check | Mapping[str, Any], env: Mapping[str, str]) -> str:
    """Return the identity of what a gate checks, whatever count it must reach: 16 hex digits.

    A gate on a model has its limits in it: what passed one was not asked about another. A parity gate that `--set`
    changed is another gate, so that its passes count for no gate that says what the spec says.
    `env` is all that the program gets, the gate's own variables among it.
    """
    if not isinstance(gate, ParityGate) and "op" not in (gate if isinstance(gate, Mapping) else ()):
        return digest([{k: v for k, v in to_json(gate).items() if k not in ("limit_s", "env")}, env], 16)
    reached = ("expect", "unsupported", "cases", "limit_s", "env")
    asked = {k: v for k, v in to_json(gate).items() if k not in reached}
    return digest([asked, env], 16)


def device_row(device: Device) -> dict[str, Any]:
    """Return the row of a device."""
    fields = {name: canonical(value) if isinstance(value, list) else value for name, value in to_json(device).items()}
    return {"device_id": device.id, **fields}


def device_from(row: Mapping[str, Any]) -> Device:
    """Return a device given its row."""
    names, uuids = (tuple(json.loads(row[name])) for name in ("names", "uuids"))
    return Device(row["host_id"], names, uuids, row["driver"], row["compute_cap"], row["cpus"])


def experiment_row(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of an experiment, given its Experiment.spec."""
    named = {name: spec[name] for name in ("name", "hypothesis")}
    return {"digest": digest(spec), **named, "spec": canonical(spec)}


def job_row(plan: Plan, experiment: str | None, host_name: str, dgxlab_version: str, *, found: str) -> dict[str, Any]:
    """Return the row of a job that is about to be started, or whose plan was found as this text.

    What was found was planned when its id says, by its maker's clock; now where it says nothing or a later time.
    """
    intent_at = time.time()
    if found:
        with contextlib.suppress(ValueError):
            stamp = "-".join(plan.job_id.split("-")[:2])
            intent_at = min(intent_at, calendar.timegm(time.strptime(stamp, "%Y%m%d-%H%M%S")))
    return {
        "job_id": plan.job_id,
        "kind": plan.kind,
        "name": plan.name,
        "experiment": experiment,
        "host": host_name,
        "plan": found or canonical(plan),  # an older dgxlab's has other fields, and the files are checked by this text
        "plan_digest": plan.digest,
        "intent_at": intent_at,
        "state": "running" if found else "intended",
        "protocol": plan.protocol,
        "dgxlab_version": dgxlab_version,
    }
