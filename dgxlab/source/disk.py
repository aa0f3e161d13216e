"""The client's own disk: lock files, and what to say when it takes no more."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dgxlab.errors import SpecError

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


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; whoever dies lets go of it."""
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
    """Turn a disk that is full or closed to us into a SpecError about `path`."""
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
    return next((cause for said, cause in _TROUBLE.items() if said in output), "")
