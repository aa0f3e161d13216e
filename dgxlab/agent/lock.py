"""The benchmark lock: one measuring job a device, across users, released by the kernel whatever ends the holder."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from dgxlab.errors import RemoteError

FOLDERS = (Path("/var/lock"), Path("/tmp"))  # noqa: S108 - where /var/lock is closed, /tmp is the one place all users share


class BenchLock:
    """An exclusive flock on /var/lock/dgxlab-<device>; its content names the holder for those who wait.

    The descriptor is inherited by the measured programs: one that outlives the agent keeps the device fenced.

    Attributes:
        fd: None until it was first tried.
        held: Whether the last try got it.
        path: Where the file is, once it was tried.
    """

    def __init__(self, device: str, folders: tuple[Path, ...] = FOLDERS) -> None:
        self.fd: int | None = None
        self.held = False
        self.path = folders[0] / f"dgxlab-{device}"
        self._device = device
        self._folders = folders

    def take(self, owner: Mapping[str, object]) -> bool:
        """Hold the lock, if nobody else does, and sign it; harmless to repeat.

        Who holds it already looks again: where a cleaner of temporary files has removed the file, a lock on it excludes
        nobody any more, and the new file is locked instead.

        Raises:
            RemoteError: if something that is no lock lies in its place.
        """
        fd = self._opened() if self.fd is None else self.fd
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if self._in_place(fd):
                break
            fd = self._opened()
        if not self.held:
            self._sign(fd, {**owner, "since": time.time()})
            self.held = True
        return True

    def owner(self) -> str:
        """Return who holds it, as a phrase: `job 2026...-stock of alice, since 2026-11-20 12:01:44`."""
        try:
            signed = json.loads(os.pread(self.fd if self.fd is not None else -1, 4096, 0))
            return plain(f"job {signed['job']} of {signed['user']}, since {moment(float(signed['since']))}")
        except (ValueError, KeyError, TypeError, OverflowError, OSError):
            return "somebody unknown"

    def release(self) -> None:
        """Let go; a child that inherited the descriptor keeps the lock."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd, self.held = None, False

    def _opened(self) -> int:
        """Open the file that lies there now, in place of the one before."""
        fd, self.path = _open(self._device, self._folders)
        self.release()
        self.fd = fd
        return fd

    def _in_place(self, fd: int) -> bool:
        """Return whether the file that is open is the one that others would open."""
        mine = os.fstat(fd)
        try:
            there = self.path.lstat()
        except FileNotFoundError:
            return False
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def _sign(self, fd: int, signature: Mapping[str, object]) -> None:
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(signature).encode(), 0)
        except OSError:
            pass  # the lock holds without a signature too; only the sentence for those who wait is poorer


def plain(text: str, at_most: int = 120) -> str:
    """Return what somebody else wrote as one short line without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= at_most else f"{line[: at_most - 1]}…"


def moment(t: float) -> str:
    """Return unix seconds as the host's own clock shows them."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def _open(device: str, folders: tuple[Path, ...]) -> tuple[int, Path]:
    refusal: OSError | None = None
    for folder in folders:
        path = folder / f"dgxlab-{device}"
        try:
            return _open_shared(path), path
        except OSError as error:
            refusal = error
            if os.path.lexists(path):  # another folder would exclude nobody who can open this file
                break
    assert refusal is not None
    raise RemoteError(
        f"the benchmark lock {path} cannot be opened: {refusal.strerror}",
        next=f"ls -l {path}; it must be a file that everybody may write, or not be there",
    )


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
    before = os.umask(0)  # 0666 from the first instant on: who finds it closed would not wait for it
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags)
    finally:
        os.umask(before)
