"""The one host error that time may mend."""

from __future__ import annotations

from dgxlab.errors import HostError


class HostLost(HostError):
    """The host could not be reached, or the connection was lost: worth another attempt.

    What the command did on the host is unknown, never failed.
    """


class HostDropped(HostLost):
    """The host hung up before it said anything, as sshd does with new connections above its MaxStartups."""


class HostSilent(HostLost):
    """Nobody answered for as long as is waited: more time has gone by than with any other loss."""
