"""Items under the root, such as builds, models and jobs: their sizes, their last use and their removal.

A job holds a shared lock on `in-use.lock` while it runs, so items that jobs share (builds, work folders, models, tools)
are removed only while no job runs. An item is renamed into `trash/` first: an interrupted removal leaves no partial
item. `jobs.removed` lists the ids of removed jobs, so that a client that missed a job's end does not start it again.
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
from dgxlab.agent.lock import lock, lock_file
from dgxlab.errors import RemoteError
from dgxlab.replies import LIVE, SHARED, Item, Removal, Status

_IN_USE, _REMOVED = "in-use.lock", "jobs.removed"

_LEFTOVER_S = 86400.0  # seconds after which an unfinished folder is a leftover; a younger one may still be in use


def was_removed(root: Root, job_id: str) -> bool:
    """Return whether a job was removed from this host; it must not run again."""
    removed = root.path / _REMOVED
    return removed.exists() and job_id in removed.read_text().splitlines()


def hold(root: Root) -> int:
    """Lock the items that jobs share against removal, and return the lock's descriptor.

    The lock lasts until the descriptor and all copies in child processes are closed.
    """
    fd = lock_file(root.path / _IN_USE)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def unfit(root: Root) -> Iterator[tuple[str, str]]:
    """Yield each obstacle to running jobs under this root, as (`root` or the program that is missing, reason)."""
    with os.fdopen(lock_file(root.path / _IN_USE), "ab") as file:
        try:
            lock(file.fileno(), fcntl.LOCK_SH)
        except RemoteError as error:
            yield "root", error.message
    if os.statvfs(root.path).f_flag & os.ST_NOEXEC:
        yield "root", f"{root.path} is mounted noexec: nothing that is built there could run"
    if not shutil.which("setsid"):
        yield "setsid", "not found on PATH: no job could be started"


def inventory(root: Root) -> list[Item]:
    """Return all items under the root except the trash, sorted by kind and last use, the oldest first."""
    items = []
    for thing in _things(root):
        used, size = thing.used, sum(map(_size, thing.paths))
        status = Job(thing.paths[0]).status() if thing.kind == "jobs" else Status(thing.name, "")
        age_s = time.time() - used
        items.append(Item(thing.kind, thing.name, used, age_s, size, status.state, status.journal_bytes))
    return sorted(items, key=lambda item: (item.kind, item.used))


def remove(root: Root, wanted: Sequence[tuple[str, str, float]]) -> Removal:
    """Remove items, each given as (kind, name, last use in its `Item`), and empty the trash; return what was removed.

    An item is kept if it was used since, if a running job may need it, or if it is of a kind that is always kept.
    """
    removed, kept, trash = [], [], root.path / "trash"
    with os.fdopen(lock_file(root.path / _IN_USE), "ab") as file:
        # no job begins while this is locked; an older agent does not hold it, so job states are read as well
        jobs = (Job(path).status().state for path in _children(root.jobs))
        alone = lock(file.fileno()) and set(jobs).isdisjoint(LIVE)
        present = {(thing.kind, thing.name): thing for thing in _things(root)}
        for kind, name, used in wanted:
            thing = present.get((kind, name))
            if thing is None:
                continue  # another command removed it
            if reason := _objection(thing, used, alone=alone):
                kept.append((kind, name, reason))
                continue
            if kind == "jobs":
                (thing.paths[0] / "agent.pyz").unlink(missing_ok=True)  # room for the note on a full disk
                with (root.path / _REMOVED).open("ab") as note:
                    note.write(f"{name}\n".encode())
                    note.flush()
                    os.fsync(note.fileno())
            trash.mkdir(mode=0o700, exist_ok=True)
            for path in thing.paths:
                path.rename(trash / f"{time.time_ns()}-{path.name}")
            removed.append((kind, name))
    for path in _children(trash):  # after the lock is released: this may take long
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)  # another command may empty it too
    return Removal(tuple(removed), tuple(kept))


@dataclass(frozen=True)
class _Thing:
    kind: str
    name: str
    paths: tuple[Path, ...]

    @property
    def used(self) -> float:
        """The newest mtime of the paths and of their direct children: jobs touch stamps and journals there."""
        inside = [child for path in self.paths if path.is_dir() for child in path.iterdir()]
        newest = 0.0
        for path in (*self.paths, *inside):
            try:
                newest = max(newest, path.lstat().st_mtime)
            except FileNotFoundError:  # it is being replaced
                newest = time.time()
        return newest


def _things(root: Root) -> Iterator[_Thing]:
    for kind, folder in (("builds", root.builds), ("work", root.work), ("tools", root.tools), ("jobs", root.jobs)):
        for path in filter(Path.is_dir, _children(folder)):
            torn = kind == "jobs" and Job(path).torn
            yield _Thing("leftovers", f"jobs/{path.name}", (path,)) if torn else _Thing(kind, path.name, (path,))
    # models made here, also those sent for a job that never started; any other file is the user's
    for path in _children(root.models):
        model = path.with_suffix(".gguf")
        if (path.match("synthetic-*.json") or path.match("derived-*.json")) and not model.is_symlink():
            yield _Thing("models", path.stem, (path, *([model] if model.exists() else ())))
        elif path.match("synthetic-*-f16.gguf"):
            yield _Thing("models", path.stem, (path,))
    if root.objects.is_dir():
        yield _Thing("sources", root.objects.name, (root.objects,))
    agents = _children(root.agents)
    yield from (_Thing("agents", path.stem, (path,)) for path in agents if path.suffix == ".pyz")
    partial = [path for path in agents if path.suffix != ".pyz"]
    for folder in (root.builds, root.work, root.tools, root.jobs, root.models, root.objects.parent):
        partial += _children(folder, hidden=True)
    for path in partial:
        thing = _Thing("leftovers", f"{path.parent.name}/{path.name}", (path,))
        if path.name.startswith(".broken-") or time.time() - thing.used > _LEFTOVER_S:
            yield thing


def _objection(thing: _Thing, used: float, *, alone: bool) -> str:
    """Return why an item must be kept, "" when it may be removed."""
    if thing.kind == "sources" or thing.paths[0] == Path(sys.argv[0]):
        return "it is always kept"
    if thing.kind in SHARED and not alone:
        return "a job runs"
    if thing.kind == "jobs" and (state := Job(thing.paths[0]).status().state) not in ("done", "lost"):
        return f"it is {state}"
    return "it was used just now" if thing.used > used else ""


def _children(folder: Path, *, hidden: bool = False) -> list[Path]:
    """Return a folder's entries without links; empty if the folder itself is a link."""
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
