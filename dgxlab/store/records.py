"""A job as the store has it, names of jobs, and the rows of jobs, experiments and devices."""

from __future__ import annotations

import calendar
import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dgxlab.errors import SpecError, UsageError
from dgxlab.model import Check, Device, ParityGate, Plan, canonical, digest, from_json, shown_kind, subject, to_json

RANK = {"intended": 0, "running": 1, "lost": 2, "cancelled": 3, "failed": 3, "done": 3}
"""A job's states in order: `set_state` and merges only go up. A lost job may still end, once its journal is found."""

ALIAS = 6  # characters at the end of a job's id that name it in tables and on the command line


@dataclass(frozen=True)
class Job:
    """A row of the table `jobs`: one run, gate, A/B or other job that was started on a host."""

    job_id: str
    kind: str
    name: str
    experiment: str | None  # its digest, None if another client started the job and only the plan is known
    host: str  # name in hosts.yaml, or "local"
    host_id: str | None  # None until the agent has reported; so are boot_id, agent_version and facts
    plan_json: str
    plan_digest: str
    intent_at: float  # when it was recorded, before any network call; for another client's job, when it was planned
    state: str
    exit_code: int | None
    error: str
    next: str
    details: str
    boot_id: str | None
    agent_version: str | None
    protocol: int
    journal_bytes: int  # the store has everything of the journal before this offset
    journal_seq: int  # sequence number of the next line to store
    dgxlab_version: str
    facts: Mapping[str, Any] | None
    finished_at: float | None  # by the host's clock
    rejected: str  # why its results do not count; "" if they do
    notes: tuple[str, ...]  # of users, oldest first

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Job:
        """Make a job from its row, joined with `rejections`."""
        facts = json.loads(row["facts"]) if row["facts"] else None
        values = {**row, "plan_json": row["plan"], "facts": facts, "notes": tuple(json.loads(row["notes"]))}
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    @property
    def plan(self) -> Plan:
        """The plan, decoded; raises SpecError if a dgxlab with other fields wrote it."""
        import dgxlab.tools  # noqa: F401 - it declares the kinds of gates and entries

        try:
            return from_json(Plan, json.loads(self.plan_json))
        except ValueError as error:
            wrote = f"was written by dgxlab {self.dgxlab_version}, and this one cannot read it: {error}"
            raise SpecError(f"the plan of job {self.job_id} {wrote}", next="dgxlab --version") from error

    @property
    def subject(self) -> str:
        """What the job is about (`model.subject`), also for a plan that cannot be decoded."""
        plan = json.loads(self.plan_json)
        return subject(plan["kind"], plan["experiment"], plan.get("baseline", ""))

    @property
    def shown_kind(self) -> str:
        """The kind that lists and reports name (`model.shown_kind`), also for a plan that cannot be decoded."""
        return shown_kind(self.kind, len(json.loads(self.plan_json)["arms"]))

    @property
    def root(self) -> str:
        """The agent's root folder, below which the job ran; "" until the agent has reported."""
        disk = (self.facts or {}).get("details", {}).get("disk", {})
        return str(disk.get("path", ""))

    @property
    def client(self) -> str:
        """Which client started the job (`Plan.client`), also for a plan that cannot be decoded."""
        return str(json.loads(self.plan_json).get("client", ""))

    @property
    def ended(self) -> bool:
        """Whether the job has reported its end: done, failed or cancelled."""
        return RANK[self.state] == RANK["done"]


def alias(job_id: str) -> str:
    """Return the short name of a job or session: the end of its id."""
    return job_id[-ALIAS:]


def matching_ids(job_ids: Iterable[str], text: str) -> list[str]:
    """Return the ids that a user's text names: the equal id, else all ids with this prefix or alias."""
    fitting = [job_id for job_id in job_ids if job_id.startswith(text) or alias(job_id) == text]
    return [text] if text in fitting else fitting


def only_match(job_ids: Sequence[str], text: str, otherwise: str = "", *, next: str = "dgxlab jobs") -> str:
    """Return the only id of `job_ids`, which are the `matching_ids` of `text`.

    Raises UsageError, with `next` as its command, if there are several, or none: then `otherwise` ends the message.
    """
    if len(job_ids) == 1:
        return job_ids[0]
    if job_ids:
        raise UsageError(f"{text!r} fits {len(job_ids)} jobs", next=next, details="\n".join(job_ids))
    raise UsageError(f"no job begins with {text!r} or has this alias{otherwise}", next=next)


def gate_digest(gate: ParityGate | Check | Mapping[str, Any], env: Mapping[str, str]) -> str:
    """Return the digest of a gate with its limits and its whole environment, but without its expected counts."""
    fields = to_json(gate)
    reached = ("expect", "unsupported", "cases") if "op" in fields else ()
    return digest([{k: v for k, v in fields.items() if k not in (*reached, "limit_s", "env")}, env], 16)


def device_row(device: Device) -> dict[str, Any]:
    """Return the row of `devices` for a device."""
    fields = {name: canonical(value) if isinstance(value, list) else value for name, value in to_json(device).items()}
    return {"device_id": device.id, **fields}


def device_from(row: Mapping[str, Any]) -> Device:
    """Return the device of a row of `devices`."""
    names, uuids = (tuple(json.loads(row[name])) for name in ("names", "uuids"))
    return Device(row["host_id"], names, uuids, row["driver"], row["compute_cap"], row["cpus"])


def experiment_row(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of `experiments` for an Experiment.spec."""
    return {"digest": digest(spec), "name": spec["name"], "hypothesis": spec["hypothesis"], "spec": canonical(spec)}


def job_row(plan: Plan, experiment: str | None, host_name: str, dgxlab_version: str, *, staged: str) -> dict[str, Any]:
    """Return the row of `jobs` for a job that is about to be started.

    With `staged`, the text of its plan on a host, it is the row of a job that another client has started there.
    """
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
