"""Which processors a pinned run gets: threads that share a core in one launch and not in the next make runs differ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

from dgxlab.agent.sensors import read

THREAD_FLAGS = ("-t", "--threads", "-tb", "--threads-batch")
TOPOLOGY = "/sys/devices/system/cpu"


def pinned(argv: Sequence[str]) -> tuple[int, ...]:
    """Return the processors for a program: as many as it has threads, of those that the agent may use itself.

    Each is on a core of its own as long as there are such, the fastest cores first (a DGX Spark has ten fast ones and
    ten slow ones); second threads of cores follow. A program that is not told how many threads to start gets one
    processor of every core, which is what llama.cpp counts.
    """
    usable = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for number in usable:
        siblings = read(f"{TOPOLOGY}/cpu{number}/topology/thread_siblings_list").strip()
        cores.setdefault(siblings or str(number), number)  # the kernel may not say
    in_order = sorted(usable, key=lambda number: (number not in cores.values(), -_capacity(number), number))
    return tuple(sorted(in_order[: _threads(argv) or len(cores)]))


def _capacity(number: int) -> int:
    """Return how fast a processor is beside the others, 0 where the kernel does not say: then all are alike."""
    said = read(f"{TOPOLOGY}/cpu{number}/cpu_capacity").strip()
    return int(said) if said.isdigit() else 0


def _threads(argv: Sequence[str]) -> int:
    """Return the most threads that the flags of a program ask for, 0 where they do not say."""
    given = [word for flag, word in pairwise(argv) if flag in THREAD_FLAGS]
    return max((int(n) for word in given for n in word.split(",") if n.isdigit()), default=0)
