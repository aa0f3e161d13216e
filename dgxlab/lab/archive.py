"""Raw files of jobs as they are kept on this machine: one gzipped tar a job, readable by its owner alone.

What lies in such a tar came from another machine, so nothing in it is believed: plain files with plain names, each
once, or the whole of it is refused. Files are read as streams; `content` alone holds one in memory.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dgxlab.errors import CheckFailed, UsageError, command
from dgxlab.transport.host import JOB_ID

PLAIN = re.compile(r"(raw/)?[A-Za-z0-9][A-Za-z0-9._+-]*")
"""What a raw file may be called; a tar without extensions has no room for more than 256 characters."""

SUFFIX = ".tar.gz"
"""Of a job's raw files; what stands before it is the job's id."""

CHUNK = 1 << 20


@dataclass(frozen=True)
class RawFile:
    """A raw file: its path in the job's folder, its size in bytes, and its content's sha256."""

    path: str
    size: int
    sha256: str


def default_folder() -> Path:
    """Return where raw files are kept: with the user's data, for a cache may be emptied by anybody."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "dgxlab" / "raw"


def path_of(folder: Path, job_id: str) -> Path:
    """Return where a job's raw files are kept; what is there is whole.

    Raises:
        UsageError: if the id cannot be the name of a file.
    """
    if not JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} is no job's id", next="dgxlab jobs")
    return folder / f"{job_id}{SUFFIX}"


@contextlib.contextmanager
def incoming(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to fill, which becomes `path` when the block ends well and is deleted when it does not.

    Raises:
        UsageError: if it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with part.open("wb") as file:
            part.chmod(0o600)
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}", next=command("df", path.parent)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def listing(path: Path, at_most: int = sys.maxsize) -> dict[str, RawFile]:
    """Return the files of an archive by path, every byte of it read.

    Args:
        at_most: More bytes than this are refused: a few kilobytes of gzip can hold any number of zeros.

    Raises:
        CheckFailed: if it is damaged, too long, or holds anything but plain files.
    """
    found = {}
    for name, chunks in _files(path, at_most):
        size, total = 0, hashlib.sha256()
        for chunk in chunks:
            size += len(chunk)
            total.update(chunk)
        found[name] = RawFile(name, size, total.hexdigest())
    return found


def copy(path: Path, name: str, write: Callable[[bytes], object]) -> None:
    """Pass one file of an archive to `write`, a chunk at a time."""
    for found, chunks in _files(path):
        if found == name:
            for chunk in chunks:
                write(chunk)
            return


def content(path: Path, name: str) -> bytes:
    """Return one file of an archive, b"" where there is none."""
    chunks: list[bytes] = []
    copy(path, name, chunks.append)
    return b"".join(chunks)


def unpack(path: Path, folder: Path) -> None:
    """Write every file of an archive into a folder, which is made for it.

    Raises:
        UsageError: if something is in it already, or it cannot be written.
    """
    try:
        (folder / "raw").mkdir(parents=True)  # refuses one that is there: nothing is written through what others made
        for name, chunks in _files(path):
            with (folder / name).open("xb") as file:
                file.writelines(chunks)
    except OSError as error:
        raise UsageError(f"cannot unpack into {folder}: {error}", next="give --out another folder") from error


def _files(path: Path, at_most: int = sys.maxsize) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the files of an archive, each with what yields its content.

    Headers are read one by one, not by tarfile: it follows extensions of the format before anybody can look at them,
    and they may be gigabytes long.
    """
    seen: set[str] = set()
    with _damage(path), gzip.open(path) as unpacked:
        while any(block := b"".join(_exactly(unpacked, tarfile.BLOCKSIZE))):
            entry = tarfile.TarInfo.frombuf(block, "ascii", "replace")
            if entry.type != tarfile.REGTYPE or not PLAIN.fullmatch(entry.name) or entry.name in seen:
                raise CheckFailed(f"{entry.name!r} in {path.name} is no raw file of a job: nothing more is read")
            seen.add(entry.name)
            if not 0 <= entry.size <= at_most - tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it holds more than was announced")
            at_most -= tarfile.BLOCKSIZE + entry.size
            content = _content(path, unpacked, entry.size)
            yield entry.name, content
            for _ in content:  # what was not looked at
                pass
            unpacked.read(-entry.size % tarfile.BLOCKSIZE)
        if len(unpacked.read(tarfile.RECORDSIZE + 1)) > tarfile.RECORDSIZE:  # to the end: there is gzip's checksum
            raise tarfile.ReadError("something follows its end")


def _content(path: Path, stream: gzip.GzipFile, size: int) -> Iterator[bytes]:
    with _damage(path):
        yield from _exactly(stream, size)


def _exactly(stream: gzip.GzipFile, size: int) -> Iterator[bytes]:
    while size:
        chunk = stream.read(min(CHUNK, size))
        if not chunk:
            raise EOFError("it ends too early")
        size -= len(chunk)
        yield chunk


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turn what Python says of a broken archive into a sentence."""
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise CheckFailed(f"{path} is damaged, fetch it again without it: {error}", next=command("rm", path)) from error
