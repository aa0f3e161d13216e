"""The programs and the disk of the client's machine: run a program, follow its progress, hold a lock file.

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
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgxlab.errors import SpecError
from dgxlab.project import user_folder

_CHUNK = 1 << 16  # bytes read at a time

_SURROUNDINGS = re.compile(
    r"PATH|HOME|USER|LOGNAME|EMAIL|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TERM|XDG_\w+|LD_(?:LIBRARY_PATH|PRELOAD)"
    r"|DISPLAY|WAYLAND_DISPLAY|DBUS_SESSION_BUS_ADDRESS|SSH_(?:AUTH_SOCK|AGENT_PID|ASKPASS\w*)|KRB5\w+|NETRC"
    r"|(?i:https?|ftp|all|no)_(?i:proxy)|SSL_CERT_(?:FILE|DIR)|(?:REQUESTS|CURL)_CA_BUNDLE"
)
"""Names of variables by which programs find their files, the network and ssh's agent."""

_TROUBLE = {
    "No space left on device": "No space left on device",
    "Out of diskspace": "No space left on device",
    "Disk quota exceeded": "Disk quota exceeded",
    "Read-only file system": "Read-only file system",
    "File too large": "File too large",
    "died of signal 25": "File too large",
}
"""Causes that lie in this machine's disk, by words in a program's output; signal 25 is SIGXFSZ."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES, errno.EPERM, errno.ENOTDIR)


@dataclass(frozen=True)
class Completed:
    """The result of a program: exit status (negative for a signal), stdout and stderr.

    After `follow`, `out` is empty and `err` has the last lines of both.
    """

    rc: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Stdout as text, without the last newline."""
        return self.out.decode(errors="surrogateescape").removesuffix("\n")


def install(package: str) -> str:
    """Return the command that installs a package on this machine."""
    return f"{'brew' if sys.platform == 'darwin' else 'sudo apt-get'} install {package}"


def environment(prefix: str = "") -> dict[str, str]:
    """Return the variables that a program inherits: those that all programs need, and those with a prefix."""
    mine = os.environ.items()
    return {k: v for k, v in mine if _SURROUNDINGS.fullmatch(k) or (prefix and k.startswith(prefix))}


def _start(argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(argv, **options)
    except FileNotFoundError as error:
        message = f"{argv[0]} is not installed on this machine"
        raise SpecError(message, next=install(argv[0])) from error


def run(argv: Sequence[str], *, input: bytes = b"", env: Mapping[str, str] | None = None) -> Completed:
    """Run a program to its end, by default with the variables of `environment()`; SpecError if not installed."""
    pipe = subprocess.PIPE
    with _start(argv, stdin=pipe, stdout=pipe, stderr=pipe, env=env or environment()) as child:
        out, err = child.communicate(input)
    return Completed(child.returncode, out, err.decode(errors="replace"))


def follow(
    argv: Sequence[str], *, on_line: Callable[[str], None], env: Mapping[str, str], silence_s: float = 120.0
) -> Completed:
    """Run a program without a terminal, so that it cannot ask questions, and report each line that it prints.

    Lines that end in a carriage return are not kept in the outcome. The program is ended if it prints nothing for
    `silence_s`. Raises SpecError if it is not installed.
    """
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    child = _start(argv, env=env, start_new_session=True, **options)
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
    return Completed(child.wait(), b"", "\n".join(kept))


def _lines(fd: int, silence_s: float) -> Iterator[tuple[str, bool]]:
    """Yield each line and whether it ended in a newline; TimeoutError after `silence_s` without a byte."""
    rest = b""
    while True:
        ready, _, _ = select.select([fd], [], [], silence_s)
        if not ready:
            raise TimeoutError
        piece = os.read(fd, _CHUNK)
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
    """Hold an exclusive lock on a file; `on_wait` is called first if another process holds it."""
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
    """Raise a SpecError about `path` if the disk is full or not writable inside the `with` block."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise unwritable(path, error.strerror or "") from error


def write_whole(path: Path, content: bytes) -> bool:
    """Write a file atomically; return whether its content changed."""
    if path.is_file() and path.read_bytes() == content:
        return False
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
    return True


def unwritable(path: Path, cause: str) -> SpecError:
    """Return the SpecError for a folder that cannot be written, for that cause."""
    mend = "make room there, or set XDG_CACHE_HOME to another disk"
    return SpecError(f"{path} cannot be written: {cause}", next=mend)


def disk_trouble(output: str) -> str:
    """Return why this machine's disk made a program fail, by the program's output; "" if it did not."""
    return next((cause for words, cause in _TROUBLE.items() if words in output), "")


def cache_path() -> Path:
    """Return the default path of the pin cache, below $XDG_CACHE_HOME or ~/.cache."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "llama.cpp.git"
