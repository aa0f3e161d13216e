"""The processors of a run: which ones it is pinned to, and what others took of them while it ran.

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

THREAD_FLAGS = ("-t", "--threads", "-tb", "--threads-batch")
TOPOLOGY = "/sys/devices/system/cpu"

FIRST_S, FIRST_PERIOD_S = 1.0, 0.1
"""In its first second a program is looked at this often: a task that ends takes its count with it."""
LOOKS = 5
"""With fewer, the one after its end among them, a program's waiting is not known: it ended within 0.3 s."""
SHORTEST_S = 0.2
"""Of less the processors' times, whole hundredths of a second each, say nothing."""

BUSY = (0, 1, 2, 5, 6)
"""user, nice, system, irq and softirq in a line of /proc/stat."""
STEAL = 7


def pinned(argv: Sequence[str]) -> tuple[int, ...]:
    """Return the processors for a program: as many as it has threads, of those that the agent may use itself.

    Each is on a core of its own as long as there are such, the fastest cores first (a DGX Spark has ten fast ones and
    ten slow ones); second threads of cores follow. A program that is not told how many threads to start gets one
    processor of every core, which is what llama.cpp counts.
    """
    usable = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    speeds: dict[int, int] = {}  # all alike where the kernel does not say
    for number in usable:
        capacity = read(f"{TOPOLOGY}/cpu{number}/cpu_capacity").strip()
        speeds[number] = int(capacity) if capacity.isdigit() else 0
        siblings = read(f"{TOPOLOGY}/cpu{number}/topology/thread_siblings_list").strip()
        cores.setdefault(siblings or str(number), number)  # the kernel may not say
    in_order = sorted(usable, key=lambda number: (number not in cores.values(), -speeds[number], number))
    given = [word for flag, word in pairwise(argv) if flag in THREAD_FLAGS]
    threads = max((int(n) for word in given for n in word.split(",") if n.isdigit()), default=0)
    return tuple(sorted(in_order[: threads or len(cores)]))


@dataclass(frozen=True)
class Contention:
    """How a program shared the processors; None is not known: the kernel does not say, or the run was too short.

    Attributes:
        processors: That it might use; all of the following is about these, but for `psi`.
        run_queue: Seconds a second that its tasks, taken together, waited for a processor.
        others: How many processors all other programs used.
        steal: Share of the processors' time that the hypervisor gave to other machines.
        psi: Share of the time in which a task on the host waited for a processor.
    """

    processors: int
    run_queue: float | None = None
    others: float | None = None
    steal: float | None = None
    psi: float | None = None


class Watch:
    """Looks at one program, from right before its start to right after its end.

    Args:
        processors: To which it is pinned; none for all that the agent may use.
    """

    def __init__(self, processors: Sequence[int] = ()) -> None:
        self._usable = set(processors) or os.sched_getaffinity(0)
        self._waited: dict[str, int] = {}
        self._looks = 0
        self._before = self._now()
        self._began = time.monotonic()

    def look(self, pid: int) -> float:
        """Note how long each task of the program has waited so far; return in how many seconds to look again."""
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
        """Return what was seen; the program and its children were waited for."""
        seconds, count = time.monotonic() - self._began, len(self._usable)
        waited = sum(self._waited.values()) / 1e9 / seconds if self._waited and self._looks >= LOOKS else None
        now = self._now()
        if seconds < SHORTEST_S:
            return Contention(count, waited)
        grown = {name: max(0.0, now[name] - since) / seconds for name, since in self._before.items() if name in now}
        steal = grown["steal"] / count if "steal" in grown else None
        return Contention(count, waited, grown.get("others"), steal, grown.get("psi"))

    def _now(self) -> dict[str, float]:
        """Return what of Contention's counters this host has, in seconds."""
        counters = parse_stat(read("/proc/stat"), self._usable, os.sysconf("SC_CLK_TCK"))
        if "others" in counters:
            own = resource.getrusage(resource.RUSAGE_CHILDREN)
            counters["others"] -= own.ru_utime + own.ru_stime
        return {**counters, **parse_pressure(read("/proc/pressure/cpu"))}


def parse_wait(schedstat: bytes) -> int | None:
    """Return how many ns a task has waited for a processor; three zeros are a kernel's that does not count."""
    words = schedstat.split()
    known = len(words) == 3 and all(word.isdigit() for word in words) and any(map(int, words))
    return int(words[1]) if known else None


def parse_stat(text: str, usable: set[int], ticks: int) -> dict[str, float]:
    """Return the seconds that all programs used of some processors, as "others", and "steal", from /proc/stat.

    Nothing if one of the processors is missing, as in some containers.

    Args:
        ticks: A second.
    """
    lines = re.findall(r"^cpu(\d+)((?: \d+){8,})", text, re.MULTILINE)
    rows = [[int(word) for word in times.split()] for number, times in lines if int(number) in usable]
    if len(rows) != len(usable):
        return {}
    busy = sum(row[i] for row in rows for i in BUSY)
    return {"others": busy / ticks, "steal": sum(row[STEAL] for row in rows) / ticks}


def parse_pressure(text: str) -> dict[str, float]:
    """Return for how many seconds so far some task waited, as "psi", from /proc/pressure/cpu; nothing without it."""
    match = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
    return {"psi": int(match[1]) / 1e6} if match else {}
