"""Signing in with keys, in ssh's order: agent keys that the configuration names, other agent keys, key files.

No passwords and no prompts: the error names keys that need a person. The agent is never forwarded.
"""

from __future__ import annotations

import base64
import binascii
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import paramiko

from dgxlab.errors import HostError
from dgxlab.transport.base import HostLost, HostSilent
from dgxlab.transport.ssh_config import Hop
from dgxlab.transport.ssh_trust import fingerprint_of

E = TypeVar("E", bound=HostError)

_AGENT_S = 5.0  # how long the agent may take to list its keys
_TIMED_OUT = "Authentication timeout."
"""paramiko's message for a host that did not answer; its error type is the same as for a refusal."""


def failure(destination: str, sentence: str, kind: type[E] = HostError) -> E:  # type: ignore[assignment]
    """Return an error of class `kind`, whose next command shows whether ssh itself signs in without a prompt."""
    return kind(sentence, next=f"ssh -o BatchMode=yes {shlex.quote(destination)} true")


class KeysOnly:
    """Signs in on one hop with keys; an authentication strategy for paramiko."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self._tried: list[str] = []  # failed attempts with reasons, in words

    def authenticate(self, transport: Any) -> None:
        """Sign in with the first key that the host takes.

        Raises:
            HostError: if it accepts no key; the error lists the attempts.
            HostSilent: if it does not answer for as long as the transport's auth_timeout.
            HostLost: if the connection ended meanwhile.
        """
        with closing(socket.socket(socket.AF_UNIX)) as agent:
            if any(self._accepted(transport, label, key) for label, key in self._keys(agent)):
                return
        try:  # with nothing: some networks grant it, else the host says what it would take
            transport.auth_none(self._hop.user)
        except paramiko.BadAuthenticationType as error:
            raise self._error(f": it takes {', '.join(error.allowed_types)}") from error
        except (paramiko.SSHException, EOFError, OSError) as error:
            self._check_alive(transport, error)
            raise self._error("") from error

    def _accepted(self, transport: Any, label: str, key: Any) -> bool:
        try:
            more = transport.auth_publickey(self._hop.user, key)
        except (paramiko.SSHException, EOFError, OSError) as error:
            self._check_alive(transport, error, f" to {label}")
            refused = isinstance(error, paramiko.AuthenticationException)
            self._tried.append(f"{label}: {'refused' if refused else error}")
            return False
        if more:
            raise self._error(f": it takes {label} but wants {' or '.join(sorted(more))} as well")
        return True

    def _check_alive(self, transport: Any, error: Exception, asked: str = "") -> None:
        host = self._hop.destination
        if str(error) == _TIMED_OUT:
            silence = f"{host} did not answer{asked} for {transport.auth_timeout:g} s"
            raise failure(host, silence, HostSilent) from error
        # what could not be sent says so before the transport's own thread has noticed
        if transport.is_active() and not isinstance(error, EOFError):
            return
        cause = str(error) or "end of file"
        if self._tried:  # most likely: too many keys in the agent
            raise self._error(f": it ended the connection ({cause})") from error
        raise failure(host, f"{host} ended the connection during authentication: {cause}", HostLost) from error

    def _error(self, why: str) -> HostError:
        hop = self._hop
        files = ", ".join(str(path) for path in hop.identities)
        tried = "; ".join(self._tried) or f"nothing: there is no agent key, and no key file of {files or 'none'}"
        return failure(hop.destination, f"{hop.destination} does not let {hop.user} in{why} (tried {tried})")

    def _keys(self, agent: socket.socket) -> Iterator[tuple[str, Any]]:
        """Yield keys with a label; unusable keys are noted."""
        held = {bytes(key.blob): key for key in self._agent_keys(agent)}
        public = {path: _public_blob(path) for path in self._hop.identities}
        named = [blob for blob in public.values() if blob in held]
        others = [] if self._hop.identities_only else [blob for blob in held if blob not in named]
        for blob in [*named, *others]:
            yield f"agent key {held[blob].get_name()} {fingerprint_of(blob)}", held[blob]
        for path, blob in public.items():
            if blob not in held and path.suffix != ".pub" and path.exists():
                key = self._load(path)
                if key is not None:
                    yield str(path), key

    def _agent_keys(self, agent: socket.socket) -> tuple[Any, ...]:
        if not self._hop.agent:
            return ()
        try:
            agent.settimeout(_AGENT_S)
            agent.connect(self._hop.agent)
            client: Any = paramiko.agent.AgentSSH()
            client._connect(agent)  # the public class takes its socket from the environment alone
            agent.settimeout(None)  # signing may wait for a touch
            return tuple(client.get_keys())
        except (paramiko.SSHException, OSError) as error:
            self._tried.append(f"the agent at {self._hop.agent}: {error}")
            return ()

    def _load(self, path: Path) -> Any:
        """Return a key file's key, None with a note where that needs a person."""
        try:
            stat = path.stat()
            if stat.st_uid == os.getuid() and stat.st_mode & 0o077:
                raise ValueError(f"others may read it, mend with chmod 600 {path}")
            return paramiko.PKey.from_path(path)
        except (TypeError, paramiko.PasswordRequiredException):
            self._tried.append(f"{path}: it wants a passphrase, so ssh-add it first")
        except Exception as error:  # whatever is wrong with this file, the next one may be good
            self._tried.append(f"{path}: {error}")
        return None


def _public_blob(path: Path) -> bytes:
    """Return the public half in or beside a key file, b"" when there is none."""
    beside = path if path.suffix == ".pub" else path.with_name(path.name + ".pub")
    try:
        return base64.b64decode(beside.read_text().split()[1], validate=True)
    except (OSError, IndexError, binascii.Error, UnicodeDecodeError):
        return b""
