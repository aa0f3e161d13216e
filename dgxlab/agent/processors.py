"""The processors of a run: which ones it is pinned to, and how much other programs used them during the run.

The agent looks at the tasks (threads) of a launch while it runs. On a host with 600 processes a look takes 0.7 ms at 2
threads and 1.8 ms at 128: two looks a second cost 0.4 % of one processor, and more with more processes or processors.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dgxlab.agent.facts import PERIOD_S, read

_THREAD_FLAGS = ("-t", "--threads", "-tb", "--threads-batch")
TOPOLOGY = "/sys/devices/system/cpu"

FIRST_S, FIRST_PERIOD_S = 1.0, 0.1
"""Looks come every FIRST_PERIOD_S in a program's first FIRST_S: the count of a task is lost when the task ends."""
LOOKS, SHORTEST_S = 5, 0.2
"""After fewer looks the waiting time is unknown; in a shorter run the other values, which are counted in 0.01 s."""
WINDOW_S = 1.0  # the worst time of this length is kept: test-backend-ops measures a case in about a second
_BUSY, _STEAL = (0, 1, 2, 5, 6), 7  # columns of a line of /proc/stat: user, nice, system, irq and softirq; steal
_TICKS = os.sysconf("SC_CLK_TCK")


def pinned(argv: Sequence[str]) -> tuple[int, ...]:
    """Return the processors to pin a program to: as many as it has threads, of those that the agent may use.

    They are of different cores as far as possible, the fastest first: a DGX Spark has ten fast cores and ten slow ones.
    If argv does not set the number of threads, they are one for each core of those, as llama.cpp chooses by default.
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
    """How a launch shared the processors. None is unknown: the kernel does not report it, or the run was too short."""

    processors: int  # number of processors that the launch could use; the values below are of these, except `psi`
    run_queue: float | None = None
    """Time that all tasks of all the launch's processes together waited for a processor, in seconds per second."""
    others: float | None = None  # how many processors all other programs used, on average
    steal: float | None = None  # share of the processors' time that the hypervisor gave to other virtual machines
    psi: float | None = None  # share of the time in which any task on the host waited for a processor
    busy: float | None = None  # how many tasks of the launch ran or waited, on average: the others slept
    burst: float | None = None
    """How long others can have made each busy task wait in the launch's worst WINDOW_S, in seconds per second."""


class ContentionWatch:
    """Measures the contention of one launch.

    Make it right before the launch starts, pass its `look` to `child.run`, and call `ended` right after.
    """

    def __init__(self, processors: Sequence[int] = ()) -> None:
        self._usable = set(processors) or os.sched_getaffinity(0)
        self._tasks: dict[str, tuple[int, int]] = {}
        self._looks, self._looked_s = 0, 0.0
        self._marks: list[tuple[float, float, float, float]] = []
        self._burst: float | None = None
        self._before = self._now()
        self._began = time.monotonic()

    def look(self, pid: int) -> float:
        """Note how long each task of the launch has waited so far; return the seconds until the next look.

        `pid` leads the launch's process group: what is measured may be a child of it, as the server under a client is.
        """
        self._looks += 1
        ran = 0.0
        for process in _of_group(pid):
            ran += parse_ran(read(f"/proc/{process}/stat"), _TICKS)
            for task in _listed(f"/proc/{process}/task"):
                self._note(task, f"/proc/{process}/task/{task}/schedstat")
        self._judge(ran)
        self._looked_s = time.monotonic() - self._began
        return FIRST_PERIOD_S if self._looked_s < FIRST_S else PERIOD_S

    def _note(self, task: str, path: str) -> None:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            if times := parse_times(file.read(64)):
                self._tasks[task] = times

    def _judge(self, ran: float) -> None:
        """Keep how long others can have made the tasks wait since WINDOW_S ago, if that is the most so far.

        `ran` is how long the processes ran so far; unlike the tasks' counts, it has that of the tasks that ended.
        """
        used = self._now().get("others")
        if used is None or not self._tasks:
            return
        mark = (time.monotonic(), ran, sum(waited for _, waited in self._tasks.values()) / 1e9, used)
        self._marks.append(mark)
        if before := next((each for each in reversed(self._marks) if mark[0] - each[0] >= WINDOW_S), None):
            seconds, ran, waited, used = (now - then for now, then in zip(mark, before, strict=True))
            burst = max(0.0, min(waited, used - ran)) / max(seconds, ran + waited)
            self._burst = max(burst, self._burst or 0.0)

    def ended(self) -> Contention:
        """Return the contention of the launch, which must have ended."""
        seconds, count = time.monotonic() - self._began, len(self._usable)
        waited = busy = None
        if self._tasks and self._looks >= LOOKS:
            # until the last look, at the program's end: what it left running may take long to be ended
            ran, waited = (sum(ns) / 1e9 / self._looked_s for ns in zip(*self._tasks.values(), strict=True))
            busy = ran + waited
        now = self._now()
        if seconds < SHORTEST_S:
            return Contention(count, waited, busy=busy)
        grown = {name: max(0.0, now[name] - since) / seconds for name, since in self._before.items() if name in now}
        steal = grown["steal"] / count if "steal" in grown else None
        return Contention(count, waited, grown.get("others"), steal, grown.get("psi"), busy, self._burst)

    def _now(self) -> dict[str, float]:
        """Return the counters of Contention that this host has, in seconds."""
        counters = parse_stat(read("/proc/stat"), self._usable, _TICKS)
        if "others" in counters:
            own = resource.getrusage(resource.RUSAGE_CHILDREN)
            counters["others"] -= own.ru_utime + own.ru_stime
        return {**counters, **parse_pressure(read("/proc/pressure/cpu"))}


def _of_group(group: int) -> Iterator[str]:
    """Yield the processes of a group, by number."""
    for process in filter(str.isdigit, _listed("/proc")):
        with contextlib.suppress(OSError):  # it has ended since
            if os.getpgid(int(process)) == group:
                yield process


def _listed(folder: str) -> list[str]:
    """Return the names in a folder; none if it is gone."""
    try:
        return os.listdir(folder)  # noqa: PTH208 - a Path would take longer than all the rest
    except OSError:
        return []


def parse_times(schedstat: bytes) -> tuple[int, int] | None:
    """Return how long a task ran and waited, in ns, given its /proc/.../schedstat; None if the kernel does not say."""
    words = schedstat.split()
    known = len(words) == 3 and all(word.isdigit() for word in words) and any(map(int, words))
    return (int(words[0]), int(words[1])) if known else None


def parse_ran(stat: str, ticks: int) -> float:
    """Return the seconds that a process and its ended children ran, given its /proc/PID/stat; 0 if it is gone."""
    return sum(map(int, stat.rpartition(")")[2].split()[11:15])) / ticks


def parse_stat(text: str, usable: set[int], ticks: int) -> dict[str, float]:
    """Return the seconds so far that programs used the processors `usable` ("others") and that were stolen ("steal").

    `text` is that of /proc/stat, in counts of 1 / `ticks` s. {} if a processor is missing, as in some containers.
    """
    lines = re.findall(r"^cpu(\d+)((?: \d+){8,})", text, re.MULTILINE)
    rows = [[int(word) for word in times.split()] for number, times in lines if int(number) in usable]
    if len(rows) != len(usable):
        return {}
    busy = sum(row[i] for row in rows for i in _BUSY)
    return {"others": busy / ticks, "steal": sum(row[_STEAL] for row in rows) / ticks}


def parse_pressure(text: str) -> dict[str, float]:
    """Return {"psi": seconds so far in which a task waited}, given /proc/pressure/cpu; {} if that is empty."""
    match = re.search(r"^some .*\btotal=(\d+)", text, re.MULTILINE)
    return {"psi": int(match[1]) / 1e6} if match else {}
