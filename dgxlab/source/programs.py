"""The client's programs and its disk: run a program, or follow one that shows progress; lock files.

git and pip are run through here. No shell is used, and the user's tokens are not passed on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgxlab.errors import SpecError
from dgxlab.project import user_folder

CHUNK = 1 << 16  # bytes read at a time

SURROUNDINGS = re.compile(
    r"PATH|HOME|USER|LOGNAME|EMAIL|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TERM|XDG_\w+|LD_(?:LIBRARY_PATH|PRELOAD)"
    r"|DISPLAY|WAYLAND_DISPLAY|DBUS_SESSION_BUS_ADDRESS|SSH_(?:AUTH_SOCK|AGENT_PID|ASKPASS\w*)|KRB5\w+|NETRC"
    r"|(?i:https?|ftp|all|no)_(?i:proxy)|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE"
)
"""Variables that a program needs to find its files, the network and the user's agents."""

_TROUBLE = {
    "No space left on device": "No space left on device",
    "Out of diskspace": "No space left on device",
    "Disk quota exceeded": "Disk quota exceeded",
    "Read-only file system": "Read-only file system",
    "File too large": "File too large",
    "died of signal 25": "File too large",
}
"""Messages of programs that mean trouble with this machine's disk, with the cause; signal 25 is SIGXFSZ."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ENOTDIR)


@dataclass(frozen=True)
class Outcome:
    """How a program ended: exit status (negative for a signal), stdout and stderr.

    Of a followed program `out` is empty, and `err` has the last lines of both.
    """

    rc: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Stdout as text, without the last newline."""
        return self.out.decode(errors="surrogateescape").removesuffix("\n")


def surroundings(prefix: str = "") -> dict[str, str]:
    """Return the environment of a program: the variables that all programs need, and those that begin with `prefix`."""
    mine = os.environ.items()
    return {k: v for k, v in mine if SURROUNDINGS.fullmatch(k) or (prefix and k.startswith(prefix))}


def start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program with options of Popen; SpecError if the program is not installed."""
    try:
        return subprocess.Popen(argv, **options)
    except FileNotFoundError as error:
        message = f"{argv[0]} is not installed on this machine"
        raise SpecError(message, next=f"sudo apt-get install {argv[0]}") from error


def run(argv: Sequence[str], *, input: bytes = b"", env: Mapping[str, str] | None = None) -> Outcome:
    """Run a program to its end; without `env` it gets only `surroundings()`. SpecError if it is not installed."""
    pipe = subprocess.PIPE
    with start(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env or surroundings()) as child:
        out, err = child.communicate(input)
    return Outcome(child.returncode, out, err.decode(errors="replace"))


def follow(
    argv: Sequence[str], *, on_line: Callable[[str], None], env: Mapping[str, str], silence_s: float = 120.0
) -> Outcome:
    """Run a program in a session of its own and call `on_line` with each line that it prints.

    Without a terminal it cannot stop to ask a question. Progress that is overwritten in place is reported, not kept.
    A program that prints nothing for `silence_s` seconds is ended.
    """
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = start(argv, env=env, start_new_session=True, **options)
    kept: deque[str] = deque(maxlen=200)
    assert child.stdout
    with child.stdout as out:
        try:
            for line, is_final in _lines(out.fileno(), silence_s):
                on_line(line)
                if is_final:
                    kept.append(line)
        except TimeoutError:
            kept.append(f"fatal: no sign of life for {silence_s:.0f} s")
            _end(child)
        except BaseException:
            _end(child)
            raise
    return Outcome(child.wait(), b"", "\n".join(kept))


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
    """End a followed program and what it started: by SIGTERM first, so that git removes its lock files."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(child.pid, sign)
            child.wait(5)
            return


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file; a process that dies releases it."""
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
    mend = "make room there, or set XDG_CACHE_HOME to another disk"
    return SpecError(f"{path} cannot be written: {cause}", next=mend)


def disk_trouble(output: str) -> str:
    """Return the trouble with this machine's disk in a program's output, or ""."""
    return next((cause for words, cause in _TROUBLE.items() if words in output), "")


def default_path() -> Path:
    """Return the user's cache of pins: below $XDG_CACHE_HOME, else ~/.cache."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "llama.cpp.git"
