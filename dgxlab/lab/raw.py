"""Raw output of a job's programs: fetched when the job has ended, checked against the record, kept.

One gzipped tar per job, readable only by its owner. It comes from another machine and is not trusted: unless it holds
only plain files with plain names, each once, it is refused. Only `content` holds a whole file in memory.
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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from dgxlab.errors import CheckFailed, DgxlabError, SpecError, UsageError, command
from dgxlab.lab import Lab, Watch, noted
from dgxlab.model import GateStep, about, events, from_json
from dgxlab.model.parts import FinalStatus
from dgxlab.replies import SLURMS_WORD, final_status
from dgxlab.store import Job, Store
from dgxlab.transport import retry
from dgxlab.transport.host import JOB_ID, Host
from dgxlab.units import size

_PLAIN = re.compile(r"(raw/)?[A-Za-z0-9][A-Za-z0-9._+-]*")  # valid names of raw files

SUFFIX = ".tar.gz"
_CHUNK = 1 << 20

AT_ONCE = 64 << 20  # raw files of up to this many bytes are fetched when their job ends; larger ones on request
_PAUSES_S = (1.0, 2.0, 4.0)  # pauses between attempts: shorter than for a job, because no result depends on raw files

_WHOLE_JOB = {
    "plan.json": "the plan",
    "journal.jsonl": "every event",
    "rc": "the final status",
    SLURMS_WORD: "what Slurm says of its end",
    "agent.err": "the agent's stderr",
    "raw/telemetry-host.jsonl": "the host's condition, twice a second",
    "raw/telemetry-gpu.csv": "the GPUs' condition, twice a second",
}
_STREAMS = {".out": "stdout", ".err": "stderr", ".log": "output", ".txt": "text"}


@dataclass(frozen=True)
class RawFile:
    """A raw file: its path in the job's folder, its size in bytes, its sha256."""

    path: str
    size: int
    sha256: str


def fetch_small(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Fetch the raw files of a job that has ended, unless they are here or have more than AT_ONCE bytes.

    A failure is only a note, and so is Ctrl-C: the results are recorded already.
    """
    if path_of(lab.raw, job_id).exists():
        return
    try:
        _fetch(lab, host, lab.store.job(job_id), watch, AT_ONCE)
    except (DgxlabError, KeyboardInterrupt) as error:
        why = error.message if isinstance(error, DgxlabError) else "interrupted"
        noted(watch)(f"the raw files of job {job_id} stay on {host.name} ({why}); to fetch them: dgxlab logs {job_id}")


def archive(lab: Lab, job: Job, where: str | None, watch: Watch) -> tuple[Path, dict[str, RawFile]]:
    """Return the path of a job's archive, and its files by path; fetch it if missing, and check it always.

    Args:
        where: The host's name in hosts.yaml, if it is not the one in the record.

    Raises:
        UsageError: if the job has not ended, as far as the record knows.
        SpecError: if they are not here and no hosts.yaml names the host.
        JobLost: if the host no longer has the job.
        CheckFailed: if a file differs from the record.
    """
    path = path_of(lab.raw, job.job_id)
    if path.exists():
        return path, _checked(lab.store, job, path, command("rm", path))
    if not job.ended and job.state != "lost":
        raise UsageError(f"job {job.job_id} has not ended in this record", next=f"dgxlab attach {job.job_id}")
    try:
        host = lab.connect(where or job.host)
    except SpecError as error:
        message = f"the raw files of job {job.job_id} are not on this machine, and {error.message}"
        details = f"to fetch them: {error.next}\n{error.details}"
        raise SpecError(message, next=f"dgxlab report {job.job_id}", details=details) from error
    noted(watch)(f"fetching the raw files of job {job.job_id} from {host.name}")
    return path, _fetch(lab, host, job, watch)


def describe(job: Job, path: str) -> str:
    """Return what a raw file of a job holds, as `run:3 TOOL stdout`; "" if unknown."""
    name = PurePosixPath(path)
    steps = {str(step["id"]).replace(":", "-"): step for step in json.loads(job.plan_json)["steps"]}
    stems = [stem for stem in steps if name.stem == stem or name.stem.startswith(f"{stem}-")]
    if not stems or name.suffix not in _STREAMS:
        return _WHOLE_JOB.get(path, "")
    step = steps[stem := max(stems, key=len)]
    of = about(from_json(GateStep, step).gate) if step["kind"] in GateStep.kinds else step.get("tool", "")
    return " ".join(filter(None, (step["id"], of, name.stem[len(stem) + 1 :], _STREAMS[name.suffix])))


def _fetch(lab: Lab, host: Host, job: Job, watch: Watch, limit: int = sys.maxsize) -> dict[str, RawFile]:
    """Fetch in one round trip, retried after a cut connection; only checked files are kept."""

    def attempt() -> dict[str, RawFile]:
        with incoming(path_of(lab.raw, job.job_id)) as part:
            announced = host.raw(job.job_id, limit, part.write)
            if announced.size > limit:
                raise UsageError(f"they are {size(announced.size)}")
            part.flush()
            why = host.entry.typed(command("ls", "-lR", f"{host.transport.root}/jobs/{job.job_id}"))
            return _checked(lab.store, job, Path(part.name), why, announced.at_most)

    return retry.again(host, attempt, noted(watch), _PAUSES_S)


def _checked(store: Store, job: Job, path: Path, next: str, at_most: int = sys.maxsize) -> dict[str, RawFile]:
    """Return the files of an archive; raises CheckFailed if one is missing or differs from the record."""
    files = listing(path, at_most)
    compare = partial(_compare, job, files, next)
    tables = (f"SELECT raw FROM {table} WHERE job_id = :job" for table in ("runs", "gates", "checks"))  # noqa: S608
    rows = store.rows(" UNION ALL ".join(tables), {"job": job.job_id})
    streams = [stream for row in rows for stream in json.loads(row["raw"]).values()]
    plan = hashlib.sha256(job.plan_json.encode()).hexdigest()
    compare({"plan.json": plan, **{stream["path"]: stream["sha256"] for stream in streams}})
    if "rc" in files:
        try:
            if journal := read_final_status(content(path, "rc"))["journal_sha256"]:
                compare({"journal.jsonl": journal})
            # the last line of the journal has the sha256 of each raw file; older agents wrote none, and on a full
            # disk the last line was incomplete
            whole, _, _ = content(path, "journal.jsonl").rpartition(b"\n")
            *_, last = whole.splitlines() or [b""]
            event = events.read(json.loads(last)) if last else None
            compare(event.raw if isinstance(event, events.EndEvent) else {})
        except (ValueError, RecursionError) as error:
            raise CheckFailed(f"rc of job {job.job_id} or its journal cannot be read: {error}", next=next) from error
    elif job.ended:
        raise CheckFailed(f"rc of job {job.job_id} is missing", next=next)
    return files


def _compare(job: Job, files: Mapping[str, RawFile], next: str, known: Mapping[str, str]) -> None:
    for name, sha256 in known.items():
        actual = files[name].sha256 if name in files else "missing"
        if actual != sha256:
            message = f"{name} of job {job.job_id} is not what was recorded: its sha256 is {actual[:16]}"
            raise CheckFailed(f"{message}, not {sha256[:16]}", next=next)


def read_final_status(content: bytes) -> FinalStatus:
    """Parse the file `rc` of a job into its final status; ValueError if it is none or damaged."""
    if (status := final_status(content)) is None:
        raise ValueError("it is no final status, or was damaged")
    return from_json(FinalStatus, status)


# -- the archive -------------------------------------------------------------------------------------------------------


def path_of(folder: Path, job_id: str) -> Path:
    """Return the path of a job's archive in a folder; UsageError if the id is no valid file name."""
    if not JOB_ID.fullmatch(job_id):
        raise UsageError(f"{job_id!r} is no job's id", next="dgxlab jobs")
    return folder / f"{job_id}{SUFFIX}"


@contextlib.contextmanager
def incoming(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which is renamed to `path` on success and deleted on an exception."""
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
    """Read all of an archive and return its files by path.

    Unpacked it may have `at_most` bytes: a few kilobytes of gzip can hold any number of zeros. Raises CheckFailed if it
    is damaged, too long, or has anything but plain files.
    """
    files = {}
    for name, chunks in _files(path, at_most):
        size, total = 0, hashlib.sha256()
        for chunk in chunks:
            size += len(chunk)
            total.update(chunk)
        files[name] = RawFile(name, size, total.hexdigest())
    return files


def content(path: Path, name: str) -> bytes:
    """Return the content of one file of an archive, b"" if there is none."""
    return next((b"".join(chunks) for each, chunks in _files(path) if each == name), b"")


def unpack(path: Path, folder: Path) -> None:
    """Write all files of an archive into a folder; UsageError if it has raw files already, or cannot be written."""
    try:
        (folder / "raw").mkdir(parents=True)  # fails if it exists: never write through a folder or link made by others
        for name, chunks in _files(path):
            with (folder / name).open("xb") as file:
                file.writelines(chunks)
    except OSError as error:
        raise UsageError(f"cannot unpack into {folder}: {error}", next="give --out another folder") from error


def _files(path: Path, at_most: int = sys.maxsize) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the files of an archive, each with an iterator over its content.

    Headers are parsed one by one, not by tarfile, which reads format extensions of up to gigabytes before they can
    be checked.
    """
    seen: set[str] = set()
    with _damage(path), gzip.open(path) as unpacked:
        while any(block := b"".join(_exactly(path, unpacked, tarfile.BLOCKSIZE))):
            entry = tarfile.TarInfo.frombuf(block, "ascii", "replace")
            if entry.type != tarfile.REGTYPE or not _PLAIN.fullmatch(entry.name) or entry.name in seen:
                raise CheckFailed(f"{entry.name!r} in {path.name} is no raw file of a job: nothing more is read")
            seen.add(entry.name)
            if not 0 <= entry.size <= at_most - tarfile.BLOCKSIZE:
                raise tarfile.ReadError("it holds more than was announced")
            at_most -= tarfile.BLOCKSIZE + entry.size
            content = _exactly(path, unpacked, entry.size)
            yield entry.name, content
            for _ in content:  # skip the unread rest
                pass
            unpacked.read(-entry.size % tarfile.BLOCKSIZE)
        if len(unpacked.read(tarfile.RECORDSIZE + 1)) > tarfile.RECORDSIZE:  # read to the end, where gzip's checksum is
            raise tarfile.ReadError("something follows its end")


def _exactly(path: Path, stream: gzip.GzipFile, size: int) -> Iterator[bytes]:
    while size:
        with _damage(path):
            chunk = stream.read(min(_CHUNK, size))
            if not chunk:
                raise EOFError("it ends too early")
        size -= len(chunk)
        yield chunk


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise CheckFailed(f"{path} is damaged, fetch it again without it: {error}", next=command("rm", path)) from error
