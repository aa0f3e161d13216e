"""What a transport is: a way to run one short command on a host, and nothing else.

Staging, starting, following and cancelling are verbs of the agent, so local and ssh differ in this one method only.
"""

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
    """The host could not be reached, or the connection was lost: the one host error that time may mend.

    What the command did on the host is unknown, never failed.
    """


class HostDropped(HostLost):
    """The host hung up before it sent anything, as sshd does with new connections above its MaxStartups."""


class HostSilent(HostLost):
    """The host did not answer for as long as is waited: more time has gone by than with any other loss."""


class Transport(Protocol):
    """A way to a host."""

    name: str
    """The host's name, as in specs and reports."""
    python: str
    """The interpreter that runs the agent there."""
    root: str
    """The agent's folder there; may begin with ~/."""

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Run `argv` on the host, feed it `stdin`, yield its stdout as it comes.

        Args:
            patience_s: Give up after so long without a byte; None is never, as long as the host itself answers.

        Raises:
            CommandFailed: if it ends with another status than 0, after all of stdout was yielded.
            HostError: if the host cannot be reached, the connection is lost, or the command is silent for too long.
        """
        ...
