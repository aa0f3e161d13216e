"""A job's raw files on their way to the client: one line of JSON that says how large they are, then a gzipped tar.

Everything that a number may be checked against: what the programs printed, the build's log, plan, journal and rc.
"""

from __future__ import annotations

import gzip
import json
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from dgxlab.agent.job import Job, sha256
from dgxlab.agent.jobs import gone
from dgxlab.errors import UsageError

LEVEL = 6
"""Of gzip: text shrinks to a tenth, at a hundred megabytes a second."""


def send(job: Job, limit: int, out: BinaryIO) -> None:
    """Write the files' size and number to `out` and, unless they are larger than `limit` bytes, the files.

    Raises:
        JobLost: if there is no such job.
        UsageError: if it has not ended: its files still grow.
    """
    state = job.status().state
    if state == "absent":
        raise gone(job.job_id)
    if state not in ("done", "lost"):
        raise UsageError(f"job {job.job_id} has not ended", next=f"dgxlab attach {job.job_id}")
    sizes = {path: path.lstat().st_size for path in _files(job)}
    size = sum(sizes.values())
    out.write(json.dumps({"size": size, "files": len(sizes)}).encode() + b"\n")
    if size <= limit:
        _pack(job.folder, sizes, out)
    out.flush()


def digests(job: Job) -> dict[str, str]:
    """Return the sha256 of every raw file by its path in the job's folder; of those that still grow, of none."""
    grow = (job.rc, job.journal, job.folder / "agent.err")
    return {str(path.relative_to(job.folder)): sha256(path) for path in _files(job) if path not in grow}


def _files(job: Job) -> list[Path]:
    """Return what is kept of a job; rc comes first, because the journal is checked against it."""
    found = [job.rc, job.plan, job.journal, job.folder / "agent.err"]
    found += [*sorted(job.folder.glob("*.log")), *sorted(job.raw.glob("*"))]
    return [path for path in found if path.exists() and stat.S_ISREG(path.lstat().st_mode)]


def _pack(folder: Path, sizes: Mapping[Path, int], out: BinaryIO) -> None:
    with (
        gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, size in sizes.items():
            entry = tarfile.TarInfo(str(path.relative_to(folder)))
            entry.size, entry.mode, entry.mtime = size, 0o600, int(path.stat().st_mtime)
            with path.open("rb") as file:
                archive.addfile(entry, file)
