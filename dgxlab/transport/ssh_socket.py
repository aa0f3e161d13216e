"""The bytes below ssh: a connection of the network, or a program that the ssh configuration names."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from typing import IO

from dgxlab.transport.ssh_config import Hop, Limits

SAID_BYTES = 500


def connect(hop: Hop, limits: Limits) -> socket.socket:
    """Return a socket connected to a hop.

    Raises:
        OSError: if no address of it answers in time.
    """
    sock = socket.create_connection((hop.hostname, hop.port), timeout=limits.connect_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else every command waits 40 ms for a delayed ACK
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: a dead network ends the connection, also while we sign in
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.silent_s * 1000))
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(limits.ask_s)))
    return sock


class ProxyProgram:
    """A ProxyCommand, run by sh as ssh runs it; its stdin and stdout are the connection."""

    def __init__(self, command: str) -> None:
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self.socket, theirs = socket.socketpair()
        end = theirs.fileno()
        with theirs:
            self._child = subprocess.Popen(
                ["sh", "-c", f"exec {command}"], stdin=end, stdout=end, stderr=self._stderr, start_new_session=True
            )

    def said(self) -> str:
        """Return the end of what it printed on stderr."""
        self._stderr.seek(0)
        return self._stderr.read()[-SAID_BYTES:].decode(errors="replace").strip()

    def close(self) -> None:
        """End it."""
        self.socket.close()
        self._child.terminate()
        self._child.wait()
        self._stderr.close()
