"""What the operating system refused, in a sentence, with the command that mends it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from dgxlab.agent.environment import settings
from dgxlab.errors import RemoteError

FULL = (errno.ENOSPC, errno.EDQUOT)

NEARLY_FULL = 16 << 20
"""Bytes free below which a program that failed most likely failed for that; what it says itself names it seldom."""


def refused(doing: str, error: OSError) -> RemoteError:
    """Return the error to tell.

    Args:
        doing: What could not be done, as the beginning of a sentence.
    """
    host = settings().name
    if error.errno in FULL:
        return RemoteError(f"{doing} failed: the disk of {host} is full", next=clean(), details=str(error))
    if error.errno == errno.EIO:  # a write names no file
        return RemoteError(
            f"{doing} failed: an I/O error on the disk of {host}", next=f"dgxlab doctor {host}", details=str(error)
        )
    program = error.filename if isinstance(error.filename, str) else ""
    if isinstance(error, FileNotFoundError) and program and os.sep not in program:
        return RemoteError(f"{doing} failed: there is no {program} on {host}", next=f"dgxlab doctor {host}")
    return RemoteError(f"{doing} failed: {error}", next=f"dgxlab doctor {host}")


def full_disk(folder: Path) -> str:
    """Return `: the disk of HOST is full` if there is hardly any room left, "" else."""
    stat = os.statvfs(folder)
    return f": the disk of {settings().name} is full" if stat.f_bavail * stat.f_frsize < NEARLY_FULL else ""


def clean() -> str:
    """Return the command that shows what takes room here."""
    return f"dgxlab host clean {settings().name} --older-than 0 --dry-run"
