"""What the figures were taken on, and how much of it other programs had meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from dgxlab.agent import facts

TICKS = os.sysconf("SC_CLK_TCK")


def described() -> dict[str, Any]:
    """Return the machine."""
    details = facts.gather().details
    return {name: details[name] for name in ("cpu", "cpus", "memory_mib", "os", "kernel", "python")}


class Others:
    """Counts the processors that programs other than this one and its children kept busy since it was made.

    Steal by other virtual machines counts too, and so does a detached agent. A figure in seconds that was taken while
    others had a processor that it could have used is no worse than it says.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._busy, self._own = _busy(), _own()

    def cpus(self) -> float:
        """Return how many processors they kept busy on average."""
        seconds = time.monotonic() - self._begin
        return max(0.0, (_busy() - self._busy - (_own() - self._own)) / seconds)


def _busy() -> float:
    """Return the CPU seconds that this machine has spent on anything since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _waiting, interrupts, softirqs, steal = fields
    return (user + nice + system + interrupts + softirqs + steal) / TICKS


def _own() -> float:
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
