"""Gate and bench entries of a spec file, as strict pydantic models; a string under each field is its help in editors.

Each model turns itself into its record of dgxlab.model. What spans several fields is in checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Field

from dgxlab import model
from dgxlab.spec import flags
from dgxlab.spec.fields import (
    Args,
    Cases,
    Column,
    Count,
    Counted,
    CpuMask,
    Env,
    Exclude,
    Few,
    FlashAttn,
    KvType,
    Layers,
    Line,
    Many,
    Maybe,
    Name,
    OneKind,
    Op,
    Param,
    Seconds,
    SplitMode,
    Strict,
    Tool,
    Whole,
)
from dgxlab.spec.gates import GreedyGateSpec, HarnessGateSpec, PerplexityGateSpec


class ParityGateSpec(Strict):
    """test-backend-ops test: every case of op on backend agrees with the CPU reference."""

    op: Op
    """The operation, as MUL_MAT."""
    backend: Name
    """The backend by its exact name, as CUDA0 or CPU."""
    expect: Counted | None = None
    """How many cases must run and pass, as 1103/1103; null: the first clean baseline on the tree records it."""
    unsupported: Whole | None = None
    """How many cases the backend is known not to support; null: not checked."""
    cases: Cases | None = None
    """Digest of the list of all cases, the unsupported ones too; null: the first clean baseline records it."""
    engaged: Maybe[Line] = None
    """What must be on stderr, because the path under test prints it."""
    env: Env = Field(default_factory=dict)
    """Environment of this gate, besides the spec's."""
    limit_s: Seconds = 3600.0
    """Longest time, in seconds."""

    def record(self) -> model.ParityGate:
        """Return the gate."""
        expect = model.Expectation.parse(self.expect) if self.expect else None
        said = self.model_dump(exclude={"expect", "cases", "engaged"})
        return model.ParityGate(**said, expect=expect, cases=self.cases or "", engaged=self.engaged or "")


class EngagedGateSpec(Strict):
    """The path under test says so on stderr in every timed run of tools."""

    stderr: Line
    """The marker: text that a line of stderr holds."""
    tools: Many[Tool] = Field(default_factory=lambda: list(get_args(Tool)))
    """The tools whose runs must print it; all, when left out."""

    def record(self) -> model.EngagedGate:
        """Return the gate."""
        return model.EngagedGate(self.stderr, tuple(self.tools))


class GateSpec(OneKind):
    """A correctness check before anything is measured."""

    backend_ops: Maybe[ParityGateSpec] = Field(default=None, alias="backend-ops")
    engaged: Maybe[EngagedGateSpec] = None
    greedy: Maybe[GreedyGateSpec] = None
    perplexity: Maybe[PerplexityGateSpec] = None
    harness: Maybe[HarnessGateSpec] = None

    def record(self) -> model.Gate:
        """Return the record of the one kind that is there."""
        gate: model.Gate = self.kind[1].record()
        return gate


class BackendOpsSpec(Strict):
    """test-backend-ops perf on the built-in shapes that where selects."""

    op: Op
    """The operation, as MUL_MAT."""
    backend: Name
    """The backend by its exact name, as CUDA0 or CPU."""
    where: Annotated[dict[Column, Many[Param]], Field(min_length=1)]
    """Parameters of the cases by test-backend-ops' names; lists expand to a matrix."""
    exclude: Exclude = Field(default_factory=list)
    """Cells to leave out: those that have all the values of an entry."""
    env: Env = Field(default_factory=dict)
    """Environment of this entry, besides the spec's."""
    limit_s: Seconds = 600.0
    """Longest time of one launch, in seconds."""

    def axes(self) -> dict[str, list[Any]]:
        """Return what is varied."""
        return dict(self.where)

    def record(self) -> model.BackendOpsBench:
        """Return the bench entry."""
        where = {key: tuple(values) for key, values in self.where.items()}
        return model.BackendOpsBench(
            self.op, self.backend, where, tuple(map(dict, self.exclude)), dict(self.env), self.limit_s
        )


class ModelBenchSpec(Strict):
    """What llama-bench and llama-batched-bench have in common."""

    model: Name
    """A name under models."""
    args: Args = Field(default_factory=list)
    """Further raw arguments, the same for every cell; flags that have a key of their own are refused."""
    exclude: Exclude = Field(default_factory=list)
    """Cells to leave out: those that have all the values of an entry."""
    env: Env = Field(default_factory=dict)
    """Environment of this entry, besides the spec's."""
    limit_s: Seconds = 1800.0
    """Longest time of one launch, in seconds."""

    n_batch: Maybe[Many[Count]] = None
    """Logical batch size, in tokens."""
    n_ubatch: Maybe[Many[Count]] = None
    """Physical batch size, in tokens."""
    n_threads: Maybe[Many[Count]] = None
    """CPU threads."""
    n_gpu_layers: Maybe[Many[Layers]] = None
    """Layers on the GPU; -1 is the tool's own choice."""
    split_mode: Maybe[Many[SplitMode]] = None
    """How several GPUs share the model."""
    main_gpu: Maybe[Many[Whole]] = None
    """The GPU that split_mode none uses."""
    flash_attn: Maybe[Many[FlashAttn]] = None
    """FlashAttention: true, false or "auto"."""
    type_k: Maybe[Many[KvType]] = None
    """Type of the K cache."""
    type_v: Maybe[Many[KvType]] = None
    """Type of the V cache."""

    def _given(self, names: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        return {name: tuple(values) for name in names if (values := getattr(self, name)) is not None}

    def _shared(self) -> dict[str, Any]:
        exclude = tuple(map(dict, self.exclude))
        return {"args": tuple(self.args), "exclude": exclude, "env": dict(self.env), "limit_s": self.limit_s}


class LlamaBenchSpec(ModelBenchSpec):
    """llama-bench: prompt and generation speed at the given sizes."""

    n_prompt: Few[Count] = Field(default_factory=list)
    """Prompt lengths, in tokens; a cell each."""
    n_gen: Few[Count] = Field(default_factory=list)
    """Numbers of generated tokens; a cell each."""
    repetitions: Annotated[int, Field(ge=1, le=1000)] = 5
    """Counted repetitions of a cell; one more is run first and thrown away."""
    n_depth: Maybe[Many[Whole]] = None
    """Tokens that are in the context before."""
    n_cpu_moe: Maybe[Many[Whole]] = None
    """Layers whose experts stay on the CPU."""
    no_kv_offload: Maybe[Many[bool]] = None
    """Keep the KV cache off the GPU."""
    use_mmap: Maybe[Many[bool]] = None
    """Map the model file into memory."""
    embeddings: Maybe[Many[bool]] = None
    """Compute embeddings instead of logits."""
    cpu_mask: Maybe[Many[CpuMask]] = None
    """CPUs to run on, in hexadecimal, as "0xff"."""
    cpu_strict: Maybe[Many[bool]] = None
    """Keep each thread on one CPU."""
    poll: Maybe[Many[Annotated[int, Field(ge=0, le=100)]]] = None
    """How eagerly threads wait for work, 0 to 100."""

    def axes(self) -> dict[str, list[Any]]:
        """Return what is varied, sizes included."""
        sizes = {"n_prompt": list(self.n_prompt), "n_gen": list(self.n_gen)}
        return sizes | {name: list(values) for name, values in self._given(flags.LLAMA_BENCH_AXES).items()}

    def record(self) -> model.LlamaBench:
        """Return the bench entry."""
        return model.LlamaBench(
            self.model,
            tuple(self.n_prompt),
            tuple(self.n_gen),
            self._given(flags.LLAMA_BENCH_AXES),
            self.repetitions,
            **self._shared(),
        )


class BatchedBenchSpec(ModelBenchSpec):
    """llama-batched-bench: prompt and generation speed with npl sequences at once."""

    npp: Many[Count]
    """Prompt lengths, in tokens."""
    ntg: Many[Count]
    """Generated tokens of each sequence."""
    npl: Many[Count]
    """Numbers of sequences at once."""
    n_ctx: Maybe[Many[Count]] = None
    """Context size, in tokens, for all sequences together."""

    def axes(self) -> dict[str, list[Any]]:
        """Return what is varied, sizes included."""
        sizes = {"npp": list(self.npp), "ntg": list(self.ntg), "npl": list(self.npl)}
        return sizes | {name: list(values) for name, values in self._given(flags.BATCHED_BENCH_AXES).items()}

    def record(self) -> model.BatchedBench:
        """Return the bench entry."""
        return model.BatchedBench(
            self.model,
            tuple(self.npp),
            tuple(self.ntg),
            tuple(self.npl),
            self._given(flags.BATCHED_BENCH_AXES),
            **self._shared(),
        )


class BenchSpec(OneKind):
    """One benchmark; its lists expand to a matrix of cells."""

    backend_ops: Maybe[BackendOpsSpec] = Field(default=None, alias="backend-ops")
    llama_bench: Maybe[LlamaBenchSpec] = Field(default=None, alias="llama-bench")
    batched_bench: Maybe[BatchedBenchSpec] = Field(default=None, alias="batched-bench")

    def record(self) -> model.Bench:
        """Return the record of the one kind that is there."""
        bench: model.Bench = self.kind[1].record()
        return bench
