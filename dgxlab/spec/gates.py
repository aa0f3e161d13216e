"""Gates beside test-backend-ops, as strict pydantic models; a string under each field is its help in editors."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dgxlab import model
from dgxlab.spec.fields import Against, Count, Env, GpuArch, Line, Maybe, Md5, Name, Ratio, Seconds, Strict, Whole


class ModelGateSpec(Strict):
    """What gates on a model have in common."""

    model: Name
    """A name under models; it needs a vocabulary."""
    n_ubatch: Count = 512
    """Tokens computed at once (physical batch size)."""
    against: Against = Field(default_factory=dict)
    """Environment that the arm is held against: variables with another value, null for one that is not set there."""
    engaged: Maybe[Line] = None
    """What must be on the arm's stderr and not on that of against, because the path under test prints it."""
    seed: Whole = 0
    """Seed of the words."""
    env: Env = Field(default_factory=dict)
    """Environment of this gate, besides the spec's."""


class GreedyGateSpec(ModelGateSpec):
    """The most likely tokens are the same, byte for byte, in the arm's environment and in that of against."""

    n_prompt: Annotated[int, Field(ge=1, le=65536)] = 64
    """Words of the prompt, each most often one token."""
    n_gen: Annotated[int, Field(ge=2, le=65536)] = 32
    """Generated tokens."""
    expect: Maybe[Md5] = None
    """The md5 that the text must have; it belongs to one model, build and machine."""
    limit_s: Seconds = 1800.0
    """Longest time of one launch, in seconds."""

    def record(self) -> model.GreedyGate:
        """Return the gate."""
        said = self.model_dump(exclude={"expect", "engaged"})
        return model.GreedyGate(**said, expect=self.expect or "", engaged=self.engaged or "")


class PerplexityGateSpec(ModelGateSpec):
    """The logits are near those of a reference on the processor, and nearer than in the environment of against."""

    reference: Name
    """A name under models: what the model would compute exactly, as derived in F32."""
    n_ctx: Annotated[int, Field(ge=16, le=1048576)] = 512
    """Context of a chunk, in tokens; its second half counts."""
    chunks: Annotated[int, Field(ge=1, le=10000)] = 4
    """Chunks of text."""
    kld_ratio_at_most: Maybe[Ratio] = None
    """Limit of the arm's mean KLD divided by that of against."""
    kld_at_most: Maybe[Ratio] = None
    """Limit of the arm's mean KLD."""
    ppl_ratio_at_most: Maybe[Annotated[float, Field(ge=1, le=1e6)]] = None
    """Limit of the arm's perplexity divided by the reference's, and of its inverse; 1.01 is within 1 %."""
    limit_s: Seconds = 3600.0
    """Longest time of one launch, in seconds."""

    def record(self) -> model.PerplexityGate:
        """Return the gate."""
        return model.PerplexityGate(**self.model_dump(exclude={"engaged"}), engaged=self.engaged or "")


class HarnessGateSpec(Strict):
    """A kernel's own tests: kernels/<kernel> is compiled on the host with its Makefile and run."""

    kernel: Name
    """A folder of kernels/."""
    arch: GpuArch = "native"
    """The architecture that nvcc compiles for, as sm_90; native is the GPU that is there."""
    tests: Count
    """How many tests must run and pass: its `test` prints a line for each."""
    env: Env = Field(default_factory=dict)
    """Environment of this gate, besides the spec's."""
    limit_s: Seconds = 1800.0
    """Longest time, in seconds."""

    def record(self) -> model.HarnessGate:
        """Return the gate."""
        return model.HarnessGate(**self.model_dump())
