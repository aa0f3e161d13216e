"""Retry calls after a lost connection, with growing, announced pauses and a limit.

Every verb of the agent may be repeated: a job runs at most once however often it is submitted, and reading a journal
goes on after the last byte that was received.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from dgxlab.errors import HostError
from dgxlab.transport.base import HostLost
from dgxlab.transport.host import Host, JobStatus

T = TypeVar("T")
Note = Callable[[str], None]  # takes a sentence on the reason for waiting
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, *(30.0,) * 18)  # pauses between attempts, ten minutes in all
_STEADY_S = 60.0  # a connection that held this long was a good one: the pauses start again


class _Patience:
    """Waits after each of several failures in a row, a little longer every time."""

    def __init__(self, host: Host, note: Note, pauses_s: Sequence[float]) -> None:
        self._host, self._note, self._pauses_s = host, note, pauses_s
        self.failures = 0

    def wait(self, error: HostLost) -> None:
        if self.failures == len(self._pauses_s):
            raise HostError(
                f"gave up on host {self._host.name} after {self.failures + 1} attempts; the last one: {error.message}",
                next=error.next,
                details=error.details,
            ) from error
        pause = self._pauses_s[self.failures]
        self.failures += 1
        self._note(f"{error.message}; trying again in {pause:g} s ({self.failures} of {len(self._pauses_s)})")
        time.sleep(pause)


def again(host: Host, call: Callable[[], T], note: Note, pauses_s: Sequence[float] = PAUSES_S) -> T:
    """Return the result of `call`, which is repeated after each HostLost.

    `note` is called with a sentence before each pause. After one more failure than `pauses_s`, a HostError is raised.
    """
    patience = _Patience(host, note, pauses_s)
    while True:
        try:
            return call()
        except HostLost as error:
            patience.wait(error)


def again_if_known(host: Host, call: Callable[[], T], note: Note) -> T:
    """Return the result of `call`; repeat it as `again` does if the host answered before: else it may not exist."""
    return again(host, call, note) if host.answered else call()


def follow(
    host: Host,
    job_id: str,
    offset: int,
    take: Callable[[bytes], object],
    note: Note,
    pauses_s: Sequence[float] = PAUSES_S,
) -> JobStatus:
    """Pass on a job's journal as `Host.follow` does, and go on after each loss of the connection; raises as `again`."""
    patience = _Patience(host, note, pauses_s)

    def taken(piece: bytes) -> None:
        nonlocal offset
        patience.failures = 0
        offset += len(piece)
        take(piece)

    while True:
        began = time.monotonic()
        try:
            return host.follow(job_id, offset, taken)
        except HostLost as error:
            if time.monotonic() - began > _STEADY_S:
                patience.failures = 0
            patience.wait(error)
