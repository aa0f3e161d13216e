"""Locks for measuring: one benchmark lock per device, and the owner file that people who share a machine sign.

A benchmark lock works across users, and the kernel releases it when the holder dies. One job measures under it, or any
number of jobs build. The owner file is for people and scripts that do not use flock: a job waits while another person's
name is in it, and signs it while it measures.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dgxlab.agent.environment import settings
from dgxlab.errors import RemoteError, command, one_line
from dgxlab.units import EARLIER

FOLDERS = (Path("/var/lock"), Path("/tmp"))  # noqa: S108 - where /var/lock is closed, /tmp is the one place all users share
TRIES, PAUSE_S = 5, 0.002
"""Tries to lock a file, and seconds between them: a probe or a job that backs off may hold the lock briefly."""
PATIENCE_S = 10.0
"""A job that is first in the queue looks every few seconds: if the lock stays free for longer, it is stopped."""
_SHORT = 120  # max characters shown of other people's text

FREE = "FREE"
_OURS = "dgxlab job "
"""How dgxlab's text in an owner file begins. A job does not wait for a job that the file names: a running job on the
same device would hold the benchmark lock, so the named one uses other devices or is dead."""


@dataclass(frozen=True)
class Signature:
    """Who holds a lock, as written into lock files (JSON) and owner files (words)."""

    job: str
    user: str
    since: float = field(default_factory=time.time)  # Unix seconds

    def __str__(self) -> str:
        return one_line(f"job {self.job} of {self.user}, since {moment(self.since)}", _SHORT)

    @classmethod
    def read(cls, fd: int) -> Signature | None:
        """Return the signature in an open lock file, None if there is none that can be parsed."""
        try:
            signed = json.loads(os.pread(fd, 4096, 0))
            signature = cls(str(signed["job"]), str(signed["user"]), float(signed["since"]))
            moment(signature.since)
        except (ValueError, KeyError, TypeError, OverflowError, OSError):
            return None
        return signature

    def write(self, fd: int) -> None:
        """Sign an open lock file; errors are ignored, since the flock is what counts."""
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(vars(self)).encode(), 0)


class BenchLock:
    """A flock on the file dgxlab-<device> in each of FOLDERS in which it exists or can be created.

    All of them must be locked, because some users cannot create a file in the first folder. Measured programs inherit
    the descriptors: a program that outlives the agent keeps the device locked. Jobs get it in the order in which they
    asked, but for one that is stopped.
    """

    def __init__(self, device: str, folders: Sequence[Path] = (), kind: int = fcntl.LOCK_EX) -> None:
        self._kind = kind
        self.since: float | None = None  # when the lock was taken, None while it is not held
        self._paths = [folder / f"dgxlab-{device}" for folder in folders or _folders()]
        self.path = self._paths[0]  # the first file of the lock; after a failed `take` the file that another job holds
        self._files: dict[Path, int] = {}
        self._holder: Signature | str | None = None
        self._queue: int | None = None
        self._asked, self._free = 0, 0.0

    @property
    def fds(self) -> list[int]:
        """The descriptors of the locked files."""
        return list(self._files.values())

    def take(self, owner: Signature) -> bool:
        """Take the lock if it is free, and sign it as `owner`; return whether it is held now.

        If it is held already, check all files again: one may have been removed, or can now be created. If not all files
        can be locked, all are released, which prevents deadlock. Raises RemoteError if a file cannot be opened or
        locked, or no folder can have one.
        """
        before, held = None, bool(self._files)
        while before != self._files:  # repeat until the set of lock files is stable
            before = dict(self._files)
            if not all(map(self._lock, self._paths)):
                self._close()
                self._is_first()
                self._free = 0.0
                return False
        if not self._files:
            folders = " or ".join(str(path.parent) for path in self._paths)
            raise RemoteError(f"no benchmark lock can be made: {folders} must be writable", next="sudo chmod 1777 /tmp")
        if not held and not self._is_first():
            self._free = self._free or time.monotonic()
            if time.monotonic() - self._free < PATIENCE_S:
                self._close()
                self._holder = EARLIER
                return False
        self._leave()
        self.path = next(path for path in self._paths if path in self._files)
        if self.since is None:
            self.since = time.time()
            for fd in self._files.values():
                replace(owner, since=self.since).write(fd)
        return True

    def owner(self) -> str:
        """Return who held the lock at the last failed `take`: `job 2026...-x of alice, since 2026-11-20 12:01:44`."""
        return str(self._holder or "an unknown user")

    def release(self) -> None:
        """Close the files; the lock stays held while a child has the descriptors that it inherited."""
        self._close()
        self._leave()

    def _close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files, self.since = {}, None

    def _is_first(self) -> bool:
        """Join the jobs that wait for the lock, and return whether none of them asked earlier.

        Each has locked a byte of an empty file, at the time of its asking in ns: the kernel forgets those that die.
        """
        if self._queue is None:
            files = (_open(path.with_name(f".{path.name}-queue")) for path in reversed(self._paths))
            self._queue = next((fd for fd in files if fd is not None), None)  # all users have the last folder
            if self._queue is None:  # the lock's files were there, and no other can be made beside them
                return True
            self._asked = time.monotonic_ns()
            fcntl.lockf(self._queue, fcntl.LOCK_EX, 1, self._asked)
        try:
            fcntl.lockf(self._queue, fcntl.LOCK_SH | fcntl.LOCK_NB, self._asked)
        except BlockingIOError:
            return False
        fcntl.lockf(self._queue, fcntl.LOCK_UN, self._asked)
        return True

    def _leave(self) -> None:
        if self._queue is not None:
            os.close(self._queue)
        self._queue, self._free = None, 0.0

    def _lock(self, path: Path) -> bool:
        """Lock the file now at `path`, replacing an earlier one; skip a file that cannot be created."""
        mine = self._files.get(path)
        if mine is not None and in_place(mine, path):
            return True
        fd = _open(path)
        if fd is not None and not lock(fd, self._kind, TRIES):
            self.path, self._holder = path, Signature.read(fd)
            os.close(fd)
            return False
        if mine is not None:
            os.close(self._files.pop(path))
        if fd is not None:
            self._files[path], self.since = fd, None
        return True


class OwnerFile:
    """A file such as ~/gpu_bench_lock/owner: it names who measures, or is empty, missing or begins with FREE.

    Jobs on different devices share the file: it names one of them until the last has ended.
    """

    def __init__(self, path: Path, owner: Signature) -> None:
        self.path, self._mine = path, owner

    @property
    def watched(self) -> bool:
        """Whether the file's folder exists; without it the file is neither read nor signed."""
        return self.path.parent.is_dir()

    def claimed_by(self) -> str:
        """Return what another person wrote, or why the file cannot be read; "" if it is free or names a dgxlab job."""
        try:
            with _opened(self.path, os.O_RDONLY) as fd:
                text = _read(fd)
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"an unknown user ({error.strerror})"
        free = text.startswith(FREE) and not text[len(FREE) :][:1].isalpha()  # FREEMAN is a name
        return f'another user: "{text}"' if text and not free and not text.startswith(_OURS) else ""

    def sign(self) -> None:
        """Write this job's signature, unless the file names another running job; errors are ignored."""
        with contextlib.suppress(OSError), self._open(create=True) as fd:
            named = _named(_read(fd))
            if named == self._mine.job or named not in measuring(but=self._mine.job):
                _write(fd, f"dgxlab {self._mine}")

    def free(self) -> None:
        """If the file names this job, write the name of another running job, or FREE; errors are ignored."""
        with contextlib.suppress(OSError), self._open() as fd:
            if _named(_read(fd)) == self._mine.job:
                others = measuring(but=self._mine.job).values()
                _write(fd, next((f"dgxlab {other}" for other in others), FREE))

    @contextlib.contextmanager
    def _open(self, *, create: bool = False) -> Iterator[int]:
        """Open and lock the file to change it. A lock held longer than a job needs is ignored: it is not a job's."""
        new = create and not self.path.exists()
        with _opened(self.path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0)) as fd:
            with contextlib.suppress(RemoteError):  # not every network disk has locks
                lock(fd, tries=TRIES)
            yield fd


def _named(text: str) -> str:
    """Return the job named in a signature of dgxlab, "" for any other text."""
    return text[len(_OURS) :].partition(" ")[0] if text.startswith(_OURS) else ""


def _read(fd: int) -> str:
    return one_line(os.read(fd, 4096).decode(errors="replace").strip(), _SHORT)


def _write(fd: int, text: str) -> None:
    """Overwrite the file in place: it is never empty for a reader, and keeps owner and mode."""
    line = f"{text}\n".encode()
    os.pwrite(fd, line, 0)
    os.ftruncate(fd, len(line))


def measuring(but: str) -> dict[str, Signature]:
    """Return the signatures of jobs that hold a benchmark lock on this host, by job id, without the job `but`."""
    jobs = {}
    for path in (path for folder in _folders() for path in folder.glob("dgxlab-*")):
        with contextlib.suppress(OSError), _opened(path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            signed = Signature.read(fd)
            if signed and signed.job != but and not lock(fd, fcntl.LOCK_SH, TRIES):
                jobs[signed.job] = signed
    return jobs


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_NONBLOCK, 0o666)  # a fifo would wait for a writer
    try:
        yield fd
    finally:
        os.close(fd)


def lock(fd: int, kind: int = fcntl.LOCK_EX, tries: int = 1) -> bool:
    """Lock an open file until it is closed, with fcntl.LOCK_EX or LOCK_SH; try every PAUSE_S seconds.

    Return False if another process has locked the file; raises RemoteError if the file system has no locks.
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


def lock_file(path: Path) -> int:
    """Open a file to lock it; on a cluster whose file system has no locks, one of this machine in its place.

    What it locks on another machine is another thing: each node builds in a folder of its own.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_UN)
    except BlockingIOError:
        pass
    except OSError:
        if settings().slurm is not None:
            os.close(fd)
            name = f".dgxlab-{os.getuid()}-{hashlib.sha256(bytes(path)).hexdigest()[:16]}"
            folder = next(folder for folder in _folders() if os.access(folder, os.W_OK))
            fd = os.open(folder / name, flags, 0o600)
    return fd


def moment(t: float) -> str:
    """Return Unix seconds as local time of the host: `2026-11-20 12:01:44`."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))


def _folders() -> Sequence[Path]:
    return settings().locks or FOLDERS


def in_place(fd: int, path: Path) -> bool:
    """Return whether the open file is still the one at `path`."""
    mine = os.fstat(fd)
    try:
        current = path.lstat()
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (current.st_dev, current.st_ino)


def _open(path: Path) -> int | None:
    """Open a lock file shared by all users; None if it is missing and cannot be made. Raises RemoteError if closed."""
    flags = os.O_RDWR | os.O_NOFOLLOW  # a link may be planted in a public folder
    before = os.umask(0)  # mode 0666 from the start: another job that could not open it would not wait for it
    try:
        # first without O_CREAT, which fs.protected_regular refuses on another's file in a sticky folder
        for attempt in (flags, flags | os.O_CREAT | os.O_EXCL, flags):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                return os.open(path, attempt, 0o666)
    except OSError as refusal:
        if os.path.lexists(path):
            message = f"the benchmark lock {path} cannot be opened: {refusal.strerror}"
            raise RemoteError(message, next=command("ls", "-l", path)) from refusal
    finally:
        os.umask(before)
    return None
