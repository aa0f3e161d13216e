"""What a job's programs printed, byte for byte: fetched when the job has ended, checked against the record, kept.

One gzipped tar a job, readable by its owner alone. What is in such a tar came from another machine, so nothing in it is
believed: plain files with plain names, each once, or the whole of it is refused. Files are read as streams; `content`
alone holds one in memory.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from dgxlab.errors import CheckFailed, DgxlabError, UsageError, command
from dgxlab.lab import Lab, Watch, noted
from dgxlab.model import CheckStep, about, events, from_json
from dgxlab.model.events import FinalStatus
from dgxlab.replies import final_status
from dgxlab.store import Job, Store
from dgxlab.transport import retry
from dgxlab.transport.host import JOB_ID, Host
from dgxlab.units import size

PLAIN = re.compile(r"(raw/)?[A-Za-z0-9][A-Za-z0-9._+-]*")
"""What a raw file may be called; a tar without extensions has no room for more than 256 characters."""

SUFFIX = ".tar.gz"
"""Of a job's raw files; the job's id is before it."""

CHUNK = 1 << 20

AT_ONCE = 64 << 20
"""Raw files of up to so many bytes come when their job ends; larger ones when they are asked for."""

PAUSES_S = (1.0, 2.0, 4.0)
"""Pauses between attempts: shorter than for a job, whose results would be missing."""

WHOLE_JOB = {
    "plan.json": "the plan",
    "journal.jsonl": "every event",
    "rc": "the final status",
    "agent.err": "the agent's stderr",
    "raw/telemetry-host.jsonl": "the host's condition, twice a second",
    "raw/telemetry-gpu.csv": "the GPUs' condition, twice a second",
}
STREAMS = {".out": "stdout", ".err": "stderr", ".log": "output", ".txt": "text"}


@dataclass(frozen=True)
class RawFile:
    """A raw file: its path in the job's folder, its size in bytes, and its content's sha256."""

    path: str
    size: int
    sha256: str


def keep(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Fetch what is not kept yet of a job that has ended, unless it is large.

    Whatever goes wrong is a note: the results are recorded. So is Ctrl-C, which must not say that the job goes on.
    """
    if path_of(lab.raw, job_id).exists():
        return
    try:
        _fetch(lab, host, lab.store.job(job_id), watch, AT_ONCE)
    except (DgxlabError, KeyboardInterrupt) as error:
        why = error.message if isinstance(error, DgxlabError) else "interrupted"
        noted(watch)(f"the raw files of job {job_id} stay on {host.name} ({why}); to fetch them: dgxlab logs {job_id}")


def kept(lab: Lab, job: Job, where: str | None, watch: Watch) -> tuple[Path, dict[str, RawFile]]:
    """Return a job's archive and the files in it by path, fetched first where they are not here; always checked.

    Args:
        where: The host, where it has another name here than in the record.

    Raises:
        UsageError: if the job has not ended, as far as the record knows.
        JobLost: if the host has it no more.
        CheckFailed: if a file is not what was recorded.
    """
    path = path_of(lab.raw, job.job_id)
    if path.exists():
        return path, _checked(lab.store, job, path, command("rm", path))
    if not job.ended and job.state != "lost":
        raise UsageError(f"job {job.job_id} has not ended in this record", next=f"dgxlab attach {job.job_id}")
    host = lab.connect(where or job.host)
    noted(watch)(f"fetching the raw files of job {job.job_id} from {host.name}")
    return path, _fetch(lab, host, job, watch)


def describe(job: Job, path: str) -> str:
    """Return what a raw file is: `run:3 llama-bench stdout`."""
    name = PurePosixPath(path)
    steps = {str(step["id"]).replace(":", "-"): step for step in json.loads(job.plan_json)["steps"]}
    stems = [stem for stem in steps if name.stem == stem or name.stem.startswith(f"{stem}-")]
    if not stems or name.suffix not in STREAMS:
        return WHOLE_JOB.get(path, "")
    step = steps[stem := max(stems, key=len)]
    if step["kind"] == "gate":
        of = f"{step['gate']['op']} {step['gate']['backend']}"
    else:
        of = about(from_json(CheckStep, step).gate) if step["kind"] == "check" else step.get("tool", "")
    return " ".join(filter(None, (step["id"], of, name.stem[len(stem) + 1 :], STREAMS[name.suffix])))


def _fetch(lab: Lab, host: Host, job: Job, watch: Watch, limit: int = sys.maxsize) -> dict[str, RawFile]:
    """Fetch in one round trip, more where the connection is cut; nothing is kept that was not checked."""

    def attempt() -> dict[str, RawFile]:
        with incoming(path_of(lab.raw, job.job_id)) as part:
            told = host.raw(job.job_id, limit, part.write)
            if told.size > limit:
                raise UsageError(f"they are {size(told.size)}")
            part.flush()
            why = host.entry.typed(command("ls", "-lR", f"{host.transport.root}/jobs/{job.job_id}"))
            return _checked(lab.store, job, Path(part.name), why, told.at_most)

    return retry.again(host, attempt, noted(watch), PAUSES_S)


def _checked(store: Store, job: Job, path: Path, next: str, at_most: int = sys.maxsize) -> dict[str, RawFile]:
    """Return the files of an archive.

    Raises:
        CheckFailed: if one is not what was recorded, or missing; names it.
    """
    files = listing(path, at_most)
    rows = store.rows(
        "SELECT raw FROM runs WHERE job_id = :job UNION ALL SELECT raw FROM gates WHERE job_id = :job"
        " UNION ALL SELECT raw FROM checks WHERE job_id = :job",
        {"job": job.job_id},
    )
    streams = [stream for row in rows for stream in json.loads(row["raw"]).values()]
    plan = hashlib.sha256(job.plan_json.encode()).hexdigest()
    _compare(job, files, {"plan.json": plan, **{stream["path"]: stream["sha256"] for stream in streams}}, next)
    if "rc" in files:
        try:
            if journal := final_word(content(path, "rc"))["journal_sha256"]:
                _compare(job, files, {"journal.jsonl": journal}, next)
            # the last line of the journal has the sha256 of each raw file; older agents wrote none, and a full disk
            # tore their last line
            whole, _, _ = content(path, "journal.jsonl").rpartition(b"\n")
            *_, last = whole.splitlines() or [b""]
            event = events.read(json.loads(last)) if last else None
            _compare(job, files, event.raw if isinstance(event, events.EndEvent) else {}, next)
        except (ValueError, RecursionError) as error:
            raise CheckFailed(f"rc of job {job.job_id} or its journal cannot be read: {error}", next=next) from error
    elif job.ended:
        raise CheckFailed(f"rc of job {job.job_id} is missing", next=next)
    return files


def _compare(job: Job, files: Mapping[str, RawFile], known: Mapping[str, str], next: str) -> None:
    for name, sha256 in known.items():
        actual = files[name].sha256 if name in files else "missing"
        if actual != sha256:
            raise CheckFailed(
                f"{name} of job {job.job_id} is not what was recorded: its sha256 is {actual[:16]}, not {sha256[:16]}",
                next=next,
            )


def final_word(content: bytes) -> FinalStatus:
    """Return what a job's rc says.

    Raises:
        ValueError: if it is no final status, or was damaged.
    """
    if (told := final_status(content)) is None:
        raise ValueError("it is no final status, or was damaged")
    return from_json(FinalStatus, told)


# -- the archive -------------------------------------------------------------------------------------------------------


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
    files = {}
    for name, chunks in _files(path, at_most):
        size, total = 0, hashlib.sha256()
        for chunk in chunks:
            size += len(chunk)
            total.update(chunk)
        files[name] = RawFile(name, size, total.hexdigest())
    return files


def copy(path: Path, name: str, write: Callable[[bytes], object]) -> None:
    """Pass one file of an archive to `write`, a chunk at a time."""
    for each, chunks in _files(path):
        if each == name:
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

    Headers are read one by one, not by tarfile: it follows extensions of the format before they can be looked at,
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
