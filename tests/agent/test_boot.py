"""What runs first on a host: files that survive a power loss, a root that only we can write, an agent that is whole."""

import os
from pathlib import Path

import pytest

from dgxlab.agent import boot
from dgxlab.transport.bundle import bundle


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "above" / "root"
    for name in boot.CODE:
        (folder / name).mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", ["..", ".", *boot.CODE])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_that_others_may_write_in(root: Path, name: str, mode: int) -> None:
    assert boot.stranger(root) is None
    (root / name).chmod(mode)
    assert boot.stranger(root) == (os.getuid(), (root / name).resolve())


def test_the_sticky_bit_is_enough_only_above_the_root(root: Path) -> None:
    root.parent.chmod(0o1777)
    assert boot.stranger(root) is None
    root.chmod(0o1777)
    assert boot.stranger(root) == (os.getuid(), root)
    root.chmod(0o777)
    assert boot.stranger(root / "a" / "b") == (os.getuid(), root)  # not there yet: the folder above decides


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", ["..", ".", "agent", "jobs"])
def test_a_folder_of_another_user(root: Path, name: str) -> None:
    folder = (root / name).resolve()
    os.chown(folder, 64321, -1)
    assert boot.stranger(root) == (64321, folder)


def test_both_ends_of_a_link_count(root: Path, tmp_path: Path) -> None:
    link, elsewhere = tmp_path / "link", tmp_path / "open" / "builds"
    link.symlink_to(root)
    (root / "builds").rmdir()
    (root / "builds").symlink_to(elsewhere)
    elsewhere.mkdir(parents=True)
    assert boot.stranger(link) is None
    elsewhere.parent.chmod(0o777)
    assert boot.stranger(link) == (os.getuid(), elsewhere.parent)


def test_an_agent_that_is_not_whole() -> None:
    packed = bundle().packed()
    assert boot.whole(packed)
    assert not [cut for cut in (0, 63, 64, 1000, -1) if boot.whole(packed[:cut])]
    assert not boot.whole(packed[:500] + bytes([packed[500] ^ 1]) + packed[501:])


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder first, then the name, then the folder that holds the name; links are left alone."""
    part, done, order = tmp_path / "part", tmp_path / "shelf" / "done", []
    for folder in (part / "bin", done.parent):
        folder.mkdir(parents=True)
    (part / "bin" / "program").write_text("x")
    (part / "link").symlink_to("/nowhere")
    os.mkfifo(part / "pipe")
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(Path(f"/proc/self/fd/{fd}").readlink()) or fsync(fd))
    monkeypatch.setattr(os, "rename", lambda old, new: order.append("renamed") or rename(old, new))
    boot.settle(part, done)
    assert order == [part / "bin" / "program", part / "bin", part, "renamed", done.parent]
    assert (done / "bin" / "program").read_text() == "x"
