"""The benchmark lock."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from dgxlab.agent.lock import BenchLock, plain
from dgxlab.errors import RemoteError

ALICE = {"job": "J1", "user": "alice"}
BOB = {"job": "J2", "user": "bob"}


def test_excludes_and_names_the_holder(tmp_path: Path) -> None:
    """The second does not get it and is told who has it; it gets it when the first lets go, and signs."""
    first, second = BenchLock("cpu", (tmp_path,)), BenchLock("cpu", (tmp_path,))
    assert first.take(ALICE)
    assert not second.take(BOB)
    assert second.owner().startswith("job J1 of alice, since 2")
    first.release()
    assert second.take(BOB)
    assert json.loads((tmp_path / "dgxlab-cpu").read_text())["job"] == "J2"
    second.release()


def test_holder_keeps_it_however_often_it_asks(tmp_path: Path) -> None:
    """Looking again before each launch neither waits for itself nor signs anew."""
    lock = BenchLock("cpu", (tmp_path,))
    assert lock.take(ALICE)
    fd, signed = lock.fd, lock.path.read_text()
    assert lock.take(ALICE)
    assert (lock.fd, lock.path.read_text()) == (fd, signed)
    lock.release()


def test_removed_file_is_locked_anew(tmp_path: Path) -> None:
    """A lock on a file that a cleaner has removed excludes nobody: the holder moves to the new one."""
    lock, other = BenchLock("cpu", (tmp_path,)), BenchLock("cpu", (tmp_path,))
    assert lock.take(ALICE)
    lock.path.unlink()
    assert lock.take(ALICE)
    assert json.loads(lock.path.read_text())["job"] == "J1"
    assert not other.take(BOB)
    lock.release()


def test_replaced_file_that_somebody_else_holds_is_waited_for(tmp_path: Path) -> None:
    """Two can hold two files of one name; who looks again finds out."""
    lock, other = BenchLock("cpu", (tmp_path,)), BenchLock("cpu", (tmp_path,))
    assert lock.take(ALICE)
    lock.path.unlink()
    assert other.take(BOB)
    assert not lock.take(ALICE)
    assert lock.owner().startswith("job J2 of bob, since ")
    other.release()
    assert lock.take(ALICE)
    lock.release()


def test_file_removed_while_waiting_is_not_taken(tmp_path: Path) -> None:
    """Who waited on a file that is no longer there gets the one that is."""
    first, second, third = (BenchLock("cpu", (tmp_path,)) for _ in range(3))
    assert first.take(ALICE)
    assert not second.take(BOB)
    first.path.unlink()
    first.release()
    assert second.take(BOB)
    assert not third.take(ALICE)
    second.release()


def test_child_that_inherits_it_keeps_it(tmp_path: Path) -> None:
    """An orphan of a measuring job keeps the device fenced."""
    lock, other = BenchLock("cpu", (tmp_path,)), BenchLock("cpu", (tmp_path,))
    assert lock.take(ALICE)
    assert lock.fd is not None
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.fd,))
    lock.release()
    assert not other.take(BOB)
    child.communicate()
    assert other.take(BOB)
    other.release()


def test_other_users_may_share_it(tmp_path: Path) -> None:
    """The file is writable by all whatever the umask, or it would exclude nobody else."""
    lock, old = BenchLock("cpu", (tmp_path,)), os.umask(0o077)
    try:
        lock.take(ALICE)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(old)
    assert stat.S_IMODE(lock.path.stat().st_mode) == 0o666
    lock.release()


def test_falls_back_where_the_first_folder_is_closed(tmp_path: Path) -> None:
    """Where /var/lock cannot be written, the next folder serves."""
    lock = BenchLock("cpu", (tmp_path / "missing", tmp_path))
    assert lock.take(ALICE)
    assert lock.path == tmp_path / "dgxlab-cpu"
    lock.release()


@pytest.mark.parametrize("planted", ["link", "folder"])
def test_what_is_no_lock_is_refused(tmp_path: Path, planted: str) -> None:
    """A link in a public folder does not make us write somewhere else, nor lock another folder's file."""
    victim, elsewhere, path = tmp_path / "victim", tmp_path / "elsewhere", tmp_path / "dgxlab-cpu"
    elsewhere.mkdir()
    victim.write_text("precious")
    if planted == "link":
        path.symlink_to(victim)
    else:
        path.mkdir()
    with pytest.raises(RemoteError, match=r"dgxlab-cpu cannot be opened: (Too many levels|Is a directory)") as refused:
        BenchLock("cpu", (tmp_path, elsewhere)).take(ALICE)
    assert refused.value.next.startswith(f"ls -l {path}")
    assert victim.read_text() == "precious"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("text", ["not json", "[]", '{"job": 1}', '{"job": "J", "user": "u", "since": 1e999}', ""])
def test_unreadable_signature_is_somebody_unknown(tmp_path: Path, text: str) -> None:
    """A lock held by a program that does not sign, or signs nonsense, is still named."""
    (tmp_path / "dgxlab-cpu").write_text(text)
    lock = BenchLock("cpu", (tmp_path,))
    assert lock.take(ALICE)
    lock.path.write_text(text)
    assert lock.owner() == "somebody unknown"
    lock.release()


def test_what_others_write_is_one_short_plain_line() -> None:
    """Nothing that others write in a file reaches a terminal as anything but words."""
    assert plain("a\x1b[31mred\nb\t\u202ec\0") == "a [31mred b c"
    assert plain("x" * 500) == "x" * 119 + "…"
