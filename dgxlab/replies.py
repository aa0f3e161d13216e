"""What the agent returns to the client, besides the journal; imported early by both, so it imports almost nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHARED = ("builds", "work", "models", "tools", "agents", "leftovers")  # kinds of items that several jobs may use
SLURMS_WORD = "slurm.end"  # file of a job that ended without a final status, with what Slurm says of it
LIVE = ("queued", "running")  # states of a job that was started and has not ended
END = b"\0"  # begins the line after a journal: no line of a journal begins with it

_UNSEALED = {"exit_code", "status", "message", "next", "t", "journal_bytes", "journal_sha256"}
"""Fields of an older agent's final status, which has no digest of its own."""


@dataclass(frozen=True)
class Status:
    """A job's state on its host."""

    job_id: str
    state: str
    """absent, staged, queued, running, done or lost; in a list of jobs also elsewhere, if it is below another root."""
    journal_bytes: int = 0
    rc: Mapping[str, Any] | None = None  # the final status, see `final_status`; None before the job ends
    cause: str = ""
    """Why a job with a final status is lost: its files were changed or damaged; what one does that is elsewhere."""
    slurm: str = ""
    """What Slurm says of a job that has no final status: `PENDING (Priority), ...`, `TIMEOUT, Slurm job 12`."""
    waits_for: str = ""  # whose build or device a running job waits for: `job J of alice, since ...`

    @property
    def outcome(self) -> str:
        """How the job ended, as its final status says: done, failed or cancelled; its state if there is none."""
        return str(self.rc["status"]) if self.rc else self.state


@dataclass(frozen=True)
class Item:
    """A file or folder that the agent keeps on the host, below its root."""

    kind: str  # builds, work, models, tools, agents, jobs, leftovers or sources
    name: str
    used: float  # when it was last used, unix seconds of the host's clock
    age_s: float  # seconds since its last use, by the host's clock
    bytes: int = 0  # its size on the disk, in bytes
    state: str = ""  # a job's state, "" for anything else
    journal_bytes: int = 0


@dataclass(frozen=True)
class Removal:
    """The result of a removal."""

    removed: tuple[tuple[str, str], ...]  # kind and name of each removed item
    kept: tuple[tuple[str, str, str], ...]  # kind and name of each item that should be removed but was kept, and why


def final_status(content: bytes) -> dict[str, Any] | None:
    """Parse the file `rc` of a job, its final status: exit code, message, next command, digest of the journal.

    Returns None if the file is damaged or was not written by an agent.
    """
    try:
        rc = json.loads(content)
        seal = rc.pop("sha256", None)
        whole = seal == sealed(rc) if seal else rc.keys() <= _UNSEALED
        return rc if whole and isinstance(rc["journal_sha256"], str) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def sealed(rc: dict[str, Any]) -> str:
    """Return the sha256 that is stored in a final status, over its other fields."""
    return hashlib.sha256(json.dumps(rc, sort_keys=True).encode()).hexdigest()
