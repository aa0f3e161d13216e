"""A small disk that can be full, and a host that can lose its power, on this machine: kernel namespaces.

Where users may make namespaces, no root is needed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = os.getuid() == 0

MOUNTED = """set -e
mkdir -p "$1"
mount -t tmpfs -o "size=$2,mode=700" tmpfs "$1"
disk=$1
shift 2
n=0
for folder; do
    n=$((n + 1))
    cp -a "$folder" "$disk/$n"
    mount --bind "$disk/$n" "$folder"
done
"""
BOOTED = 'mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && while :; do "$@"; sleep 0.2; done'
"""The init process of a host: it reaps all others, and restarts its one service when that ends."""


@dataclass(frozen=True)
class Disk:
    """A small disk in a mount namespace, seen by the programs that are started by `within`.

    Attributes:
        folder: The mount point.
        pid: The process that keeps the namespace.
    """

    folder: Path
    pid: int

    def within(self, folder: Path) -> Sequence[str]:
        """Return the words to put before a command, so that it sees the disk and runs in a folder."""
        own = () if ROOT else ("--user", "--preserve-credentials")
        return ("nsenter", f"--target={self.pid}", *own, "--mount", "--", "env", f"--chdir={folder}")

    def mount(self, size: int, *folders: Path) -> None:
        """Mount the disk with `size` bytes, and move folders with their content onto it."""
        argv = [*self.within(Path("/")), "sh", "-c", MOUNTED, "sh", str(self.folder), str(size), *map(str, folders)]
        subprocess.run(argv, check=True)

    def seen(self, path: Path) -> Path:
        """Return the path in this process's namespace of a path in the disk's."""
        return Path(f"/proc/{self.pid}/root{path}")

    @property
    def free(self) -> int:
        """Free bytes."""
        stat = os.statvfs(self.seen(self.folder))
        return stat.f_bavail * stat.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Fill the disk, but for `leave` bytes, or a page less."""
        with self._filler.open("ab") as file:
            while (size := self.free - leave) > 0:
                with suppress(OSError):  # another process has taken some of it meanwhile
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)

    def clear(self) -> None:
        """Free what `fill` took."""
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.seen(self.folder / "filler")


@contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """Yield a disk that is not mounted yet."""
    own = () if ROOT else ("--map-current-user", "--keep-caps")
    argv = ["unshare", *own, "--mount", "sh", "-c", "echo && exec cat"]
    keeper = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert keeper.stdout
        if keeper.stdout.readline() != b"\n":
            raise RuntimeError("no disk can be had here: that needs root, or namespaces that users may make")
        yield Disk(folder, keeper.pid)
    finally:
        keeper.communicate()


def power(boot_id: Path) -> Sequence[str]:
    """Return the words to put before a command, so that it runs as a host: killing it ends all its descendants.

    Args:
        boot_id: A file with the host's next boot id.
    """
    own = () if ROOT else ("--map-root-user",)
    user = () if ROOT else ("unshare", "--user", f"--map-user={os.getuid()}", f"--map-group={os.getgid()}")
    apart = ("unshare", *own, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    return (*apart, "sh", "-c", BOOTED, "sh", str(boot_id), *user)
