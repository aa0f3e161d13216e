"""Plans of jobs: the tree to build, the cells to measure, the steps in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Union

from dgxlab.model.checks import ARM, Check
from dgxlab.model.experiment import Param, ParityGate, Recipe
from dgxlab.model.wire import LATER, JsonHooks, digest

PROTOCOL = 3  # of plan, journal and agent together; results of another protocol are measured again
WAIT_S = 3600.0  # how long a job waits for its devices unless it is told otherwise
SESSIONS = ("ab", "screen", "noise")  # kinds of plan that hold chains
_UNIDENTIFYING = ("job_id", "wait_s", "specs", "diffs", "node", "client")  # fields that do not identify the work


@dataclass(frozen=True)
class SeriesRef:
    """A patch series: its name, and the sha256 over its patches and overlay files in order."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name}@{self.digest[:12]}"


@dataclass(frozen=True)
class Source:
    """The source code to build: a pin of llama.cpp with series applied to it."""

    pin: str
    tree: str  # git's hash of the patched tree
    commit: str  # deterministic, of the patched tree; the pin itself when nothing is applied
    series: tuple[SeriesRef, ...] = ()
    dirty: bool = False  # made from a checkout (--tree): measured, never promoted


@dataclass(frozen=True)
class Cell:
    """One thing to measure: a tool and every parameter that affects the number.

    `params` are by llama.cpp's column names: the row of the output with all of these values belongs to the cell.
    """

    tool: str
    label: str  # `pp512`, `tg128 @ d4096`, `MUL_MAT q4_0 4096x512x14336`, `pp128 tg64 B8`
    params: Mapping[str, Param]
    fixed: Mapping[str, Param] = field(default_factory=dict)  # not in the row: repetitions, further arguments

    @cached_property
    def key(self) -> str:
        """Identity of the cell, 16 hex digits; build, model, environment and host are not part of it."""
        return digest([self.tool, self.params, self.fixed], 16)


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: source, cmake definitions, programs to build (`targets`) and their environment."""

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
    """Make sure that a model is on the host: find the file, or write it from its recipe, and quantise it."""

    id: str
    arm: str
    model: str  # the spec's name for it; later argv have {model:NAME}
    path: str
    recipe: Union[Recipe, None] = None
    make: tuple[str, ...] = ()  # writes {out}, an f16 GGUF; () for an existing file, or a model made from another
    quantize: tuple[str, ...] = ()  # reads {in}, writes {out}; () for an f16 model
    limit_s: float = 3600.0
    kind: str = "model"
    of: str = field(default="", metadata=LATER)  # the model that `quantize` reads; "" for what `make` wrote


@dataclass(frozen=True)
class ProbeStep:
    """Run a program's `--help` and fail if it lacks one of `flags`, before anything is measured."""

    id: str
    arm: str
    argv: tuple[str, ...]
    flags: tuple[str, ...]
    limit_s: float = 60.0
    kind: str = "probe"


LaunchedGate = Union[ParityGate, Check]  # a gate that runs commands; an EngagedGate only reads the output of other runs


@dataclass(frozen=True)
class CheckCommand:
    """One command of a gate; `model` is the spec's name of the model that it reads, "" for none."""

    role: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    model: str = ""


@dataclass(frozen=True)
class CheckText:
    """Text that the agent writes for a gate to {text}: this many random words, chosen by `seed`."""

    words: int
    seed: int = 0


@dataclass(frozen=True)
class GateStep(JsonHooks):
    """Run a gate's commands in order, then judge the output of all of them."""

    kinds = ("gate", "check")

    id: str
    arm: str
    gate: LaunchedGate
    commands: tuple[CheckCommand, ...]
    """Their argv may name the file {text}, the folder {files} and the file {logits}; the last two are deleted after."""
    text: Union[CheckText, None] = None
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts to write into the folder {files} first, by relative path."""
    limit_s: float = 3600.0  # longest time of one command
    kind: str = "gate"
    like: str = field(default="", metadata=LATER)
    """Id of the baseline's parity gate of the same operation. Both must run the same cases, unless the specs expect
    different ones."""
    listed: bool = field(default=False, metadata=LATER)
    """The record already has the list of cases with the digest `gate.cases`."""

    @property
    def env(self) -> Mapping[str, str]:
        """The environment of the ARM command."""
        return next(command.env for command in self.commands if command.role == ARM)

    @staticmethod
    def post_dump(fields: dict[str, Any]) -> dict[str, Any]:
        """Return a parity gate with `argv` and `env` of its one command, any other gate with the kind "check"."""
        if not isinstance(fields["gate"], ParityGate):
            return {**fields, "kind": "check"}
        (command,) = fields["commands"]
        kept = {name: value for name, value in fields.items() if name not in ("commands", "text", "files")}
        return {**kept, "argv": command.argv, "env": command.env}

    @staticmethod
    def pre_load(value: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a step, given what `post_dump` returned."""
        fields = {name: each for name, each in value.items() if name not in ("argv", "env")}
        if "argv" in value:
            fields["commands"] = [{"role": ARM, "argv": value["argv"], "env": value.get("env")}]
        return {**fields, "kind": "gate"}


def about(gate: LaunchedGate) -> str:
    """Return a gate's name for reports: `MUL_MAT on CUDA0`, `greedy of tiny`."""
    return f"{gate.what} on {gate.backend}" if isinstance(gate, ParityGate) else f"{gate.name} of {gate.subject()}"


FILES = "files"  # the folder {files} of a run, within the job's folder


def program_of(argv: Sequence[str]) -> str:
    """Return the first word of an argv that is a program of the build (`{bin}/...`), else the first after a driver.

    Another program, such as a tracer, may come before it.
    """
    words = argv[5:] if argv[:3] == ("{python}", "{agent}", "drive") else argv
    return next((word for word in words if word.startswith("{bin}/")), words[0])


@dataclass(frozen=True)
class RunStep:
    """One launch of one benchmark: a fresh process that gives a value for each of its cells."""

    id: str
    arm: str
    tool: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cells: tuple[Cell, ...]
    model: str = ""  # name of the model it reads
    markers: tuple[str, ...] = ()  # each must appear on stderr (engaged gate)
    attempts: int = 1  # how often it may be run when it exits with 0 and rows are missing
    limit_s: float = 600.0
    kind: str = "run"
    files: Mapping[str, str] = field(default_factory=dict, metadata=LATER)  # written into {files} first, by path


BURN_IN, BASELINE, CANDIDATE = "burn-in", "baseline", "candidate"
"""Roles of a chain's runs; burn-in runs use the baseline."""


@dataclass(frozen=True)
class Noise:
    """Run-to-run noise of one metric of one cell on one host, as an A/A session estimates it."""

    cell: str  # Cell.key
    metric: str
    sigma: float  # relative: 0.006 is 0.6 %
    cycles: int  # number of valid cycles behind it
    session: str  # the job that measured it


@dataclass(frozen=True)
class ChainStep:
    """Alternating runs of a baseline (A) and a candidate (B): a burn-in of A, then A B A ... B A.

    The cells of both run steps are compared in pairs. In an A/A session both steps are equal.
    If `cycles` is 0, `chains.cycles_planned` computes it after the burn-in from `effect`, `claims` and `max_s`.
    """

    id: str
    baseline: RunStep
    candidate: RunStep
    cycles: int  # candidate runs, fixed beforehand; 1 for a screen
    drift_limit: float
    thermal: str = "hot"  # "cold" where each run waits for the device to cool
    screen: bool = False  # one bracket only: it can reject, never accept
    noise: tuple[Noise, ...] = ()  # known for the baseline's cells on this host
    absent: tuple[str, ...] = ()  # markers of the candidate's path under test: must not be on a baseline run's stderr
    effect: float = field(default=0.0, metadata=LATER)  # to be detected, a share
    claims: int = field(
        default=0, metadata=LATER
    )  # verdicts of the session, more in a ledger; 0 for a screen, before protocol 3
    max_s: float = field(default=0.0, metadata=LATER)  # for the chain, burn-in included; 0 for no limit
    pin: bool = field(default=False, metadata=LATER)  # pin each run to as many processors as it has threads
    block_s: float = field(default=0.0, metadata=LATER)  # how long an arm runs before each run that counts
    kind: str = "chain"

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms that the chain compares; one in an A/A session."""
        return tuple(dict.fromkeys((self.baseline.arm, self.candidate.arm)))


Step = Union[BuildStep, ModelStep, ProbeStep, GateStep, RunStep, ChainStep]


def arms_of(step: Step) -> tuple[str, ...]:
    """Return the names of the arms that a step builds, tests or measures."""
    return step.arms if isinstance(step, ChainStep) else (step.arm,)


@dataclass(frozen=True)
class Plan:
    """The complete description of a job's steps, in order.

    argv and paths may hold placeholders, which the agent replaces: {bin} the folder of the arm's programs, {src} its
    source, {cmake} its cmake folder, {models} the models folder, {model:NAME} a model's path, {python} and {agent} the
    interpreter and the agent, {jobs} the number of compile jobs, {id} the id of a model, and within one step the files
    {in}, {out}, {vocab} and {imatrix}.
    """

    job_id: str
    name: str
    experiment: str  # Experiment.digest; the candidate's in a session of two
    arms: tuple[Arm, ...]
    steps: tuple[Step, ...]
    kind: str = "run"  # or gate, ab, screen (one bracket of an ab), noise
    protocol: int = PROTOCOL
    wait_s: float = WAIT_S  # max time that the job may wait for its devices, in total
    baseline: str = ""  # Experiment.digest of the baseline of an A/B session
    # Experiment.spec of its experiments, the candidate's last, so that a job's folder is self-contained
    specs: tuple[Mapping[str, Any], ...] = field(default=(), metadata=LATER)
    # by arm, the changes of its checkout over the pin, as `git diff` prints them: its commit is on no other machine
    diffs: Mapping[str, str] = field(default_factory=dict, metadata=LATER)
    # the one node of a cluster that must run it, for its results, its noise or want of another; "" for any
    node: str = field(default="", metadata=LATER)
    # digest of the machine, user and record that started it; "" if that is not known
    client: str = field(default="", metadata=LATER)

    @property
    def subject(self) -> str:
        """Digest of kind and experiments. No second job with the same subject is started while one runs."""
        return subject(self.kind, self.experiment, self.baseline)

    @property
    def shown_kind(self) -> str:
        """The kind that lists and reports name."""
        return shown_kind(self.kind, len(self.arms))

    @property
    def compared(self) -> tuple[object, ...]:
        """What a session compares: kind, protocol, arms, models, and each side's model, environment and cells."""
        models = [(step.arm, step.model, step.path, step.recipe) for step in self.steps if isinstance(step, ModelStep)]
        sides = [run for chain in self.chains for run in (chain.baseline, chain.candidate)]
        runs = [(run.model, run.env, [cell.key for cell in run.cells]) for run in sides]
        return self.shown_kind, self.protocol, self.arms, models, runs

    @property
    def digest(self) -> str:
        """Digest of the work, without the job's id and its waiting time."""
        return plan_digest(vars(self))

    def arm(self, name: str) -> Arm:
        """Return the arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def runs(self) -> Iterator[RunStep]:
        """The run steps of the plan and of its chains, in order; an A/A chain has one."""
        for step in self.steps:
            if isinstance(step, RunStep):
                yield step
            elif isinstance(step, ChainStep):
                yield step.baseline
                if step.candidate != step.baseline:
                    yield step.candidate

    def markers(self, arm: str) -> dict[str, tuple[str, ...]]:
        """Return what the runs of an arm must print on stderr, by tool."""
        return {run.tool: run.markers for run in self.runs if run.arm == arm}

    @property
    def chains(self) -> Iterator[ChainStep]:
        """The chains of an A/B session, in order."""
        return (step for step in self.steps if isinstance(step, ChainStep))


def plan_digest(fields: Mapping[str, Any]) -> str:
    """Return Plan.digest, given the plan's fields as JSON or as records."""
    # plans from before A/B sessions have no baseline, and keep their digest
    return digest({k: v for k, v in fields.items() if k not in _UNIDENTIFYING and not (k == "baseline" and v == "")})


def subject(kind: str, experiment: str, baseline: str = "") -> str:
    """Return Plan.subject, given the plan's kind and the digests of its experiments."""
    return digest([kind, baseline, experiment]) if baseline else experiment


def shown_kind(kind: str, arms: int) -> str:
    """Return Plan.shown_kind, given a plan's kind and number of arms: an A/B of an experiment with itself is an A/A."""
    return "noise" if kind == "ab" and arms == 1 else kind
