"""What a host says of all its jobs, whoever started them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgxlab.agent.job import Job
from dgxlab.errors import JobLost
from dgxlab.model import subject


def listed(folder: Path) -> list[dict[str, Any]]:
    """Return every job's status with its name, its kind and its age in seconds, oldest first."""
    return [{**vars(job.status()), **_about(job)} for job in _jobs(folder)]


def running(folder: Path) -> dict[str, str]:
    """Return the subject of each job that runs, by job id.

    Part of every probe, so a job that has ended costs a look for its rc and no more.
    """
    live = (job for job in _jobs(folder) if not job.rc.exists() and job.status().state == "running")
    plans = ((job.job_id, plan(job)) for job in live if _about(job))
    return {job_id: subject(said["kind"], said["experiment"], said.get("baseline", "")) for job_id, said in plans}


def plan(job: Job) -> Any:
    """Return a job's plan.

    Raises:
        JobLost: if there is no such job.
    """
    try:
        return json.loads(job.plan.read_text())
    except FileNotFoundError:
        raise gone(job.job_id) from None


def gone(job_id: str) -> JobLost:
    """Return what to say of a job whose folder is not there."""
    cause = "its folder was deleted, or was never there"
    return JobLost(f"the host has no job {job_id}: {cause}", next=f"dgxlab report {job_id}")


def _jobs(folder: Path) -> Iterator[Job]:
    return (Job(path) for path in sorted(folder.iterdir()) if not path.name.startswith("."))


def _about(job: Job) -> dict[str, Any]:
    """Return what a job's plan says of it; nothing for a folder that is being deleted, or is no job's."""
    try:
        staged = json.loads(job.plan.read_text())
        age_s = max(0.0, time.time() - job.plan.stat().st_mtime)
        return {**{name: str(staged[name]) for name in ("name", "kind", "experiment")}, "age_s": age_s}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
