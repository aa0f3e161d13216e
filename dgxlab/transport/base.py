"""The interface of a transport: run one short command on a host. Everything else is a verb of the agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from dgxlab.errors import HostError


class CommandFailed(Exception):
    """A command on a host ended with a status other than 0; `stderr` is decoded with replacement."""

    def __init__(self, rc: int, stderr: str) -> None:
        super().__init__(f"exit status {rc}: {stderr.strip()}")
        self.rc = rc
        self.stderr = stderr


class HostLost(HostError):
    """The host could not be reached, or the connection was lost: the only host error that may be temporary.

    The effect of the command on the host is unknown; it must not be treated as failed.
    """


class HostDropped(HostLost):
    """The host hung up before it sent anything, as sshd does with new connections above its MaxStartups."""


class HostSilent(HostLost):
    """The host did not answer before the deadline: more time has passed than with any other loss."""


class Transport(Protocol):
    """A way to a host: its name, the interpreter that runs the agent there, and the agent's folder (~/ is the home)."""

    name: str
    python: str
    root: str

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Run `argv` on the host, feed it `stdin`, yield its stdout while it runs.

        Args:
            patience_s: Timeout without a byte of output; None means none, as long as the host itself answers.

        Raises:
            CommandFailed: if it ends with another status than 0, after all of stdout was yielded.
            HostError: if the host cannot be reached, the connection is lost, or the command is silent for too long.
        """
        ...
