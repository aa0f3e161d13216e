"""Which devices a plan measures on."""

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.agent.gpus import ComputeProcess, phrase
from dgxlab.agent.lease import DeviceLease, devices
from dgxlab.agent.lock import BenchLock, Signature
from dgxlab.errors import HostBusy, RemoteError
from dgxlab.model import ARM, Arm, ChainStep, CheckCommand, GateStep, ParityGate, Plan, RunStep
from dgxlab.model.reasons import Code, reason
from tests.journals import source
from tests.machines import script

H200 = [{"index": str(i), "uuid": f"GPU-{i}{i}-{9 - i}", "name": "NVIDIA H200"} for i in range(3)]
MIXED = [{**gpu, "name": f"NVIDIA {gpu['index']}"} for gpu in H200]
ALL = ("GPU-00-9", "GPU-11-8", "GPU-22-7")


def plan(*envs: Mapping[str, str], **cmake: str) -> Plan:
    gates = [GateStep("g", "a", ParityGate("MUL_MAT", "CUDA0"), (CheckCommand(ARM, (), env),)) for env in envs]
    runs = [RunStep("r", "a", "llama-bench", (), env, ()) for env in envs]
    return Plan("J", "n", "e", (Arm("a", source(), {"GGML_CUDA": "ON", **cmake}),), (*gates, *runs))


def visible(value: str, order: str = "") -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": value, **({"CUDA_DEVICE_ORDER": order} if order else {})}


def test_processor_unknown_gpus_and_the_order_of_locks() -> None:
    assert devices(plan({}, GGML_CUDA="OFF"), H200) == ("cpu",)
    assert devices(plan({}), []) == ()
    assert devices(plan({}), [{"index": "0", "uuid": None, "name": "NVIDIA GB10"}]) == ()
    assert devices(plan({}), H200) == devices(plan({}), H200[::-1]) == ALL


@pytest.mark.parametrize("backend", ["GGML_VULKAN", "GGML_HIP", "GGML_SYCL"])
def test_other_backends_of_gpus(backend: str) -> None:
    """They read no CUDA_VISIBLE_DEVICES, and a machine may have a GPU for them that nvidia-smi does not list."""
    built = {"GGML_CUDA": "OFF", backend: "ON"}
    assert devices(plan(visible("1"), **built), H200) == ALL
    assert devices(plan(visible("1"), **{backend: "ON"}), H200) == ALL
    assert devices(plan({}, **built), []) == ("cpu",)
    assert devices(plan({}, **{backend: "ON"}), []) == ()


@pytest.mark.parametrize(
    ("env", "gpus", "expected"),
    [
        (visible("GPU-11-8"), MIXED, ALL[1:2]),
        (visible("GPU-2, GPU-0"), MIXED, (ALL[0], ALL[2])),
        (visible("GPU-"), MIXED, ALL),
        (visible("GPU-77"), MIXED, ALL),
        (visible("1"), H200, ALL[1:2]),
        (visible("2,0"), H200, (ALL[0], ALL[2])),
        (visible("1"), MIXED, ALL),
        (visible("1", "FASTEST_FIRST"), MIXED, ALL),
        (visible("1", "PCI_BUS_ID"), MIXED, ALL[1:2]),
        (visible("7"), H200, ALL),
        (visible("0,MIG-1"), H200, ALL),
        (visible("0,-1,1"), H200, ALL),
        (visible(""), H200, ALL),
    ],
)
def test_named_gpus_where_that_is_certain(
    env: dict[str, str], gpus: list[dict[str, str]], expected: tuple[str, ...]
) -> None:
    """A uuid's beginning always; an index where CUDA counts as nvidia-smi does; in doubt all of them."""
    assert devices(plan(env), gpus) == expected


def test_union_over_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices(plan(visible("0"), visible("2")), H200) == (ALL[0], ALL[2])
    assert devices(plan(visible("0"), {}), H200) == ALL
    arms = [RunStep(gpu, "a", "llama-bench", (), visible(gpu), ()) for gpu in "12"]
    session = replace(plan(), steps=(ChainStep("chain:0", *arms, cycles=8, drift_limit=0.05),))
    assert devices(session, H200) == ALL[1:]
    monkeypatch.setenv("DGXLAB_HOST", json.dumps({"env": visible("1")}))
    assert devices(plan(visible("0"), {}), H200) == ALL[:2]


BOB = Signature("J2", "bob")


@pytest.fixture
def told() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script(tmp_path / "nvidia-smi", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("DGXLAB_LOCKS", str(tmp_path))
    return tmp_path


def lease(plan: Plan, told: list[tuple[str, str]], gpus: list[dict[str, str]] = H200) -> DeviceLease:
    return DeviceLease(
        replace(plan, wait_s=0.0), gpus, (), lambda event: told.append((event.state, Path(event.path).name))
    )


def test_gpu_that_is_not_there_is_not_the_processor(here: Path, told: list[tuple[str, str]]) -> None:
    with pytest.raises(RemoteError, match="nvidia-smi lists no GPU on this host") as refused:
        lease(plan({}), told, []).hold()
    assert refused.value.next == "dgxlab doctor local"
    assert told == []
    assert not list(here.glob("dgxlab-*"))


def test_what_is_taken_away_is_said(here: Path, told: list[tuple[str, str]]) -> None:
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
    """A job that lost a lock to another lets go of the later ones, which that one needs next: no deadlock."""
    mine = lease(plan({}), told)
    mine.hold()
    (here / f"dgxlab-{ALL[1]}").unlink()
    theirs = [BenchLock(uuid) for uuid in ALL]
    assert theirs[1].take(BOB)
    with pytest.raises(HostBusy, match=f"dgxlab-{ALL[1]} is held by job J2"):
        mine.hold()
    assert theirs[2].take(BOB)
    assert not theirs[0].take(BOB)
    mine.release()
    for lock in theirs:
        lock.release()


@pytest.mark.parametrize(
    ("builds", "measures", "waits"), [([], [], True), ([0, 1], [0, 1], True), ([0, 1], [2, 3], False), ([], [2], True)]
)
def test_what_measures_and_builds_on_the_same_processors_wait_for_each_other(
    here: Path,
    told: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    builds: list[int],
    measures: list[int],
    waits: bool,
) -> None:
    def of(processors: list[int]) -> DeviceLease:
        monkeypatch.setenv("DGXLAB_HOST", json.dumps({"processors": processors}))
        return lease(plan({}, GGML_CUDA="OFF"), told)

    busy = pytest.raises(HostBusy, match=r"dgxlab-cpu.* is held by job") if waits else nullcontext()
    mine, other, measuring = of(builds), of(builds), of(measures)
    with mine.building(), other.building():
        assert len(mine.fds) == 1  # for compilers that outlive the agent
        with busy:
            measuring.hold()
    measuring.hold()
    with busy, mine.building():
        pass
    measuring.release()
    with mine.building():
        pass
    mine.hold()  # it does not wait for itself
    mine.release()


def test_missing_folder_is_said_once(here: Path, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGXLAB_HOST", json.dumps({"lock": str(here / "gone" / "owner")}))
    mine = lease(plan({}, GGML_CUDA="OFF"), told)
    mine.hold()
    mine.hold()
    mine.release()
    assert told == [("unwatched", "owner"), ("held", "dgxlab-cpu"), ("released", "dgxlab-cpu")]


def test_a_look_that_failed_is_not_an_idle_gpu(told: list[tuple[str, str]]) -> None:
    stranger = ComputeProcess(ALL[0], 2**22 + 1, "/usr/bin/python3", "", 300)
    mine = lease(plan({}), told)
    assert mine.disturbance(([], [])) is None
    assert mine.disturbance(([], None)) == reason(Code.UNWATCHED)
    assert mine.disturbance(([stranger], [])) == reason(Code.STRANGER, processes=phrase([stranger]))
    assert lease(plan({}, GGML_CUDA="OFF"), told).disturbance((None, [stranger])) is None
    assert lease(plan({}), told, H200[1:]).disturbance(([stranger], [])) is None  # not of this job's part of the node
    unnamed = replace(stranger, gpu_uuid="[N/A]")
    assert mine.disturbance(([unnamed], [])) == reason(Code.STRANGER, processes=phrase([unnamed]))
    vulkan = lease(plan({}, GGML_CUDA="OFF", GGML_VULKAN="ON"), told)
    assert vulkan.disturbance(([stranger], [])) == mine.disturbance(([stranger], []))
