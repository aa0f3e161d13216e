"""The journal: what a job did, one JSON object a line, only ever appended to.

The client learns everything from it, so an event that a result depends on is on disk before the next step begins.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgxlab.agent.boot import sync

DURABLE = frozenset({"job", "build", "model", "gate", "check", "run", "error", "end"})
"""Events that are fsynced: losing one would lose or repeat work."""


class Journal:
    """Appends events to a file; one writer at a time, which the job's run.lock guarantees."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        sync(path.parent)
        self._seq = 0

    def emit(self, event: str, **fields: Any) -> None:
        """Append one event.

        Raises:
            OSError: if the disk is full; nothing of the event is there then, and a later one that fits comes whole.
            ValueError: if the event is not as `model.events` declares it.
        """
        from dgxlab.model import events  # only here: whoever follows a journal comes by, which should be quick

        line = json.dumps(events.written(self._seq, event, fields), separators=(",", ":"), allow_nan=False)
        blob, end = line.encode() + b"\n", os.fstat(self._fd).st_size
        try:
            while blob:
                blob = blob[os.write(self._fd, blob) :]
        except OSError:
            os.ftruncate(self._fd, end)
            raise
        self._seq += 1
        if event in DURABLE:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; the journal is complete."""
        os.fsync(self._fd)
        os.close(self._fd)


def whole_lines(path: Path, offset: int, limit: int = 1 << 20) -> bytes:
    """Return the complete lines from `offset`, at most about `limit` bytes of them, b"" when there is none yet."""
    with path.open("rb") as file:
        file.seek(offset)
        chunk = file.read(limit)
        end = chunk.rfind(b"\n") + 1
        while chunk and not end:
            more = file.read(limit)
            if not more:
                return b""
            chunk += more
            end = chunk.rfind(b"\n") + 1
    return chunk[:end]


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a journal, leaving out a torn last line."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
