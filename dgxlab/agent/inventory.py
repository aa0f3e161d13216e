"""What lies under the root, when it was last used, and taking away what is asked for while nothing runs.

A job holds `in-use.lock` shared for its life, so what jobs share (builds, work folders, models, tools) goes only while
no job runs. What goes is renamed into `trash/` first: an interrupted removal leaves no half of anything. The ids of
removed jobs are in `jobs.removed`, so that a client that never heard of a job's end does not start it again.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dgxlab.agent.environment import Root
from dgxlab.agent.job import Job
from dgxlab.agent.lock import lock
from dgxlab.errors import RemoteError
from dgxlab.replies import SHARED, Item, Removal, Status

LEFTOVER_S = 86400.0
"""What an interrupted command left half done is left alone for a day: it may still be at work."""


def was_removed(root: Root, job_id: str) -> bool:
    """Tell whether a job was here and was removed: it ran, and runs at most once."""
    return _removed(root).exists() and job_id in _removed(root).read_text().splitlines()


def hold(root: Root) -> int:
    """Return a descriptor that keeps what jobs share from being removed until it, and every copy of it, is closed."""
    fd = _open(root)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def unfit(root: Root) -> Iterator[tuple[str, str]]:
    """Yield why no job can run under this root, each reason with `root` or the program that is missing."""
    fd = _open(root)
    try:
        lock(fd, fcntl.LOCK_SH)
    except RemoteError as error:
        yield "root", error.message
    finally:
        os.close(fd)
    if os.statvfs(root.path).f_flag & os.ST_NOEXEC:
        yield "root", f"{root.path} is mounted noexec: nothing that is built there could run"
    if not shutil.which("setsid"):
        yield "setsid", "not found on PATH: no job could be started"


def inventory(root: Root) -> list[Item]:
    """Return everything under the root but what is in the trash, by kind, the longest unused first."""
    return sorted((thing.item() for thing in _things(root)), key=lambda item: (item.kind, item.used))


def remove(root: Root, wanted: Sequence[tuple[str, str, float]]) -> Removal:
    """Remove things, each named by kind, name and the last use that was seen; one that was used since then stays.

    What the trash holds goes too, also when nothing else does.
    """
    removed, kept, trash = [], [], root.path / "trash"
    fd = _open(root)
    try:  # no job begins while this is locked; one of an older version does not hold it, and is looked at as well
        alone = lock(fd) and not any(Job(path).status().state == "running" for path in _children(root.jobs))
        there = {(thing.kind, thing.name): thing for thing in _things(root)}
        for kind, name, used in wanted:
            thing = there.get((kind, name))
            if thing is None:
                continue  # another command removed it
            if reason := _objection(thing, used, alone=alone):
                kept.append((kind, name, reason))
            else:
                if kind == "jobs":
                    (thing.paths[0] / "agent.pyz").unlink(missing_ok=True)  # room for the note on a full disk
                    _note_removal(root, name)
                trash.mkdir(mode=0o700, exist_ok=True)
                for path in thing.paths:
                    path.rename(trash / f"{time.time_ns()}-{path.name}")
                removed.append((kind, name))
    finally:
        os.close(fd)
    for path in _children(trash):  # the lock is free again: this may take long
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)  # another command may be at the same
    return Removal(tuple(removed), tuple(kept), busy=not alone)


@dataclass(frozen=True)
class _Thing:
    kind: str
    name: str
    paths: tuple[Path, ...]

    def item(self) -> Item:
        used, size = self.used, sum(map(_size, self.paths))
        status = Job(self.paths[0]).status() if self.kind == "jobs" else Status(self.name, "")
        return Item(self.kind, self.name, used, time.time() - used, size, status.state, status.journal_bytes)

    @property
    def used(self) -> float:
        """The newest time of the paths and of what lies directly in them: stamps and journals are touched there."""
        inside = [child for path in self.paths if path.is_dir() for child in path.iterdir()]
        newest = 0.0
        for path in (*self.paths, *inside):
            try:
                newest = max(newest, path.lstat().st_mtime)
            except FileNotFoundError:  # it is being replaced this instant
                newest = time.time()
        return newest


def _things(root: Root) -> Iterator[_Thing]:
    """Yield everything that dgxlab made."""
    for kind, folder in (("builds", root.builds), ("work", root.work), ("tools", root.tools), ("jobs", root.jobs)):
        for path in filter(Path.is_dir, _children(folder)):
            torn = kind == "jobs" and Job(path).torn
            yield _Thing("leftovers", f"jobs/{path.name}", (path,)) if torn else _Thing(kind, path.name, (path,))
    yield from (_Thing("agents", path.stem, (path,)) for path in _children(root.agents) if path.suffix == ".pyz")
    # synthetic models, also one that was sent for a job that never came; any other file there is the user's own
    for path in _children(root.models):
        model = path.with_suffix(".gguf")
        if path.match("synthetic-*.json") and not model.is_symlink():
            yield _Thing("models", path.stem, (path, *([model] if model.exists() else ())))
        elif path.match("synthetic-*-f16.gguf"):
            yield _Thing("models", path.stem, (path,))
    if root.objects.is_dir():
        yield _Thing("sources", root.objects.name, (root.objects,))
    # what interrupted commands left half done, and at once what is broken
    for folder in (root.builds, root.work, root.tools, root.jobs, root.models, root.objects.parent):
        for path in _children(folder, hidden=True):
            thing = _Thing("leftovers", f"{folder.name}/{path.name}", (path,))
            yield from [thing] if path.name.startswith(".broken-") else _old(thing)
    for path in _children(root.agents):
        if path.suffix != ".pyz":
            yield from _old(_Thing("leftovers", f"{root.agents.name}/{path.name}", (path,)))


def _old(thing: _Thing) -> Iterator[_Thing]:
    if time.time() - thing.used > LEFTOVER_S:
        yield thing


def _objection(thing: _Thing, used: float, *, alone: bool) -> str:
    """Return why something stays, "" when it may go."""
    if thing.kind == "sources" or thing.paths[0] == Path(sys.argv[0]):
        return "it is always kept"
    if thing.kind in SHARED and not alone:
        return "a job runs"
    if thing.kind == "jobs" and (state := Job(thing.paths[0]).status().state) not in ("done", "lost"):
        return f"it is {state}"
    return "it was used just now" if thing.used > used else ""


def _children(folder: Path, *, hidden: bool = False) -> list[Path]:
    """Return what lies in a folder of ours: no links, and nothing where the folder is one; they lead elsewhere."""
    if folder.is_symlink() or not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if path.name.startswith(".") == hidden)
    return sorted(path for path in paths if not path.is_symlink())


def _size(path: Path) -> int:
    """Return the bytes on the disk of a file or a folder, links not followed."""
    inside = (Path(folder, name) for folder, folders, files in os.walk(path) for name in (*folders, *files))
    total = 0
    for each in (path, *inside):
        with suppress(FileNotFoundError):
            total += each.lstat().st_blocks * 512
    return total


def _removed(root: Root) -> Path:
    return root.path / "jobs.removed"


def _note_removal(root: Root, job_id: str) -> None:
    fd = os.open(_removed(root), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, f"{job_id}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(root: Root) -> int:
    return os.open(root.path / "in-use.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
