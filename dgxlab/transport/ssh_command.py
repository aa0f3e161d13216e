"""One command on a channel: framed, fed and read with bounded memory, and judged only by what is certain.

The command line is `exec sh -c SCRIPT sh MARK... ARGV...`. SCRIPT prints a line that nobody can guess to stdout and to
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
from typing import Any

from dgxlab.errors import HostError, UsageError
from dgxlab.transport.base import CommandFailed
from dgxlab.transport.lost import HostLost
from dgxlab.transport.ssh_connection import Connection
from dgxlab.transport.ssh_pulse import CUT

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


class Command:
    """A command to run once, on a channel that is open for it."""

    def __init__(self, connection: Connection, channel: Any, stdin: Iterable[bytes]) -> None:
        self._connection, self._channel, self._stdin = connection, channel, stdin
        self._host = connection.host
        self._nonce = secrets.token_hex(8)
        self._mark = f"{MARK}{self._nonce}\n".encode()
        self._stderr = b""
        self._active_at = time.monotonic()
        self._feeder: threading.Thread | None = None
        self._feed_error: BaseException | None = None

    def run(self, line: bytes, patience_s: float | None) -> Iterator[bytes]:
        """Run a quoted command line and yield its stdout; see SshTransport.stream."""
        self._start(framed(line, self._nonce))
        try:
            begun = yield from self._after_mark(self._chunks(patience_s))
            self._wait(patience_s)
        except CUT as error:
            raise self._feed_error or self._connection.lost(error) from error
        if self._feed_error is not None:
            raise self._feed_error
        self._judge(begun)

    def close(self) -> None:
        """Close the channel, wherever the command and the connection stand."""
        with contextlib.suppress(*CUT):
            self._channel.close()
        if self._feeder is not None:
            self._feeder.join()

    def _start(self, line: bytes) -> None:
        self._channel.settimeout(TICK_S)
        try:
            self._channel.exec_command(line)
        except CUT as error:
            if not self._connection.alive:
                raise self._connection.lost(error) from error
            raise HostError(
                f"host {self._host} lets us in but runs no commands, it needs an account with a shell: {error}",
                next=self._shell("true"),
            ) from error
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()

    def _chunks(self, patience_s: float | None) -> Iterator[bytes]:
        """Yield stdout until it closes, draining stderr beside it, as both share one window."""
        while True:
            try:
                chunk = self._channel.recv(CHUNK_BYTES)
            except TimeoutError:
                self._check_patience(patience_s)
                chunk = None
            while self._channel.recv_stderr_ready():
                self._keep(self._channel.recv_stderr(CHUNK_BYTES))
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
                    next=self._shell("true"),
                    details=before[-200:].decode(errors="replace"),
                )
        return False

    def _wait(self, patience_s: float | None) -> None:
        """Wait for the exit status, or the end of the channel without one."""
        while not self._channel.status_event.wait(TICK_S):
            self._check_patience(patience_s)
        while self._channel.recv_stderr_ready():
            self._keep(self._channel.recv_stderr(CHUNK_BYTES))

    def _judge(self, begun: bool) -> None:
        """Raise for whatever is not a good end that is certain."""
        rc = int(self._channel.recv_exit_status())
        if not self._channel.eof_received:  # even when the status is known: output may be missing
            raise self._connection.lost()
        if rc < 0:
            raise HostLost(
                f"a command on host {self._host} ended without a status: it was killed, or the connection was cut",
                next=self._shell("uptime"),
            )
        _, mark, said = self._stderr.partition(self._mark)
        text = (said if mark else self._stderr).decode(errors="replace")
        if not begun:
            raise HostError(
                f"host {self._host} did not run the command: its login shell ended first, with status {rc}",
                next=self._shell("sh -c \"'echo ok'\""),
                details=text.strip(),
            )
        if rc != 0:
            raise CommandFailed(rc, text)

    def _shell(self, command: str) -> str:
        """Return what shows how ssh itself fares there."""
        return f"ssh {shlex.quote(self._connection.destination)} {command}"

    def _keep(self, chunk: bytes) -> None:
        self._active_at = time.monotonic()
        self._stderr = (self._stderr + chunk)[-STDERR_BYTES:]

    def _check_patience(self, patience_s: float | None) -> None:
        if patience_s is not None and time.monotonic() - self._active_at > patience_s:
            raise HostError(
                f"a command on host {self._host} was silent for {patience_s:g} s; it may still run there, "
                "kept by a dead network disk, for one",
                next=self._shell("uptime"),
            )

    def _feed(self) -> None:
        """Send stdin; runs in a thread, so that a command may write before it has read everything."""
        try:
            for chunk in self._stdin:
                if not self._sent(chunk):
                    return
        except BaseException as error:  # the caller's own, raised where the caller is
            self._feed_error = error
        with contextlib.suppress(*CUT):
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
            except CUT:
                return False
            if size == 0:
                return False
            at += size
            self._active_at = time.monotonic()
        return True
