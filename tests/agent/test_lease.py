"""What a job measures on, held against everybody else."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.agent.lease import DeviceLease
from dgxlab.agent.lock import BenchLock
from dgxlab.agent.occupancy import ComputeProcess
from dgxlab.errors import HostBusy, RemoteError
from dgxlab.model import Plan
from tests.agent.test_devices import ALL, H200, plan

BOB = {"job": "J2", "user": "bob"}


@pytest.fixture
def told() -> list[tuple[str, str]]:
    """State and file of what was told."""
    return []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the locks are, on a host whose GPUs are idle."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DGXLAB_LOCKS", str(tmp_path))
    return tmp_path


def lease(plan: Plan, told: list[tuple[str, str]], gpus: list[dict[str, str]] = H200) -> DeviceLease:
    """Return the lease of a job that does not wait."""
    return DeviceLease(
        replace(plan, wait_s=0.0), gpus, (), lambda state, path, owner: told.append((state, Path(path).name))
    )


def test_gpu_that_is_not_there_is_not_the_processor(here: Path, told: list[tuple[str, str]]) -> None:
    """A plan for CUDA is refused where nvidia-smi lists no GPU; nothing is held."""
    with pytest.raises(RemoteError, match="nvidia-smi lists no GPU on this host") as refused:
        lease(plan({}), told, []).hold()
    assert refused.value.next == "dgxlab doctor local"
    assert told == []
    assert not list(here.glob("dgxlab-*"))


def test_what_is_taken_away_is_said(here: Path, told: list[tuple[str, str]]) -> None:
    """A file that a cleaner removed is locked anew and told anew, and nothing else is told twice."""
    mine = lease(plan({}), told)
    mine.hold()
    mine.hold()
    assert told == [("held", f"dgxlab-{uuid}") for uuid in ALL]
    (here / f"dgxlab-{ALL[1]}").unlink()
    mine.hold()
    assert len(told) == 6
    mine.release()
    assert told[6:] == [("released", f"dgxlab-{uuid}") for uuid in ALL]


def test_who_waits_keeps_only_what_comes_before(here: Path, told: list[tuple[str, str]]) -> None:
    """A job that lost a lock to another lets go of the later ones, which that one needs next: neither waits in vain."""
    mine = lease(plan({}), told)
    mine.hold()
    (here / f"dgxlab-{ALL[1]}").unlink()
    theirs = [BenchLock(uuid) for uuid in ALL]
    assert theirs[1].take(BOB)
    with pytest.raises(HostBusy, match=f"dgxlab-{ALL[1]} is held by job J2 of bob"):
        mine.hold()
    assert theirs[2].take(BOB)
    assert not theirs[0].take(BOB)
    mine.release()
    for lock in theirs:
        lock.release()


def test_missing_folder_is_said_once(here: Path, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first launch, not before each."""
    monkeypatch.setenv("DGXLAB_HOST", json.dumps({"lock": str(here / "gone" / "owner")}))
    mine = lease(plan({}, cuda="OFF"), told)
    mine.hold()
    mine.hold()
    mine.release()
    assert told == [("unwatched", "owner"), ("held", "dgxlab-cpu"), ("released", "dgxlab-cpu")]


def test_silence_about_a_run_is_not_nobody(told: list[tuple[str, str]]) -> None:
    """A look that failed may hide a stranger; on the processor nobody looks."""
    stranger = ComputeProcess(ALL[0], 2**22 + 1, "/usr/bin/python3", "", 300)
    mine = lease(plan({}), told)
    assert mine.disturbance(([], [])) == ""
    assert mine.disturbance(([], None)) == "nvidia-smi did not say who computes"
    assert mine.disturbance(([stranger], [])).startswith("a foreign compute process appeared: pid 4194305 (python3 of")
    assert lease(plan({}, cuda="OFF"), told).disturbance((None, [stranger])) == ""
