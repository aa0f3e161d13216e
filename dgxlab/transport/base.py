"""The interface of a transport, which runs one short command on a host. Anything else is a verb of the agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from dgxlab.errors import HostError


class CommandFailed(Exception):
    """A command on a host ended with the exit status `rc`, which is not 0, and this `stderr`."""

    def __init__(self, rc: int, stderr: str) -> None:
        super().__init__(f"exit status {rc}: {stderr.strip()}")
        self.rc = rc
        self.stderr = stderr


class HostLost(HostError):
    """The host could not be reached, or the connection was lost. Only this host error may pass by itself.

    The command may have run or not: it must not be treated as failed.
    """


class HostDropped(HostLost):
    """The host hung up before it sent anything, as sshd does with new connections above its MaxStartups."""


class HostSilent(HostLost):
    """The host did not answer before a deadline, so that another attempt at once would wait as long again."""


class Transport(Protocol):
    """A way to run commands on a host."""

    name: str  # the host's
    python: str  # the interpreter that runs the agent there
    root: str  # the agent's folder there; ~/ is the home folder

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Run `argv` on the host, send it `stdin`, and yield pieces of its stdout while it runs.

        Args:
            patience_s: Longest silence of the command, in seconds; None for any, as long as the host itself answers.

        Raises:
            CommandFailed: if it ends with another status than 0; all of its stdout was yielded before.
            HostError: if the host cannot be reached, the connection is lost, or the command is silent for too long.
        """
        ...
