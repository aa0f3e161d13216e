"""The processors of a run: which ones it is pinned to, and how much other programs used them during it.

The agent looks at the program's tasks while it waits for its end. A look takes 0.05 ms at 2 threads, 0.3 ms at 16 and
1.7 ms at 128: two a second cost at most 0.4 % of one processor.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dgxlab.agent.facts import PERIOD_S, read

_THREAD_FLAGS = ("-t", "--threads", "-tb", "--threads-batch")
TOPOLOGY = "/sys/devices/system/cpu"

FIRST_S, FIRST_PERIOD_S = 1.0, 0.1
"""Looks are frequent in a program's first second: a task that ends takes its count with it."""
LOOKS, SHORTEST_S = 5, 0.2
"""Fewer looks: waiting time unknown. Shorter run: the other values unknown, as times are in hundredths of a second."""
_BUSY, _STEAL = (0, 1, 2, 5, 6), 7
"""Columns of a line of /proc/stat: user, nice, system, irq and softirq; steal."""


def pinned(argv: Sequence[str]) -> tuple[int, ...]:
    """Return the processors for a program: as many as it has threads, among those that the agent may use.

    One per core first, the fastest cores first (a DGX Spark has ten fast ones and ten slow ones), then the cores'
    second threads. Without a number of threads in its argv, a program gets one processor of every core: that is the
    number of threads that llama.cpp starts by default.
    """
    usable = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    speeds: dict[int, int] = {}
    for number in usable:  # the kernel may report neither
        capacity = read(f"{TOPOLOGY}/cpu{number}/cpu_capacity").strip()
        speeds[number] = int(capacity) if capacity.isdigit() else 0
        siblings = read(f"{TOPOLOGY}/cpu{number}/topology/thread_siblings_list").strip()
        cores.setdefault(siblings or str(number), number)
    in_order = sorted(usable, key=lambda number: (number not in cores.values(), -speeds[number], number))
    given = [word for flag, word in pairwise(argv) if flag in _THREAD_FLAGS]
    threads = max((int(n) for word in given for n in word.split(",") if n.isdigit()), default=0)
    return tuple(sorted(in_order[: threads or len(cores)]))


@dataclass(frozen=True)
class Contention:
    """How a program shared the processors; None is unknown: not reported by the kernel, or the run was too short."""

    processors: int
    """Number of processors it could use; the values below are about these, except `psi`."""
    run_queue: float | None = None
    """Waiting time of all its tasks for a processor, in seconds per second."""
    others: float | None = None
    """How many processors all other programs used."""
    steal: float | None = None
    """Share of the processors' time that the hypervisor gave to other machines."""
    psi: float | None = None
    """Share of the time in which any task on the host waited for a processor."""


class Watch:
    """Measures contention for one program, from right before its start to right after its end."""

    def __init__(self, processors: Sequence[int] = ()) -> None:
        self._usable = set(processors) or os.sched_getaffinity(0)
        self._waited: dict[str, int] = {}
        self._looks = 0
        self._before = self._now()
        self._began = time.monotonic()

    def look(self, pid: int) -> float:
        """Note how long each task of the program has waited so far; return the seconds until the next look."""
        self._looks += 1
        with contextlib.suppress(OSError):  # a Path would take longer than all the rest
            for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
                self._note(task, f"/proc/{pid}/task/{task}/schedstat")
        return FIRST_PERIOD_S if time.monotonic() - self._began < FIRST_S else PERIOD_S

    def _note(self, task: str, path: str) -> None:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            if (waited := parse_wait(file.read(64))) is not None:
                self._waited[task] = waited

    def ended(self) -> Contention:
        """Return the contention; call it after the program and its children have ended."""
        seconds, count = time.monotonic() - self._began, len(self._usable)
        waited = sum(self._waited.values()) / 1e9 / seconds if self._waited and self._looks >= LOOKS else None
        now = self._now()
        if seconds < SHORTEST_S:
            return Contention(count, waited)
        grown = {name: max(0.0, now[name] - since) / seconds for name, since in self._before.items() if name in now}
        steal = grown["steal"] / count if "steal" in grown else None
        return Contention(count, waited, grown.get("others"), steal, grown.get("psi"))

    def _now(self) -> dict[str, float]:
        """Return the counters of Contention that this host has, in seconds."""
        counters = parse_stat(read("/proc/stat"), self._usable, os.sysconf("SC_CLK_TCK"))
        if "others" in counters:
            own = resource.getrusage(resource.RUSAGE_CHILDREN)
            counters["others"] -= own.ru_utime + own.ru_stime
        return {**counters, **parse_pressure(read("/proc/pressure/cpu"))}


def parse_wait(schedstat: bytes) -> int | None:
    """Return a task's waiting time in ns; None for three zeros, from a kernel that does not count it."""
    words = schedstat.split()
    known = len(words) == 3 and all(word.isdigit() for word in words) and any(map(int, words))
    return int(words[1]) if known else None


def parse_stat(text: str, usable: set[int], ticks: int) -> dict[str, float]:
    """Return "others", the seconds that all programs used these processors, and "steal", from /proc/stat.

    `ticks` are counts a second. The result is empty if one of the processors is missing, as in some containers.
    """
    lines = re.findall(r"^cpu(\d+)((?: \d+){8,})", text, re.MULTILINE)
    rows = [[int(word) for word in times.split()] for number, times in lines if int(number) in usable]
    if len(rows) != len(usable):
        return {}
    busy = sum(row[i] for row in rows for i in _BUSY)
    return {"others": busy / ticks, "steal": sum(row[_STEAL] for row in rows) / ticks}


def parse_pressure(text: str) -> dict[str, float]:
    """Return "psi", the seconds so far in which some task waited, from /proc/pressure/cpu; empty without that file."""
    match = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
    return {"psi": int(match[1]) / 1e6} if match else {}
