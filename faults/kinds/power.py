"""A host that loses its power, and with it everything in its page cache."""

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
"""The ioctl EXT4_IOC_SHUTDOWN, which stops a file system."""
NO_LOG_FLUSH = 2
"""Its flag for a loss of power: the part of its journal that is not on the disk is lost."""

LATER_S = 2.0
"""The power fails at most this long after a file appeared."""
SIZE = "96M"
OPTIONS = "loop,commit=1,noauto_da_alloc"
"""Mount options by which file names reach the disk long before their content: the hardest case of ext4."""
APPEARING = {
    "empty": ("agent/*.pyz", "src/*.git", "src/*.git/refs/dgxlab/*", "jobs/[!.]*", "work/*/cmake", "builds/[!.]*", "-"),
    "warm": ("jobs/*-{name}-*", "jobs/*-{name}-*/journal.jsonl", "jobs/*-{name}-*/rc", "-"),
}
"""Files that appear on an empty or a warm host during a run; `-` is its end."""


@dataclass(frozen=True, kw_only=True)
class Drive(Machine):
    """A machine whose agent's folder is on a separate disk.

    Attributes:
        disk: The mount point.
        images: Folder of disk images: `empty` and `warm` are copied to `now`, which is used.
    """

    disk: Disk
    images: Path

    @property
    def root(self) -> Path:
        """The agent's folder, on the disk."""
        return self.disk.seen(super().root)

    def insert(self, which: str) -> None:
        """Boot with a copy of a disk image."""
        self.stop()
        if self.root.is_mount():
            self._do("umount", str(super().root))
        subprocess.run(["cp", "--sparse=always", self.images / which, self.images / "now"], check=True)
        self._mount()

    def lose_power(self) -> None:
        """Kill everything at once, lose what is not on the disk, and boot again."""
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
    with TemporaryDirectory(prefix="dgxlab-power-") as name, disk(Path(name) / "disk") as small:
        boot_id, around = Path(name) / "boot_id", small.within(Path("/"))
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
                disk=small,
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
