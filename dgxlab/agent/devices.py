"""Which devices a plan measures on: every GPU that its programs may see, or the processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dgxlab.agent.environment import settings
from dgxlab.model import CheckStep, GateStep, Plan, gpu_backends

CPU = "cpu"
Gpu = Mapping[str, Any]


def uses_cuda(plan: Plan) -> bool:
    """Return whether any arm is built for CUDA."""
    return any("CUDA" in gpu_backends(arm.cmake) for arm in plan.arms)


def devices(plan: Plan, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return what to lock, in the one order that keeps two jobs from waiting for each other.

    All GPUs, unless every gate and run names its own in a CUDA_VISIBLE_DEVICES that can be read with certainty. None
    for a plan that needs a GPU where none has a uuid to lock.
    """
    if not uses_cuda(plan):
        return (CPU,)
    every = [gpu for gpu in gpus if gpu["uuid"]]
    envs = [step.env for step in plan.steps if isinstance(step, GateStep)] + [run.env for run in plan.runs]
    envs += [command.env for step in plan.steps if isinstance(step, CheckStep) for command in step.commands]
    seen = [_visible({**settings().env, **env}, every) for env in envs]
    return tuple(sorted({gpu["uuid"] for gpus in seen for gpu in gpus} or {gpu["uuid"] for gpu in every}))


def _visible(env: Mapping[str, str], gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """Return the GPUs that a program sees in this environment, all of them when that is not certain."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    by_bus = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu["name"] for gpu in gpus}) == 1
    found = [_named(word.strip(), gpus, by_bus) for word in named.split(",")]
    certain = [gpu for gpu in found if gpu is not None]
    return certain if len(certain) == len(found) else gpus


def _named(word: str, gpus: Sequence[Gpu], by_bus: bool) -> Gpu | None:
    """Return the GPU of a uuid's beginning, or of an index where CUDA counts as nvidia-smi does; None if in doubt."""
    if word.startswith("GPU-"):
        matching = [gpu for gpu in gpus if gpu["uuid"].startswith(word)]
    else:
        matching = [gpu for gpu in gpus if by_bus and gpu["index"] == word]
    return matching[0] if len(matching) == 1 else None
