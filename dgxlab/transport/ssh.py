"""A host over ssh: one connection, opened when first needed and kept, on which every command is a channel of its own.

    ssh_config      what ssh would use to reach it         ssh_trust       whether a host key is trusted
    ssh_connection  fabric, with checks and deadlines      ssh_auth        signing in with keys
    ssh_command     one command on a channel

Here and in the first row nothing heavy is imported: fabric costs a tenth of a second.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dgxlab.transport.lost import HostLost, HostSilent
from dgxlab.transport.ssh_config import Limits, route
from dgxlab.transport.ssh_trust import HostKey

if TYPE_CHECKING:
    from dgxlab.transport.ssh_connection import Connection


def fingerprint(destination: str, limits: Limits | None = None) -> HostKey:
    """Return a host's key without signing in, or that of the first jump host on the way that is not trusted.

    `host add` shows it, asks, hands it to `ssh_trust.trust`, and comes back here until the state is trusted.

    Raises:
        HostError: if a hop cannot be reached, or a trusted jump host does not let us in.
    """
    from dgxlab.transport.ssh_connection import show

    return show(destination, route(destination), limits or Limits())


class SshTransport:
    """Runs commands on a host over ssh; see Transport. Threads may share it.

    Args:
        name: The host's name in hosts.yaml.
        destination: What ssh would be given: an alias of its configuration, user@host or ssh://user@host:port.
        root: The agent's folder there.
        python: The interpreter there.
        limits: Deadlines; the default suits people and real networks.
    """

    def __init__(
        self,
        name: str,
        destination: str,
        root: str = "~/.dgxlab",
        python: str = "python3",
        *,
        limits: Limits | None = None,
    ) -> None:
        self.name = name
        self.destination = destination
        self.root = root
        self.python = python
        self._limits = limits or Limits()
        self._connection: Connection | None = None
        self._asked = False
        self._lock = threading.Lock()

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Run `argv` once; see Transport.

        Memory is bounded by ssh's window: a reader that pauses holds up the command's output, a command that does not
        read holds up `stdin`, which is iterated in a thread of its own. Leaving early closes the channel; that ends a
        command when it next writes.

        Args:
            patience_s: Give up after so long without a byte either way; None is never, while the host itself answers.

        Raises:
            CommandFailed: if it ended with a status other than 0.
            HostLost: if the host is gone; what the command did is unknown.
            HostError: if the host does not let us in, or never ran the command.
        """
        from dgxlab.transport.ssh_command import Command, quote

        line = quote(argv)
        connection, channel = self._open()
        command = Command(connection, channel, stdin)
        try:
            yield from command.run(line, patience_s)
        finally:
            command.close()

    def close(self) -> None:
        """Close the connection; a later command opens a new one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> tuple[Connection, Any]:
        """Return a new channel, on the connection at hand where it still stands."""
        from dgxlab.transport.ssh_connection import Connection, meet

        with self._lock:
            connect, self._asked = Connection if self._asked else meet, True
            if self._connection is not None and self._connection.alive:
                try:
                    return self._connection, self._connection.session()
                except HostSilent:  # which took its time: whoever waits is told before it takes more
                    self._end()
                    raise
                except HostLost:  # it had died unnoticed, and nothing ran on it yet
                    pass
            self._end()
            self._connection = connect(self.name, route(self.destination), self._limits)
            return self._connection, self._connection.session()
