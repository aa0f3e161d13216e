"""The file in which people who share a machine say who measures: read before measuring, signed meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dgxlab.agent.lock import Signature, locked, measuring, plain
from dgxlab.errors import RemoteError

FREE = "FREE"
OURS = "dgxlab job "
"""How every signature of dgxlab begins. A job is alive as long as it holds a benchmark lock; for the one that is named
here no job waits: it measures on other devices, or is dead."""


class OwnerFile:
    """A file such as ~/gpu_bench_lock/owner: empty, missing or beginning with the word FREE when nobody measures.

    Other people's scripts look into it and know nothing of flock. Jobs on different devices share it: it names one of
    them until the last is done.
    """

    def __init__(self, path: Path, job_id: str, user: str) -> None:
        self.path = path
        self._mine = Signature(job_id, user, time.time())

    @property
    def watched(self) -> bool:
        """Whether its folder is there: where people keep none, nobody is asked and nobody is told."""
        return self.path.parent.is_dir()

    def somebody(self) -> str:
        """Return what somebody else wrote there, cleaned and shortened, or why it cannot be read; "" for nobody."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo would wait for a writer
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"somebody unknown ({error.strerror})"
        try:
            said = _read(fd)
        except OSError as error:
            return f"somebody unknown ({error.strerror})"
        finally:
            os.close(fd)
        return f'somebody: "{said}"' if said and not _free(said) and not said.startswith(OURS) else ""

    def sign(self) -> None:
        """Say that this job measures, unless the file says it of another that still does.

        Where that cannot be written, only others' scripts are the poorer.
        """
        with contextlib.suppress(OSError), self._open(create=True) as fd:
            named = _named(_read(fd))
            if named == self._mine.job or named not in measuring(but=self._mine.job):
                _write(fd, f"dgxlab {self._mine}")

    def free(self) -> None:
        """Say that nobody measures, or which job still does, if the file says that this one does."""
        with contextlib.suppress(OSError), self._open() as fd:
            if _named(_read(fd)) == self._mine.job:
                others = measuring(but=self._mine.job).values()
                _write(fd, next((f"dgxlab {other}" for other in others), FREE))

    @contextlib.contextmanager
    def _open(self, *, create: bool = False) -> Iterator[int]:
        """Open the file to change it, alone among jobs: between look and word no other shall begin or end.

        It is not waited for longer than a job needs: whoever keeps it locked is no job.
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
                locked(fd)
            yield fd
        finally:
            os.close(fd)


def _free(said: str) -> bool:
    return said.startswith(FREE) and not said[len(FREE) :][:1].isalpha()


def _named(said: str) -> str:
    """Return the job that a signature of dgxlab names, "" for what is none."""
    return said[len(OURS) :].partition(" ")[0] if said.startswith(OURS) else ""


def _read(fd: int) -> str:
    return plain(os.read(fd, 4096).decode(errors="replace"))


def _write(fd: int, text: str) -> None:
    """Write over what is there: who reads meanwhile never finds it empty, and owner and mode stay."""
    line = f"{text}\n".encode()
    os.pwrite(fd, line, 0)
    os.ftruncate(fd, len(line))
