"""The benchmark lock: one measuring job a device, across users, released by the kernel whatever ends the holder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab.agent.environment import settings
from dgxlab.errors import RemoteError, command

FOLDERS = (Path("/var/lock"), Path("/tmp"))  # noqa: S108 - where /var/lock is closed, /tmp is the one place all users share
TRIES, PAUSE_S = 5, 0.002
"""How often a lock is tried: who only looks at it, or has it in vain for want of the next, has it for an instant."""


@dataclass(frozen=True)
class Signature:
    """What a holder writes into its lock files.

    Attributes:
        since: Unix seconds.
    """

    job: str
    user: str
    since: float

    def __str__(self) -> str:
        return plain(f"job {self.job} of {self.user}, since {moment(self.since)}")

    @classmethod
    def read(cls, fd: int) -> Signature | None:
        """Return a file's, None where there is none that can be read."""
        try:
            signed = json.loads(os.pread(fd, 4096, 0))
            found = cls(str(signed["job"]), str(signed["user"]), float(signed["since"]))
            moment(found.since)
        except (ValueError, KeyError, TypeError, OverflowError, OSError):
            return None
        return found


class BenchLock:
    """An exclusive flock on dgxlab-<device> in every folder where that file is or can be made.

    Not everybody can make a file in the first folder, and who cannot may come before one who can: only who holds the
    files of all folders excludes both. Their content names the holder for those who wait. The descriptors are inherited
    by the measured programs: one that outlives the agent keeps the device fenced.

    Attributes:
        path: The first file that is held, or the one that somebody else holds.
        since: When it was taken, None while it is not held.
    """

    def __init__(self, device: str, folders: Sequence[Path] = ()) -> None:
        self.since: float | None = None
        self._paths = [folder / f"dgxlab-{device}" for folder in folders or _folders()]
        self.path = self._paths[0]
        self._files: dict[Path, int] = {}
        self._holder: Signature | None = None

    @property
    def fds(self) -> list[int]:
        """The descriptors of the files that are held."""
        return list(self._files.values())

    def take(self, owner: Mapping[str, object]) -> bool:
        """Hold the lock, if nobody else does, and sign it; harmless to repeat.

        Who holds it already looks again: where a cleaner of temporary files has removed a file, a lock on it excludes
        nobody any more, and where somebody has made one that could not be made here, that one counts too. Who does not
        get every file keeps none, so that no two wait for each other.

        Raises:
            RemoteError: if something that is no lock lies in its place, or there is no place.
        """
        before = None
        while before != self._files:  # who made a file after it was looked for here looks for ours, or finds it later
            before = dict(self._files)
            if not all(map(self._lock, self._paths)):
                self.release()
                return False
        if not self._files:
            folders = " or ".join(str(path.parent) for path in self._paths)
            raise RemoteError(f"no benchmark lock can be made: {folders} must be writable", next="sudo chmod 1777 /tmp")
        self.path = next(path for path in self._paths if path in self._files)
        if self.since is None:
            self.since = time.time()
            self._sign({**owner, "since": self.since})
        return True

    def owner(self) -> str:
        """Return who held it when it was last tried: `job 2026...-stock of alice, since 2026-11-20 12:01:44`."""
        return str(self._holder or "somebody unknown")

    def release(self) -> None:
        """Let go; a child that inherited the descriptors keeps the lock."""
        for fd in self._files.values():
            os.close(fd)
        self._files, self.since = {}, None

    def _lock(self, path: Path) -> bool:
        """Lock the file that lies there now, in place of the one before; one that cannot be made is nobody's."""
        mine = self._files.get(path)
        if mine is not None and in_place(mine, path):
            return True
        there = _open(path)
        if there is not None and not locked(there):
            self.path, self._holder = path, Signature.read(there)
            os.close(there)
            return False
        if mine is not None:
            os.close(self._files.pop(path))
        if there is not None:
            self._files[path], self.since = there, None
        return True

    def _sign(self, signature: Mapping[str, object]) -> None:
        for fd in self._files.values():
            with contextlib.suppress(OSError):  # unsigned it holds too; only the sentence for those who wait is poorer
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(signature).encode(), 0)


def measuring(but: str) -> dict[str, Signature]:
    """Return every job but one that holds a lock of any device here."""
    found = {}
    for path in (path for folder in _folders() for path in folder.glob("dgxlab-*")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            signed = Signature.read(fd)
            if signed and signed.job != but and not locked(fd, fcntl.LOCK_SH):
                found[signed.job] = signed
        finally:
            os.close(fd)
    return found


def lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed; return whether that could be done at once: another may hold it.

    Raises:
        RemoteError: if its file system has no locks, where waiting for one would never end.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as refusal:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        raise RemoteError(
            f"{path} cannot be locked: {refusal.strerror}; the host's root: must lie on a file system that has flock, "
            "such as a local disk",
            next=f"dgxlab doctor {settings().name}",
        ) from refusal
    return True


def locked(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Return whether an open file could be locked, as `lock`, in a few attempts."""
    for _ in range(TRIES):
        if lock(fd, kind):
            return True
        time.sleep(PAUSE_S)
    return False


def plain(text: str, at_most: int = 120) -> str:
    """Return what somebody else wrote as one short line without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= at_most else f"{line[: at_most - 1]}…"


def moment(t: float) -> str:
    """Return unix seconds as the host's own clock shows them."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def _folders() -> Sequence[Path]:
    return settings().locks or FOLDERS


def in_place(fd: int, path: Path) -> bool:
    """Return whether the file that is open is the one that others would open."""
    mine = os.fstat(fd)
    try:
        there = path.lstat()
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _open(path: Path) -> int | None:
    """Open a lock file, None for one that is not there and cannot be made.

    Raises:
        RemoteError: if something lies there that cannot be opened.
    """
    try:
        return _open_shared(path)
    except OSError as refusal:
        if not os.path.lexists(path):
            return None
        raise RemoteError(
            f"the benchmark lock {path} cannot be opened: {refusal.strerror}",
            next=command("ls", "-l", path),
        ) from refusal


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
