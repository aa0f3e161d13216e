"""A connection to a host over ssh: a fabric connection per hop, with its host key checked, its silence limited.

Fabric alone checks no host key, not even a changed one, has no deadlines and does not notice a dead peer.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fabric
import paramiko

from dgxlab.errors import HostError, edit
from dgxlab.transport.base import HostDropped, HostLost, HostSilent
from dgxlab.transport.ssh_auth import KeysOnly, failure
from dgxlab.transport.ssh_config import Hop, Limits
from dgxlab.transport.ssh_trust import TRUSTED, HostKey, KnownHosts, NotTrusted, private_known_hosts

DROPPED_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # pauses between attempts at a first connection on which sshd hangs up
_HUNG_UP = "it hung up at once, as sshd does above its MaxStartups"
_REFUSED_PAUSE_S = 0.05  # pause before a command's channel is asked for again
_WEAK = re.compile("cbc|md5")  # algorithms that are never offered, whatever the ssh configuration says
_SAME = {"curve25519-sha256": "curve25519-sha256@libssh.org"}  # ssh's names of algorithms with another name in paramiko
CUT: tuple[type[Exception], ...] = (paramiko.SSHException, EOFError, OSError)
"""All exceptions of paramiko for an ended connection."""

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # else its errors reach the terminal beside ours


@dataclass(eq=False)
class Seen(Exception):
    """Raised instead of signing in, when a Connection is made only to see the host's key."""

    key: HostKey


def connect_first(host: str, hops: Sequence[Hop], limits: Limits, *, peek: bool = False) -> Connection:
    """Return a new Connection to a host; repeat if sshd hangs up at once, as it does when many connect."""
    for pause_s in DROPPED_PAUSES_S:
        with contextlib.suppress(HostDropped):
            return Connection(host, hops, limits, peek=peek)
        time.sleep(pause_s)
    return Connection(host, hops, limits, peek=peek)


class Connection:
    """An open connection to a host. After a loss it is not opened again: a new one is made.

    With `peek`, Seen is raised with the last hop's key instead of signing in there.

    Raises:
        NotTrusted: if a hop's key is not trusted; nothing was sent to that hop then.
        HostError: if a hop refuses to let the user in.
        HostLost: if a hop cannot be reached now.
    """

    CUT: ClassVar = CUT  # for users of its channels that do not import paramiko

    def __init__(self, host: str, hops: Sequence[Hop], limits: Limits, *, peek: bool = False) -> None:
        self.host, self.destination = host, hops[-1].destination
        self._add = shlex.join([self.destination, *([] if host == self.destination else ["--name", host])])
        self._limits = limits
        self._used = False
        self._watches: list[_Watch] = []
        self._opened: list[Any] = []
        self._program: _ProxyProgram | None = None
        try:
            for hop in hops:
                self._open(hop, peek=peek and hop is hops[-1])
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether no loss has been noticed."""
        return all(opened.is_connected for opened in self._opened)

    def session(self) -> Any:
        """Open a paramiko channel for one command.

        If the host refuses, it is asked again for `connect_s`: sshd's MaxSessions also counts the previous command,
        until both sides have closed its channel.

        Raises:
            HostSilent: if the host does not answer.
            HostLost: if the connection is gone.
            HostError: if the host refuses.
        """
        began, most_s = time.monotonic(), self._limits.connect_s
        while True:
            try:
                channel = self._opened[-1].transport.open_session(timeout=most_s)
            except paramiko.ChannelException as error:
                if not self._used or time.monotonic() - began >= most_s:
                    why = f"host {self.host} refuses another session, see its sshd's MaxSessions: {error.text}"
                    raise failure(self.destination, why) from error
                time.sleep(_REFUSED_PAUSE_S)
            except CUT as error:
                if self.alive and time.monotonic() - began >= most_s:
                    raise self._silent(most_s) from error
                raise self.lost(error) from error
            else:
                self._used = True
                return channel

    def lost(self, error: object = "") -> HostLost:
        """Return the error for the end of the connection; `error` is the exception that showed it."""
        if any(watch.silent for watch in self._watches):
            return self._silent(self._limits.silent_s)
        why = f": {error}" if str(error) else ""
        return failure(self.destination, f"the connection to host {self.host} was cut{why}", HostLost)

    def _silent(self, limit_s: float) -> HostSilent:
        return failure(self.destination, f"host {self.host} did not answer for {limit_s:g} s", HostSilent)

    def close(self) -> None:
        """Close every hop, the last one first."""
        for watch in self._watches:
            watch.over.set()
        for opened in reversed(self._opened):
            opened.client.close()
        if self._program is not None:
            self._program.close()

    def _open(self, hop: Hop, *, peek: bool) -> None:
        """Open a fabric connection with all settings given, so that it reads no configuration itself."""
        policy = _Policy(hop, self._add, peek)
        opened = fabric.Connection(
            hop.hostname,
            user=hop.user,
            port=hop.port,
            config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
            gateway=self._opened[-1] if self._opened else False,
            forward_agent=False,
            inline_ssh_env=False,
            connect_kwargs={
                **({} if self._opened else {"sock": self._socket(hop)}),
                "timeout": self._limits.connect_s,
                "banner_timeout": self._limits.connect_s,
                "auth_timeout": self._limits.auth_s,
                "channel_timeout": self._limits.connect_s,
                "auth_strategy": KeysOnly(hop),
                "transport_factory": partial(_transport, hop=hop, known=policy.known, limits=self._limits),
            },
        )
        opened.client.set_missing_host_key_policy(policy)
        self._opened.append(opened)
        try:
            opened.open()
        except CUT as error:
            raise self._unopened(hop, opened, error) from error
        watch: _Watch = opened.transport.sock
        self._watches.append(watch)
        watch.begin(opened.transport)

    def _unopened(self, hop: Hop, opened: Any, error: Exception) -> HostError:
        if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
            return failure(hop.destination, f"{hop.destination} and this machine share no way to talk: {error}")
        if isinstance(error, paramiko.ChannelException):  # from the jump host
            if error.code == paramiko.common.OPEN_FAILED_CONNECT_FAILED:
                return self._unreachable(hop, error.text)  # a network beyond it may mend itself
            why = f"does not forward to {hop.hostname}:{hop.port}: {error.text}; its sshd must allow TCP forwarding"
            return failure(hop.destination, f"jump host {self._opened[-2].host} {why}")
        transport = opened.client.get_transport()  # None: no way through a jump host
        unnamed = transport is not None and not transport.remote_version
        if not self._program and unnamed and isinstance(error.__context__ or error, EOFError | ConnectionError):
            return self._unreachable(hop, _HUNG_UP, HostDropped)
        return self._unreachable(hop, error)

    def _socket(self, hop: Hop) -> Any:
        if hop.proxy_command:
            self._program = _ProxyProgram(hop.proxy_command)
            return self._program.socket
        try:
            return connect(hop, self._limits)
        except ConnectionResetError as error:
            raise self._unreachable(hop, _HUNG_UP, HostDropped) from error
        except OSError as error:
            raise self._unreachable(hop, error.strerror or error) from error

    def _unreachable(self, hop: Hop, why: object, kind: type[HostLost] = HostLost) -> HostLost:
        way = ""
        if self._program is not None:
            way, why = " through its ProxyCommand", self._program.stderr_end() or why
        elif len(self._opened) > 1:
            way = f" through {self._opened[-2].host}"
        place = f"{hop.destination} ({hop.hostname}:{hop.port})"
        return failure(hop.destination, f"{place} cannot be reached{way}: {why or 'no answer'}", kind)


class _Policy:
    """Checks the key of one hop, between the key exchange and signing in."""

    def __init__(self, hop: Hop, add: str, peek: bool) -> None:
        self.known = KnownHosts([*hop.known_hosts, private_known_hosts()], hop.key_names)
        self._hop, self._add, self._peek = hop, add, peek

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        """Refuse an untrusted key; paramiko asks about every key, because the client has no known keys."""
        judged = self.known.judge(self._hop.destination, key.get_name(), key.asbytes())
        if self._peek:
            raise Seen(judged)
        if judged.state != TRUSTED:
            raise NotTrusted(judged, self._add)


def _transport(sock: Any, *, hop: Hop, known: KnownHosts, limits: Limits, **options: Any) -> Any:
    """Make a transport that offers the algorithms allowed by the ssh configuration.

    It asks for a key of a known type first: one of another type would look like a changed key.
    """
    watch: Any = _Watch(sock, limits)
    transport = paramiko.Transport(watch, **options)
    transport.handshake_timeout = limits.connect_s
    security = transport.get_security_options()
    for keyword, allowed in hop.algorithms.items():
        option = {"Ciphers": "ciphers", "MACs": "digests", "KexAlgorithms": "kex"}[keyword]
        names = dict.fromkeys(_SAME.get(name, name) for name in allowed if not _WEAK.search(name))
        offered = [name for name in names if name in getattr(security, option)]
        if not offered:
            watch.close()
            why = f"allows no {keyword} for {hop.destination} that dgxlab knows: {','.join(allowed)}"
            raise HostError(f"the ssh configuration {why}", next=edit(Path.home() / ".ssh" / "config"))
        setattr(security, option, offered)
    first = tuple("rsa-sha2" if keytype == "ssh-rsa" else keytype for keytype in known.keytypes())
    security.key_types = sorted(security.key_types, key=lambda name: not name.startswith(first))
    return transport


# -- below ssh --------------------------------------------------------------------------------------------------------


def connect(hop: Hop, limits: Limits) -> socket.socket:
    """Return a TCP socket to a hop; OSError if none of its addresses answers in time."""
    sock = socket.create_connection((hop.hostname, hop.port), timeout=limits.connect_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else every command waits 40 ms for a delayed ACK
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: a dead network ends the connection, also while we sign in
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limits.silent_s * 1000))
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            sock.setsockopt(socket.IPPROTO_TCP, option, max(1, int(limits.ask_s)))
    return sock


class _ProxyProgram:
    """A ProxyCommand, run by sh as ssh runs it; its stdin and stdout are the connection."""

    def __init__(self, command: str) -> None:
        self._stderr: Any = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self.socket, theirs = socket.socketpair()
        with theirs:
            argv, end = ["sh", "-c", f"exec {command}"], theirs.fileno()
            self._child = subprocess.Popen(argv, stdin=end, stdout=end, stderr=self._stderr, start_new_session=True)

    def stderr_end(self) -> str:
        self._stderr.seek(0)
        return str(self._stderr.read()[-500:].decode(errors="replace").strip())

    def close(self) -> None:
        self.socket.close()
        self._child.terminate()
        self._child.wait()
        self._stderr.close()


class _Watch:
    """A socket whose host is asked whether it is there; it ends the connection after a long time without any byte.

    paramiko's own keepalive wants no reply, so it finds nothing out. Any byte received counts here: an answer may be
    delayed behind much output. Time is counted in the ticks of a waiting thread, so that a client that was stopped or
    asleep does not take its own absence for the host's.
    """

    TICKS = 20

    def __init__(self, wrapped: Any, limits: Limits) -> None:
        self._wrapped, self._limits = wrapped, limits
        self._silent_ticks = 0
        self.over = threading.Event()
        self.silent = False  # whether the connection was ended here

    def begin(self, transport: Any) -> None:
        """Ask and watch until the transport closes: from signing in on, as a host answers no questions before."""
        # in a thread each: under a full send buffer even the question would wait
        for work in (self._watch, self._ask):
            threading.Thread(target=work, args=(transport,), daemon=True).start()

    def _ask(self, transport: Any) -> None:
        with contextlib.suppress(*CUT):
            while transport.is_active():
                transport.global_request("keepalive@openssh.com", wait=True)
                if self.over.wait(self._limits.ask_s):
                    return

    def _watch(self, transport: Any) -> None:
        while transport.is_active() and not self.over.wait(self._limits.silent_s / self.TICKS):
            self._silent_ticks += 1
            if self._silent_ticks > self.TICKS:
                self.silent = True
                transport.close()

    def recv(self, size: int) -> bytes:
        chunk: bytes = self._wrapped.recv(size)
        self._silent_ticks = 0
        return chunk

    def close(self) -> None:
        with contextlib.suppress(*CUT):  # a jump host that is gone cannot be told
            self._wrapped.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)
