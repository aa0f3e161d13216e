"""Runs trials of faults in worker processes, and collects their results."""

from __future__ import annotations

import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from types import FrameType
from typing import Any

from faults.fault import Broken, Fault, seeded

SHARDS = 4
"""Number of pieces that the trials of a kind are divided into; each piece makes its own place."""


@dataclass(frozen=True)
class Failure:
    """A failed trial; `number` is None if the place of many trials failed."""

    fault: str
    number: int | None
    reason: str


@dataclass
class Tally:
    """The results of a kind's trials.

    Attributes:
        met: How often a trial returned each word; see `Fault.trial`.
        seconds: Time of all workers together.
    """

    trials: int = 0
    met: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Add the results of another worker."""
        self.trials += other.trials
        self.met += other.met
        self.failures += other.failures
        self.seconds += other.seconds

    @property
    def bound(self) -> float:
        """The 95 % upper bound of the probability that a trial fails, if none of these did (the rule of three)."""
        return min(1.0, 3 / self.trials)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise Broken(f"it did not end within {seconds:.0f} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def trials(fault: Fault[Any], seed: int, numbers: Iterable[int]) -> Tally:
    """Run trials of one kind, by their numbers, in one place and in this process."""
    tally, begin = Tally(), time.monotonic()
    with fault.place() as place:
        for number in numbers:
            tally.trials += 1
            try:
                with _within(fault.limit_s):
                    tally.met[fault.trial(place, seeded(seed, fault.name, number))] += 1
            except Broken as broken:
                tally.failures.append(Failure(fault.name, number, str(broken)))
            except Exception:
                tally.failures.append(Failure(fault.name, number, traceback.format_exc()))
    tally.seconds = time.monotonic() - begin
    return tally


def _result(piece: Future[Tally], name: str) -> Tally:
    """Return the results of a piece; if its place failed, that is a failure, and the campaign goes on."""
    try:
        return piece.result()
    except Exception:
        return Tally(failures=[Failure(name, None, traceback.format_exc())])


def campaign(
    faults: Sequence[Fault[Any]],
    seed: int,
    times: Callable[[Fault[Any]], int],
    workers: int,
    done: Callable[[Fault[Any], Tally], None],
) -> dict[str, Tally]:
    """Run all trials of all kinds in worker processes.

    Args:
        faults: The kinds.
        seed: Makes each trial reproducible, with its kind and number.
        times: Returns the number of trials of a kind.
        workers: Number of processes.
        done: Called with the results of each piece of a kind's trials.

    Returns:
        The results by the kinds' names.
    """
    tallies = {fault.name: Tally() for fault in faults}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {}
        for fault in faults:
            shards = min(SHARDS, times(fault))
            for shard in range(shards):
                piece = pool.submit(trials, fault, seed, range(shard, times(fault), shards))
                running[piece] = fault
        for piece in as_completed(running):
            tally = _result(piece, running[piece].name)
            tallies[running[piece].name].add(tally)
            done(running[piece], tally)
    return tallies
