"""The vocabulary: frozen records that every layer shares.

Standard library only and Python 3.10 syntax, because the agent carries this module to the host. `spec` makes
experiments, `plan` makes plans from them, `agent` runs plans. `to_json` and `from_json` carry a record over the wire.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, Union

PROTOCOL = 1
"""Version of plan, journal and agent taken together; results of another protocol are measured again."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a name from a spec may be: it becomes a file name on the host."""

COMMIT = re.compile(r"[0-9a-f]{40}")

Param = Union[str, int, float, bool]
"""One parameter of a cell, as llama.cpp prints it."""

T = TypeVar("T")


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces: the text that digests are made from."""
    return json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any, length: int = 64) -> str:
    """Return the first `length` hex digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:length]


# -- experiments ------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class FileModel:
    """A GGUF file that is already on the host."""

    path: str


Model = Union[SyntheticModel, FileModel]


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


@dataclass(frozen=True)
class EngagedGate:
    """The path under test says so on stderr in every timed run of `tools`."""

    stderr: str
    tools: tuple[str, ...] = ("backend-ops", "llama-bench", "batched-bench")


Gate = Union[ParityGate, EngagedGate]


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

    cycles: int = 8
    thermal: str = "hot"
    drift_limit: float = 0.05
    min_effect: float | None = None


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
    def digest(self) -> str:
        """Identity of what is asked for: the same spec at another path has the same digest."""
        body = to_json(self)
        return digest({k: v for k, v in body.items() if k not in ("path", "root")})


# -- what a series makes of a pin -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeriesRef:
    """A series as it was read: its name and the sha256 over its patches and overlay files, in order."""

    name: str
    digest: str


@dataclass(frozen=True)
class Source:
    """The tree to build: a pin, the series applied to it, and the deterministic commit that holds both."""

    pin: str
    tree: str
    """git tree hash after applying."""
    commit: str
    """The pin itself when nothing is applied."""
    series: tuple[SeriesRef, ...] = ()
    dirty: bool = False
    """Made from somebody's checkout (--tree): measured, never promoted."""


# -- cells and plans --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One thing that gets a number: a tool and every parameter that shapes the number.

    Attributes:
        tool: "backend-ops", "llama-bench" or "batched-bench".
        label: What a table calls it: `pp512`, `tg128 @ d4096`, `MUL_MAT q4_0 4096x512x14336`, `pp128 tg64 B8`.
        params: The parameters that tell this cell's row from the others in the tool's output, by llama.cpp's column
            names. A row belongs to the cell when it has every one of these values.
        fixed: What shapes the number without being in the row: repetitions, further arguments.
    """

    tool: str
    label: str
    params: Mapping[str, Param]
    fixed: Mapping[str, Param] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Identity of the cell within a build, a model, an environment and a host: 16 hex digits."""
        return digest([self.tool, self.params, self.fixed], 16)


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: a source, how it is built, the environment its programs get."""

    name: str
    source: Source
    cmake: Mapping[str, str]
    env: Mapping[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildStep:
    """Check out the arm's commit, configure, compile its targets, install them under builds/<id>."""

    id: str
    arm: str
    configure: tuple[str, ...]
    compile: tuple[str, ...]
    limit_s: float = 7200.0
    kind: str = "build"


@dataclass(frozen=True)
class ModelStep:
    """Make sure that a model is on the host: find the file, or write the synthetic one and quantise it."""

    id: str
    arm: str
    model: str
    """The spec's name for it; argv of later steps says {model:NAME}."""
    path: str
    """Where it is, with placeholders."""
    recipe: SyntheticModel | None = None
    make: tuple[str, ...] = ()
    """Writes {out}, an f16 GGUF; empty for a file that must be there."""
    quantize: tuple[str, ...] = ()
    """Reads {in}, writes {out}; empty when f16 is what is wanted."""
    limit_s: float = 3600.0
    kind: str = "model"


@dataclass(frozen=True)
class ProbeStep:
    """Ask a tool for its own help and refuse flags that it does not have, before anything is measured."""

    id: str
    arm: str
    argv: tuple[str, ...]
    flags: tuple[str, ...]
    limit_s: float = 60.0
    kind: str = "probe"


@dataclass(frozen=True)
class GateStep:
    """Run a parity gate and judge it."""

    id: str
    arm: str
    gate: ParityGate
    argv: tuple[str, ...]
    env: Mapping[str, str]
    limit_s: float = 3600.0
    kind: str = "gate"


@dataclass(frozen=True)
class RunStep:
    """One launch of one benchmark: a fresh process that gives a value for each of its cells."""

    id: str
    arm: str
    tool: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cells: tuple[Cell, ...]
    model: str = ""
    """Name of the model it reads, or ""."""
    markers: tuple[str, ...] = ()
    """Each must appear on stderr (engaged gate)."""
    attempts: int = 1
    """How often it may be run when it ends well with rows missing."""
    limit_s: float = 600.0
    kind: str = "run"


Step = Union[BuildStep, ModelStep, ProbeStep, GateStep, RunStep]


@dataclass(frozen=True)
class Plan:
    """What a job does, in order, and nothing else decides it.

    argv and paths may hold placeholders that only the host can fill in: {bin} the arm's installed programs, {src} its
    source, {cmake} its cmake folder, {models} the models folder, {model:NAME} a model's path, {python} and {agent} the
    interpreter and this program, {jobs} the number of compile jobs, {in} and {out} within one step.
    """

    job_id: str
    name: str
    experiment: str
    """Experiment.digest."""
    arms: tuple[Arm, ...]
    steps: tuple[Step, ...]
    kind: str = "run"
    protocol: int = PROTOCOL

    @property
    def digest(self) -> str:
        """Identity of the work, whatever the job is called."""
        return digest({k: v for k, v in to_json(self).items() if k != "job_id"})

    def arm(self, name: str) -> Arm:
        """Return the arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


# -- what comes back --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolchain:
    """What turns a source into programs on a host; a version line each, "" for a tool that is not there."""

    cc: str = ""
    cxx: str = ""
    cmake: str = ""
    nvcc: str = ""
    machine: str = ""
    """Architecture and a digest of the CPU flags: GGML_NATIVE compiles for exactly this."""


@dataclass(frozen=True)
class Facts:
    """One look at a host. `probe` of the agent makes it; stored with every job."""

    host_id: str
    """Digest of the machine id and user: the same box under another name is the same host."""
    hostname: str
    boot_id: str
    toolchain: Toolchain
    details: Mapping[str, Any] = field(default_factory=dict)
    """CPU, memory, kernel, disk, GPUs, driver, tool paths: shown and kept, never compared."""


@dataclass(frozen=True)
class Measurement:
    """One metric of one cell in one run.

    Attributes:
        cell: Cell.key.
        metric: llama.cpp's column name: avg_ts, speed_pp, speed_tg, time_us, flops, bandwidth_gb_s.
        unit: As in `units`.
        samples: Counted raw values in the order measured, never empty.
        discarded: Raw values thrown away because the tool's first is cold; kept, not counted.
    """

    cell: str
    metric: str
    unit: str
    samples: tuple[float, ...]
    discarded: tuple[float, ...] = ()


@dataclass(frozen=True)
class CellResult:
    """All that a run says of one cell: its metrics, and the tool's own row as it printed it."""

    cell: str
    measurements: tuple[Measurement, ...]
    raw: Mapping[str, Any] = field(default_factory=dict)


def build_id(source: Source, cmake: Mapping[str, str], toolchain: Toolchain) -> str:
    """Return a build's identity, computed alike by client and agent: 16 hex digits.

    nvcc counts only where CUDA is on, so that installing it does not make a CPU build stale.
    """
    cuda = cmake.get("GGML_CUDA", "OFF") == "ON"
    tools = toolchain if cuda else dataclasses.replace(toolchain, nvcc="")
    return digest([source.pin, source.tree, cmake, tools], 16)


def model_id(model: Model) -> str:
    """Return a model's identity: its recipe's digest, or its path until the host has looked at the file."""
    kind = "synthetic" if isinstance(model, SyntheticModel) else "file"
    return f"{kind}-{digest(model, 16)}"


# -- over the wire ----------------------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Turn records into plain JSON values; tuples become lists, fields keep their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    return value


def from_json(kind: type[T], value: Any) -> T:
    """Rebuild a record from `to_json`'s output.

    A union of records is told apart by its `kind` field's default, else by which record has exactly the keys.

    Raises:
        ValueError: if the value does not fit.
    """
    result: T = _decode(kind, value)
    return result


def _decode(kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _decode_record(kind, value)
    if origin is tuple:
        (item, *_) = typing.get_args(kind)
        return tuple(_decode(item, v) for v in value)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        (_, item) = typing.get_args(kind)
        return {k: _decode(item, v) for k, v in value.items()}
    if origin is Union or origin is types.UnionType:
        return _decode_union(typing.get_args(kind), value)
    return value


def _decode_record(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{kind.__name__} expects an object, not {type(value).__name__}")
    hints = _hints(kind)
    if extra := sorted(set(value) - set(hints)):
        raise ValueError(f"{kind.__name__} has no field {extra[0]!r}")
    try:
        return kind(**{name: _decode(hints[name], v) for name, v in value.items()})
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from error


def _decode_union(options: tuple[Any, ...], value: Any) -> Any:
    records: list[Any] = [option for option in options if dataclasses.is_dataclass(option)]
    if not isinstance(value, dict) or not records:
        return value
    for option in records:
        names = {f.name: f.default for f in dataclasses.fields(option)}
        if "kind" in value and names.get("kind") == value["kind"]:
            return _decode_record(option, value)
    for option in records:
        if set(value) == {f.name for f in dataclasses.fields(option)}:
            return _decode_record(option, value)
    raise ValueError(f"none of {[record.__name__ for record in records]} has the fields {sorted(value)}")


_hint_cache: dict[Any, dict[str, Any]] = {}


def _hints(kind: Any) -> dict[str, Any]:
    if kind not in _hint_cache:
        _hint_cache[kind] = typing.get_type_hints(kind, vars(sys.modules[kind.__module__]))
    return _hint_cache[kind]
