"""The file in which people who share a machine say who measures."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dgxlab.agent.lock import BenchLock
from dgxlab.agent.owner import OwnerFile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return where the file is."""
    return tmp_path / "owner"


def owner(path: Path, job: str = "J1") -> OwnerFile:
    """Return it as a job of alice sees it."""
    return OwnerFile(path, job, "alice")


@pytest.mark.parametrize(
    "text", ["", "\n \n", "FREE", "FREE since 12:00 (bob)\n", "FREE: bob\n", "dgxlab job J0 of bob, since 2026\n"]
)
def test_nobody_measures(path: Path, text: str) -> None:
    """Empty, FREE, or a signature of dgxlab, whose job is dead or measures elsewhere for who holds the lock."""
    path.write_text(text)
    assert owner(path).somebody() == ""


def test_missing_is_nobody(path: Path) -> None:
    """So is a file whose folder is missing."""
    assert owner(path).somebody() == ""
    assert owner(path / "deeper").somebody() == ""


@pytest.mark.parametrize("text", ["FREEMAN measures until 5", "FREEÉ", "free", "not FREE"])
def test_free_is_a_word(path: Path, text: str) -> None:
    """A name that begins like it is a name."""
    path.write_text(text)
    assert owner(path).somebody() == f'somebody: "{text}"'


def test_somebody_is_told_cleaned_and_shortened(path: Path) -> None:
    """One line of what was written, as plain text."""
    path.write_text("bob:\tvllm\x1b[2J sweep\n" + "x" * 500)
    said = owner(path).somebody()
    assert said.startswith('somebody: "bob: vllm [2J sweep xxx')
    assert len(said) < 140


def test_unreadable_is_somebody(path: Path) -> None:
    """What cannot be read may be somebody's word."""
    path.mkdir()
    assert owner(path).somebody() == "somebody unknown (Is a directory)"


def test_pipe_does_not_hold_the_job_up(path: Path) -> None:
    """A fifo without a writer says nothing, and is not written to."""
    os.mkfifo(path)
    file = owner(path)
    assert file.somebody() == ""
    file.sign()
    file.free()


def test_signed_and_set_free(path: Path) -> None:
    """Others' scripts see the job while it measures and FREE after it; whose file it is does not change."""
    path.write_text(
        "FREE since a time that is a longer text than the signature, so that some of it could be left over\n"
    )
    path.chmod(0o640)
    file = owner(path)
    file.sign()
    assert path.read_text().startswith("dgxlab job J1 of alice, since 2")
    assert path.read_text().count("\n") == 1
    file.free()
    assert path.read_text() == "FREE\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_file_is_made_but_not_its_folder(tmp_path: Path) -> None:
    """Where people keep no such folder there is nobody to tell."""
    here, nowhere = owner(tmp_path / "owner"), owner(tmp_path / "none" / "owner")
    here.sign()
    nowhere.sign()
    nowhere.free()
    assert here.path.read_text().startswith("dgxlab job J1 of alice, since 2")
    assert here.watched
    assert not nowhere.watched
    assert not nowhere.path.parent.exists()


@pytest.mark.parametrize("text", ["bob: mine now\n", "dgxlab job J2 of alice, since 2026-11-20 12:00:00\n"])
def test_anothers_word_is_left_alone(path: Path, text: str) -> None:
    """At the end only the job's own signature is replaced."""
    file = owner(path)
    file.sign()
    path.write_text(text)
    file.free()
    assert path.read_text() == text


@pytest.fixture
def job(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], tuple[BenchLock, OwnerFile]]]:
    """Start jobs of alice, each with a device of its own, that share the file."""
    monkeypatch.setenv("DGXLAB_LOCKS", str(tmp_path))
    held = []

    def start(name: str) -> tuple[BenchLock, OwnerFile]:
        lock = BenchLock(f"GPU-{name}")
        assert lock.take({"job": name, "user": "alice"})
        held.append(lock)
        file = owner(path, name)
        file.sign()
        return lock, file

    yield start
    for lock in held:
        lock.release()


def test_file_is_handed_on(path: Path, job: Callable[[str], tuple[BenchLock, OwnerFile]]) -> None:
    """It names a job that measures until none does, whichever ends first; FREE is only the last one's word."""
    jobs = {name: job(name) for name in ("J1", "J2", "J3")}
    assert path.read_text().startswith("dgxlab job J1 of alice, since 2")
    for name, after in (("J2", "dgxlab job J1 "), ("J1", "dgxlab job J3 of alice, since 2"), ("J3", "FREE\n")):
        lock, file = jobs[name]
        file.sign()
        file.free()
        lock.release()
        assert path.read_text().startswith(after)


def test_dead_jobs_word_is_replaced(path: Path, job: Callable[[str], tuple[BenchLock, OwnerFile]]) -> None:
    """As soon as a living one looks again."""
    dead, _ = job("J1")
    _, living = job("J2")
    dead.release()
    living.sign()
    assert path.read_text().startswith("dgxlab job J2 ")


def test_file_that_somebody_keeps_locked_is_signed(path: Path) -> None:
    """Some hold it with flock(1) for as long as they work."""
    with path.open("w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        owner(path).sign()
    assert path.read_text().startswith("dgxlab job J1 ")
