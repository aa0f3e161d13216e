"""Which file system a path lies on: SQLite's locks and its WAL cannot be trusted on a network one."""

from __future__ import annotations

import re
from pathlib import Path

NETWORK = frozenset({"nfs", "nfs4", "9p", "cifs", "smb3", "smbfs", "fuse.sshfs", "afs", "fuse.rclone", "fuse.davfs2"})
"""Types in mountinfo where another machine, or a process in between, answers for the locks."""

MOUNTINFO = Path("/proc/self/mountinfo")


def network_mount(path: str, mountinfo: str) -> str | None:
    """Return `type at mount point` when an absolute path without symlinks lies on a network file system, else None.

    Args:
        path: Need not exist.
        mountinfo: The text of /proc/self/mountinfo; lines that are not of its form are ignored.
    """
    best, kind = "", ""
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split(" ")
        if not separator or len(fields) < 5:
            continue
        point = _unescape(fields[4])
        if _under(path, point) and len(point) >= len(best):  # of two mounts on one point the later is on top
            best, kind = point, right.split(" ")[0]
    return f"{kind} at {best}" if kind in NETWORK else None


def on_network(path: Path) -> str | None:
    """Return what `network_mount` says of a path on this machine; None where there is no mountinfo to ask."""
    try:
        return network_mount(str(path.resolve()), MOUNTINFO.read_text(errors="replace"))
    except OSError:
        return None


def _under(path: str, point: str) -> bool:
    return point in ("/", path) or path.startswith(point + "/")


def _unescape(field: str) -> str:
    """Undo the kernel's octal escapes: a space in a mount point is written as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
