"""How ssh would reach a destination, in ssh's own words: `ssh -G` applies Host, Match, Include and the defaults.

What is taken from it: HostName, User, Port, IdentityFile, IdentitiesOnly, IdentityAgent, ProxyJump, ProxyCommand,
HostKeyAlias, UserKnownHostsFile, GlobalKnownHostsFile, Ciphers, MACs, KexAlgorithms. StrictHostKeyChecking is not:
unknown keys are always refused.
Neither are ForwardAgent, SendEnv, forwardings and password prompts. RevokedHostKeys is refused rather than ignored.
"""

from __future__ import annotations

import getpass
import os
import pwd
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dgxlab.errors import HostError, edit

MAX_HOPS = 8
UNSAFE = re.compile(r"^-|[\s'\"`$;&<>|(){}]")
"""What no name in a ProxyCommand may hold."""
ASK_S = 30.0
"""How long ssh may take to read its configuration; a Match may run a program."""


@dataclass(frozen=True)
class Limits:
    """Deadlines, in seconds.

    Attributes:
        connect_s: For each of connecting, the banner, the key exchange and opening a channel.
        auth_s: For the host's answer to one key: it may ask a directory first, an agent may ask a person.
        ask_s: Pause between questions whether the host is still there.
        silent_s: Once signed in, without a byte from the host for so long, it is gone.
    """

    connect_s: float = 15.0
    auth_s: float = 60.0
    ask_s: float = 4.0
    silent_s: float = 15.0


@dataclass(frozen=True)
class Hop:
    """One ssh connection of the one or more that lead to a host.

    Attributes:
        destination: What ssh itself would be given: an alias, user@host or a URL.
        hostname: What to connect to, from the hop before it where there is one.
        key_names: What known_hosts files call it; a new line is written under the first.
        known_hosts: Those files.
        identities: Private key files in the order to try; not all need exist.
        identities_only: Whether the agent may offer only these.
        agent: Path of the agent's socket, "" for none.
        proxy_command: A shell command whose streams are the connection, "" for none.
        ciphers, macs, kex: Algorithms that may be offered, the preferred ones first.
    """

    destination: str
    hostname: str
    port: int
    user: str
    key_names: tuple[str, ...]
    known_hosts: tuple[Path, ...]
    identities: tuple[Path, ...]
    identities_only: bool
    agent: str
    proxy_command: str
    ciphers: tuple[str, ...]
    macs: tuple[str, ...]
    kex: tuple[str, ...]


def route(destination: str) -> tuple[Hop, ...]:
    """Return the hops to a destination: jump hosts in order, the destination last.

    As with ssh, the first jump host's own ProxyJump applies, that of the later ones does not.

    Raises:
        HostError: if ssh cannot make sense of it, or the jumps lead in a circle.
    """
    hops: list[Hop] = []
    first: str | None = destination
    while first is not None:
        answer = _ask(first)
        jumps = [jump for jump in answer.get("proxyjump", [""])[0].split(",") if jump not in ("", "none")]
        # as ssh takes an entry with a port: as a URL
        jumps = [f"ssh://{jump}" if ":" in jump and "://" not in jump else jump for jump in jumps]
        hops = [*(_hop(jump, _ask(jump)) for jump in jumps[1:]), _hop(first, answer), *hops]
        if len(hops) > MAX_HOPS:
            raise HostError(
                f"the way to {destination} has more than {MAX_HOPS} jump hosts; does ProxyJump lead in a circle?",
                next=f"ssh -G {shlex.quote(destination)}",
            )
        first = jumps[0] if jumps else None
    return tuple(hops)


def _ask(destination: str) -> dict[str, list[str]]:
    file = []
    if Path.home() != _account_home():  # else ssh would read the account's file, whatever $HOME says
        path = Path.home() / ".ssh" / "config"
        file = ["-F", str(path) if path.exists() else "none"]
    try:
        ran = subprocess.run(
            ["ssh", *file, "-G", "--", destination],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_S,
        )
    except FileNotFoundError:
        raise HostError("ssh is not installed on this machine", next="sudo apt-get install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise HostError(f"ssh took more than {ASK_S:.0f} s to read its configuration for {destination}") from None
    if ran.returncode != 0:
        raise HostError(
            f"ssh does not understand {destination!r}: {ran.stderr.strip()}", next=f"ssh -G {shlex.quote(destination)}"
        )
    answer: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        key, _, value = line.partition(" ")
        answer.setdefault(key, []).append(value.strip())
    return answer


def _account_home() -> Path:
    return Path(pwd.getpwuid(os.getuid()).pw_dir)


def _hop(destination: str, answer: Mapping[str, list[str]]) -> Hop:
    def value(key: str, otherwise: str = "") -> str:
        first = answer.get(key, [otherwise])[0]
        return otherwise if first == "none" else first

    if value("revokedhostkeys"):
        raise HostError(
            f"RevokedHostKeys is set for {destination}, which dgxlab cannot check: put its keys into a "
            "known_hosts file as @revoked lines instead",
            next=edit(Path.home() / ".ssh" / "config"),
        )
    hostname, port, alias = value("hostname").lower(), int(value("port", "22")), value("hostkeyalias")
    names = (alias,) if alias else (hostname,) if port == 22 else (f"[{hostname}]:{port}", hostname)
    tokens = _tokens(destination, hostname, port, value("user"), names[0])
    proxy = value("proxycommand")
    # a shell reads a ProxyCommand with the host's names in it; a newer ssh refuses such names itself
    if proxy and any(UNSAFE.search(tokens[token]) for token in "hknr" if f"%{token}" in proxy):
        raise HostError(
            f"{destination!r} holds characters that a shell would read in the ProxyCommand",
            next=f"ssh -G {shlex.quote(destination)}",
        )
    # ssh names the account's home, which $HOME may differ from
    home = _account_home()
    files = [Path(path) for path in f"{value('userknownhostsfile')} {value('globalknownhostsfile')}".split()]
    identities = [path for path in answer.get("identityfile", []) if path != "none"]
    return Hop(
        destination=destination,
        hostname=hostname,
        port=port,
        user=value("user"),
        key_names=names,
        known_hosts=tuple(
            Path.home() / path.relative_to(home) if path.is_relative_to(home / ".ssh") else path for path in files
        ),
        identities=tuple(Path(_expand(path, tokens)).expanduser() for path in identities),
        identities_only=value("identitiesonly", "no") == "yes",
        agent=_agent(answer.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        proxy_command=_expand(proxy, tokens),
        ciphers=tuple(value("ciphers").split(",")),
        macs=tuple(value("macs").split(",")),
        kex=tuple(value("kexalgorithms").split(",")),
    )


def _agent(value: str, tokens: Mapping[str, str]) -> str:
    if value == "none":
        return ""
    if value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK", "")
    if value.startswith("$"):
        return os.environ.get(value.strip("${}"), "")
    return str(Path(_expand(value, tokens)).expanduser())


def _tokens(destination: str, hostname: str, port: int, user: str, key_name: str) -> dict[str, str]:
    """Return ssh's percent tokens: `ssh -G` leaves them as written in IdentityFile and ProxyCommand."""
    local = socket.gethostname()
    return {
        "%": "%",
        "d": str(Path.home()),
        "h": hostname,
        "i": str(os.getuid()),
        "k": key_name,
        "L": local.partition(".")[0],
        "l": local,
        "n": destination,
        "p": str(port),
        "r": user,
        "u": getpass.getuser(),
    }


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), text)
