"""Host keys: look a key up in known_hosts files, and store a new one.

`ssh-keygen -F` finds a host's lines, so that names are compared as ssh does. If there are lines for a host but none has
the key that it presents, its key has changed, whatever the key types are. Not supported: @cert-authority (host
certificates are not asked for), KnownHostsCommand, VerifyHostKeyDNS. Besides the files of the ssh configuration there
is a private one that `dgxlab host add` writes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dgxlab.errors import HostError
from dgxlab.project import user_folder

TRUSTED, UNKNOWN, CHANGED, REVOKED = "trusted", "unknown", "changed", "revoked"

_PRINTED = re.compile(r"^# Host .* found: line (\d+) .*\n(.*)$", re.MULTILINE)
"""What ssh-keygen prints for a line: its number, and the line itself."""


@dataclass(frozen=True)
class KnownHostsLine:
    """A line of a known_hosts file."""

    place: str  # FILE:LINE
    path: Path
    marker: str  # "", @revoked or @cert-authority
    keytype: str
    blob: bytes  # the public key in ssh's binary form


@dataclass(frozen=True)
class HostKey:
    """The key that a host presented, and what known_hosts files say about it."""

    destination: str  # what the user asked to connect to
    name: str  # the host's name in known_hosts
    keytype: str
    blob: bytes
    state: str  # trusted, unknown, changed or revoked
    line: KnownHostsLine | None = None  # the line that decided the state, None for an unknown key
    certified: bool = False  # whether an @cert-authority line names the host

    @property
    def fingerprint(self) -> str:
        """The key's SHA-256 as ssh-keygen prints it."""
        return fingerprint_of(self.blob)

    @property
    def known_hosts_line(self) -> str:
        """The line for a known_hosts file that trusts the key, without newline."""
        return f"{self.name} {self.keytype} {base64.b64encode(self.blob).decode()}"


class NotTrusted(HostError):
    """A host's key is unknown, changed or revoked; nothing was sent to it.

    `add` are the quoted arguments of the `dgxlab host add` that would trust the key.
    """

    def __init__(self, key: HostKey, add: str) -> None:
        self.key = key
        host, shown = f"the host key of {key.destination}", f"it showed {key.keytype} {key.fingerprint}"
        if key.line is None:
            hint = "; it is named by an @cert-authority line, but host certificates are not supported"
            why = f"is not known: {shown}{hint if key.certified else ''}"
            super().__init__(f"{host} ({key.name}) {why}", next=f"dgxlab host add {add}")
            return
        place, line = key.line.place, shlex.join([key.name, "-f", str(key.line.path)])
        if key.state == REVOKED:
            why = f"is revoked by {place}: {shown}; do not connect, ask its administrator for the new key"
            super().__init__(f"{host} {why}", next=f"ssh-keygen -F {line}")
            return
        super().__init__(
            f"{host} ({key.name}) has changed: {shown}, but {place} has {key.line.keytype} "
            f"{fingerprint_of(key.line.blob)}: a new installation, or an attacker in between; "
            f"only if you know why, take that line out, then: dgxlab host add {add}",
            next=f"ssh-keygen -R {line}",
        )


class KnownHosts:
    """What known_hosts files say about one host; files that cannot be read say nothing.

    `names` are the host's in known_hosts, and perhaps one without the port: a line of the latter can make a key
    trusted, but not changed.
    """

    def __init__(self, paths: Iterable[Path], names: Sequence[str]) -> None:
        files = [path for path in dict.fromkeys(paths) if os.access(path, os.R_OK)]
        self.name = names[0]
        self.named, *spare = [[line for path in files for line in _lines(path, name.lower())] for name in names]
        self.spare = [line for lines in spare for line in lines]

    def judge(self, destination: str, keytype: str, blob: bytes) -> HostKey:
        """Return the host's presented key with its state: trusted, unknown, changed or revoked."""
        every = [*self.named, *self.spare]
        certified = any(line.marker == "@cert-authority" for line in self.named)
        plain = [line for line in self.named if not line.marker]
        revoked = [line for line in every if line.marker == "@revoked" and line.blob == blob]
        trusted = [line for line in plain or self.spare if not line.marker and line.blob == blob]
        state = REVOKED if revoked else TRUSTED if trusted else CHANGED if plain else UNKNOWN
        line = next(iter([*revoked, *trusted, *plain]), None)
        return HostKey(destination, self.name, keytype, blob, state, line, certified)

    def keytypes(self) -> list[str]:
        """Return the types of the host's known keys, which should be asked for first."""
        return list(dict.fromkeys(line.keytype for line in [*self.named, *self.spare] if not line.marker))


def private_known_hosts() -> Path:
    """Return the path of dgxlab's own known_hosts file."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "known_hosts"


def trust(key: HostKey) -> Path:
    """Store an unknown key, which the user has confirmed, in dgxlab's own known_hosts; return that file's path.

    Raises:
        NotTrusted: if another key is known for the host, or this one is revoked: the user must remove that line first.
    """
    path = private_known_hosts()
    if key.state in (CHANGED, REVOKED):
        raise NotTrusted(key, shlex.quote(key.destination))
    if key.state == UNKNOWN:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        torn = path.exists() and not path.read_bytes().endswith(b"\n")  # edited by hand
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write("\n" * torn + key.known_hosts_line + "\n")
    return path


def fingerprint_of(blob: bytes) -> str:
    """Return a key's SHA-256 as ssh-keygen prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _lines(path: Path, name: str) -> Iterator[KnownHostsLine]:
    argv = ["ssh-keygen", "-F", name, "-f", str(path)]
    answer = subprocess.run(argv, check=False, capture_output=True).stdout.decode(errors="replace")
    for number, text in _PRINTED.findall(answer):
        words = text.split()
        marker = words.pop(0) if words[0].startswith("@") else ""
        with suppress(binascii.Error, IndexError):  # skip a line without a valid key
            yield KnownHostsLine(f"{path}:{number}", path, marker, words[1], base64.b64decode(words[2], validate=True))
