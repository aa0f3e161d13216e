"""The first program of each call: check that only this user can write the root and that the agent is undamaged.

The client sends this source code with every call, because no file on the host is trusted before. So it cannot import
the agent. It also has what installing needs and the agent imports: writing files so that they survive a power loss.

    AGENT ROOT install      install the agent that is on stdin
    AGENT ROOT VERB ...     start the agent
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from pathlib import Path

NO_AGENT, OPEN_ROOT = 97, 96
"""Exit statuses: the agent is missing or damaged; another user can write in a folder of the root (see stderr)."""

SEAL = 64  # length of the agent's last bytes: the sha256, in hex, of all bytes before them
CODE = ("agent", "tools", "src", "work", "builds", "jobs")  # folders of the root that hold programs


def sync(path: Path) -> None:
    """Call fsync on one file, or on one folder for the names in it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def flush(path: Path) -> None:
    """Call fsync on a file, or on a folder and everything below it; files that vanish meanwhile are skipped."""
    if path.is_file():
        sync(path)
    for folder, _, names in os.walk(path, topdown=False):
        for child in (*(Path(folder, name) for name in names), Path(folder)):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_IFMT(child.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR):
                    sync(child)


def me() -> str:
    """Return a name of this process that no other one has, on any machine that shares the root."""
    return f"{os.uname().nodename}-{os.getpid()}"


def settle(part: Path, path: Path) -> None:
    """Flush the finished file or folder `part` to disk and rename it to `path`; a file replaces an existing file.

    After a power loss `path` is either complete or as it was before. Raises OSError if the disk is full, or `path` is a
    folder that is not empty.
    """
    flush(part)
    part.rename(path)
    sync(path.parent)


def whole(content: bytes) -> bool:
    """Return whether the bytes of an agent end with the digest of the bytes before it."""
    return content[-SEAL:] == hashlib.sha256(content[:-SEAL]).hexdigest().encode()


def stranger(root: Path) -> tuple[int, Path] | None:
    """Return owner (uid) and path of a folder in which another user could plant a program that we run; None if safe.

    The rule is that of sshd's StrictModes: the root, its folders of programs and all folders above belong to us or to
    root, and no other user may write in them. Above the root the sticky bit is enough: others cannot rename our files.
    """
    folders = (root, *(root / name for name in CODE))
    inside = {path for folder in folders for path in (folder.absolute(), folder.resolve())}
    owners = {0, os.getuid()}
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        # in a user namespace the machine's root appears as this user
        owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    for path in sorted(inside.union(*(path.parents for path in inside))):
        try:
            status = path.stat()
        except OSError:  # not there yet: the folder above decides
            continue
        sticky = path not in inside and status.st_mode & stat.S_ISVTX
        if status.st_uid not in owners or (status.st_mode & 0o022 and not sticky):
            return status.st_uid, path
    return None


def main(agent: str, root: str, verb: str, *args: str) -> int:
    """Install the agent or start it; return the exit status."""
    if other := stranger(Path(root)):
        sys.stderr.write(f"{other[0]} {os.getuid()} {other[1]}\n")
        return OPEN_ROOT
    if verb == "install":
        return _install(Path(agent))
    try:
        ready = whole(Path(agent).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        ready = False
    if not ready:
        return NO_AGENT
    sys.argv = [agent, verb, root, *args]
    sys.path.insert(0, agent)
    from dgxlab.agent.__main__ import main as start

    return start(sys.argv[1:])


def _install(agent: Path) -> int:
    content, part = sys.stdin.buffer.read(), agent.with_name(f"{agent.name}.{me()}")
    os.umask(0o077)
    try:
        if not whole(content):
            raise OSError("it did not arrive whole")
        agent.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        settle(part, agent)
        sync(agent.parent.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
