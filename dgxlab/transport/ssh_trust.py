"""Host keys: look up a key in known_hosts files, and trust a new one.

Understood as in OpenSSH: names in lists, with * ? and !, hashed, with a port, under an alias; @revoked. A key that is
on none of a host's lines means that its key has changed, of whatever type the lines are. Not supported: @cert-authority
(host certificates are not asked for), KnownHostsCommand, VerifyHostKeyDNS. Besides the files of the ssh configuration
there is a private one that `dgxlab host add` writes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dgxlab.errors import HostError

TRUSTED, UNKNOWN, CHANGED, REVOKED = "trusted", "unknown", "changed", "revoked"


@dataclass(frozen=True)
class Line:
    """A line of a known_hosts file; `blob` is the key as it travels, `marker` may be @revoked or @cert-authority."""

    path: Path
    number: int
    marker: str
    names: str
    keytype: str
    blob: bytes

    @property
    def place(self) -> str:
        """File and line, as an editor takes them."""
        return f"{self.path}:{self.number}"


@dataclass(frozen=True)
class HostKey:
    """The key that a host presented, and its state."""

    destination: str
    """The requested destination."""
    name: str
    """Its name in known_hosts."""
    keytype: str
    blob: bytes
    state: str
    """Trusted, unknown, changed or revoked."""
    line: Line | None = None
    """The line that decided the state, None for an unknown key."""
    certified: bool = False
    """Whether an @cert-authority line names the host."""

    @property
    def fingerprint(self) -> str:
        """Its SHA-256 as ssh-keygen prints it."""
        return fingerprint_of(self.blob)

    @property
    def known_hosts_line(self) -> str:
        """What to write into a known_hosts file, without newline."""
        return f"{self.name} {self.keytype} {base64.b64encode(self.blob).decode()}"


class NotTrusted(HostError):
    """A host's key is unknown, changed or revoked; nothing was sent to it.

    Args:
        add: The arguments that `dgxlab host add` would be given, quoted.
    """

    def __init__(self, key: HostKey, add: str) -> None:
        self.key = key
        host, shown = f"the host key of {key.destination}", f"it showed {key.keytype} {key.fingerprint}"
        if key.line is None:
            hint = "; it is named by an @cert-authority line, but host certificates are not supported"
            why = f"is not known: {shown}{hint if key.certified else ''}"
            super().__init__(f"{host} ({key.name}) {why}", next=f"dgxlab host add {add}")
            return
        place, line = key.line.place, f"{shlex.quote(key.name)} -f {shlex.quote(str(key.line.path))}"
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
    """The lines of some known_hosts files; files that do not exist or cannot be read hold none."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.lines = [line for path in dict.fromkeys(paths) for line in _read(path)]

    def judge(self, destination: str, names: Sequence[str], keytype: str, blob: bytes) -> HostKey:
        """Return a key with its state.

        Args:
            names: Its name in known_hosts; a second one, without the port, can vouch for the key but not against it.
        """
        named = self._named(names[:1])
        certified = any(line.marker == "@cert-authority" for line in named)
        plain = [line for line in named if not line.marker]
        spare = self._named(names[1:])
        revoked = [line for line in [*named, *spare] if line.marker == "@revoked" and line.blob == blob]
        trusted = [line for line in plain or spare if not line.marker and line.blob == blob]
        state = REVOKED if revoked else TRUSTED if trusted else CHANGED if plain else UNKNOWN
        line = next(iter([*revoked, *trusted, *plain]), None)
        return HostKey(destination, names[0], keytype, blob, state, line, certified)

    def keytypes(self, names: Sequence[str]) -> list[str]:
        """Return the types of the keys known for a host: the ones to ask it for first."""
        return list(dict.fromkeys(line.keytype for line in self._named(names) if not line.marker))

    def _named(self, names: Sequence[str]) -> list[Line]:
        return [line for name in names for line in self.lines if _matches(line.names, name.lower())]


def private_known_hosts() -> Path:
    """Return dgxlab's own known_hosts file."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder) / "dgxlab" / "known_hosts"


def trust(key: HostKey) -> Path:
    """Write a key that a person vouched for into dgxlab's own known_hosts; return the file.

    Raises:
        NotTrusted: if another key is known for the host, or this one is revoked: a person has to take that line out.
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


def _read(path: Path) -> list[Line]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    lines = []
    for number, words in enumerate(map(str.split, text.splitlines()), 1):
        marker = words.pop(0) if words and words[0].startswith("@") else ""
        if len(words) >= 3 and not words[0].startswith("#"):
            with suppress(binascii.Error):  # skip a line without a valid key
                blob = base64.b64decode(words[2], validate=True)
                lines.append(Line(path, number, marker, words[0], words[1], blob))
    return lines


def _matches(names: str, name: str) -> bool:
    """Whether a known_hosts name field means a host; a !pattern that fits rules it out."""
    if names.startswith("|"):
        fields = names.split("|")
        if len(fields) != 4 or fields[1] != "1":
            return False
        try:
            salt, digest = (base64.b64decode(field, validate=True) for field in fields[2:])
        except binascii.Error:
            return False
        return hmac.compare_digest(hmac.new(salt, name.encode(), "sha1").digest(), digest)
    fitting = [pattern for pattern in names.lower().split(",") if _fits(pattern.removeprefix("!"), name)]
    return bool(fitting) and not any(pattern.startswith("!") for pattern in fitting)


def _fits(pattern: str, name: str) -> bool:
    """Match * and ? alone: the brackets of [host]:port are no character class."""
    regex = "".join(".*" if c == "*" else "." if c == "?" else re.escape(c) for c in pattern)
    return re.fullmatch(regex, name) is not None
