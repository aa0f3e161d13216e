"""How a host is reached."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

ON_HOST = ("sudo ", "df ", "ls ", "python3 ")
"""How a `next` begins that is meant for the host itself."""


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
        file: The hosts.yaml that says so, "" where none does.
    """

    name: str
    ssh: str = ""
    root: str = "~/.dgxlab"
    python: str = ""
    path_prepend: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""
    file: str = field(default="", compare=False)

    def typed(self, command: str) -> str:
        """Return what to type on the client for a command to run there; with a terminal, for sudo asks."""
        if not self.ssh:
            return command
        words = command if re.fullmatch(r"[\w@%+=:,./ -]*", command) else shlex.quote(command)
        return f"ssh -t {shlex.quote(self.ssh)} {words}"

    def next_of_agent(self, said: str) -> str:
        """Return the `next` of an error that the agent told: it does not know from where it is reached."""
        return self.typed(said) if said.startswith(ON_HOST) else said
