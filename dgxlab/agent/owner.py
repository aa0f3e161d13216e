"""The file in which people who share a machine say who measures: read before measuring, signed meanwhile."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from dgxlab.agent.lock import moment, plain

FREE = "FREE"
OURS = "dgxlab job "
"""How every signature of dgxlab begins. One that is found by who holds the benchmark lock is a dead job's."""


class OwnerFile:
    """A file such as ~/gpu_bench_lock/owner: empty, missing or beginning with FREE when nobody measures.

    Other people's scripts look into it and know nothing of flock.
    """

    def __init__(self, path: Path, job_id: str, user: str) -> None:
        self.path = path
        self.signature = f"{OURS}{job_id} of {user} since {moment(time.time())}"

    def somebody(self) -> str:
        """Return what somebody else wrote there, cleaned and shortened, or why it cannot be read; "" for nobody."""
        try:
            said = self._read()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        except OSError as error:
            return f"somebody unknown ({error.strerror})"
        return f'somebody: "{said}"' if said and not said.startswith((FREE, OURS)) else ""

    def sign(self) -> None:
        """Say that this job measures; where that cannot be written, only others' scripts are the poorer."""
        with contextlib.suppress(OSError):
            self._write(self.signature)

    def free(self) -> None:
        """Say that nobody measures, if the signature is still this job's."""
        with contextlib.suppress(OSError):
            if self._read() == plain(self.signature):
                self._write(FREE)

    def _read(self) -> str:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a fifo would wait for a writer
        try:
            return plain(os.read(fd, 4096).decode(errors="replace"))
        finally:
            os.close(fd)

    def _write(self, text: str) -> None:
        """Write over what is there: who reads meanwhile never finds it empty, and owner and mode stay."""
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(self.path, flags)
        except FileNotFoundError:
            fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            line = f"{text}\n".encode()
            os.pwrite(fd, line, 0)
            os.ftruncate(fd, len(line))
        finally:
            os.close(fd)
