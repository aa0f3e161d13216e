"""The benchmark lock: one measuring job a device, across users, released by the kernel whatever ends the holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

FOLDERS = (Path("/var/lock"), Path("/tmp"))  # noqa: S108 - where /var/lock is closed, /tmp is the one place all users share


class BenchLock:
    """An exclusive flock on /var/lock/dgxlab-<device>; its content names the holder for those who wait.

    The descriptor is inherited by the measured programs: one that outlives the agent keeps the device fenced.
    """

    def __init__(self, device: str, folders: tuple[Path, ...] = FOLDERS) -> None:
        self.fd, self.path = _open(device, folders)

    def acquire(self, owner: dict[str, object], on_wait: Callable[[str], None]) -> None:
        """Wait for the lock and sign it; `on_wait` is called once with the holder's name if it is taken."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            on_wait(self.owner())
            fcntl.flock(self.fd, fcntl.LOCK_EX)
        signature = json.dumps({**owner, "since": time.time()}).encode()
        try:
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, signature, 0)
        except OSError:
            pass  # the lock holds without a signature too; only the sentence for those who wait is poorer

    def owner(self) -> str:
        """Return who holds it, as a phrase: `job 2026...-stock of alice, since 12:01:44`."""
        try:
            signed = json.loads(os.pread(self.fd, 4096, 0))
            since = time.strftime("%H:%M:%S", time.localtime(float(signed["since"])))
            return f"job {signed['job']} of {signed['user']}, since {since}"
        except (ValueError, KeyError, TypeError, OSError):
            return "somebody unknown"

    def release(self) -> None:
        """Let go; a child that inherited the descriptor keeps the lock."""
        os.close(self.fd)


def _open(device: str, folders: tuple[Path, ...]) -> tuple[int, Path]:
    refusal: OSError | None = None
    for folder in folders:
        path = folder / f"dgxlab-{device}"
        try:
            return _open_shared(path), path
        except OSError as error:
            refusal = error
    raise refusal if refusal else FileNotFoundError(f"no folder for a lock among {folders}")


def _open_shared(path: Path) -> int:
    """Open a lock file that any user may share, without following a link planted in a public folder.

    O_CREAT on somebody else's file in a sticky folder is refused by fs.protected_regular, so an existing one is opened
    without it.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags)
    os.fchmod(fd, 0o666)
    return fd
