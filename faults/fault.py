"""What a kind of fault is: a place to inject it in, one trial, and what must hold after it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

P = TypeVar("P")
T = TypeVar("T")


class Broken(Exception):
    """What must hold did not: a sentence that names what was lost, wrong, repeated or let in."""


@dataclass(frozen=True)
class Fault(Generic[P]):
    """A kind of fault.

    Attributes:
        name: A short word, for --only.
        what: The row of the table: what is done to the program.
        times: Trials of a whole campaign.
        holds: What must hold after each, in a few words.
        place: Makes what trials need (a host, a database, captures); trials of one worker share it.
        trial: Injects the fault once, decided by the random numbers alone, and checks. Returns in a word what the fault
            met (submit, ingest, refused ...), so that the table shows that it met something. Raises Broken, or anything
            else, which is a failure too.
        limit_s: A trial that takes longer is a failure.
        lacks: Returns what this machine lacks for it, "" for nothing.
    """

    name: str
    what: str
    times: int
    holds: str
    place: Callable[[], AbstractContextManager[P]]
    trial: Callable[[P, Random], str]
    limit_s: float = 120.0
    lacks: Callable[[], str] = str


def wait_while(state: Callable[[], T], seconds: float) -> T:
    """Wait until a state is empty, for so long at most, and return the last one."""
    deadline = time.monotonic() + seconds
    while (last := state()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return last


def seeded(seed: int, name: str, number: int) -> Random:
    """Return the random numbers of one trial: the same whichever worker runs it, and whichever ran before."""
    return Random(f"{seed}:{name}:{number}")  # noqa: S311 - to choose moments, not secrets
