"""What the agent answers and the client reads, besides a journal; both need it early, so it imports almost nothing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

SHARED = ("builds", "work", "models", "tools", "agents", "leftovers")
"""What any job may use while it runs; the rest is a job's own."""

UNSEALED = {"exit_code", "status", "message", "next", "t", "journal_bytes", "journal_sha256"}
"""What the final status of an older agent says, without a digest of its own."""


@dataclass(frozen=True)
class Status:
    """What the host knows of a job.

    Attributes:
        state: absent, staged, running, done or lost.
        journal_bytes: Length of its journal.
        rc: The final status it wrote, None before.
        cause: Why a job that wrote one is lost nevertheless: what lies there is not what it wrote.
    """

    job_id: str
    state: str
    journal_bytes: int = 0
    rc: dict[str, Any] | None = None
    cause: str = ""


@dataclass(frozen=True)
class Item:
    """One thing under the root.

    Attributes:
        kind: builds, work, models, tools, agents, jobs, leftovers or sources.
        used: When it was last used, unix seconds of the host's clock.
        age_s: How long ago that was when it was listed.
        bytes: What it takes on the disk.
        state: A job's state, "" for anything else.
        journal_bytes: Length of a job's journal.
    """

    kind: str
    name: str
    used: float
    age_s: float
    bytes: int = 0
    state: str = ""
    journal_bytes: int = 0


@dataclass(frozen=True)
class Removal:
    """What a removal did.

    Attributes:
        removed: Kind and name of what is gone.
        kept: Kind, name and reason of what was asked for and is still there.
        busy: Whether a job kept what jobs share.
    """

    removed: tuple[tuple[str, str], ...]
    kept: tuple[tuple[str, str, str], ...]
    busy: bool


def final_status(content: bytes) -> dict[str, Any] | None:
    """Return what an rc says, None where that is not what an agent wrote."""
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
