"""How a host is reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostEntry:
    """One entry of hosts.yaml.

    Attributes:
        name: What specs and reports call it.
        ssh: What ssh would be given: an alias of its configuration, user@host or ssh://user@host:port. "" is this
            machine.
        root: The agent's folder there.
        python: The interpreter that runs the agent there; "" is ssh's python3, or this program's own on this machine.
    """

    name: str
    ssh: str = ""
    root: str = "~/.dgxlab"
    python: str = ""
