"""What is tried again when a connection is lost: with growing pauses, each announced, and an end.

Every verb of the agent may be repeated: a job runs at most once however often it is submitted, and reading a journal
goes on from the byte that came last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dgxlab.errors import HostError
from dgxlab.transport.base import HostLost
from dgxlab.transport.host import Host

T = TypeVar("T")
Note = Callable[[str], None]
"""Takes a sentence about what is waited for."""

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, *(30.0,) * 18)
"""Pauses between attempts, ten minutes in all."""
STEADY_S = 60.0
"""A connection that held this long was a good one: the pauses start again."""


class Patience:
    """Counts the failures in a row and waits after each, a little longer every time."""

    def __init__(self, host: str, note: Note, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self._host, self._note, self._pauses_s = host, note, pauses_s
        self._failures = 0

    def reset(self) -> None:
        """Forget the failures so far: the host answered."""
        self._failures = 0

    def wait(self, error: HostLost) -> None:
        """Wait before the next attempt.

        Raises:
            HostError: with the last cause, when there is no next attempt.
        """
        if self._failures == len(self._pauses_s):
            raise HostError(
                f"gave up on host {self._host} after {self._failures + 1} attempts; the last one: {error.message}",
                next=error.next,
                details=error.details,
            ) from error
        pause = self._pauses_s[self._failures]
        self._failures += 1
        self._note(f"{error.message}; trying again in {pause:g} s ({self._failures} of {len(self._pauses_s)})")
        time.sleep(pause)


def again(host: Host, call: Callable[[], T], note: Note, pauses_s: Sequence[float] = PAUSES_S) -> T:
    """Return what `call` returns, called again as long as the host is lost and patience lasts.

    Raises:
        HostError: at once for a host that is not trusted or does not let us in, else with the last cause.
    """
    patience = Patience(host.name, note, pauses_s)
    while True:
        try:
            return call()
        except HostLost as error:
            patience.wait(error)


def first(host: Host, call: Callable[[], T], note: Note) -> T:
    """Return what `call` returns: once of a host that never answered, which may not be there at all, else as `again`.

    Raises:
        HostError: as `again`.
    """
    return again(host, call, note) if host.answered else call()


def follow(host: Host, job_id: str, offset: int, note: Note, pauses_s: Sequence[float] = PAUSES_S) -> Iterator[bytes]:
    """Yield what `host.follow` yields, going on after each cut at the byte where it came.

    Raises:
        HostError: as `again`.
    """
    patience = Patience(host.name, note, pauses_s)
    while True:
        began = time.monotonic()
        try:
            for piece in host.follow(job_id, offset):
                patience.reset()
                offset += len(piece)
                yield piece
            return
        except HostLost as error:
            if time.monotonic() - began > STEADY_S:
                patience.reset()
            patience.wait(error)
