"""What is asked for: an arm's build and what to measure on it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from dgxlab.model.checks import GreedyGate, HarnessGate, PerplexityGate
from dgxlab.model.wire import LATER, digest, to_json

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
class SyntheticModel:
    """A model written from a fixed seed; its identity is this recipe."""

    arch: str = "llama"
    n_layer: int = 2
    n_embd: int = 256
    n_ff: int = 1024
    n_head: int = 4
    n_head_kv: int = 4
    n_vocab: int = 1000
    n_ctx_train: int = 4096
    seed: int = 0
    quant: str = "Q4_0"
    """A type that llama-quantize knows; F16 is written as it is."""
    pure: bool = True
    """Every tensor in `quant` (llama-quantize --pure)."""
    vocab: str = field(default="", metadata=LATER)
    """The pin's models/ggml-vocab-NAME.gguf, whose tokenizer it gets; "" for none."""
    vocab_pin: str = field(default="", metadata=LATER)
    """The commit that the vocabulary comes from."""
    scales: bool = field(default=False, metadata=LATER)
    """Every matrix of a layer has a `.scale` of its own, as models published in NVFP4 have."""


@dataclass(frozen=True)
class DerivedModel:
    """A synthetic model that was finished, in another type: F32 for exactly the weights that its blocks stand for."""

    source: SyntheticModel
    quant: str


@dataclass(frozen=True)
class FileModel:
    """A GGUF file that is already on the host."""

    path: str


Model = Union[SyntheticModel, DerivedModel, FileModel]


@dataclass(frozen=True)
class ParityGate:
    """`test-backend-ops test`: every case of `op` on `backend` agrees with the CPU reference."""

    op: str
    backend: str
    expect: Expectation | None = None
    """None: the first clean baseline on this pin and tree records it."""
    unsupported: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 3600.0
    cases: str = field(default="", metadata=LATER)
    """`case_digest` of all cases, the unsupported ones too; "" where the first clean baseline records it."""
    engaged: str = field(default="", metadata=LATER)
    """What must be on stderr: the path under test says that it ran."""
    overridden: bool = field(default=False, metadata=LATER)
    """The command line changed what it must reach."""


CHANGED = " (changed by --set)"
"""Follows the status of a gate that is `overridden`."""


def case_digest(cases: Iterable[str]) -> str:
    """Return the identity of a list of test cases in any order, 16 hex digits: a repeated case counts twice."""
    return hashlib.sha256("\n".join(sorted(cases)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EngagedGate:
    """The path under test says so on stderr in every timed run of `tools`."""

    stderr: str
    tools: tuple[str, ...] = ("backend-ops", "llama-bench", "batched-bench")


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
    """How an A/B session is run; every field but these is decided by the protocol."""

    cycles: int = 0
    """Candidate runs of a chain; 0 where each chain's burn-in decides how many `effect` needs."""
    thermal: str = "hot"
    drift_limit: float = 0.05
    min_effect: float | None = None
    """Always None; specs recorded before protocol 3 may say it."""
    effect: float = field(default=0.02, metadata=LATER)
    """What a chain is to find with a chance of 80 %, a share; of no meaning where `cycles` is given."""
    pin: bool = field(default=False, metadata=LATER)
    """Whether each run is pinned to as many processors as it has threads."""
    block_minutes: float = field(default=0.0, metadata=LATER)
    """How long an arm runs before the run that counts; 0 where every run counts."""


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
        """What is asked for, as plain JSON; where the file lies is left out, it is no part of it."""
        return {k: v for k, v in to_json(self).items() if k not in ("path", "root")}

    @property
    def digest(self) -> str:
        """Identity of what is asked for: the same spec at another path has the same digest."""
        return digest(self.spec)
