"""Entries of hosts.yaml: how to reach a host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from dgxlab.errors import AGAIN

_WORD = r"(?:(?!-)[A-Za-z0-9_@%+=:,./~-]+|'[^'\x00-\x1f\x7f]*')"
_ON_CLIENT = re.compile(
    rf"dgxlab (?:report|attach|doctor|logs)(?: {_WORD}){{1,2}}|dgxlab host clean {_WORD} --older-than 0 --dry-run"
)
"""Commands that an agent's error may suggest for the client: read-only, without options or shell syntax."""
_ON_HOST = re.compile(
    rf"sudo chmod 1777 /tmp|sudo apt-get install cmake ninja-build|(?:df -h|ls -l) {_WORD}|{_WORD} --version"
)
"""Commands that an agent's error may suggest for the host."""


@dataclass(frozen=True)
class HostEntry:
    """One entry of hosts.yaml: a host and how to reach it."""

    name: str
    ssh: str = ""  # an alias of ssh's configuration, user@host or ssh://user@host:port; "" is this machine
    root: str = "~/.dgxlab"  # the agent's folder there
    python: str = ""  # runs the agent there; "" is ssh's python3, or this program's own on this machine
    path_prepend: tuple[str, ...] = ()  # folders that come first on PATH there; may begin with ~/
    env: Mapping[str, str] = field(default_factory=dict)  # for every program there, compilers too
    lock: str = ""  # a file in which people who share the machine say that they measure; may begin with ~/
    file: str = field(default="", compare=False)  # the hosts.yaml that has this entry

    def typed(self, command: str) -> str:
        """Return what to type on the client to run `command` on this host: `ssh -t HOST COMMAND`."""
        if not self.ssh:
            return command
        words = command if re.fullmatch(r"[\w@%+=:,./ -]*", command) else shlex.quote(command)
        return f"ssh -t {shlex.quote(self.ssh)} {words}"  # -t: sudo asks for a password

    def next_of_agent(self, command: str) -> str:
        """Return what to type on the client for the `next` of an agent's error; "" if its form is not allowed."""
        if _ON_HOST.fullmatch(command):
            return self.typed(command)
        return command if command == AGAIN or _ON_CLIENT.fullmatch(command) else ""
