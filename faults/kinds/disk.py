"""A full disk, on the host or on the client: told in a sentence, no program waits, and nothing measured is lost."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from dgxlab.store import Store
from faults.aftermath import appeared, recovered
from faults.fault import Broken, Fault
from faults.host import Box, Ran, box, ended, two_cells
from faults.spaces import Disk, disk

SIZE = 40 << 20
"""More than twice what a disk has that is nearly full."""

PAGE = os.sysconf("SC_PAGE_SIZE")
"""What a disk gives at once."""

BENCH, CELLS = two_cells(3), 6

NAMED = re.compile(r"the disk of box is full|No space left on device|the disk that holds \S+ (is full|does not)")
"""How a disk is named that takes no more."""
ERROR = re.compile(r"^error: (.*(?:\n  .*)*)", re.MULTILINE)
"""The sentence that a command ends with, and the lines that belong to it."""


@dataclass(frozen=True, kw_only=True)
class OnDisk(Box):
    """A box of which a part lies on a small disk."""

    disk: Disk


class HostOnDisk(OnDisk):
    """The agent's folder on the host does."""

    @property
    def root(self) -> Path:
        """The agent's folder, on its disk."""
        return self.disk.seen(super().root)


class ClientOnDisk(OnDisk):
    """Everything of the client's does: the project with its record, the home, the cache."""

    @contextmanager
    def store(self) -> Iterator[Store]:
        """Open a copy of the record: by whatever path SQLite would find its way back to the one before the mount."""
        record = self.disk.seen(self.database)
        for suffix in ("", "-wal", "-shm"):
            path, copy = (Path(f"{file}{suffix}") for file in (record, self.database))
            copy.unlink(missing_ok=True)
            if path.exists():
                shutil.copy(path, copy)
        with super().store() as opened:
            yield opened

    def spec(self, name: str, **fields: Any) -> Path:
        """Write an experiment that was never measured."""
        path = super().spec(name, **fields)
        shutil.copy(path, self.disk.seen(path))
        return path


@contextmanager
def _host() -> Iterator[HostOnDisk]:
    with ExitStack() as stack:
        small = stack.enter_context(disk(Path(stack.enter_context(TemporaryDirectory(prefix="dgxlab-disk-")))))
        whole = stack.enter_context(box(small.within(Path("/"))))
        small.mount(SIZE, whole.root)
        yield HostOnDisk(whole.there, whole.proxy, disk=small)


@contextmanager
def _client() -> Iterator[ClientOnDisk]:
    with TemporaryDirectory(prefix="dgxlab-disk-") as name, disk(Path(name)) as small, box() as whole:
        here = whole.there.here
        small.mount(SIZE, *(here.folder / part for part in ("project", "home", "cache")))
        yield ClientOnDisk(whole.there, whole.proxy, small.within(here.project), disk=small)


def _trial(place: OnDisk, random: Random) -> str:
    """Fill the disk before or during a run, try again while it is full, and once more when there is room."""
    name, spec = place.new(random, "disk", (50, 200), bench=BENCH)
    leave = random.choice((0, random.randrange(1 << 16), just_enough(place, random.randrange(20))))
    begin, pause = random.choice((_before, _early, _late)), random.random()
    met = []
    try:
        for run in (begin, *(_before,) * random.randrange(2)):
            met.append(_told(run(place, spec, leave, pause)))
    finally:
        place.disk.clear()
    recovered(place, name, place.run("run", spec, "--host", "box"), CELLS)
    return next(filter(None, met), "too late")


def just_enough(place: OnDisk, pages: int) -> int:
    """Return how many bytes a job needs to be sent, and so many pages more: then it ends in one of its steps."""
    (job, *_) = place.folders("warm")
    return sum(-(-file.stat().st_size // PAGE) * PAGE for file in (job.plan, job.folder / "agent.pyz")) + pages * PAGE


def _before(place: OnDisk, spec: Path, leave: int, pause: float) -> Ran:
    place.disk.fill(leave)
    return place.run("run", spec, "--host", "box")


def _early(place: OnDisk, spec: Path, leave: int, pause: float) -> Ran:
    child = place.start("run", spec, "--host", "box")
    time.sleep(2 * pause)
    place.disk.fill(leave)
    return ended(child)


def _late(place: OnDisk, spec: Path, leave: int, pause: float) -> Ran:
    child = place.start("run", spec, "--host", "box")
    appeared(place, spec.stem)
    time.sleep(pause)
    place.disk.fill(leave)
    return ended(child)


def _told(ran: Ran) -> str:
    """Return what a full disk kept from being done, "" for nothing.

    Raises:
        Broken: if the command did not say that it was the disk.
    """
    if ran.rc == 0:
        return ""
    errors = ERROR.findall(ran.err)
    if not errors or not NAMED.search(errors[-1]):
        raise Broken(f"it does not say that the disk is full: {ran.err}")
    return str(errors[-1].split(":")[0].split("/")[0].strip())


MUST = "bounded attempts, a sentence that names the disk, database intact, measured work kept"
HOST = Fault("disk-host", "disk full on the host", 30, MUST, _host, _trial)
CLIENT = Fault("disk-client", "disk full on the client", 30, MUST, _client, _trial)
