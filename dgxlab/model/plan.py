"""What a job does: the tree to build, the cells that get a number, the steps in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Union

from dgxlab.model.checks import Check
from dgxlab.model.experiment import DerivedModel, Param, ParityGate, SyntheticModel
from dgxlab.model.wire import LATER, digest

PROTOCOL = 3
"""Version of plan, journal and agent taken together; results of another protocol are measured again."""

WAIT_S = 3600.0
"""How long a job waits for its devices unless it is told otherwise."""

SESSIONS = ("ab", "screen", "noise")
"""Kinds of plan that hold chains."""

UNIDENTIFYING = ("job_id", "wait_s", "specs")
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
    """Made from a checkout (--tree): measured, never promoted."""


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

    @cached_property
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
    recipe: Union[SyntheticModel, DerivedModel, None] = None
    make: tuple[str, ...] = ()
    """Writes {out}, an f16 GGUF; empty for a file that must be there, and for one made from another model."""
    quantize: tuple[str, ...] = ()
    """Reads {in}, writes {out}; empty when f16 is what is wanted."""
    limit_s: float = 3600.0
    kind: str = "model"
    of: str = field(default="", metadata=LATER)
    """The model that `quantize` reads; "" where it reads what `make` wrote."""


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
    like: str = field(default="", metadata=LATER)
    """The baseline's gate of the same operation, whose cases it must have unless both specs declare others."""
    listed: bool = field(default=False, metadata=LATER)
    """The record has the list of cases that `gate.cases` is the digest of."""


ARM, AGAINST, REFERENCE = "arm", "against", "reference"
"""What a command of a check shows: the arm, the same in another environment, the reference of both."""


@dataclass(frozen=True)
class CheckCommand:
    """One launch of a check."""

    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    model: str = ""
    """The model that it reads, or ""."""


@dataclass(frozen=True)
class CheckText:
    """Text that the agent writes for a check, made of words that a seed chooses."""

    words: int
    seed: int = 0


@dataclass(frozen=True)
class CheckStep:
    """Run a gate's commands in order and judge what they print, all of it together."""

    id: str
    arm: str
    gate: Check
    commands: tuple[CheckCommand, ...]
    """Their argv may say {text}, {files}, and {logits} for a file; the latter two are gone afterwards."""
    text: Union[CheckText, None] = None
    files: Mapping[str, str] = field(default_factory=dict)
    """What is put into a folder first, by path below it."""
    limit_s: float = 3600.0
    """Longest time of one command."""
    kind: str = "check"

    @property
    def env(self) -> Mapping[str, str]:
        """The environment of the arm's command."""
        return next(command.env for command in self.commands if command.role == ARM)


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


BURN_IN, BASELINE, CANDIDATE = "burn-in", "baseline", "candidate"
"""What a run of a chain is; burn-in runs are the baseline's."""


@dataclass(frozen=True)
class NoiseFloor:
    """How much one metric of one cell differs from run to run on a host, as an A/A session found.

    Attributes:
        cell: Cell.key.
        metric: Name in `units`.
        sigma: Relative: 0.006 is 0.6 %.
        cycles: Valid cycles behind it.
        session: The job that measured it.
    """

    cell: str
    metric: str
    sigma: float
    cycles: int
    session: str


@dataclass(frozen=True)
class ChainStep:
    """Runs of a baseline and a candidate that alternate, A B A ... B A, after a burn-in of A.

    Both run steps have as many cells, and those at the same place are compared. In an A/A session both are the same.

    Attributes:
        id: Of the chain; its runs are told from one another by role and cycle.
        cycles: Candidate runs, fixed beforehand; 1 for a screen, 0 where the burn-in decides (`slots.planned`).
        drift_limit: Largest distance of two baselines that are taken to be on one side of a step.
        thermal: "hot" for steady state, "cold" where each run waits for the device to cool.
        screen: Whether it is one bracket only, which settles nothing.
        noise: What is known beforehand of the baseline's cells on this host.
        absent: What must not be on a baseline run's stderr: the candidate's path under test.
        effect: What is to be found where the burn-in decides, a share.
        claims: Of the whole session, all of its chains; 0 for a screen, and in plans before protocol 3.
        max_s: Seconds that the chain may take where the burn-in decides, the burn-in included; 0 for no limit.
        pin: Whether each run is pinned to as many processors as it has threads.
        block_s: How long an arm runs in each place before the run that counts; 0 where the first one does.
    """

    id: str
    baseline: RunStep
    candidate: RunStep
    cycles: int
    drift_limit: float
    thermal: str = "hot"
    screen: bool = False
    noise: tuple[NoiseFloor, ...] = ()
    absent: tuple[str, ...] = ()
    effect: float = field(default=0.0, metadata=LATER)
    claims: int = field(default=0, metadata=LATER)
    max_s: float = field(default=0.0, metadata=LATER)
    pin: bool = field(default=False, metadata=LATER)
    block_s: float = field(default=0.0, metadata=LATER)
    kind: str = "chain"

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that it compares; one in an A/A session."""
        return tuple(dict.fromkeys((self.baseline.arm, self.candidate.arm)))


Step = Union[BuildStep, ModelStep, ProbeStep, GateStep, CheckStep, RunStep, ChainStep]


def arms_of(step: Step) -> tuple[str, ...]:
    """Return the arms that a step is about."""
    return step.arms if isinstance(step, ChainStep) else (step.arm,)


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
    """Experiment.digest; the candidate's in a session of two."""
    arms: tuple[Arm, ...]
    steps: tuple[Step, ...]
    kind: str = "run"
    """run, gate, ab, screen (one bracket of an ab) or noise."""
    protocol: int = PROTOCOL
    wait_s: float = WAIT_S
    """How long the job may wait for its devices, all of its waits together."""
    baseline: str = ""
    """Experiment.digest of the baseline of an A/B session."""
    specs: tuple[Mapping[str, Any], ...] = field(default=(), metadata=LATER)
    """Experiment.spec of its experiments, the candidate's last: a job's folder alone says what it was for."""

    @property
    def subject(self) -> str:
        """What the job is about: one of the same subject that still runs need not be started again."""
        return subject(self.kind, self.experiment, self.baseline)

    @property
    def digest(self) -> str:
        """Identity of the work, whatever the job is called and however long it may wait."""
        return plan_digest(vars(self))

    def arm(self, name: str) -> Arm:
        """Return the arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def runs(self) -> Iterator[RunStep]:
        """What is launched for a number: each run step, those of chains too."""
        for step in self.steps:
            if isinstance(step, RunStep):
                yield step
            elif isinstance(step, ChainStep):
                yield step.baseline
                if step.candidate != step.baseline:
                    yield step.candidate

    @property
    def chains(self) -> Iterator[ChainStep]:
        """The chains of an A/B session, in order."""
        return (step for step in self.steps if isinstance(step, ChainStep))


def plan_digest(fields: Mapping[str, Any]) -> str:
    """Return Plan.digest given a plan's fields, as JSON or as records.

    No baseline is left out: plans had no such field before there were A/B sessions, and keep their digest.
    """
    return digest({k: v for k, v in fields.items() if k not in UNIDENTIFYING and not (k == "baseline" and v == "")})


def subject(kind: str, experiment: str, baseline: str = "") -> str:
    """Return what a job of this kind is about, given the digests of its experiments."""
    return digest([kind, baseline, experiment]) if baseline else experiment
