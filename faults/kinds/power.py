"""A host that loses its power and with it all that was written and not yet on its disk, empty before or warm."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from faults.aftermath import recovered
from faults.fault import Fault
from faults.host import box, ended
from faults.kinds.reboot import BENCH, CELLS, Machine
from faults.spaces import ROOT, Disk, disk, power

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: the file system goes down."""
NO_LOG_FLUSH = 2
"""As it does when the power fails: what its journal has not on the disk is lost."""

LATER_S = 2.0
"""So long after something appeared the power fails at most."""
SIZE = "96M"
OPTIONS = "loop,commit=1,noauto_da_alloc"
"""Names reach the disk within a second, what the files hold long after: the widest gap that ext4 has."""
APPEARING = {
    "empty": ("agent/*.pyz", "src/*.git", "src/*.git/refs/dgxlab/*", "jobs/[!.]*", "work/*/cmake", "builds/[!.]*", "-"),
    "warm": ("jobs/*-{name}-*", "jobs/*-{name}-*/journal.jsonl", "jobs/*-{name}-*/rc", "-"),
}
"""What a run brings to a host, by what that begins with; a dash for the end of the run."""


@dataclass(frozen=True, kw_only=True)
class Drive(Machine):
    """A machine whose agent's folder lies on a disk of its own.

    Attributes:
        disk: Where it is mounted.
        images: Folder of disks: `empty` and `warm` to copy from, `now` to use.
    """

    disk: Disk
    images: Path

    @property
    def root(self) -> Path:
        """The agent's folder, on its disk."""
        return self.disk.seen(super().root)

    def insert(self, which: str) -> None:
        """Boot from a copy of a disk."""
        self.stop()
        if self.root.is_mount():
            self._do("umount", str(super().root))
        subprocess.run(["cp", "--sparse=always", self.images / which, self.images / "now"], check=True)
        self._mount()

    def lose_power(self) -> None:
        """End everything at once, lose what is not on the disk, and boot again."""
        self.stop()
        fd = os.open(self.root, os.O_RDONLY)
        fcntl.ioctl(fd, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(fd)
        self._do("umount", str(super().root))
        self._mount()

    def _mount(self) -> None:
        self._do("mount", "-o", OPTIONS, str(self.images / "now"), str(super().root))
        self.boot()

    def _do(self, *argv: str) -> None:
        subprocess.run([*self.disk.within(Path("/")), *argv], check=True)


@contextmanager
def _drive() -> Iterator[Drive]:
    with TemporaryDirectory(prefix="dgxlab-power-") as name, disk(Path(name) / "disk") as drive:
        boot_id, around = Path(name) / "boot_id", drive.within(Path("/"))
        boot_id.write_text(f"{uuid.uuid4()}\n")
        with box([*around, *power(boot_id)]) as whole:
            for which, content in (("empty", []), ("warm", ["-d", str(whole.root)])):
                subprocess.run(
                    ["mkfs.ext4", "-q", *content, Path(name) / which, SIZE], check=True, stderr=subprocess.DEVNULL
                )
            machine = Drive(
                whole.there,
                whole.proxy,
                boot_id=boot_id,
                boots=[whole.server],
                around=around,
                disk=drive,
                images=Path(name),
            )
            with machine.running:
                yield machine


def _trial(place: Drive, random: Random) -> str:
    """Let the power fail as a run has just brought something, or ended, and see that the next one needs no help."""
    name, spec = place.new(random, "power", (0, 100), bench=BENCH)
    before = random.choice(tuple(APPEARING))
    place.insert(before)
    what, child = random.choice(APPEARING[before]), place.start("run", spec, "--host", "box")
    while child.poll() is None and not any(place.root.glob(what.format(name=name))):
        time.sleep(0.01)
    time.sleep(LATER_S * random.random())
    place.lose_power()
    ended(child)
    recovered(place, name, place.run("run", spec, "--host", "box"), CELLS)
    return f"{before}, {what.replace('{name}', 'x')}"


def _lacks() -> str:
    return (
        "" if ROOT and Path("/dev/loop-control").exists() else "only root can mount disks, where there are loop devices"
    )


MUST = "the next run needs no help, nothing measured lost"
POWER = Fault("power", "power lost, page cache with it", 100, MUST, _drive, _trial, lacks=_lacks)
