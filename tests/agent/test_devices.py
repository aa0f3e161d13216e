"""Which devices a plan measures on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from dgxlab.agent.devices import devices
from dgxlab.model import Arm, ChainStep, GateStep, ParityGate, Plan, RunStep
from tests.journals import source

H200 = [{"index": str(i), "uuid": f"GPU-{i}{i}-{9 - i}", "name": "NVIDIA H200"} for i in range(3)]
MIXED = [{**gpu, "name": f"NVIDIA {gpu['index']}"} for gpu in H200]
ALL = ("GPU-00-9", "GPU-11-8", "GPU-22-7")


def plan(*envs: Mapping[str, str], cuda: str = "ON") -> Plan:
    """Return a plan with a gate and a run for each environment."""
    gates = [GateStep("g", "a", ParityGate("MUL_MAT", "CUDA0"), (), env) for env in envs]
    runs = [RunStep("r", "a", "llama-bench", (), env, ()) for env in envs]
    return Plan("J", "n", "e", (Arm("a", source(), {"GGML_CUDA": cuda}),), (*gates, *runs))


def visible(value: str, order: str = "") -> dict[str, str]:
    """Return an environment."""
    return {"CUDA_VISIBLE_DEVICES": value, **({"CUDA_DEVICE_ORDER": order} if order else {})}


def test_processor_and_unknown_gpus() -> None:
    """A CPU job takes the processor; a CUDA job takes nothing where no GPU has a uuid, and so cannot measure."""
    assert devices(plan({}, cuda="OFF"), H200) == ("cpu",)
    assert devices(plan({}), []) == ()
    assert devices(plan({}), [{"index": "0", "uuid": None, "name": "NVIDIA GB10"}]) == ()


def test_all_gpus_in_one_order() -> None:
    """Whatever nvidia-smi's order is, two jobs lock in the same one."""
    assert devices(plan({}), H200) == devices(plan({}), H200[::-1]) == ALL


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
    """Each gate and run has its own environment over the host's, in chains too; one without a word may use all."""
    assert devices(plan(visible("0"), visible("2")), H200) == (ALL[0], ALL[2])
    assert devices(plan(visible("0"), {}), H200) == ALL
    one, two = (RunStep(gpu, "a", "llama-bench", (), visible(gpu), ()) for gpu in "12")
    session = replace(plan(), steps=(ChainStep("chain:0", one, two, cycles=8, drift_limit=0.05),))
    assert devices(session, H200) == ALL[1:]
    monkeypatch.setenv("DGXLAB_HOST", json.dumps({"env": visible("1")}))
    assert devices(plan(visible("0"), {}), H200) == ALL[:2]
