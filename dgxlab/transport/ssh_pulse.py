"""Whether the other end is still there: asked over and over, and believed of any byte that comes."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import paramiko

from dgxlab.transport.ssh_config import Limits

CUT: tuple[type[Exception], ...] = (paramiko.SSHException, EOFError, OSError)
"""What paramiko raises when a connection goes, in all its ways."""


class Pulse:
    """Asks the host whether it is there, and ends the connection when nothing at all came back for too long.

    paramiko's own keepalive wants no reply, so it finds nothing out. Any byte received counts here: an answer stuck
    behind much output is no silence. Time is counted in the ticks of a waiting thread, so that a client that was
    stopped or asleep does not take its own absence for the host's.
    """

    TICKS = 20

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._silent_ticks = 0
        self._over = threading.Event()
        self.lost = ""
        """Why the connection was ended here, "" while it was not."""

    def heard(self) -> None:
        """Note that something came from the host."""
        self._silent_ticks = 0

    def begin(self, transport: Any) -> None:
        """Ask and watch until the transport closes: from signing in on, as a host answers no questions before."""
        for work in (self._watch, self._ask):
            threading.Thread(target=work, args=(transport,), daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()

    def _ask(self, transport: Any) -> None:
        """Ask in a thread of its own: under a full send buffer even the question would wait."""
        while transport.is_active():
            try:
                transport.global_request("keepalive@openssh.com", wait=True)
            except CUT:
                return
            if self._over.wait(self._limits.ask_s):
                return

    def _watch(self, transport: Any) -> None:
        while transport.is_active() and not self._over.wait(self._limits.silent_s / self.TICKS):
            self._silent_ticks += 1
            if self._silent_ticks > self.TICKS:
                self.lost = f"did not answer for {self._limits.silent_s:g} s"
                transport.close()


class Heard:
    """A socket that tells a pulse of every byte received."""

    def __init__(self, wrapped: Any, pulse: Pulse) -> None:
        self._wrapped, self._pulse = wrapped, pulse

    def recv(self, size: int) -> bytes:
        """Receive as the socket does."""
        chunk: bytes = self._wrapped.recv(size)
        self._pulse.heard()
        return chunk

    def close(self) -> None:
        """Close, also where that can no longer be told to a jump host."""
        with contextlib.suppress(*CUT):
            self._wrapped.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
