"""Files on a host: their digests, files that the client sends, errors of the operating system, and the journal."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from dgxlab.agent.boot import settle, sync
from dgxlab.agent.environment import PATIENCE_S, Root, base_env, settings
from dgxlab.errors import AGAIN, RemoteError, command

if TYPE_CHECKING:  # following a journal needs no vocabulary, and should be quick
    from dgxlab.model.events import Event

_PIECE = 1 << 20
NEARLY_FULL = 16 << 20
"""With fewer bytes free, a full disk is the likely cause of a failure; a program's own message seldom says so."""


@contextmanager
def scratch_folder(folder: Path, texts: Mapping[str, str]) -> Iterator[None]:
    """Write texts into a new folder, by relative path, and delete the folder with all its content on exit."""
    try:
        for name, content in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sha256(path: Path) -> str:
    """Return a file's sha256 in hex, "" if the file is missing."""
    if not path.exists():
        return ""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            total.update(piece)
    return total.hexdigest()


def tail(path: Path, size: int) -> str:
    """Return the last `size` bytes of a file as text; undecodable bytes are replaced."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        return file.read().decode(errors="replace")


@contextmanager
def incoming(stream: IO[bytes], digest: str, beside: Path, what: str) -> Iterator[Path]:
    """Yield the path of a temporary file below `beside` with the content of a stream; the caller renames it.

    `what` names the content in errors. Raises RemoteError if the sha256 is not `digest`, as after a cut connection, or
    the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=".in-", dir=beside) as scratch:
            path, total = Path(scratch, "file"), hashlib.sha256()
            with path.open("wb") as file:
                while piece := stream.read(_PIECE):
                    total.update(piece)
                    file.write(piece)
            if total.hexdigest() != digest:
                raise RemoteError(f"{what} did not arrive whole", next=AGAIN)
            yield path
    except OSError as error:
        message = f"{what} cannot be written on the host: {error.strerror or error}"
        raise RemoteError(message, next=command("df", "-h", beside)) from error


def remote_error(doing: str, error: OSError) -> RemoteError:
    """Return an error of the operating system as a RemoteError: `<doing> failed: <cause>`."""
    host = settings().name
    program = error.filename if isinstance(error.filename, str) else ""
    cause, remedy, details = str(error), f"dgxlab doctor {host}", ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cause, remedy, details = f"the disk of {host} is full", clean_command(), cause
    elif error.errno == errno.EIO:  # a write names no file
        cause, details = f"an I/O error on the disk of {host}", cause
    elif isinstance(error, FileNotFoundError) and program and os.sep not in program:
        cause = f"there is no {program} on {host}"
    return RemoteError(f"{doing} failed: {cause}", next=remedy, details=details)


def full_disk(folder: Path) -> str:
    """Return `: the disk of HOST is full`, to end an error's sentence, if the folder's disk is nearly full; else ""."""
    return f": the disk of {settings().name} is full" if shutil.disk_usage(folder).free < NEARLY_FULL else ""


def clean_command() -> str:
    """Return the client's command that lists what dgxlab could delete on this host."""
    return f"dgxlab host clean {settings().name} --older-than 0 --dry-run"


def unpack(root: Root, name: str, version: str, sha256: str, stream: IO[bytes]) -> None:
    """Install a build tool from the wheel in a stream as tools/<name>-<version>, unless that exists and runs.

    The folder gets this name only after the tool ran, so that PATH has no incomplete tool, or one for another machine.
    Raises RemoteError if the wheel is incomplete or damaged, the tool does not run here, or the disk is full.
    """
    from zipfile import BadZipFile  # imported late: most verbs unpack nothing

    folder = root.tools / f"{name}-{version}"
    with incoming(stream, sha256, root.tools, f"{name} {version}") as wheel:
        tool = wheel.with_name("tool")
        try:
            _extract(wheel, tool, name, version)
        except (BadZipFile, ValueError) as error:
            raise RemoteError(f"the wheel of {name} {version} is damaged: {error}") from error
        _try(tool / "bin" / name)
        with suppress(OSError, RemoteError):
            _try(folder / "bin" / name)
            return  # sent before, or by another client just now
        with suppress(FileNotFoundError):
            folder.rename(wheel.with_name("broken"))
        try:
            settle(tool, folder)
        except OSError:
            if not folder.exists():
                raise


def _extract(wheel: Path, tool: Path, name: str, version: str) -> None:
    """Write a tool's files except the Python ones: all of `data` (cmake finds share from bin), `scripts` as bin."""
    from zipfile import ZipFile

    places = {f"{name}/data/": "", f"{name}-{version}.data/scripts/": "bin/"}
    with ZipFile(wheel) as archive:
        for entry in archive.infolist():
            prefix = next((prefix for prefix in places if entry.filename.startswith(prefix)), None)
            if prefix is None or entry.is_dir():
                continue
            inside = PurePosixPath(places[prefix] + entry.filename.removeprefix(prefix))
            mode = entry.external_attr >> 16
            if inside.is_absolute() or ".." in inside.parts or stat.S_ISLNK(mode):
                raise ValueError(f"{entry.filename} would be written elsewhere")
            target = tool / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(entry))
            target.chmod(0o755 if mode & 0o111 else 0o644)


def _try(program: Path) -> None:
    try:
        argv = [str(program), "--version"]
        subprocess.run(argv, capture_output=True, text=True, env=base_env(), timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        message = f"the {program.name} that was sent does not run on the host: {reason}"
        raise RemoteError(message, next="sudo apt-get install cmake ninja-build") from error


# -- the journal -------------------------------------------------------------------------------------------------------


_DURABLE = frozenset({"job", "build", "model", "gate", "run", "error", "end"})
"""Events that are fsynced: losing one would lose or repeat work."""


class Journal:
    """An append-only log of a job's events, one JSON object per line; the job's run.lock guarantees one writer.

    It is all that the client records, so an event that a result depends on is on disk before the next step begins.
    """

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


def waits_for(journal: Path) -> str:
    """Return whom a running job waits for, as the last line of its journal says; "" if it does not wait."""
    try:
        last = json.loads(tail(journal, 4096).splitlines()[-1])
        return str(last["owner"]) if last["event"] == "lock" and last["state"] in ("waiting", "building") else ""
    except (OSError, ValueError, LookupError, TypeError):  # not written yet, or not whole
        return ""
