"""The client's programs and its disk: run a program, stream its output, or follow one that shows progress; lock files.

git and pip are run through here. Nothing goes through a shell, and no token of the user's goes along.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dgxlab.errors import SpecError

CHUNK = 1 << 16
"""Bytes read at a time."""

SURROUNDINGS = re.compile(
    r"PATH|HOME|USER|LOGNAME|EMAIL|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TERM|XDG_\w+|LD_(?:LIBRARY_PATH|PRELOAD)"
    r"|DISPLAY|WAYLAND_DISPLAY|DBUS_SESSION_BUS_ADDRESS|SSH_(?:AUTH_SOCK|AGENT_PID|ASKPASS\w*)|KRB5\w+|NETRC"
    r"|(?i:https?|ftp|all|no)_(?i:proxy)|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE"
)
"""What a program needs to find its files, the network and the user's own agents."""


_TROUBLE = {
    "No space left on device": "No space left on device",
    "Out of diskspace": "No space left on device",
    "Disk quota exceeded": "Disk quota exceeded",
    "Read-only file system": "Read-only file system",
    "File too large": "File too large",
    "died of signal 25": "File too large",
}
"""What a program says when this machine's disk is at fault, and what that means; signal 25 is SIGXFSZ."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ENOTDIR)


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        rc: Exit status; negative is the signal that ended it.
        out: Its stdout; empty for a followed program.
        err: Its stderr, or the last lines of both for a followed one.
    """

    rc: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Stdout as text, without the last newline."""
        return self.out.decode(errors="surrogateescape").removesuffix("\n")


def surroundings(prefix: str = "") -> dict[str, str]:
    """Return the environment of a program: what every one needs, and variables that begin with a prefix of its own."""
    return {
        name: value
        for name, value in os.environ.items()
        if SURROUNDINGS.fullmatch(name) or (prefix and name.startswith(prefix))
    }


def run(argv: Sequence[str], *, input: bytes = b"", env: Mapping[str, str] | None = None) -> Outcome:
    """Run a program to its end; without `env` it gets its surroundings alone.

    Raises:
        SpecError: if the program is not installed.
    """
    with _installed(argv[0]):
        ran = subprocess.run(argv, input=input, capture_output=True, env=env or surroundings(), check=False)
    return Outcome(ran.returncode, ran.stdout, ran.stderr.decode(errors="replace"))


def stream(
    argv: Sequence[str], *, input: bytes, env: Mapping[str, str], failed: Callable[[Outcome], Exception]
) -> Iterator[bytes]:
    """Run a program and yield its stdout in pieces; a consumer that stops early ends it.

    Raises:
        SpecError: if the program is not installed.
        Exception: what `failed` makes of an outcome that is no success, after the last piece.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as err:
        given.write(input)
        given.seek(0)
        with _installed(argv[0]):
            child = subprocess.Popen(argv, stdin=given, stdout=subprocess.PIPE, stderr=err, env=env)
        with child.stdout or io.BytesIO() as out:
            try:
                while piece := out.read(CHUNK):
                    yield piece
            except BaseException:
                child.kill()
                raise
            finally:
                child.wait()
        if child.returncode != 0:
            err.seek(0)
            raise failed(Outcome(child.returncode, b"", err.read().decode(errors="replace")))


def follow(
    argv: Sequence[str],
    *,
    on_line: Callable[[str], None],
    env: Mapping[str, str],
    silence_s: float = 120.0,
) -> Outcome:
    """Run a program in a session of its own and call `on_line` with each line that it prints.

    Without a terminal it cannot stop to ask a question. Progress that is overwritten in place is reported, not kept.
    A program that prints nothing for `silence_s` seconds is ended.

    Raises:
        SpecError: if the program is not installed.
    """
    with _installed(argv[0]):
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    kept: deque[str] = deque(maxlen=200)
    with child.stdout or io.BytesIO() as out:
        try:
            for line, final in _lines(out.fileno(), silence_s):
                on_line(line)
                if final:
                    kept.append(line)
        except TimeoutError:
            kept.append(f"fatal: no sign of life for {silence_s:.0f} s")
            _end(child)
        except BaseException:
            _end(child)
            raise
    return Outcome(child.wait(), b"", "\n".join(kept))


@contextmanager
def _installed(name: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SpecError(f"{name} is not installed on this machine", next=f"sudo apt-get install {name}") from error


def _lines(fd: int, silence_s: float) -> Iterator[tuple[str, bool]]:
    """Yield each line and whether it ended in a newline; TimeoutError after `silence_s` without a byte."""
    rest = b""
    while True:
        ready, _, _ = select.select([fd], [], [], silence_s)
        if not ready:
            raise TimeoutError
        piece = os.read(fd, CHUNK)
        *lines, rest = re.split(rb"(?<=[\r\n])", rest + piece)
        for line in [*lines, rest] if not piece else lines:
            if text := line.decode(errors="replace").strip():
                yield text, not line.endswith(b"\r")
        if not piece:
            return


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a followed program and what it started: asked first, so that git removes its lock files."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
        except ProcessLookupError:
            break
        until = time.monotonic() + 5
        while child.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        if child.poll() is not None:
            break


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; a process that dies lets go of it."""
    with writing(path.parent):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a disk that is full or not writable into a SpecError about `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise unwritable(path, error.strerror or "") from error


def unwritable(path: Path, cause: str) -> SpecError:
    """Return the error for a folder that cannot be written."""
    return SpecError(
        f"{path} cannot be written: {cause}", next="make room there, or set XDG_CACHE_HOME to another disk"
    )


def disk_trouble(output: str) -> str:
    """Return what a program's output says against this machine's disk, or ""."""
    return next((cause for words, cause in _TROUBLE.items() if words in output), "")


def default_path() -> Path:
    """Return the user's cache of pins: below $XDG_CACHE_HOME, else ~/.cache."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "dgxlab" / "llama.cpp.git"
