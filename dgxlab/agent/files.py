"""Files on a host: their digests, those that the client sends, and what the operating system refuses."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dgxlab.agent.environment import settings
from dgxlab.errors import AGAIN, RemoteError, command

PIECE = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
NEARLY_FULL = 16 << 20
"""Bytes free below which a program that failed most likely failed for that; its own message seldom names it."""


def sha256(path: Path) -> str:
    """Return a file's sha256 in hex, "" when it is not there."""
    if not path.exists():
        return ""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            total.update(piece)
    return total.hexdigest()


@contextmanager
def incoming(stream: IO[bytes], digest: str, beside: Path, what: str) -> Iterator[Path]:
    """Give what a stream holds as a file in a scratch folder on the disk of `beside`, to be moved from there.

    Raises:
        RemoteError: if its sha256 is not `digest` (a cut connection looks like its end), or the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".in-", dir=beside) as scratch:
            path, total = Path(scratch, "file"), hashlib.sha256()
            with path.open("wb") as file:
                while piece := stream.read(PIECE):
                    total.update(piece)
                    file.write(piece)
            if total.hexdigest() != digest:
                raise RemoteError(f"{what} did not arrive whole", next=AGAIN)
            yield path
    except OSError as error:
        raise RemoteError(
            f"{what} cannot be written on the host: {error.strerror or error}", next=command("df", "-h", beside)
        ) from error


def refused(doing: str, error: OSError) -> RemoteError:
    """Return what the operating system refused, with the command that mends it.

    Args:
        doing: What could not be done, as the beginning of a sentence.
    """
    host = settings().name
    doctor = f"dgxlab doctor {host}"
    if error.errno in FULL:
        return RemoteError(f"{doing} failed: the disk of {host} is full", next=clean(), details=str(error))
    if error.errno == errno.EIO:  # a write names no file
        return RemoteError(f"{doing} failed: an I/O error on the disk of {host}", next=doctor, details=str(error))
    program = error.filename if isinstance(error.filename, str) else ""
    if isinstance(error, FileNotFoundError) and program and os.sep not in program:
        return RemoteError(f"{doing} failed: there is no {program} on {host}", next=doctor)
    return RemoteError(f"{doing} failed: {error}", next=doctor)


def full_disk(folder: Path) -> str:
    """Return `: the disk of HOST is full` if there is hardly any room left, "" else."""
    stat = os.statvfs(folder)
    return f": the disk of {settings().name} is full" if stat.f_bavail * stat.f_frsize < NEARLY_FULL else ""


def clean() -> str:
    """Return the command that shows what takes room here."""
    return f"dgxlab host clean {settings().name} --older-than 0 --dry-run"
