"""Replies of the agent to the client, besides the journal; imported early by both, so it imports almost nothing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

SHARED = ("builds", "work", "models", "tools", "agents", "leftovers")
"""Kinds of items shared by jobs; other kinds belong to one job."""

UNSEALED = {"exit_code", "status", "message", "next", "t", "journal_bytes", "journal_sha256"}
"""Fields of an older agent's final status, which has no digest of its own."""


@dataclass(frozen=True)
class Status:
    """A job's state on its host."""

    job_id: str
    state: str
    """absent, staged, running, done or lost."""
    journal_bytes: int = 0
    rc: dict[str, Any] | None = None
    """Its final status, None before it ends."""
    cause: str = ""
    """Why a job with a final status is lost: its files were changed or damaged."""


@dataclass(frozen=True)
class Item:
    """One thing under the root."""

    kind: str
    """builds, work, models, tools, agents, jobs, leftovers or sources."""
    name: str
    used: float
    """When it was last used, unix seconds of the host's clock."""
    age_s: float
    """Time since its last use when it was listed."""
    bytes: int = 0
    """Its size on the disk."""
    state: str = ""
    """A job's state, "" for anything else."""
    journal_bytes: int = 0


@dataclass(frozen=True)
class Removal:
    """The result of a removal."""

    removed: tuple[tuple[str, str], ...]
    """Kind and name of each removed item."""
    kept: tuple[tuple[str, str, str], ...]
    """Kind, name and reason of each requested item that was kept."""
    busy: bool
    """Whether a running job prevented the removal of shared items."""


def final_status(content: bytes) -> dict[str, Any] | None:
    """Parse an rc; None if it is damaged or not written by an agent."""
    try:
        rc = json.loads(content)
        seal = rc.pop("sha256", None)
        whole = seal == sealed(rc) if seal else rc.keys() <= UNSEALED
        return rc if whole and isinstance(rc["journal_sha256"], str) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def sealed(rc: dict[str, Any]) -> str:
    """Return the digest of a final status."""
    return hashlib.sha256(json.dumps(rc, sort_keys=True).encode()).hexdigest()
