"""Jobs on a machine that others use too: real locks, real processes, and an nvidia-smi that prints what a file says."""

import json
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dgxlab.agent.lock import BenchLock, Signature, lock
from dgxlab.errors import AGAIN, GateFailed, HostBusy
from dgxlab.model import EngagedGate, Experiment, HostEntry
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.lab.conftest import Event, ToyLab, is_measured, kinds, undisturbed
from tests.machines import script

SMI = """#!/bin/sh
cd {folder}
case "$1" in
  --query-gpu=index,*) cat gpus ;;
  --query-compute-apps=*) [ ! -e broken ] && sed "s/AGENT/$PPID/" apps ;;
esac
"""
CUDA = {"GGML_CUDA": "ON"}
VULKAN = {"GGML_VULKAN": "ON"}


@dataclass
class Gpus:
    """GPUs that exist only for nvidia-smi, and what computes on them."""

    folder: Path
    uuids: tuple[str, ...]
    lock_files: tuple[Path, ...]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def occupy(self, *pids: object, gpu: int = 0) -> None:
        lines = (f"{self.uuids[gpu]}, {pid}, /usr/bin/other, 300\n" for pid in pids)
        part = self.folder / "apps.part"
        part.write_text("".join(lines))
        part.rename(self.folder / "apps")

    def stranger(self) -> int:
        self.started.append(subprocess.Popen(["sleep", "600"]))
        return self.started[-1].pid

    def lock(self, gpu: int = 0, job: str = "J1") -> BenchLock:
        lock = BenchLock(self.uuids[gpu])
        assert lock.take(Signature(job, "alice"))
        return lock

    def locks(self) -> set[int]:
        held = set()
        for number, uuid in enumerate(self.uuids):
            lock = BenchLock(uuid)
            if not lock.take(Signature("J", "bob")):
                held.add(number)
            lock.release()
        return held


@pytest.fixture
def gpus(tmp_path: Path, locks: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """Two idle GPUs of one name that no other test has."""
    folder = tmp_path / "smi"
    script(folder / "nvidia-smi", SMI.format(folder=folder))
    uuids = tuple(sorted(f"GPU-{secrets.token_hex(8)}" for _ in range(2)))
    rows = (f"{i}, {uuid}, NVIDIA Toy, 580.1, 9.0, 1000\n" for i, uuid in enumerate(uuids))
    (folder / "gpus").write_text("".join(rows))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    new = Gpus(folder, uuids, tuple(locks / f"dgxlab-{uuid}" for uuid in uuids))
    new.occupy()
    yield new
    for child in new.started:
        child.kill()
        child.wait()


@pytest.fixture
def owner(tmp_path: Path) -> Path:
    return tmp_path / "owner"


@pytest.fixture
def lab(make_toy_lab: Callable[..., ToyLab], gpus: Gpus, owner: Path) -> ToyLab:
    new = make_toy_lab()
    new.host = Host(LocalTransport(str(new.root)), HostEntry("local", lock=str(owner)))
    new.lab = replace(new.lab, connect=lambda name: new.host)
    return new


def cuda(lab: ToyLab, **changes: object) -> Experiment:
    return lab.experiment(**{"cmake": CUDA, "bench": (toy.backend_ops(),), **changes})


def locks(events: list[Event], state: str) -> list[Event]:
    return [event for event in kinds(events, "lock") if event["state"] == state]


def order(events: list[Event]) -> list[str]:
    shown = ("build", "gate", "run", "lock")
    return [event.get("state", event["event"]) for event in undisturbed(events) if event["event"] in shown]


@pytest.mark.parametrize("cmake", [CUDA, VULKAN])
def test_every_gpu_is_locked_for_measuring_alone(lab: ToyLab, gpus: Gpus, cmake: dict[str, str]) -> None:
    seen: list[set[int]] = []

    def react(event: Event) -> None:
        if event["event"] == "run":
            seen.append(gpus.locks())
            lab.release()

    held = [gpus.lock(0), gpus.lock(1)]
    _, events = lab.fail(HostBusy, cuda(lab, cmake=cmake), wait_s=0)
    assert order(events) in ([], ["build"])  # another test may have built it
    for each in held:
        each.release()
    _, events = lab.run_well(cuda(lab, cmake=cmake, bench=lab.slow().bench), react=react)
    assert seen[0] == {0, 1}
    assert order(events) == ["build", "held", "held", "gate", "run", "run", "released", "released"]
    assert [event["path"].rpartition("dgxlab-")[2] for event in locks(events, "held")] == list(gpus.uuids)
    assert gpus.locks() == set()


def test_a_build_waits_while_another_job_measures(lab: ToyLab, gpus: Gpus) -> None:
    unbuilt, held = cuda(lab, cmake={**CUDA, "TOY": gpus.uuids[0]}), gpus.lock(0)

    def react(event: Event) -> None:
        if event["event"] == "lock" and event["state"] == "waiting":
            threading.Timer(0.5, held.release).start()

    error, events = lab.fail(HostBusy, unbuilt, wait_s=0)
    assert f"the device is busy: {gpus.lock_files[0]} is held by job J1 of alice" in error.message
    assert order(events) == []
    _, events = lab.run_well(unbuilt, react=react)
    assert order(events)[:3] == ["waiting", "build", "held"]
    (built,), (waiting,) = kinds(events, "build"), locks(events, "waiting")
    assert built["seconds"] < built["t"] - waiting["t"]  # its own time alone, by which later ones are predicted


def test_a_build_that_waits_for_another_one_is_timed_without_it(lab: ToyLab) -> None:
    mark = secrets.token_hex(8)
    experiment = lab.experiment(cmake={"TOY": mark}, bench=(toy.backend_ops(),))
    (built,) = kinds(lab.run_well(experiment)[1], "build")
    shutil.rmtree(lab.root / "builds" / built["build_id"])
    caches = (lab.root / "work").glob("*/cmake/CMakeCache.txt")
    work = next(cache.parent.parent for cache in caches if mark in cache.read_text())
    with (work / "lock").open("ab") as other:
        assert lock(other.fileno())

        def react(event: Event) -> None:
            if event["event"] == "lock" and event["state"] == "building":
                threading.Timer(2.0, other.close).start()

        _, events = lab.run_well(experiment, react=react, again=True)
    (again,), (waiting,) = kinds(events, "build"), locks(events, "building")
    assert again["seconds"] < again["t"] - waiting["t"] - 1.5


def test_waiting_says_who_holds_what(lab: ToyLab, gpus: Gpus, owner: Path) -> None:
    held, pid = gpus.lock(0), gpus.stranger()

    def react(event: Event) -> None:
        if event["event"] != "lock" or event["state"] != "waiting":
            return
        if "job J1" in event["owner"]:
            os.pwrite(held.fds[0], json.dumps({"job": "J2", "user": "b\x1bob", "since": 1.5}).encode().ljust(200), 0)
        elif "job J2" in event["owner"]:
            owner.write_text("carol tunes vllm\n")
            held.release()
        elif "carol" in event["owner"]:
            gpus.occupy(pid, 2**22 + 1)
            owner.write_text("FREE\n")
        else:
            gpus.occupy()

    _, events = lab.run_well(cuda(lab), react=react)
    told = [(event["path"], event["owner"]) for event in locks(events, "waiting")]
    user = Path(f"/proc/{pid}").owner()
    since = told[0][1].removeprefix("job J1 of alice, since ")
    assert len(since) == len("2026-11-20 12:01:44")
    assert told == [
        (str(gpus.lock_files[0]), f"job J1 of alice, since {since}"),
        (str(gpus.lock_files[0]), "job J2 of b\\u001bob, since 1970-01-01 00:00:01"),
        (str(owner), 'another user: "carol tunes vllm"'),
        (gpus.uuids[0], f"pid {pid} (other of {user}, 300 MiB) and 1 more"),
    ]


@pytest.mark.parametrize("by", ["job", "person", "process"])
def test_patience_runs_out(lab: ToyLab, gpus: Gpus, owner: Path, by: str) -> None:
    held, pid, left = None, gpus.stranger(), ""
    if by == "job":
        held, holder = gpus.lock(1), f"{gpus.lock_files[1]} is held by job J1 of alice, since "
    elif by == "person":
        left = "carol tunes vllm\n"
        owner.write_text(left)
        holder = f'{owner} is held by another user: "carol tunes vllm"'
    else:
        left = "FREE\n"
        gpus.occupy(pid)
        holder = f"{gpus.uuids[0]} is held by pid {pid} (other of "
    outcome, events = lab.run(cuda(lab), wait_s=0.2, kind="gate")
    assert isinstance(outcome.error, HostBusy)
    assert (outcome.error.exit_code, outcome.error.next) == (10, f"{AGAIN} with --wait 60")
    assert f" 200 ms: {holder}" in outcome.error.message
    assert (len(locks(events, "waiting")), kinds(events, "gate"), kinds(events, "run")) == (1, [], [])
    assert (owner.read_text() if owner.exists() else "") == left
    assert lab.lab.store.job(outcome.job_id).exit_code == 10
    if held:
        held.release()
    assert gpus.locks() == set()


def test_job_on_the_processor_honours_peoples_word(lab: ToyLab, gpus: Gpus, owner: Path) -> None:
    owner.write_text("carol compiles\n")
    gpus.occupy(gpus.stranger())

    def react(event: Event) -> None:
        if event["event"] == "lock" and event["path"] == str(owner):
            owner.write_text("FREE\n")

    _, events = lab.run_well(lab.experiment(bench=(toy.backend_ops(),)), react=react)
    assert locks(events, "waiting")[-1]["owner"] == 'another user: "carol compiles"'
    assert [event["path"] for event in locks(events, "held")] == [str(gpus.lock_files[0].with_name("dgxlab-cpu"))]


def test_disturbed_run_is_discarded_and_repeated(lab: ToyLab, gpus: Gpus) -> None:
    pid = gpus.stranger()
    disturbed: list[Event] = []

    def react(event: Event) -> None:
        if is_measured(event) and not disturbed:
            gpus.occupy(pid)
            lab.release()
        if event["event"] == "run":
            disturbed.append(event)
            gpus.occupy()

    _, events = lab.run_well(cuda(lab, bench=lab.slow().bench[1:]), react=react)
    ran = kinds(events, "run")
    assert [event["status"] for event in ran] == ["discarded", "valid"]
    assert f": pid {pid} (other of " in ran[0]["reason"]
    assert set(lab.values()) == {"pp16", "pp32"}
    recorded = lab.lab.store.rows("SELECT status, reason FROM runs ORDER BY position")
    assert [(row["status"], row["reason"]) for row in recorded] == [(e["status"], e["reason"]) for e in ran]


def test_worst_failure_is_the_one_that_is_told(lab: ToyLab, gpus: Gpus) -> None:
    unseen = EngagedGate("no such marker", ("backend-ops",))
    crash = toy.llama_bench(n_gen=(0,), env={"TOY": "crash"})
    error, _ = lab.fail(GateFailed, cuda(lab, gates=(toy.parity(), unseen), bench=(toy.backend_ops(), crash)))
    assert "no such marker" in error.message
