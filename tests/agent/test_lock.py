"""The benchmark lock."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from dgxlab.agent.lock import BenchLock


def test_excludes_and_names_the_holder(tmp_path: Path) -> None:
    """The second waits, is told who holds it, and gets it when the first lets go."""
    first, second = BenchLock("cpu", (tmp_path,)), BenchLock("cpu", (tmp_path,))
    first.acquire({"job": "J1", "user": "alice"}, lambda owner: pytest.fail("nobody holds it"))
    told: list[str] = []
    got = threading.Event()

    def wait() -> None:
        second.acquire({"job": "J2", "user": "bob"}, told.append)
        got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.2)
    first.release()
    assert got.wait(5)
    thread.join()
    assert len(told) == 1
    assert told[0].startswith("job J1 of alice, since ")
    assert json.loads((tmp_path / "dgxlab-cpu").read_text())["job"] == "J2"
    second.release()


def test_other_users_may_share_it(tmp_path: Path) -> None:
    """The file is writable by all whatever the umask, or it would exclude nobody else."""
    old = os.umask(0o077)
    try:
        lock = BenchLock("cpu", (tmp_path,))
    finally:
        os.umask(old)
    assert stat.S_IMODE(lock.path.stat().st_mode) == 0o666
    lock.release()


def test_falls_back_where_the_first_folder_is_closed(tmp_path: Path) -> None:
    """Where /var/lock cannot be written, the next folder serves."""
    lock = BenchLock("cpu", (tmp_path / "missing", tmp_path))
    assert lock.path == tmp_path / "dgxlab-cpu"
    lock.release()


def test_planted_link_is_not_followed(tmp_path: Path) -> None:
    """A symbolic link in a public folder does not make us write somewhere else."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "dgxlab-cpu").symlink_to(victim)
    with pytest.raises(OSError, match=r"symbolic link|Too many levels"):
        BenchLock("cpu", (tmp_path,))
    assert victim.read_text() == "precious"


def test_unreadable_signature_is_somebody_unknown(tmp_path: Path) -> None:
    """A lock held by a program that does not sign is still named."""
    lock = BenchLock("cpu", (tmp_path,))
    os.pwrite(lock.fd, b"not json", 0)
    assert lock.owner() == "somebody unknown"
    lock.release()
