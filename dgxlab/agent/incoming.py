"""Files that the client sends: whole and as they were meant, or not at all."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dgxlab.errors import AGAIN, RemoteError, command


@contextmanager
def incoming(stream: IO[bytes], sha256: str, beside: Path, what: str) -> Iterator[Path]:
    """Give what a stream holds as a file in a scratch folder on the disk of `beside`, to be moved from there.

    Raises:
        RemoteError: if it is not what the client meant to send (a cut connection looks like its end), or the disk is
            full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".in-", dir=beside) as scratch:
            file = Path(scratch, "file")
            if _copy(stream, file) != sha256:
                raise RemoteError(f"{what} did not arrive whole", next=AGAIN)
            yield file
    except OSError as error:
        raise RemoteError(
            f"{what} cannot be written on the host: {error.strerror or error}", next=command("df", "-h", beside)
        ) from error


def _copy(stream: IO[bytes], file: Path) -> str:
    """Write a stream to a file, a piece at a time, and return its sha256."""
    total = hashlib.sha256()
    with file.open("wb") as out:
        while piece := stream.read(1 << 20):
            total.update(piece)
            out.write(piece)
    return total.hexdigest()
