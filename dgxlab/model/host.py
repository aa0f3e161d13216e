"""How a host is reached."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from dgxlab.errors import AGAIN

_WORD = r"(?:(?!-)[A-Za-z0-9_@%+=:,./~-]+|'[^'\x00-\x1f\x7f]*')"
ON_CLIENT = re.compile(
    rf"dgxlab (?:report|attach|doctor|logs)(?: {_WORD}){{1,2}}|dgxlab host clean {_WORD} --older-than 0 --dry-run"
)
"""What a host may tell the user to type here: a command that looks, no option, nothing for a shell."""
ON_HOST = re.compile(
    rf"sudo chmod 1777 /tmp|sudo apt-get install cmake ninja-build|(?:df -h|ls -l) {_WORD}|{_WORD} --version"
)
"""What it may tell the user to type on itself."""


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

    def next_of_agent(self, command: str) -> str:
        """Return the `next` of an error that the agent told, as it is typed here; "" for one that is not its own.

        The agent does not know from where it is reached; and what answers in its name may want anything to be typed.
        """
        if ON_HOST.fullmatch(command):
            return self.typed(command)
        return command if command == AGAIN or ON_CLIENT.fullmatch(command) else ""
