"""Full disks: a small part of the campaign, and what its checks see."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from faults.campaign import trials
from faults.fault import Broken
from faults.host import Ran
from faults.kinds.disk import BENCH, CLIENT, HOST, _told, just_enough
from faults.spaces import disk


def test_the_host() -> None:
    """Full before a job, or during it: said, and mended once there is room."""
    tally = trials(HOST, 3, range(2))
    assert tally.failures == []
    assert tally.met["submit failed"]


def test_the_client() -> None:
    """The record is whole, and the job goes on without it."""
    tally = trials(CLIENT, 3, range(2))
    assert tally.failures == []
    assert tally.met.total() == 2


def test_wherever_the_room_ends() -> None:
    """A page more each time: not sent, ended early, asked for flags; each time the disk is blamed, nothing else."""
    met = set()
    with HOST.place() as place:
        for pages in range(2, 6):
            spec = place.spec(f"level-{pages}", bench=BENCH)
            place.disk.fill(just_enough(place, pages))
            met.add(_told(place.run("run", spec, "--host", "box")))
            place.disk.clear()
        assert list(place.root.glob("jobs/.in-*")) == []
    assert {"submit failed", "the job failed", "llama-bench could not say which flags it knows"} <= met


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """Of its own size, seen by those within alone, and empty again."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_text("before")
    with disk(tmp_path / "disk") as made:
        made.mount(1 << 20, folder)
        write = [*made.within(folder), "sh", "-c", "cat file; head -c 8000 /dev/zero >more"]
        made.fill(4096)
        full = subprocess.run(write, capture_output=True, text=True, check=False)
        assert (full.returncode, full.stdout) == (1, "before")
        assert "No space left on device" in full.stderr
        made.clear()
        assert subprocess.run(write, capture_output=True, text=True, check=False).returncode == 0
        assert made.seen(folder / "more").stat().st_size == 8000
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_command_that_blames_something_else_is_seen() -> None:
    """What it says must be the disk, in the sentence that it ends with."""
    said = "error: submit failed: the disk of box is full\n  [Errno 28]\nnext: dgxlab host clean box\n"
    assert _told(Ran(4, "", said)) == "submit failed"
    assert _told(Ran(0, "", "")) == ""
    with pytest.raises(Broken, match="does not say that the disk is full"):
        _told(Ran(4, "", f"{said}error: llama-bench of this build does not know -m\n"))
