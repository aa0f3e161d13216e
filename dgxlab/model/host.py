"""How a host is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class HostEntry:
    """One entry of hosts.yaml.

    Attributes:
        name: What specs and reports call it.
        ssh: What ssh would be given: an alias of its configuration, user@host or ssh://user@host:port. "" is this
            machine.
        root: The agent's folder there.
        python: The interpreter that runs the agent there; "" is ssh's python3, or this program's own on this machine.
        path_prepend: Folders that come first on PATH there; may begin with ~/.
        env: Variables for every program there, compilers too.
        lock: A file in which people who share the machine say that they measure; "" for none. May begin with ~/.
    """

    name: str
    ssh: str = ""
    root: str = "~/.dgxlab"
    python: str = ""
    path_prepend: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""
