"""Experiments: an arm's build and what to measure on it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Union

from dgxlab.model.checks import Check
from dgxlab.model.wire import LATER, Text, Within, digest, to_json

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it becomes a file name on the host
COMMIT = re.compile(r"[0-9a-f]{40}")
Param = Union[str, int, float, bool]  # of a cell, as llama.cpp prints it


@dataclass(frozen=True)
class Expectation:
    """How many cases a parity gate must run and pass, e.g. 1103/1103."""

    passed: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Expectation:
        """Read `1103/1103`, or raise ValueError."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or match[1] != match[2] or int(match[1]) == 0:
            raise ValueError(f"expected all of a positive number of cases, as in 1103/1103, not {text!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.passed}/{self.total}"


Width = Annotated[int, Within(1, 2**22)]
Quant = Annotated[str, Text(r"[A-Z][A-Z0-9_]{0,31}", "a type of llama-quantize, as Q4_K_M")]
Architecture = Literal["llama", "qwen3moe", "qwen35", "qwen35moe", "qwen3next"]


@dataclass(frozen=True)
class SyntheticModel:
    """A model written from a fixed seed: good for shapes and throughput, not for quality."""

    arch: Architecture = "llama"
    """By llama.cpp's name; all but llama and qwen35 have experts."""
    n_layer: Annotated[int, Within(1, 1000)] = 2
    """Number of layers."""
    n_embd: Width = 256
    """Width; a multiple of n_head and of the quantisation's block."""
    n_ff: Width = 1024
    """Width of the feed-forward part; a multiple of the quantisation's block."""
    n_head: Width = 4
    """Attention heads; a multiple of n_head_kv."""
    n_head_kv: Width = 4
    """Key and value heads."""
    n_vocab: Width = 1000
    """Size of the vocabulary, which has no text unless vocab names one."""
    n_ctx_train: Annotated[int, Within(1, 2**31 - 1)] = 4096
    """Context length that the model states, in tokens."""
    seed: Annotated[int, Within(0, 2**31 - 1)] = 0
    """Seed of the weights."""
    quant: Quant = "Q4_0"
    """A type that llama-quantize knows, F16, or NVFP4 for the matrices of layers and F16 for the others."""
    pure: bool = True
    """Every tensor in quant (llama-quantize --pure); of no meaning for NVFP4 and F16."""
    vocab: Annotated[str, Text(NAME.pattern, "a name, as llama-spm")] = field(default="", metadata=LATER)
    """Tokenizer of the pin's models/ggml-vocab-NAME.gguf, for gates on text: llama-spm, with n_vocab 32000."""
    vocab_pin: str = field(default="", metadata=LATER)
    """The commit that the vocabulary comes from."""
    scales: bool = field(default=False, metadata=LATER)
    """Give every matrix of a layer a scale of its own, as models published in NVFP4 have."""
    plain_text: bool = field(default=False, metadata=LATER)
    """With vocab: zero the output rows of byte, control and unknown tokens, as servers need."""
    head_dim: Annotated[int, Within(8, 1024)] = field(default=64, metadata=LATER)
    """Width of an attention head, a multiple of 8; that of llama is n_embd / n_head."""
    n_expert: Annotated[int, Within(2, 1024)] = field(default=8, metadata=LATER)
    """Experts of a layer."""
    n_expert_used: Annotated[int, Within(1, 1024)] = field(default=2, metadata=LATER)
    """Experts that a token passes through."""
    n_ff_expert: Width = field(default=256, metadata=LATER)
    """Width of an expert."""
    n_ff_shared: Width = field(default=256, metadata=LATER)
    """Width of the shared expert; qwen3moe has none."""
    routing_skew: Annotated[float, Within(0, 10)] = field(default=0.0, metadata=LATER)
    """How uneven experts are used: the router's last row is exp(-skew) of its first; 0 uses all alike."""
    ssm_state: Literal[16, 32, 64, 128] = field(default=128, metadata=LATER)
    """Width of a head of the gated delta net; a head's state is its square."""
    ssm_k_heads: Annotated[int, Within(1, 1024)] = field(default=2, metadata=LATER)
    """Key heads of the gated delta net."""
    ssm_v_heads: Annotated[int, Within(1, 1024)] = field(default=4, metadata=LATER)
    """Value heads of the gated delta net, a multiple of ssm_k_heads; each has a state of every sequence."""
    ssm_conv: Annotated[int, Within(2, 16)] = field(default=4, metadata=LATER)
    """Taps of its convolution."""
    decay_min: Annotated[float, Within(1e-6, 20)] = field(default=1e-4, metadata=LATER)
    """Decay of the slowest head in a token, as -log of the factor; heads lie between at equal ratios."""
    decay_max: Annotated[float, Within(1e-6, 20)] = field(default=0.05, metadata=LATER)
    """Decay of the fastest head in a token."""
    full_attention_interval: Annotated[int, Within(1, 1000)] = field(default=4, metadata=LATER)
    """Every so many-th layer has attention, the others a gated delta net."""


@dataclass(frozen=True)
class FileModel:
    """A GGUF file that is already on the host."""

    path: str


@dataclass(frozen=True)
class DerivedModel:
    """A model that llama-quantize makes from another one; F32 gives exactly the dequantised weights."""

    source: Model
    quant: str
    pure: bool = field(default=False, metadata=LATER)
    imatrix: str = field(default="", metadata=LATER)
    allow_requantize: bool = field(default=False, metadata=LATER)


Model = Union[SyntheticModel, DerivedModel, FileModel]
Recipe = Union[SyntheticModel, DerivedModel]
"""A model that is made on the host."""


def quantisation(recipe: Recipe) -> DerivedModel:
    """Return how a model gets its types: a synthetic one is its own F16 form, quantised."""
    if isinstance(recipe, DerivedModel):
        return recipe
    return DerivedModel(replace(recipe, quant="F16"), recipe.quant, recipe.pure)


def root_of(model: Model) -> SyntheticModel | FileModel:
    """Return the recipe or the file that a model is made from in the end."""
    return root_of(model.source) if isinstance(model, DerivedModel) else model


def files_of(model: Model) -> tuple[str, ...]:
    """Return the paths of the host's files that a model is, or is made from."""
    if isinstance(model, DerivedModel):
        return (*files_of(model.source), *filter(None, (model.imatrix,)))
    return (model.path,) if isinstance(model, FileModel) else ()


@dataclass(frozen=True)
class ParityGate:
    """test-backend-ops test: every case of op on backend agrees with the CPU reference."""

    op: str
    """The operation, as MUL_MAT."""
    backend: str
    """The backend by its exact name, as CUDA0 or CPU."""
    expect: Expectation | None = None
    """How many cases must run and pass, as 1103/1103; null: the first clean baseline on the tree records it."""
    unsupported: int | None = None
    """How many cases the backend is known not to support; null: not checked."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of this gate, besides the spec's."""
    limit_s: float = 3600.0
    """Longest time, in seconds."""
    cases: str = field(default="", metadata=LATER)
    """Digest of the list of all cases, the unsupported ones too; null: the first clean baseline records it."""
    engaged: str = field(default="", metadata=LATER)
    """Text that the path under test prints, required on stderr."""
    overridden: bool = field(default=False, metadata=LATER)
    """The command line changed its limits."""


CHANGED = " (changed by --set)"  # follows the status of a gate that is `overridden`


def case_digest(cases: Iterable[str]) -> str:
    """Return the identity of a list of test cases in any order, 16 hex digits: a repeated case counts twice."""
    return hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measurements with one tool; each kind is a record in the module of its tool, in `dgxlab.tools`."""

    declared: ClassVar[list[type[Bench]]] = []
    """Filled by `dgxlab.tools`."""
    name: ClassVar[str] = ""
    """Its key in specs, and its name in the record."""
    compared: ClassVar[Mapping[str, str]] = {}
    """The metrics that get a verdict, each with the parameter of a cell that must not be 0, or ""; what has none is a
    picture of a run: it is neither compared nor exported."""

    exclude: tuple[Mapping[str, Param], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0


@dataclass(frozen=True)
class EngagedGate:
    """The path under test prints a marker on stderr in every timed run of `tools`."""

    stderr: str
    """The marker: text that a line of stderr holds."""
    tools: tuple[str, ...] = field(default_factory=lambda: tuple(kind.name for kind in Bench.declared if kind.compared))
    """The tools whose runs must print it; all that are compared, when left out."""


Gate = Union[ParityGate, EngagedGate, Check]


@dataclass(frozen=True)
class Session:
    """How an A/B session is run."""

    cycles: int = 0  # where each chain's burn-in decides how many `effect` needs
    """Candidate runs of a chain, fixed by hand, in place of effect."""
    thermal: str = "hot"
    """hot: steady state; cold: each run waits for a temperature."""
    drift_limit: float = 0.05
    """Largest distance of two neighbouring baselines that does not count as a step, as a fraction."""
    min_effect: float | None = None
    """Always None; specs recorded before protocol 3 may have it."""
    effect: float = field(default=0.02, metadata=LATER)
    """The effect to be found with a chance of 80 %, as in 2% or 0.02; it sets the cycles of a chain."""
    pin: bool = field(default=False, metadata=LATER)
    """Pin a run to as many processors as it has threads, each of its own core where there are enough."""
    block_minutes: float = field(default=0.0, metadata=LATER)
    """Run an arm for this long before each run that counts, so that each arm is at its own temperature."""


@dataclass(frozen=True)
class Experiment:
    """One arm: a build and what to measure on it, fully resolved from the spec file."""

    name: str
    pin: str
    sources: tuple[str, ...]
    path: str  # the spec file, absolute
    root: str  # the project folder that holds patches/ and kernels/, absolute
    host: str = "local"
    hypothesis: str = ""
    series: tuple[str, ...] = ()
    cmake: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    bench: tuple[Bench, ...] = ()
    session: Session = field(default_factory=Session)

    @property
    def spec(self) -> dict[str, Any]:
        """The experiment as plain JSON, without the file's path."""
        return {k: v for k, v in to_json(self).items() if k not in ("path", "root")}

    @property
    def digest(self) -> str:
        """Identity of the experiment: the same spec at another path has the same digest."""
        return digest(self.spec)
