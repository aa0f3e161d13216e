"""A host over ssh: one connection, opened when first needed and kept, on which every command has its own channel.

    ssh_config      what ssh would use to reach it         ssh_trust       whether a host key is trusted
    ssh_connection  fabric, with checks and deadlines      ssh_auth        signing in with keys

Here and in the first row nothing heavy is imported: fabric costs a tenth of a second.

A command line is `exec sh -c SCRIPT sh MARK... ARGV...`. SCRIPT prints a random line to stdout and stderr and then
becomes the command. Output of the login shell's startup files comes before that line and is dropped; a shell that ends
without it never ran the command. Everything is bytes; nothing is decoded.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dgxlab.errors import HostError, UsageError
from dgxlab.transport.base import CommandFailed, HostLost, HostSilent
from dgxlab.transport.ssh_config import Limits, route
from dgxlab.transport.ssh_trust import HostKey, NotTrusted

if TYPE_CHECKING:
    from dgxlab.transport.ssh_connection import Connection

MARK = "dgxlab-begins-"
# the mark comes in two halves: a shell that echoes the commands it is given does not print the whole
SCRIPT = 'printf "%s%s\\n" "$1" "$2"; printf "%s%s\\n" "$1" "$2" >&2; shift 2; exec "$@"'
_NOISE_BYTES = 1 << 20  # max bytes that a login shell may print before the command
_STDERR_BYTES = 1 << 18  # bytes kept from the end of a command's stderr
_CHUNK_BYTES = 1 << 18
_SEND_BYTES = 1 << 15
_TICK_S = 0.25  # how often stderr is read while stdout is silent


def host_key(destination: str, limits: Limits | None = None) -> HostKey:
    """Return a host's key without signing in; if a jump host on the way is not trusted, that one's key."""
    from dgxlab.transport.ssh_connection import Seen, connect_first

    try:
        connect_first(destination, route(destination), limits or Limits(), peek=True)
    except (NotTrusted, Seen) as end:
        return end.key
    raise AssertionError("a peek ends at a key")


class SshTransport:
    """Runs commands on a host over ssh; see Transport. Threads may share it.

    `destination` is as for ssh: an alias of its configuration, user@host or ssh://user@host:port.
    """

    def __init__(
        self,
        name: str,
        destination: str,
        root: str = "~/.dgxlab",
        python: str = "python3",
        *,
        limits: Limits | None = None,
    ) -> None:
        self.name, self.destination, self.root, self.python = name, destination, root, python
        self._limits = limits or Limits()
        self._connection: Connection | None = None
        self._asked = False
        self._lock = threading.Lock()

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        """Run `argv` once on the host; see Transport.

        Memory is bounded by ssh's window: if the caller pauses, the command must wait to write; if the command does not
        read, `stdin` waits, which is iterated in a separate thread. If the caller stops early, the channel is closed;
        that ends a command when it next writes.
        """
        line = quote(argv)
        command = _Command(*self._open(), stdin, patience_s)
        try:
            yield from command.run(line)
        finally:
            command.close()

    def close(self) -> None:
        """Close the connection; a later command opens a new one."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _open(self) -> tuple[Connection, Any]:
        """Return a new channel, on the open connection while it is alive."""
        from dgxlab.transport.ssh_connection import Connection, connect_first

        with self._lock:
            connect, self._asked = Connection if self._asked else connect_first, True
            if self._connection is not None and self._connection.alive:
                try:
                    return self._connection, self._connection.session()
                except HostSilent:  # the timeout took long: report it before another attempt
                    self._end()
                    raise
                except HostLost:  # the connection had died unnoticed, and nothing ran on it yet
                    pass
            self._end()
            self._connection = connect(self.name, route(self.destination), self._limits)
            return self._connection, self._connection.session()


def quote(argv: Sequence[str]) -> bytes:
    """Return words as a line for a POSIX shell; UsageError if one has a NUL byte."""
    if any("\0" in word for word in argv):
        raise UsageError("an argument for the host holds a NUL byte")
    return shlex.join(argv).encode("utf-8", "surrogateescape")


def framed(line: bytes, nonce: str) -> bytes:
    """Return the line for the login shell that prints MARK and `nonce`, then runs the command of a quoted line."""
    return b"exec " + quote(["sh", "-c", SCRIPT, "sh", MARK, nonce]) + b" " + line


class _Command:
    """A command to run once on an open channel; success and failure are reported only if certain."""

    def __init__(self, connection: Connection, channel: Any, stdin: Iterable[bytes], patience_s: float | None) -> None:
        self._connection, self._channel, self._stdin, self._patience_s = connection, channel, stdin, patience_s
        self._host, self._cut = connection.host, connection.CUT
        self._nonce = secrets.token_hex(8)
        self._mark = f"{MARK}{self._nonce}\n".encode()
        self._stderr = b""
        self._active_at = time.monotonic()
        self._feeder: threading.Thread | None = None
        self._feed_error: BaseException | None = None

    def run(self, line: bytes) -> Iterator[bytes]:
        self._channel.settimeout(_TICK_S)
        try:
            self._channel.exec_command(framed(line, self._nonce))
        except self._cut as error:
            if not self._connection.alive:
                raise self._connection.lost(error) from error
            why = f"host {self._host} lets us in but runs no commands, it needs an account with a shell: {error}"
            raise HostError(why, next=self._by_hand("true")) from error
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()
        try:
            begun = yield from self._after_mark(self._chunks())
            while not self._channel.status_event.wait(_TICK_S):  # set at the end of the channel too
                self._check_patience()
            self._drain_stderr()
        except self._cut as error:
            raise self._feed_error or self._connection.lost(error) from error
        if self._feed_error is not None:
            raise self._feed_error
        self._judge(begun)

    def close(self) -> None:
        with contextlib.suppress(*self._cut):
            self._channel.close()
        if self._feeder is not None:
            self._feeder.join()

    def _chunks(self) -> Iterator[bytes]:
        """Yield stdout until it closes, draining stderr beside it, as both share one window."""
        chunk: bytes | None = None
        while chunk != b"":
            try:
                chunk = self._channel.recv(_CHUNK_BYTES)
            except TimeoutError:
                self._check_patience()
                chunk = None
            self._drain_stderr()
            if chunk:
                yield chunk
                self._active_at = time.monotonic()  # however long the reader took

    def _after_mark(self, chunks: Iterator[bytes]) -> Generator[bytes, None, bool]:
        """Yield the output after the mark; return whether the mark came."""
        head = b""
        for chunk in chunks:
            head += chunk
            before, mark, rest = head.partition(self._mark)
            if mark:
                if rest:
                    yield rest
                yield from chunks
                return True
            if len(before) > _NOISE_BYTES:
                raise HostError(
                    f"the login shell on host {self._host} prints more than {_NOISE_BYTES} bytes before the command: "
                    "see what its ~/.bashrc does for shells that are not interactive",
                    next=self._by_hand("true"),
                    details=before[-200:].decode(errors="replace"),
                )
        return False

    def _judge(self, begun: bool) -> None:
        """Raise unless the command certainly ran and ended with status 0."""
        rc = int(self._channel.recv_exit_status())
        if not self._channel.eof_received:  # even when the status is known: output may be missing
            raise self._connection.lost()
        if rc < 0:
            why = f"a command on host {self._host} ended without a status: it was killed, or the connection was cut"
            raise HostLost(why, next=self._by_hand("uptime"))
        before, mark, after = self._stderr.partition(self._mark)
        stderr = (after if mark else before).decode(errors="replace")
        if not begun:
            raise HostError(
                f"host {self._host} did not run the command: its login shell ended first, with status {rc}",
                next=self._by_hand("sh -c \"'echo ok'\""),
                details=stderr.strip(),
            )
        if rc != 0:
            raise CommandFailed(rc, stderr)

    def _by_hand(self, command: str) -> str:
        return f"ssh {shlex.quote(self._connection.destination)} {command}"

    def _drain_stderr(self) -> None:
        while self._channel.recv_stderr_ready():
            self._active_at = time.monotonic()
            self._stderr = (self._stderr + self._channel.recv_stderr(_CHUNK_BYTES))[-_STDERR_BYTES:]

    def _check_patience(self) -> None:
        if self._patience_s is not None and time.monotonic() - self._active_at > self._patience_s:
            why = f"was silent for {self._patience_s:g} s; it may still run there, kept by a dead network disk, for one"
            raise HostError(f"a command on host {self._host} {why}", next=self._by_hand("uptime"))

    def _feed(self) -> None:
        """Send stdin; runs in a thread, so that a command may write before it has read everything."""
        try:
            for chunk in self._stdin:
                for at in range(0, len(chunk), _SEND_BYTES):
                    if not self._sent(chunk[at : at + _SEND_BYTES]):
                        return
        except BaseException as error:  # the caller's own, raised where the caller is
            self._feed_error = error
        with contextlib.suppress(*self._cut):
            if self._feed_error is None:
                self._channel.shutdown_write()
            else:
                self._channel.close()

    def _sent(self, piece: bytes) -> bool:
        """Send a piece; return False if the command stopped reading, for a reason found when reading stdout."""
        while piece:
            try:
                size = self._channel.send(piece)
            except TimeoutError:
                continue
            except self._cut:
                size = 0
            if size == 0:
                return False
            piece = piece[size:]
            self._active_at = time.monotonic()
        return True
