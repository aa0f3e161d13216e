"""What ran and does not count, in words: gates that failed, sessions that did not end well."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dgxlab.report.records import Failure
from dgxlab.tools.parity import unlike

if TYPE_CHECKING:
    from dgxlab.store import Job

CASES = 3
"""Failing cases named of a gate."""

ENDS = {
    "intended": "recorded, and nothing has been heard from the host yet",
    "running": "it has not ended",
    "lost": "it started and will never report its end",
    "cancelled": "it was cancelled",
    "failed": "it ended with an error",
}
"""How a session stands that is not done, by its state."""


def failed_gate(gate: Mapping[str, Any], whose: str = "", *, again: bool = False) -> Failure:
    """Say why a gate failed, given its row of `evidence.GATES`.

    Args:
        whose: Follows the gate's name where one session has several of it.
        again: It was run again later, and passed.
    """
    reasons = [*json.loads(gate["reasons"]), *some(json.loads(gate["failed"]), CASES)]
    if gate["printed"] and gate["demanded"]:
        reasons += filter(None, [unlike(json.loads(gate["printed"]), json.loads(gate["demanded"]))])
    what = f"gate {gate['op']} on {gate['backend']}{whose}"
    return Failure(gate["job_id"], what, "failed", "; ".join(reasons), again)


def failed_session(job: Job | None, failures: Sequence[Failure]) -> list[Failure]:
    """Say how a session stands, unless it is done or what ended it is listed anyway."""
    if job is not None and job.rejected:
        return [Failure(job.job_id, "session", "rejected", job.rejected)]
    if job is None or job.state == "done":
        return []
    if any(failure.session == job.job_id and _explains(failure, job.error) for failure in failures):
        return []
    return [Failure(job.job_id, "session", job.state, job.error or ENDS[job.state])]


def _explains(failure: Failure, error: str) -> bool:
    """Tell whether a session's error only repeats a run's reason, or says that a gate failed which is listed."""
    return error in ("", failure.reason) or error.startswith(f"{failure.what} failed")


def some(items: Sequence[str], most: int) -> list[str]:
    """Return the first items, and how many more there are."""
    rest = len(items) - most
    return [*items[:most], f"and {rest} more"] if rest > 0 else list(items)
