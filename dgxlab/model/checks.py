"""Gates beside test-backend-ops: a model's greedy text, its logits against a reference, a kernel's own tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Union

from dgxlab.model.wire import LATER, digest, from_json

Against = Mapping[str, Union[str, None]]
"""Variables that the other environment has instead; None for one that it does not have."""


@dataclass(frozen=True)
class GreedyGate:
    """A model's most likely tokens are the same, byte for byte, in the arm's environment and in another."""

    name: ClassVar[str] = "greedy"

    model: str
    n_prompt: int = 64
    """Words of the prompt, each most often one token."""
    n_gen: int = 32
    n_ubatch: int = 512
    """Tokens computed at once, so that prefill is below or above a threshold."""
    against: Against = field(default_factory=dict)
    expect: str = ""
    """The md5 that the text must have; "" for any."""
    seed: int = 0
    """Of the prompt."""
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0
    engaged: str = field(default="", metadata=LATER)
    """What must be on the arm's stderr, and not on that of `against`: the path under test says that it ran."""


@dataclass(frozen=True)
class PerplexityGate:
    """A model's logits are near those of a reference, and nearer than in another environment.

    The KLD is the mean Kullback-Leibler divergence from the reference's distribution, computed on the processor.
    """

    name: ClassVar[str] = "perplexity"

    model: str
    reference: str
    n_ctx: int = 512
    chunks: int = 4
    n_ubatch: int = 512
    against: Against = field(default_factory=dict)
    kld_ratio_at_most: float | None = None
    """Limit of the arm's KLD divided by that of `against`."""
    kld_at_most: float | None = None
    ppl_ratio_at_most: float | None = None
    """Limit of the perplexity divided by the reference's, and of its inverse."""
    seed: int = 0
    """Of the text."""
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 3600.0
    engaged: str = field(default="", metadata=LATER)
    """What must be on the arm's stderr, and not on that of `against`: the path under test says that it ran."""


@dataclass(frozen=True)
class HarnessGate:
    """A kernel's own tests pass: kernels/<kernel> and kernels/common are sent, compiled and run."""

    name: ClassVar[str] = "harness"
    model: ClassVar[str] = ""
    """It reads none."""
    against: ClassVar[Against] = {}
    """It has one environment."""

    kernel: str
    arch: str = "native"
    """The GPU's architecture by nvcc's name."""
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0
    tests: int = field(default=0, metadata=LATER)
    """How many tests must run and pass; 0 in records of gates that did not say."""


Check = Union[GreedyGate, PerplexityGate, HarnessGate]


def check_from_json(value: Any) -> Check:
    """Return a gate as it was written.

    Raises:
        ValueError: if it is none.
    """
    return from_json(Check, value)  # type: ignore[arg-type]


def sources(kernel: str, files: Mapping[str, str]) -> dict[str, str]:
    """Return what a harness gate reads of a kernel, by the name under which it is recorded."""
    return {f"kernels/{kernel}": digest(files, 16)}


def about(gate: Check) -> str:
    """Name a gate for people: `greedy of tiny`, `perplexity of tiny against exact`, `harness of nvfp4_dequant`."""
    if isinstance(gate, GreedyGate):
        return f"greedy of {gate.model}"
    if isinstance(gate, HarnessGate):
        return f"harness of {gate.kernel}"
    return f"perplexity of {gate.model} against {gate.reference}"


def limits(gate: Check) -> tuple[str, ...]:
    """Return what a gate asks, in words."""
    if isinstance(gate, HarnessGate):
        return (f"{gate.tests} tests pass" if gate.tests else "every test passes, and there are some",)
    engaged = (f"{gate.engaged!r} on stderr",) if gate.engaged else ()
    if isinstance(gate, GreedyGate):
        same = ("the same text in both environments",) if gate.against else ()
        return (*same, *((f"md5 {gate.expect}",) if gate.expect else ()), *engaged)
    asked = {
        "KLD at most {} times the other environment's": gate.kld_ratio_at_most,
        "KLD at most {}": gate.kld_at_most,
        "perplexity at most {} times the reference's, and its inverse": gate.ppl_ratio_at_most,
    }
    return (*(words.format(f"{limit:g}") for words, limit in asked.items() if limit is not None), *engaged)


def environments(gate: Check, env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment of the arm and the one that it is held against, given the experiment's own."""
    arm = {**env, **gate.env}
    other = {name: value for name, value in {**arm, **gate.against}.items() if value is not None}
    return arm, other
