"""What runs first on a host: files that survive a power loss, a root that is ours alone, an agent that is whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dgxlab.agent import boot
from dgxlab.transport.bundle import bundle


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root as the agent makes it."""
    folder = tmp_path / "above" / "root"
    for name in boot.CODE:
        (folder / name).mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", ["..", ".", *boot.CODE])
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_folder_that_others_may_write_in(root: Path, name: str, mode: int) -> None:
    """The group counts as others; who may only read may do so."""
    assert boot.stranger(root) is None
    (root / name).chmod(mode)
    assert boot.stranger(root) == (os.getuid(), (root / name).resolve())
    (root / name).chmod(0o755)
    assert boot.stranger(root) is None


def test_the_sticky_bit_is_enough_above_alone(root: Path) -> None:
    """In /tmp no other can rename what is ours; in the root itself they could still add something.

    Of a root that is not there yet, what is above decides.
    """
    root.parent.chmod(0o1777)
    assert boot.stranger(root) is None
    root.chmod(0o1777)
    assert boot.stranger(root) == (os.getuid(), root)
    root.chmod(0o777)
    assert boot.stranger(root / "a" / "b") == (os.getuid(), root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("name", ["..", ".", "agent", "jobs"])
def test_a_folder_of_another_user(root: Path, name: str) -> None:
    """Its owner can open it whenever they like."""
    folder = (root / name).resolve()
    os.chown(folder, 64321, -1)
    assert boot.stranger(root) == (64321, folder)


def test_links_are_looked_behind(root: Path, tmp_path: Path) -> None:
    """Both where the link lies and where it leads, for the root and for a folder in it."""
    link, elsewhere = tmp_path / "link", tmp_path / "open" / "builds"
    link.symlink_to(root)
    (root / "builds").rmdir()
    (root / "builds").symlink_to(elsewhere)
    elsewhere.mkdir(parents=True)
    assert boot.stranger(link) is None
    elsewhere.parent.chmod(0o777)
    assert boot.stranger(link) == (os.getuid(), elsewhere.parent)


def test_an_agent_that_is_not_whole() -> None:
    """Nothing, the digest of nothing, some of it; one byte that is another."""
    packed = bundle().packed()
    assert boot.whole(packed)
    assert not [cut for cut in (0, 63, 64, 1000, -1) if boot.whole(packed[:cut])]
    assert not boot.whole(packed[:500] + bytes([packed[500] ^ 1]) + packed[501:])


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and folder first, then the name, then the folder that holds the name; links are left alone."""
    part, done, order = tmp_path / "part", tmp_path / "shelf" / "done", []
    (part / "bin").mkdir(parents=True)
    done.parent.mkdir()
    (part / "bin" / "program").write_text("x")
    (part / "link").symlink_to("/nowhere")
    os.mkfifo(part / "pipe")
    fsync, rename = os.fsync, os.rename

    def note(fd: int) -> None:
        order.append(Path(f"/proc/self/fd/{fd}").readlink())
        fsync(fd)

    def renamed(old: Path, new: Path) -> None:
        order.append(Path("renamed"))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", renamed)
    boot.settle(part, done)
    assert order == [part / "bin" / "program", part / "bin", part, Path("renamed"), done.parent]
    assert (done / "bin" / "program").read_text() == "x"
