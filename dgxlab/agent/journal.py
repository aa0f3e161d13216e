"""The journal: an append-only log of a job's events, one JSON object per line.

It is all that the client records, so an event that a result depends on is on disk before the next step begins.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab.agent.boot import sync

if TYPE_CHECKING:  # following a journal needs no vocabulary, and should be quick
    from dgxlab.model.events import Event

_DURABLE = frozenset({"job", "build", "model", "gate", "run", "error", "end"})
"""Events that are fsynced: losing one would lose or repeat work."""


class Journal:
    """Appends events to a file. The job's run.lock guarantees that there is one writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        sync(path.parent)
        self._seq = 0

    def emit(self, event: Event) -> None:
        """Append one event.

        Raises:
            OSError: if the disk is full; the partial line is removed, and later events can still be written.
            ValueError: if the event violates its declaration in `model.events`.
        """
        from dgxlab.model.events import written

        line = json.dumps(written(event, self._seq), separators=(",", ":"), allow_nan=False)
        blob, end = line.encode() + b"\n", os.fstat(self._fd).st_size
        try:
            while blob:
                blob = blob[os.write(self._fd, blob) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._seq += 1
        if event.event in _DURABLE:
            os.fsync(self._fd)

    def close(self) -> None:
        """Flush the file to disk and close it."""
        os.fsync(self._fd)
        os.close(self._fd)


def whole_lines(path: Path, offset: int, limit: int = 1 << 20) -> bytes:
    """Return the complete lines of a file from byte `offset` on, about `limit` bytes at most; b"" if there is none."""
    with path.open("rb") as file:
        file.seek(offset)
        chunk = file.read(limit)
        while b"\n" not in chunk and (more := file.read(limit)):
            chunk += more
    return chunk[: chunk.rfind(b"\n") + 1]
