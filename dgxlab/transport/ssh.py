"""A host over ssh: one connection, opened when first needed and kept, on which every command is a channel of its own.

    ssh_config      what ssh would use to reach it         ssh_trust       whether a host key is trusted
    ssh_connection  fabric, with checks and deadlines      ssh_auth        signing in with keys

Here and in the first row nothing heavy is imported: fabric costs a tenth of a second.

A command line is `exec sh -c SCRIPT sh MARK... ARGV...`. SCRIPT prints a line that cannot be guessed to stdout and to
stderr and then becomes the command. What the login shell's startup files print comes before that line and is dropped; a
shell that ends without it never ran the command. Everything is bytes; nothing is decoded on the way.
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
from dgxlab.transport.ssh_trust import HostKey

if TYPE_CHECKING:
    from dgxlab.transport.ssh_connection import Connection

MARK = "dgxlab-begins-"
# the mark comes in two halves: a shell that echoes the commands it is given does not print the whole
SCRIPT = 'printf "%s%s\\n" "$1" "$2"; printf "%s%s\\n" "$1" "$2" >&2; shift 2; exec "$@"'
NOISE_BYTES = 1 << 20
"""How much a login shell may print before the command."""
STDERR_BYTES = 1 << 18
"""How much of a command's stderr is kept: the end of it."""
CHUNK_BYTES = 1 << 18
SEND_BYTES = 1 << 15
TICK_S = 0.25
"""How often stderr is looked at while stdout is silent."""


def fingerprint(destination: str, limits: Limits | None = None) -> HostKey:
    """Return a host's key without signing in, or that of the first jump host on the way that is not trusted.

    `host add` shows it, asks, hands it to `ssh_trust.trust`, and comes back here until the state is trusted.

    Raises:
        HostError: if a hop cannot be reached, or a trusted jump host does not let us in.
    """
    from dgxlab.transport.ssh_connection import show

    return show(destination, route(destination), limits or Limits())


class SshTransport:
    """Runs commands on a host over ssh; see Transport. Threads may share it.

    Args:
        name: The host's name in hosts.yaml.
        destination: What ssh would be given: an alias of its configuration, user@host or ssh://user@host:port.
        root: The agent's folder there.
        python: The interpreter there.
        limits: Deadlines; the default suits people and real networks.
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
        """Run `argv` once; see Transport.

        Memory is bounded by ssh's window: a reader that pauses holds up the command's output, a command that does not
        read holds up `stdin`, which is iterated in a thread of its own. Leaving early closes the channel; that ends a
        command when it next writes.

        Args:
            patience_s: Give up after so long without a byte either way; None is never, while the host itself answers.

        Raises:
            CommandFailed: if it ended with a status other than 0.
            HostLost: if the host is gone; what the command did is unknown.
            HostError: if the host does not let us in, or never ran the command.
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
        """Return a new channel, on the connection at hand while it is alive."""
        from dgxlab.transport.ssh_connection import Connection, meet

        with self._lock:
            connect, self._asked = Connection if self._asked else meet, True
            if self._connection is not None and self._connection.alive:
                try:
                    return self._connection, self._connection.session()
                except HostSilent:  # which took its time: the user is told before it takes more
                    self._end()
                    raise
                except HostLost:  # it had died unnoticed, and nothing ran on it yet
                    pass
            self._end()
            self._connection = connect(self.name, route(self.destination), self._limits)
            return self._connection, self._connection.session()


def quote(argv: Sequence[str]) -> bytes:
    """Return `argv` as a command line for a POSIX shell: the only place where words become shell text.

    Raises:
        UsageError: for a NUL byte, at which the host would cut the line.
    """
    if any("\0" in word for word in argv):
        raise UsageError("an argument for the host holds a NUL byte")
    return shlex.join(argv).encode("utf-8", "surrogateescape")


def framed(line: bytes, nonce: str) -> bytes:
    """Return what the login shell is given to run a quoted command line: the mark first, then the command."""
    return b"exec " + quote(["sh", "-c", SCRIPT, "sh", MARK, nonce]) + b" " + line


class _Command:
    """A command to run once, on a channel that is open for it; judged only by what is certain."""

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
        """Run a quoted command line and yield its stdout."""
        self._start(framed(line, self._nonce))
        try:
            begun = yield from self._after_mark(self._chunks())
            while not self._channel.status_event.wait(TICK_S):  # set at the end of the channel too
                self._check_patience()
            self._drain_stderr()
        except self._cut as error:
            raise self._feed_error or self._connection.lost(error) from error
        if self._feed_error is not None:
            raise self._feed_error
        self._judge(begun)

    def close(self) -> None:
        """Close the channel, whatever state the command and the connection are in."""
        with contextlib.suppress(*self._cut):
            self._channel.close()
        if self._feeder is not None:
            self._feeder.join()

    def _start(self, line: bytes) -> None:
        self._channel.settimeout(TICK_S)
        try:
            self._channel.exec_command(line)
        except self._cut as error:
            if not self._connection.alive:
                raise self._connection.lost(error) from error
            raise HostError(
                f"host {self._host} lets us in but runs no commands, it needs an account with a shell: {error}",
                next=self._by_hand("true"),
            ) from error
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()

    def _chunks(self) -> Iterator[bytes]:
        """Yield stdout until it closes, draining stderr beside it, as both share one window."""
        while True:
            try:
                chunk = self._channel.recv(CHUNK_BYTES)
            except TimeoutError:
                self._check_patience()
                chunk = None
            self._drain_stderr()
            if chunk == b"":
                return
            if chunk:
                yield chunk
                self._active_at = time.monotonic()  # however long the reader took

    def _after_mark(self, chunks: Iterator[bytes]) -> Generator[bytes, None, bool]:
        """Yield what follows the mark; return whether it came."""
        head = b""
        for chunk in chunks:
            head += chunk
            before, mark, rest = head.partition(self._mark)
            if mark:
                if rest:
                    yield rest
                yield from chunks
                return True
            if len(before) > NOISE_BYTES:
                raise HostError(
                    f"the login shell on host {self._host} prints more than {NOISE_BYTES} bytes before the command: "
                    "see what its ~/.bashrc does for shells that are not interactive",
                    next=self._by_hand("true"),
                    details=before[-200:].decode(errors="replace"),
                )
        return False

    def _judge(self, begun: bool) -> None:
        """Raise for whatever is not a good end that is certain."""
        rc = int(self._channel.recv_exit_status())
        if not self._channel.eof_received:  # even when the status is known: output may be missing
            raise self._connection.lost()
        if rc < 0:
            raise HostLost(
                f"a command on host {self._host} ended without a status: it was killed, or the connection was cut",
                next=self._by_hand("uptime"),
            )
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
            self._stderr = (self._stderr + self._channel.recv_stderr(CHUNK_BYTES))[-STDERR_BYTES:]

    def _check_patience(self) -> None:
        if self._patience_s is not None and time.monotonic() - self._active_at > self._patience_s:
            raise HostError(
                f"a command on host {self._host} was silent for {self._patience_s:g} s; it may still run there, "
                "kept by a dead network disk, for one",
                next=self._by_hand("uptime"),
            )

    def _feed(self) -> None:
        """Send stdin; runs in a thread, so that a command may write before it has read everything."""
        try:
            for chunk in self._stdin:
                if not self._sent(chunk):
                    return
        except BaseException as error:  # the caller's own, raised where the caller is
            self._feed_error = error
        with contextlib.suppress(*self._cut):
            if self._feed_error is None:
                self._channel.shutdown_write()
            else:
                self._channel.close()

    def _sent(self, chunk: bytes) -> bool:
        """Send a chunk; False when the command wants no more. Why it does not is found where stdout is read."""
        at = 0
        while at < len(chunk):
            try:
                size = self._channel.send(chunk[at : at + SEND_BYTES])
            except TimeoutError:
                continue
            except self._cut:
                return False
            if size == 0:
                return False
            at += size
            self._active_at = time.monotonic()
        return True
