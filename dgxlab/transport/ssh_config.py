"""How ssh would reach a destination, by asking ssh: `ssh -G` applies Host, Match, Include and the defaults.

What is taken from it: HostName, User, Port, IdentityFile, IdentitiesOnly, IdentityAgent, ProxyJump, ProxyCommand,
HostKeyAlias, UserKnownHostsFile, GlobalKnownHostsFile, Ciphers, MACs, KexAlgorithms. Not StrictHostKeyChecking: unknown
keys are always refused. Not ForwardAgent, SendEnv, forwardings and password prompts. RevokedHostKeys is an error.
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

_MAX_HOPS = 8
_UNSAFE = re.compile(r"^-|[\s'\"`$;&<>|(){}]")  # characters forbidden in names in a ProxyCommand
_ASK_S = 30.0  # how long ssh may take to read its configuration; a Match may run a program


@dataclass(frozen=True)
class Limits:
    """Deadlines, in seconds."""

    connect_s: float = 15.0  # for each of connecting, the banner, the key exchange and opening a channel
    auth_s: float = 60.0  # for the host's answer to one key: it may ask a directory first, an agent may ask a person
    ask_s: float = 4.0  # pause between questions whether the host is still there
    silent_s: float = 15.0  # once signed in, a host that sends nothing for this long is lost


@dataclass(frozen=True)
class Hop:
    """One of the ssh connections that lead to a host: the last is the host's, those before it are jump hosts'."""

    destination: str  # what ssh itself would be given: an alias, user@host or a URL
    hostname: str
    port: int
    user: str
    key_names: tuple[str, ...]  # what known_hosts files call it; a new line is written under the first
    known_hosts: tuple[Path, ...]
    identities: tuple[Path, ...]  # private key files in the order to try; not all need exist
    identities_only: bool  # whether the agent may offer only these
    agent: str  # path of the agent's socket, "" for none
    proxy_command: str  # a shell command whose streams are the connection, "" for none
    algorithms: Mapping[str, tuple[str, ...]]  # those that may be offered, by ssh's keyword, the preferred ones first


def route(destination: str) -> tuple[Hop, ...]:
    """Return the hops to a destination: jump hosts in order, the destination last.

    As in ssh, the ProxyJump of the first jump host itself applies; later jump hosts' do not. Raises HostError if ssh
    does not understand the destination, or the jumps are circular.
    """
    hops: list[Hop] = []
    first: str | None = destination
    while first is not None:
        answer = _ask(first)
        jumps = [jump for jump in answer.get("proxyjump", [""])[0].split(",") if jump not in ("", "none")]
        # as ssh takes an entry with a port: as a URL
        jumps = [f"ssh://{jump}" if ":" in jump and "://" not in jump else jump for jump in jumps]
        hops = [*(_hop(jump, _ask(jump)) for jump in jumps[1:]), _hop(first, answer), *hops]
        if len(hops) > _MAX_HOPS:
            message = f"the way to {destination} has more than {_MAX_HOPS} jump hosts; does ProxyJump lead in a circle?"
            raise HostError(message, next=_asked_by_hand(destination))
        first = jumps[0] if jumps else None
    return tuple(hops)


def _ask(destination: str) -> dict[str, list[str]]:
    file = []
    if Path.home() != _account_home():  # else ssh would read the account's file, whatever $HOME says
        path = Path.home() / ".ssh" / "config"
        file = ["-F", str(path) if path.exists() else "none"]
    argv = ["ssh", *file, "-G", "--", destination]
    try:
        ran = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_S)
    except FileNotFoundError:
        raise HostError("ssh is not installed on this machine", next="sudo apt-get install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise HostError(f"ssh took more than {_ASK_S:.0f} s to read its configuration for {destination}") from None
    if ran.returncode != 0:
        why = ran.stderr.decode(errors="replace").strip()
        raise HostError(f"ssh does not understand {destination!r}: {why}", next=_asked_by_hand(destination))
    answer: dict[str, list[str]] = {}
    for line in ran.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        answer.setdefault(key, []).append(value.strip())
    return answer


def _asked_by_hand(destination: str) -> str:
    return f"ssh -G {shlex.quote(destination)}"


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
    # ssh's percent tokens, which `ssh -G` leaves as written in IdentityFile and ProxyCommand
    local = socket.gethostname()
    tokens = {"%": "%", "d": str(Path.home()), "h": hostname, "i": str(os.getuid()), "k": names[0]}
    tokens |= {"L": local.partition(".")[0], "l": local, "n": destination, "p": str(port)}
    tokens |= {"r": value("user"), "u": getpass.getuser()}
    proxy = value("proxycommand")
    # a shell reads a ProxyCommand with the host's names in it; a newer ssh refuses such names itself
    if proxy and any(_UNSAFE.search(tokens[token]) for token in "hknr" if f"%{token}" in proxy):
        message = f"{destination!r} holds characters that a shell would read in the ProxyCommand"
        raise HostError(message, next=_asked_by_hand(destination))
    home = _account_home()  # which ssh names, and $HOME may differ from
    files = [Path(path) for path in f"{value('userknownhostsfile')} {value('globalknownhostsfile')}".split()]
    files = [Path.home() / path.relative_to(home) if path.is_relative_to(home / ".ssh") else path for path in files]
    identities = [path for path in answer.get("identityfile", []) if path != "none"]
    return Hop(
        destination=destination,
        hostname=hostname,
        port=port,
        user=value("user"),
        key_names=names,
        known_hosts=tuple(files),
        identities=tuple(Path(_expand(path, tokens)).expanduser() for path in identities),
        identities_only=value("identitiesonly", "no") == "yes",
        agent=_agent(answer.get("identityagent", ["SSH_AUTH_SOCK"])[0], tokens),
        proxy_command=_expand(proxy, tokens),
        algorithms={key: tuple(value(key.lower()).split(",")) for key in ("Ciphers", "MACs", "KexAlgorithms")},
    )


def _agent(value: str, tokens: Mapping[str, str]) -> str:
    if value == "none":
        return ""
    if value == "SSH_AUTH_SOCK" or value.startswith("$"):
        return os.environ.get(value.strip("${}"), "")
    return str(Path(_expand(value, tokens)).expanduser())


def _expand(text: str, tokens: Mapping[str, str]) -> str:
    return re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), text)
