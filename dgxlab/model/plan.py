"""What a job does: the tree to build, the cells that get a number, the steps in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Union

from dgxlab.model.experiment import Param, ParityGate, SyntheticModel
from dgxlab.model.wire import digest

PROTOCOL = 1
"""Version of plan, journal and agent taken together; results of another protocol are measured again."""

WAIT_S = 3600.0
"""How long a job waits for its devices unless it is told otherwise."""

UNIDENTIFYING = ("job_id", "wait_s")
"""Fields of a plan that are no part of the work."""


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
    wait_s: float = WAIT_S
    """How long the job may wait for its devices, all of its waits together."""

    @property
    def digest(self) -> str:
        """Identity of the work, whatever the job is called and however long it may wait."""
        return digest({k: v for k, v in vars(self).items() if k not in UNIDENTIFYING})

    def arm(self, name: str) -> Arm:
        """Return the arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)
