"""Records and rows of the store: jobs, experiments, devices, the identity of a gate."""

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
"""Rank of a job's states. `lost` is below the ends: a journal found later may still have the job's end."""

ALIAS = 6  # characters at the end of a job's id that name it in tables and on the command line


@dataclass(frozen=True)
class Job:
    """One job as the store knows it."""

    job_id: str
    kind: str
    name: str
    experiment: str | None  # its digest, None if another client started the job and only the plan is known
    host: str  # name in hosts.yaml, or "local"
    host_id: str | None  # None until the agent has reported, and so are boot_id, agent_version and facts
    plan_json: str
    plan_digest: str
    intent_at: float  # when it was recorded, before any network call; of another client's job, when it was planned
    state: str
    exit_code: int | None
    error: str
    next: str
    details: str
    boot_id: str | None
    agent_version: str | None
    protocol: int
    journal_bytes: int  # offset to continue reading the journal: everything before it is in the store
    journal_seq: int  # sequence number of the next line that is wanted
    dgxlab_version: str
    facts: Mapping[str, Any] | None
    finished_at: float | None  # by the host's clock
    rejected: str  # why its evidence was set aside

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Job:
        """Make a job from a row of the jobs table."""
        facts = json.loads(row["facts"]) if row["facts"] else None
        values = {**row, "plan_json": row["plan"], "facts": facts}
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @property
    def plan(self) -> Plan:
        """The plan it carries out."""
        return from_json(Plan, json.loads(self.plan_json))

    @property
    def subject(self) -> str:
        """Its subject, also for a plan that cannot be decoded; see `model.subject`."""
        plan = json.loads(self.plan_json)
        return subject(plan["kind"], plan["experiment"], plan.get("baseline", ""))

    @property
    def ended(self) -> bool:
        """Whether it reported its end: done, failed or cancelled."""
        return RANK[self.state] == RANK["done"]


def alias(job_id: str) -> str:
    """Return the short name of a job or session: the end of its id."""
    return job_id[-ALIAS:]


def named(job_ids: Iterable[str], text: str) -> list[str]:
    """Return the ids that match a text: the equal one, or those with this prefix or alias."""
    fitting = [job_id for job_id in job_ids if job_id.startswith(text) or alias(job_id) == text]
    return [text] if text in fitting else fitting


def the_one(job_ids: Sequence[str], text: str, otherwise: str = "", *, next: str = "dgxlab jobs") -> str:
    """Return the one id in `job_ids`, the matches of `text`; UsageError, with `otherwise` at its end, for none."""
    if len(job_ids) == 1:
        return job_ids[0]
    if job_ids:
        raise UsageError(f"{text!r} fits {len(job_ids)} jobs", next="dgxlab jobs", details="\n".join(job_ids))
    raise UsageError(f"no job begins with {text!r} or has this alias{otherwise}", next=next)


def gate_digest(gate: ParityGate | Check | Mapping[str, Any], env: Mapping[str, str]) -> str:
    """Return a gate's identity, given its whole environment; limits are part of it, expected counts are not."""
    fields = to_json(gate)
    reached = ("expect", "unsupported", "cases") if "op" in fields else ()
    return digest([{k: v for k, v in fields.items() if k not in (*reached, "limit_s", "env")}, env], 16)


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
    return {"digest": digest(spec), "name": spec["name"], "hypothesis": spec["hypothesis"], "spec": canonical(spec)}


def job_row(plan: Plan, experiment: str | None, host_name: str, dgxlab_version: str, *, staged: str) -> dict[str, Any]:
    """Return the row of a job that is about to be started, or, given the text of its plan there, is on a host."""
    intent_at = time.time()
    if staged:  # the id has the time, from another clock: never in the future
        with contextlib.suppress(ValueError):
            stamp = "-".join(plan.job_id.split("-")[:2])
            intent_at = min(intent_at, calendar.timegm(time.strptime(stamp, "%Y%m%d-%H%M%S")))
    return {
        "job_id": plan.job_id,
        "kind": plan.kind,
        "name": plan.name,
        "experiment": experiment,
        "host": host_name,
        "plan": staged or canonical(plan),  # an older dgxlab's has other fields, and files are checked by this text
        "plan_digest": plan.digest,
        "intent_at": intent_at,
        "state": "running" if staged else "intended",
        "protocol": plan.protocol,
        "dgxlab_version": dgxlab_version,
    }
