"""The definition of a kind of fault: a place to inject it, a trial, and what must hold after each trial."""

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
    """Something that must hold did not; the message names what was lost, wrong, repeated or let in."""


@dataclass(frozen=True)
class Fault(Generic[P]):
    """A kind of fault.

    Attributes:
        name: A short word, for --only.
        what: The row of the table: what is done to the program.
        times: Number of trials in a full campaign.
        holds: What must hold after each, in a few words.
        place: Makes what trials need (a host, a database, captures); the trials of a piece share it.
        trial: Injects the fault once, as the random numbers decide, and checks what must hold. Returns a word for the
            state that the fault met (submit, ingest, refused ...), for the table. Any exception is a failure.
        limit_s: A trial that takes longer is a failure.
        lacks: Returns what this machine lacks for this kind of fault, "" for nothing.
    """

    name: str
    what: str
    times: int
    holds: str
    place: Callable[[], AbstractContextManager[P]]
    trial: Callable[[P, Random], str]
    limit_s: float = 240.0
    lacks: Callable[[], str] = str


def wait_while(state: Callable[[], T], seconds: float) -> T:
    """Call `state` until its result is empty or the time is over; return the last result."""
    deadline = time.monotonic() + seconds
    while (last := state()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return last


def seeded(seed: int, name: str, number: int) -> Random:
    """Return the random numbers of one trial, which depend on nothing else."""
    return Random(f"{seed}:{name}:{number}")  # noqa: S311 - to choose moments, not secrets
