"""Who measures: a benchmark lock a device, and the file in which people who share a machine sign.

The lock holds across users, and the kernel releases it whatever ends the holder. The file is read before measuring and
signed meanwhile: other people's scripts look into it and know nothing of flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab.agent.environment import settings
from dgxlab.errors import RemoteError, command, one_line

FOLDERS = (Path("/var/lock"), Path("/tmp"))  # noqa: S108 - where /var/lock is closed, /tmp is the one place all users share
TRIES, PAUSE_S = 5, 0.002
"""Retries: a probe or a job that backs off may hold the lock briefly."""
SHORT = 120
"""Characters that are shown of what others wrote."""

FREE = "FREE"
OURS = "dgxlab job "
"""How every signature of dgxlab begins. A job is alive as long as it holds a benchmark lock; for the one that is named
here no job waits: it measures on other devices, or is dead."""


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
        return one_line(f"job {self.job} of {self.user}, since {moment(self.since)}", SHORT)

    @classmethod
    def read(cls, fd: int) -> Signature | None:
        """Return a file's, None where there is none that can be read."""
        try:
            signed = json.loads(os.pread(fd, 4096, 0))
            signature = cls(str(signed["job"]), str(signed["user"]), float(signed["since"]))
            moment(signature.since)
        except (ValueError, KeyError, TypeError, OverflowError, OSError):
            return None
        return signature


class BenchLock:
    """An exclusive flock on dgxlab-<device> in every folder where that file is or can be made.

    Some users cannot make a file in the first folder, so only the files of all folders together exclude every user.
    Their content names the holder for those who wait. Measured programs inherit the descriptors: one that outlives the
    agent keeps the device fenced.

    Attributes:
        path: The first file that is held, or the one that another holds.
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
        """Hold the lock, if no other does, and sign it; harmless to repeat.

        A holder looks again: a cleaner of temporary files may have removed a file, whose lock then excludes no job any
        more, and another user may have made one that could not be made here. A job that does not get every file keeps
        none, so that no two wait for each other.

        Raises:
            RemoteError: if something that is no lock lies in its place, or there is no place.
        """
        before = None
        while before != self._files:  # repeat until the set of lock files is stable
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
            signature = json.dumps({**owner, "since": self.since}).encode()
            for fd in self._files.values():
                with contextlib.suppress(OSError):  # best effort; the flock is authoritative
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, signature, 0)
        return True

    def owner(self) -> str:
        """Return who held it when it was last tried: `job 2026...-stock of alice, since 2026-11-20 12:01:44`."""
        return str(self._holder or "an unknown user")

    def release(self) -> None:
        """Let go; a child that inherited the descriptors keeps the lock."""
        for fd in self._files.values():
            os.close(fd)
        self._files, self.since = {}, None

    def _lock(self, path: Path) -> bool:
        """Lock the file that is there now, in place of the one before; one that cannot be made is passed over."""
        mine = self._files.get(path)
        if mine is not None and in_place(mine, path):
            return True
        there = _open(path)
        if there is not None and not lock(there, tries=TRIES):
            self.path, self._holder = path, Signature.read(there)
            os.close(there)
            return False
        if mine is not None:
            os.close(self._files.pop(path))
        if there is not None:
            self._files[path], self.since = there, None
        return True


class OwnerFile:
    """A file such as ~/gpu_bench_lock/owner: empty, missing or beginning with the word FREE when no one measures.

    Other people's scripts look into it and know nothing of flock. Jobs on different devices share it: it names one of
    them until the last is done.
    """

    def __init__(self, path: Path, job_id: str, user: str) -> None:
        self.path = path
        self._mine = Signature(job_id, user, time.time())

    @property
    def watched(self) -> bool:
        """Whether its folder is there: without it the file is neither read nor signed."""
        return self.path.parent.is_dir()

    def claim(self) -> str:
        """Return what another person wrote there, cleaned and shortened, or why it cannot be read; "" for free."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo would wait for a writer
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"an unknown user ({error.strerror})"
        try:
            text = _read(fd)
        except OSError as error:
            return f"an unknown user ({error.strerror})"
        finally:
            os.close(fd)
        free = text.startswith(FREE) and not text[len(FREE) :][:1].isalpha()  # FREEMAN is a name
        return f'another user: "{text}"' if text and not free and not text.startswith(OURS) else ""

    def sign(self) -> None:
        """Say that this job measures, unless the file says it of another that still does.

        Best effort: only other people's scripts read it.
        """
        with contextlib.suppress(OSError), self._open(create=True) as fd:
            named = _named(_read(fd))
            if named == self._mine.job or named not in measuring(but=self._mine.job):
                _write(fd, f"dgxlab {self._mine}")

    def free(self) -> None:
        """Write FREE, or the job that still measures, if the file names this one."""
        with contextlib.suppress(OSError), self._open() as fd:
            if _named(_read(fd)) == self._mine.job:
                others = measuring(but=self._mine.job).values()
                _write(fd, next((f"dgxlab {other}" for other in others), FREE))

    @contextlib.contextmanager
    def _open(self, *, create: bool = False) -> Iterator[int]:
        """Open the file to change it, alone among jobs: between look and word no other shall begin or end.

        It is waited for only as long as another job needs: a longer lock is not a job's.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags)
        except FileNotFoundError:
            if not create:
                raise
            fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with contextlib.suppress(RemoteError):  # not every network disk has locks
                lock(fd, tries=TRIES)
            yield fd
        finally:
            os.close(fd)


def _named(text: str) -> str:
    """Return the job that a signature of dgxlab names, "" for what is none."""
    return text[len(OURS) :].partition(" ")[0] if text.startswith(OURS) else ""


def _read(fd: int) -> str:
    return one_line(os.read(fd, 4096).decode(errors="replace").strip(), SHORT)


def _write(fd: int, text: str) -> None:
    """Write over what is there: a reader never finds it empty, and owner and mode stay."""
    line = f"{text}\n".encode()
    os.pwrite(fd, line, 0)
    os.ftruncate(fd, len(line))


def measuring(but: str) -> dict[str, Signature]:
    """Return every job but one that holds a lock of any device here."""
    jobs = {}
    for path in (path for folder in _folders() for path in folder.glob("dgxlab-*")):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            signed = Signature.read(fd)
            if signed and signed.job != but and not lock(fd, fcntl.LOCK_SH, TRIES):
                jobs[signed.job] = signed
        finally:
            os.close(fd)
    return jobs


def lock(fd: int, kind: int = fcntl.LOCK_EX, tries: int = 1) -> bool:
    """Lock an open file until it is closed; return whether that succeeded: another may hold it.

    Raises:
        RemoteError: if its file system has no locks, where waiting for one would never end.
    """
    for pause_s in (*[PAUSE_S] * (tries - 1), 0.0):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(pause_s)
        except OSError as refusal:
            path = Path(f"/proc/self/fd/{fd}").readlink()
            raise RemoteError(
                f"{path} cannot be locked: {refusal.strerror}; the host's root: must lie on a file system that has"
                " flock, such as a local disk",
                next=f"dgxlab doctor {settings().name}",
            ) from refusal
        else:
            return True
    return False


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
    """Open a lock file that any user may share, None for one that is not there and cannot be made.

    No link is followed, which may be planted in a public folder. fs.protected_regular refuses O_CREAT on another's file
    in a sticky folder, so an existing one is opened without it.

    Raises:
        RemoteError: if something lies there that cannot be opened.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    before = os.umask(0)  # 0666 from the first instant on: another job that cannot open it would not wait for it
    try:
        for attempt in (flags, flags | os.O_CREAT | os.O_EXCL, flags):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                return os.open(path, attempt, 0o666)
    except OSError as refusal:
        if os.path.lexists(path):
            raise RemoteError(
                f"the benchmark lock {path} cannot be opened: {refusal.strerror}", next=command("ls", "-l", path)
            ) from refusal
    finally:
        os.umask(before)
    return None
