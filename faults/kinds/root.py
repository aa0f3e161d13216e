"""Folders on the host that others may write to: nothing runs there, and the printed commands close them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from dgxlab.agent.boot import CODE
from dgxlab.errors import DgxlabError, HostError
from dgxlab.transport.bundle import bundle
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from faults.fault import Broken, Fault
from faults.spaces import ROOT as IS_ROOT

STRANGER = 64321
"""A user that is not us."""
STEPS = 4
"""How many printed commands a user types at most: a folder each."""


@contextmanager
def _place() -> Iterator[Path]:
    with TemporaryDirectory(prefix="dgxlab-root-") as name:
        yield Path(name)


def _trial(place: Path, random: Random) -> str:
    """Open or give away folders of a root, put a stranger's agent in it, and ask something of the host."""
    root = place / f"{random.getrandbits(40):010x}" / "above" / "it's a root"
    agent, canary = root / "agent" / f"{bundle().digest}.pyz", place / "canary"
    for folder in (root, *(root / name for name in CODE)):
        folder.mkdir(parents=True)
    agent.write_text(f"open({str(canary)!r}, 'w')\n")
    folders = [root.parent.parent, root.parent, root, *(root / name for name in CODE)]
    hostile = {}
    for folder in random.sample(folders, random.randrange(3)):
        how = random.choice(("others", "group", "owner") if IS_ROOT else ("others", "group"))
        hostile[folder] = how
        os.chown(folder, STRANGER, -1) if how == "owner" else folder.chmod(0o757 if how == "others" else 0o775)
    shared = [folder for folder in folders[:2] if folder not in hostile and random.random() < 0.3]
    for folder in shared:  # as /tmp is: no others can rename what is ours
        folder.chmod(0o1777)
    host, steps = Host(LocalTransport(str(root), name="box")), 0
    ask = random.choice((host.probe, host.jobs, host.inventory, lambda: host.remove([])))
    while hostile:
        try:
            ask()
        except HostError as error:
            _close(error, hostile)
            steps += 1
        else:
            raise Broken(f"it was asked although {hostile} were open")
        if steps > STEPS:
            raise Broken(f"after {steps} printed commands there are {hostile}")
    ask()
    if canary.exists():
        raise Broken("the stranger's agent ran")
    if stat.S_IMODE(agent.stat().st_mode) & 0o077:
        raise Broken(f"others may read or write the agent: {agent.stat()}")
    return f"{steps} refused" if steps else "shared" if shared else "ours"


def _close(error: DgxlabError, hostile: dict[Path, str]) -> None:
    """Type the command that an error prints, and see that it closes one of the folders.

    Raises:
        Broken: if it does not, or names another folder.
    """
    ran = subprocess.run(["sh", "-c", re.sub("^sudo ", "", error.next)], capture_output=True, text=True, check=False)
    closed = [folder for folder in hostile if _is_closed(folder)]
    if ran.returncode != 0 or len(closed) != 1 or str(closed[0]) not in error.message:
        raise Broken(f"{error.message} / {error.next} / {ran.stderr}: of {hostile} it closed {closed}")
    del hostile[closed[0]]


def _is_closed(folder: Path) -> bool:
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


ROOT = Fault("root", "root open to others", 200, "nothing runs, the printed command mends it", _place, _trial)
