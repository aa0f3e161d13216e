"""Whether an installed build is still what was installed, and what a power loss leaves in a work folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dgxlab.agent import build
from dgxlab.agent.build import _held, installed
from dgxlab.agent.files import sha256

PROGRAM, LIBRARY = "llama-bench", "libggml.so.0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An installed build, a day old by its times."""
    build_folder = tmp_path / "build"
    (build_folder / "bin").mkdir(parents=True)
    for name in (PROGRAM, LIBRARY):
        (build_folder / "bin" / name).write_bytes(name.encode() * 100)
        (build_folder / "bin" / name).chmod(0o755)
    stamp = {
        "build_id": "B1",
        **dict.fromkeys(("source", "cmake", "toolchain", "cmake_cache"), ""),
        "binaries": {PROGRAM: sha256(build_folder / "bin" / PROGRAM)},
        "libraries": {LIBRARY: sha256(build_folder / "bin" / LIBRARY)},
    }
    (build_folder / "stamp.json").write_text(json.dumps(stamp))
    return build_folder


def wrapped(folder: Path) -> None:
    """Put a script in a program's place that calls it."""
    shutil.move(folder / "bin" / PROGRAM, folder / "real")
    (folder / "bin" / PROGRAM).write_text(f'#!/bin/sh\nexec {folder}/real "$@"\n')
    (folder / "bin" / PROGRAM).chmod(0o755)


def edited(folder: Path) -> None:
    """Change a byte of a library in place and set its times back."""
    path = folder / "bin" / LIBRARY
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"L")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def linked(folder: Path) -> None:
    """Put a link to the same bytes in a program's place: they load the libraries beside them."""
    shutil.move(folder / "bin" / PROGRAM, folder / "real")
    (folder / "bin" / PROGRAM).symlink_to(folder / "real")


def garbled(folder: Path) -> None:
    """Leave a stamp that is JSON and no stamp."""
    (folder / "stamp.json").write_text("[]")


CHANGES: list[Callable[[Path], object]] = [
    wrapped,
    edited,
    linked,
    garbled,
    lambda folder: (folder / "stamp.json").write_text("{"),
    lambda folder: (folder / "stamp.json").write_text('{"build_id": "B1", "binaries": {}, "libraries": {}}'),
    lambda folder: (folder / "bin" / PROGRAM).chmod(0o644),
    lambda folder: (folder / "bin" / LIBRARY).unlink(),
    lambda folder: (folder / "bin" / "libggml-other.so").write_bytes(b"x"),
    lambda folder: shutil.rmtree(folder / "bin"),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("settled_s", [1.0, -1.0], ids=["fresh", "hashed before"])
def test_a_build_that_was_changed_is_not_reused(
    folder: Path, change: Callable[[Path], object], settled_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not its files were hashed before."""
    monkeypatch.setattr(build, "SETTLED_S", settled_s)
    stamp = installed(folder, "B1")
    assert stamp
    assert stamp["binaries"].keys() == {PROGRAM}
    assert installed(folder, "B2") is None
    change(folder)
    assert installed(folder, "B1") is None


def test_a_file_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again while its inode, size and times stay; damage of what was noted costs another hash."""
    hashed: list[str] = []
    monkeypatch.setattr(build, "sha256", lambda path: hashed.append(path.name) or sha256(path))
    for _ in range(2):
        installed(folder, "B1")
    assert len(hashed) == 4  # changed just now
    monkeypatch.setattr(build, "SETTLED_S", -1.0)
    for _ in range(2):
        assert installed(folder, "B1")
    assert len(hashed) == 6
    (folder / "digests.json").write_text("[1]")
    assert installed(folder, "B1")
    assert len(hashed) == 8
    edited(folder)
    assert installed(folder, "B1") is None
    assert hashed[8:] == [LIBRARY]


@pytest.mark.parametrize(("mark", "kept"), [(None, True), ("this boot", True), ("another boot", False), ("", False)])
def test_what_another_boot_left_half_done_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str | None, kept: bool
) -> None:
    """A finished build stays, and so does one that this boot cut short: ninja goes on from it."""
    monkeypatch.setattr(build, "boot_id", lambda: "this boot")
    parts = (tmp_path / "cmake" / "x.o", tmp_path / "src" / "x.c", tmp_path / "index")
    for part in parts:
        part.parent.mkdir(exist_ok=True)
        part.write_text("x")
    if mark is not None:
        (tmp_path / "building").write_text(mark)
    with _held(tmp_path):
        assert {part.exists() for part in parts} == {kept}
        assert (tmp_path / "building").read_text() == "this boot"
    assert not (tmp_path / "building").exists()
