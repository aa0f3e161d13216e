"""Experiments: the contents of a spec, as records."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Union

from dgxlab.model.checks import Check
from dgxlab.model.wire import LATER, Text, Within, digest, to_json

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it becomes a file name on the host
SPANS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
SERIES = re.compile(rf"{NAME.pattern}(:{SPANS.pattern})?")
"""A series: its name, and unless all are meant, the numbers of its patches, as w4a16:1-2,4."""
COMMIT = re.compile(r"[0-9a-f]{40}")
UPSTREAM = "https://github.com/ggml-org/llama.cpp"
Param = Union[str, int, float, bool]  # of a cell, as llama.cpp prints it


def spans(text: str) -> list[tuple[int, int]]:
    """Return the first and the last number of each part of SPANS, as 1-2,4."""
    ends = (part.partition("-")[::2] for part in text.split(","))
    return [(int(first), int(last or first)) for first, last in ends]


@dataclass(frozen=True)
class Expectation:
    """How many cases a parity gate must pass, and of how many; both numbers are equal, as in 1103/1103."""

    passed: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Expectation:
        """Parse `1103/1103`; raises ValueError for any other form, unequal numbers or 0."""
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
    """By llama.cpp's name; llama and qwen35 have no experts."""
    n_layer: Annotated[int, Within(1, 1000)] = 2
    """Number of layers."""
    n_embd: Width = 256
    """Width of the model; a multiple of n_head and of the quantisation's block."""
    n_ff: Width = 1024
    """Width of the feed-forward part; a multiple of the quantisation's block."""
    n_head: Width = 4
    """Attention heads; a multiple of n_head_kv."""
    n_head_kv: Width = 4
    """Key and value heads."""
    n_vocab: Width = 1000
    """Number of tokens in the vocabulary, which have no text unless vocab is set."""
    n_ctx_train: Annotated[int, Within(1, 2**31 - 1)] = 4096
    """Context length in the model's metadata, in tokens."""
    seed: Annotated[int, Within(0, 2**31 - 1)] = 0
    """Seed of the weights."""
    quant: Quant = "Q4_0"
    """Type of the weights: one of llama-quantize, F16, or NVFP4, with which matrices outside the layers are F16."""
    pure: bool = True
    """Quantise every tensor to quant (llama-quantize --pure); ignored for NVFP4 and F16."""
    vocab: Annotated[str, Text(NAME.pattern, "a name, as llama-spm")] = field(default="", metadata=LATER)
    """Take the tokenizer of the pin's models/ggml-vocab-NAME.gguf, for gates on text: llama-spm, with n_vocab 32000."""
    vocab_pin: str = field(default="", metadata=LATER)
    """The commit of llama.cpp that vocab is taken from."""
    scales: bool = field(default=False, metadata=LATER)
    """Give every matrix of a layer a scale of its own, as models published in NVFP4 have."""
    plain_text: bool = field(default=False, metadata=LATER)
    """With vocab: zero the output rows of byte, control and unknown tokens, as servers need."""
    head_dim: Annotated[int, Within(8, 1024)] = field(default=64, metadata=LATER)
    """Width of an attention head, a multiple of 8; not for llama, whose width is n_embd / n_head."""
    n_expert: Annotated[int, Within(2, 1024)] = field(default=8, metadata=LATER)
    """Experts of a layer."""
    n_expert_used: Annotated[int, Within(1, 1024)] = field(default=2, metadata=LATER)
    """Experts that a token passes through."""
    n_ff_expert: Width = field(default=256, metadata=LATER)
    """Width of an expert."""
    n_ff_shared: Width = field(default=256, metadata=LATER)
    """Width of the shared expert; qwen3moe has none."""
    routing_skew: Annotated[float, Within(0, 10)] = field(default=0.0, metadata=LATER)
    """How unevenly tokens use the experts: the router's last row is exp(-skew) times its first; 0 is evenly."""
    ssm_state: Literal[16, 32, 64, 128] = field(default=128, metadata=LATER)
    """Width of a head of the gated delta net; a head's state is its square."""
    ssm_k_heads: Annotated[int, Within(1, 1024)] = field(default=2, metadata=LATER)
    """Key heads of the gated delta net."""
    ssm_v_heads: Annotated[int, Within(1, 1024)] = field(default=4, metadata=LATER)
    """Value heads of the gated delta net, a multiple of ssm_k_heads; each has one state per sequence."""
    ssm_conv: Annotated[int, Within(2, 16)] = field(default=4, metadata=LATER)
    """Taps of the gated delta net's convolution."""
    decay_min: Annotated[float, Within(1e-6, 20)] = field(default=1e-4, metadata=LATER)
    """Decay of the slowest head in a token, as -log of the factor; up to decay_max by equal ratios."""
    decay_max: Annotated[float, Within(1e-6, 20)] = field(default=0.05, metadata=LATER)
    """Decay per token of the fastest head."""
    full_attention_interval: Annotated[int, Within(1, 1000)] = field(default=4, metadata=LATER)
    """Every Nth layer has attention, the others a gated delta net."""


@dataclass(frozen=True)
class FileModel:
    """A GGUF file that is already on the host."""

    path: str


@dataclass(frozen=True)
class DerivedModel:
    """A model that llama-quantize makes from another one; with `quant` F32 it has exactly the dequantised weights."""

    source: Model
    quant: str
    pure: bool = field(default=False, metadata=LATER)
    imatrix: str = field(default="", metadata=LATER)
    allow_requantize: bool = field(default=False, metadata=LATER)


Model = Union[SyntheticModel, DerivedModel, FileModel]
Recipe = Union[SyntheticModel, DerivedModel]
"""A model that is made on the host."""


def quantisation(recipe: Recipe) -> DerivedModel:
    """Return a recipe as a quantisation of another model: for a synthetic model, of its F16 form."""
    if isinstance(recipe, DerivedModel):
        return recipe
    return DerivedModel(replace(recipe, quant="F16"), recipe.quant, recipe.pure)


def root_of(model: Model) -> SyntheticModel | FileModel:
    """Return the synthetic model or file that a chain of derived models begins with."""
    return root_of(model.source) if isinstance(model, DerivedModel) else model


def type_of(model: Model | None) -> str:
    """Return the type of a model's weights, of a file its name; "" for no model."""
    if isinstance(model, FileModel):
        return PurePosixPath(model.path).name
    return model.quant if model else ""


def files_of(model: Model) -> tuple[str, ...]:
    """Return the paths of files on the host that a model needs: its own, its source's, importance matrices."""
    if isinstance(model, DerivedModel):
        return (*files_of(model.source), *filter(None, (model.imatrix,)))
    return (model.path,) if isinstance(model, FileModel) else ()


@dataclass(frozen=True)
class ParityGate:
    """test-backend-ops test: every case of `op` on `backend` agrees with the CPU reference."""

    op: str
    """The operation, as MUL_MAT."""
    backend: str
    """The backend by its exact name, as CUDA0 or CPU."""
    expect: Expectation | None = None
    """How many cases must run and pass, as 1103/1103; null: as many as in the first clean run on the same source."""
    unsupported: int | None = None
    """How many cases the backend is known not to support; null: not checked."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of this gate, besides the spec's."""
    limit_s: float = 3600.0
    """Longest time, in seconds."""
    cases: str = field(default="", metadata=LATER)
    """Digest of the list of all cases, the unsupported ones too; null: of the first clean run on the same source."""
    engaged: str = field(default="", metadata=LATER)
    """Text that the path under test prints, required on stderr."""
    overridden: bool = field(default=False, metadata=LATER)
    """The command line changed its limits."""
    where: Mapping[str, tuple[Param, ...]] = field(default_factory=dict, metadata=LATER)
    """Parameters of the cases to run, as in a bench entry; none for all cases."""

    @property
    def what(self) -> str:
        """The operation, and which of its cases: `MUL_MAT where n=1,2`."""
        parts = (f"{name}={','.join(map(str, values))}" for name, values in self.where.items())
        return " where ".join(filter(None, (self.op, " ".join(parts))))

    def completed(self, expect: Expectation, unsupported: int | None, cases: str) -> ParityGate:
        """Return the gate with what the record has of its source, in place of what it does not say itself."""
        if self.expect is None:
            known = unsupported if self.unsupported is None else self.unsupported
            return replace(self, expect=expect, unsupported=known, cases=self.cases or cases)
        return self if self.cases or self.expect != expect else replace(self, cases=cases)


CHANGED = " (changed by --set)"  # follows the status of a gate that is `overridden`


def case_digest(cases: Iterable[str]) -> str:
    """Return a digest of test cases, 16 hex digits, that depends on repetitions but not on the order."""
    return hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One entry of a spec's `bench`: what to measure with one tool. Each kind is a class in its tool's module."""

    declared: ClassVar[list[type[Bench]]] = []
    """All kinds; `dgxlab.tools` fills the list."""
    name: ClassVar[str] = ""
    """The kind's key in specs, and its name in the record."""
    compared: ClassVar[Mapping[str, str]] = {}
    """The metrics that get a verdict. A cell has such a metric if its parameter named as the value is there and not 0,
    or if the value is "". A kind without such metrics, as a profile, is neither compared nor exported."""

    exclude: tuple[Mapping[str, Param], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0


@dataclass(frozen=True)
class EngagedGate:
    """The path under test, the code that a patch adds, prints a marker on stderr in every timed run of `tools`."""

    stderr: str
    """The marker: a text that must be on stderr."""
    tools: tuple[str, ...] = field(default_factory=lambda: tuple(kind.name for kind in Bench.declared if kind.compared))
    """Whose runs must print it."""


Gate = Union[ParityGate, EngagedGate, Check]


@dataclass(frozen=True)
class Session:
    """How an A/B session is run."""

    cycles: int = 0  # 0: computed from each chain's burn-in and `effect`
    """Number of candidate runs of a chain, fixed by hand in place of effect; for a try, the minimum."""
    thermal: str = "hot"
    """hot: steady state; cold: each run waits until the device has cooled."""
    drift_limit: float = 0.05
    """A cycle whose baselines differ by more can be a step, not counted; at most 2% in screens."""
    min_effect: float | None = None
    """Always None; specs recorded before protocol 3 may have it."""
    effect: float = field(default=0.02, metadata=LATER)
    """A chain has enough cycles to detect this effect with a chance of 80 %: 2% or 0.02."""
    pin: bool = field(default=False, metadata=LATER)
    """Pin each run to as many processors as it has threads, of different cores if there are enough."""
    block_minutes: float = field(default=0.0, metadata=LATER)
    """Run an arm for this many minutes before each run that counts, so that each arm is at its own temperature."""


@dataclass(frozen=True)
class Experiment:
    """The content of a spec file, with everything it extends: a build and what to measure on it."""

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
    holdout: tuple[Bench, ...] = field(default=(), metadata=LATER)
    kernels: Mapping[str, str] = field(default_factory=dict)
    """Texts of a checkout's copies of files of kernels/, by path below it, which its gates compile in their place."""

    @property
    def spec(self) -> dict[str, Any]:
        """The experiment as JSON, without the paths of the spec file and the project, and a checkout's texts."""
        return {k: v for k, v in to_json(self).items() if k not in ("path", "root", "kernels")}

    @property
    def digest(self) -> str:
        """sha256 of `spec`, in hex."""
        return digest(self.spec)

    @property
    def markers(self) -> dict[str, tuple[str, ...]]:
        """By tool, what each of its runs must print on stderr: the texts of the engaged gates."""
        markers: dict[str, tuple[str, ...]] = {}
        for gate in (gate for gate in self.gates if isinstance(gate, EngagedGate)):
            for tool in gate.tools:
                markers[tool] = (*markers.get(tool, ()), gate.stderr)
        return markers
