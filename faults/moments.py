"""The phases of a `dgxlab run`, seen from outside: wait for a random moment of one, or tell which it is."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from random import Random

from faults.host import Box

POLL_S = 0.004

WINDOW_S: Mapping[str, float] = {"submit": 1.0, "start": 0.4, "follow": 0.6, "ingest": 0.15, "report": 0.4}
"""Phases in order; a fault comes within this many seconds from the first sign of a phase."""


def wait(box: Box, name: str, child: subprocess.Popen[str], random: Random) -> None:
    """Wait for a random moment of a run, or for its end.

    Args:
        name: The experiment's.
        child: The process of the run.
    """
    phase = random.choice(list(WINDOW_S))
    delay_s = random.uniform(0, WINDOW_S[phase])
    seen = _signs(box, name)[phase]
    while child.poll() is None and not seen():
        time.sleep(POLL_S)
    until = time.monotonic() + delay_s
    while child.poll() is None and time.monotonic() < until:
        time.sleep(POLL_S)


def phase(box: Box, name: str) -> str:
    """Return the phase of an experiment's last job."""
    recorded, there = box.jobs(name), box.folders(name)
    if not recorded:
        return "submit"
    if recorded[-1]["state"] not in ("intended", "running"):
        return "report"
    state = there[-1].status().state if there else "absent"
    if state in ("absent", "staged"):
        return "start"
    return "follow" if state == "running" else "ingest"


def _signs(box: Box, name: str) -> Mapping[str, Callable[[], bool]]:
    """Return, by phase, a function that tells whether it has begun."""

    def there(what: str) -> Callable[[], bool]:
        return lambda: any(box.root.glob(f"jobs/*-{name}-*{what}"))

    return {
        "submit": lambda: True,
        "start": lambda: bool(box.jobs(name)) or any(box.root.glob(f"jobs/*{name}*")),
        "follow": there("/journal.jsonl"),
        "ingest": there("/rc"),
        "report": lambda: any(job["state"] == "done" for job in box.jobs(name)),
    }
