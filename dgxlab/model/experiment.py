"""What is asked for: an arm's build and what to measure on it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Union

from dgxlab.model.checks import GreedyGate, HarnessGate, PerplexityGate
from dgxlab.model.wire import LATER, Match, Within, digest, to_json

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a name from a spec may be: it becomes a file name on the host."""

COMMIT = re.compile(r"[0-9a-f]{40}")

Param = Union[str, int, float, bool]
"""One parameter of a cell, as llama.cpp prints it."""


@dataclass(frozen=True)
class Expectation:
    """How many cases a parity gate must run and pass, e.g. 1103/1103."""

    passed: int
    total: int

    @classmethod
    def parse(cls, text: str) -> Expectation:
        """Read `1103/1103`.

        Raises:
            ValueError: if it is not two numbers, or they differ, or they are 0.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if not match or match[1] != match[2] or int(match[1]) == 0:
            raise ValueError(f"expected all of a positive number of cases, as in 1103/1103, not {text!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.passed}/{self.total}"


@dataclass(frozen=True)
class Between(Within):
    """What a number may be, in a record that is also a map of the spec file."""

    def __get_pydantic_core_schema__(self, source: Any, inner: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
        """Return what pydantic, which reads the file, is to check."""
        return {**inner(source), "ge": self.least, "le": self.most}


@dataclass(frozen=True)
class Text(Match):
    """What a text may be, in a record that is also a map of the spec file; `wanted` says it in words."""

    wanted: str

    def __get_pydantic_core_schema__(self, source: Any, inner: Callable[[Any], Mapping[str, Any]]) -> dict[str, Any]:
        """Return what pydantic, which reads the file, is to check."""
        checked = {"type": "no-info", "function": self._checked}
        return {"type": "function-after", "function": checked, "schema": inner(source)}

    def __get_pydantic_json_schema__(self, schema: Any, inner: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the pattern for editors."""
        return {**inner(schema), "pattern": f"^({self.pattern})$"}

    def _checked(self, value: str) -> str:
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"must be {self.wanted}")
        return value


Width = Annotated[int, Between(1, 2**22)]
Quant = Annotated[str, Text(r"[A-Z][A-Z0-9_]{0,31}", "a type of llama-quantize, as Q4_K_M")]


@dataclass(frozen=True)
class SyntheticModel:
    """A model written from a fixed seed: good for shapes and throughput, not for quality."""

    arch: Annotated[str, Text(r"[a-z][a-z0-9_-]{0,31}", "an architecture by llama.cpp's name, as llama")] = "llama"
    """Architecture, by llama.cpp's name."""
    n_layer: Annotated[int, Between(1, 1000)] = 2
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
    n_ctx_train: Annotated[int, Between(1, 2**31 - 1)] = 4096
    """Context length that the model states, in tokens."""
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0
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


@dataclass(frozen=True)
class DerivedModel:
    """A synthetic model that was finished, in another type: F32 for exactly the weights that its blocks give."""

    source: SyntheticModel
    quant: str


@dataclass(frozen=True)
class FileModel:
    """A GGUF file that is already on the host."""

    path: str


Model = Union[SyntheticModel, DerivedModel, FileModel]


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
    """What must be on stderr, because the path under test prints it."""
    overridden: bool = field(default=False, metadata=LATER)
    """The command line changed what it must reach."""


CHANGED = " (changed by --set)"
"""Follows the status of a gate that is `overridden`."""


def case_digest(cases: Iterable[str]) -> str:
    """Return the identity of a list of test cases in any order, 16 hex digits: a repeated case counts twice."""
    return hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EngagedGate:
    """The path under test says so on stderr in every timed run of tools."""

    stderr: str
    """The marker: text that a line of stderr holds."""
    tools: tuple[str, ...] = ("backend-ops", "llama-bench", "batched-bench")
    """The tools whose runs must print it; all, when left out."""


Gate = Union[ParityGate, EngagedGate, GreedyGate, PerplexityGate, HarnessGate]


@dataclass(frozen=True)
class BackendOpsBench:
    """`test-backend-ops perf` on the built-in shapes that `where` selects."""

    op: str
    backend: str
    where: Mapping[str, tuple[Param, ...]]
    exclude: tuple[Mapping[str, Param], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 600.0


@dataclass(frozen=True)
class LlamaBench:
    """`llama-bench`: prompt and generation speed at the given sizes.

    `axes` holds the other flags by llama-bench's column name (n_ubatch, type_k, ...), a tuple of values each.
    """

    model: str
    n_prompt: tuple[int, ...]
    n_gen: tuple[int, ...]
    axes: Mapping[str, tuple[Param, ...]] = field(default_factory=dict)
    repetitions: int = 5
    """Counted repetitions; one more is run first and thrown away."""
    args: tuple[str, ...] = ()
    exclude: tuple[Mapping[str, Param], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0


@dataclass(frozen=True)
class BatchedBench:
    """`llama-batched-bench`: prompt and generation speed with npl sequences at once."""

    model: str
    npp: tuple[int, ...]
    ntg: tuple[int, ...]
    npl: tuple[int, ...]
    axes: Mapping[str, tuple[Param, ...]] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    exclude: tuple[Mapping[str, Param], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0


Bench = Union[BackendOpsBench, LlamaBench, BatchedBench]


@dataclass(frozen=True)
class Session:
    """How an A/B session is run."""

    cycles: int = 0  # where each chain's burn-in decides how many `effect` needs
    """Candidate runs of a chain, fixed by hand, in place of effect."""
    thermal: str = "hot"
    """hot: steady state; cold: each run waits for a temperature."""
    drift_limit: float = 0.05
    """Largest distance of two neighbouring baselines that is no step, as a fraction."""
    min_effect: float | None = None
    """Always None; specs recorded before protocol 3 may say it."""
    effect: float = field(default=0.02, metadata=LATER)
    """The effect to be found with a chance of 80 %, as in 2% or 0.02: it decides how many cycles a chain has."""
    pin: bool = field(default=False, metadata=LATER)
    """Pin every run to as many processors as it has threads, each of a core of its own where there are enough."""
    block_minutes: float = field(default=0.0, metadata=LATER)
    """Run an arm for so long before each run that counts: each arm is then at its own temperature."""


@dataclass(frozen=True)
class Experiment:
    """One arm: a build and what to measure on it, as the spec file says, with nothing left to look up in YAML."""

    name: str
    pin: str
    sources: tuple[str, ...]
    path: str
    """The spec file, absolute."""
    root: str
    """The project folder that holds patches/ and kernels/, absolute."""
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
        """What is asked for, as plain JSON; the path of the file is no part of it."""
        return {k: v for k, v in to_json(self).items() if k not in ("path", "root")}

    @property
    def digest(self) -> str:
        """Identity of what is asked for: the same spec at another path has the same digest."""
        return digest(self.spec)
