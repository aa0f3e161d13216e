"""What a job tells in its journal: one class an event, with its fields, their types and their limits.

The agent writes a journal through `written` and every reader takes its lines from `read`, so that neither can differ
from what is declared here. A default is what is read where an older agent did not tell the field. What the record keeps
as the JSON that it is (states, commands, readings) stays a dictionary.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Union

from dgxlab.model.checks import Check
from dgxlab.model.experiment import DerivedModel, ParityGate, SyntheticModel
from dgxlab.model.plan import BASELINE, CANDIDATE, Cell, Source
from dgxlab.model.reasons import Code, Reason, sentence
from dgxlab.model.result import CellResult, Count, Facts, Name, Toolchain
from dgxlab.model.wire import LATER, As, Match, Told, Within, from_json, to_json

Seconds = Annotated[float, Within(0, 1e10)]
Time = Annotated[float, Within(0, 1e11)]
"""Unix seconds, to the year 5138: later ones cannot be shown."""
Exit = Annotated[int, Within(0, 255)]
Digest = Annotated[str, Within(1, 128)]
Path = Annotated[str, Within(1, 4096)]
Texts = tuple[str, ...]
Variables = Mapping[Name, str]
Role = Annotated[str, Match("burn-in|baseline|candidate")]

HOST = "host"
"""The device of what is no GPU's."""


@dataclass(frozen=True)
class File(Told):
    """A raw file: its path in the job's folder, and its size in bytes."""

    path: Path
    sha256: Digest
    size: Count


@dataclass(frozen=True)
class Summary(Told):
    """One quantity of one device during a run, of `n` samples; a counter's growth is one number."""

    device: Name
    name: Name
    unit: Name
    n: Annotated[int, Within(1)]
    median: float
    min: float
    max: float


@dataclass(frozen=True)
class Flag(Told):
    """Something that makes a run's numbers doubtful; `kind` is a `reasons.Code`, at most one a device.

    No verdict may use a run with a hard flag.
    """

    device: Name
    kind: Name
    hard: bool
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """The flag in words."""
        return sentence(self.kind, self.params)


def flag(code: Code, device: str = HOST, *, hard: bool, **params: Any) -> Flag:
    """Return a flag that this program knows; params are those of its sentence."""
    return Flag(device, code.value, hard, params)


class Graphics(TypedDict):
    """A GPU's state: nvidia-smi's fields as it printed them."""

    uuid: Union[str, None]


class State(TypedDict, total=False):
    """The host's condition at one instant; earlier agents told less of it."""

    boot_id: str
    gpus: Union[list[Graphics], None]
    load_1min: Union[float, None]
    mem_available_mib: Union[float, None]
    swap_used_mib: Union[float, None]
    swap_in_mib: Union[float, None]
    oom_kills: Union[float, None]
    cpu_mhz: Union[float, None]
    cpu_temp_c: Union[float, None]
    pinned: list[Count]
    """The processors that the program was pinned to, before a run that was."""


class Launched(TypedDict):
    """One launch of a check."""

    role: Name
    argv: list[str]
    env: Variables
    rc: Union[int, None]


class NoReading(TypedDict):
    """Why a command of a check showed nothing."""

    problem: str


class Greedy(TypedDict):
    """What llama-completion wrote."""

    md5: str
    n_prompt: Union[Count, None]
    n_gen: Union[Count, None]


class Tests(TypedDict):
    """What a kernel's harness printed."""

    passed: Count
    failed: list[str]
    verdict: str


class Divergence(TypedDict):
    """What llama-perplexity said of a model beside its reference."""

    kld: float
    ppl_ratio: float


class Reference(TypedDict):
    """What llama-perplexity said of the reference."""

    ppl: float


class ModelFile(TypedDict):
    """A model on the host."""

    model_id: Name
    path: Path
    size: Count
    digest: Digest


class ExitStatus(TypedDict):
    """What every final status says."""

    exit_code: Exit
    status: Literal["done", "failed", "cancelled"]


class FinalStatus(ExitStatus, total=False):
    """A job's last word outside its journal; an earlier agent's has less."""

    message: str
    next: str
    journal_sha256: str


@dataclass(frozen=True, kw_only=True)
class Event(Told):
    """Any line of a journal: its place in it, and when it was written. By itself it is one of a newer agent."""

    event: ClassVar[str] = ""
    """Its name in the journal."""
    seq: Count = 0
    t: Time = 0.0

    def check(self) -> None:
        """Raise ValueError where the fields contradict one another."""


@dataclass(frozen=True, kw_only=True)
class JobEvent(Event):
    """The agent has begun: who it is and what the host looks like."""

    event = "job"
    job_id: Name
    plan_digest: Digest
    protocol: Count
    agent_version: Name
    boot_id: Name
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """A step has begun or ended, or is left out."""

    event = "step"
    id: Name
    kind: Name
    state: Name


@dataclass(frozen=True, kw_only=True)
class ProgressEvent(Event):
    """How far a step is; a `total` of 0 is not known."""

    event = "progress"
    id: Name
    done: Count
    total: Count
    note: str


@dataclass(frozen=True, kw_only=True)
class NoteEvent(Event):
    """A sentence for those who watch, from the agent or from the client itself."""

    event = "note"
    note: str


@dataclass(frozen=True, kw_only=True)
class LockEvent(Event):
    """The device is waited for, or was let go."""

    event = "lock"
    state: Name
    path: str
    owner: str


@dataclass(frozen=True, kw_only=True)
class BuildEvent(Event):
    """An arm has its build."""

    event = "build"
    arm: Name
    build_id: Digest
    source: Source
    cmake: Variables
    toolchain: Toolchain
    binaries: Mapping[Name, Digest]
    libraries: Mapping[Name, Digest]
    cmake_cache: str
    log: Path
    seconds: Seconds
    reused: bool


@dataclass(frozen=True, kw_only=True)
class ModelEvent(Event):
    """A model is there; `reused` is None where an earlier agent did not say it."""

    event = "model"
    name: Name
    model_id: Name
    path: Path
    size: Count
    digest: Digest
    recipe: Union[SyntheticModel, DerivedModel, None]
    seconds: Seconds
    reused: Union[bool, None] = None


@dataclass(frozen=True, kw_only=True)
class JudgedEvent(Event):
    """A gate that was judged, of either kind."""

    id: Name
    arm: Name
    build_id: Digest
    env: Variables
    status: Literal["passed", "failed", "flaky"]
    reasons: Texts
    raw: Mapping[Name, File]
    seconds: Seconds

    def check(self) -> None:
        """Raise ValueError unless exactly the gates that failed have reasons."""
        if bool(self.reasons) != (self.status == "failed"):
            raise ValueError(f"it {self.status}, with {len(self.reasons)} reasons against that")


@dataclass(frozen=True, kw_only=True)
class GateEvent(JudgedEvent):
    """A parity gate was judged; earlier agents knew no lists of cases."""

    event = "gate"
    gate: ParityGate
    argv: Texts
    rc: Union[int, None]
    passed: Union[Count, None]
    total: Union[Count, None]
    unsupported: Union[Count, None]
    flaky: Texts
    failed: Texts
    cases: Union[str, None] = None
    case_list: Union[Texts, None] = field(default=None, metadata=LATER)

    def check(self) -> None:
        """Raise ValueError for reasons that the status denies, or without stdout."""
        super().check()
        _has_stdout(self.raw)


@dataclass(frozen=True, kw_only=True)
class CheckEvent(JudgedEvent):
    """A gate on a model was judged."""

    event = "check"
    kind: Name
    gate: Check
    inputs: Mapping[Name, Name]
    commands: list[Launched]
    readings: Mapping[Name, Union[NoReading, Greedy, Tests, Divergence, Reference]]
    status: Literal["passed", "failed"]


@dataclass(frozen=True, kw_only=True)
class RunEvent(Event):
    """One launch of a benchmark, with every raw value; `chain`, `role` and `cycle` are None outside a chain."""

    event = "run"
    id: Name
    arm: Name
    build_id: Digest
    tool: Name
    model_id: str
    position: Count
    argv: Texts
    env: Variables
    env_digest: Digest
    rc: Union[int, None]
    signal: Union[int, None]
    started: Time
    seconds: Seconds
    status: Literal["valid", "discarded", "failed"]
    reasons: tuple[Reason, ...] = ()
    """Why it is not valid."""
    results: tuple[CellResult, ...]
    cells: Mapping[Digest, Cell]
    before: Annotated[Mapping[str, Any], As(State)]
    after: Annotated[Mapping[str, Any], As(State)]
    telemetry: tuple[Summary, ...] = ()
    flags: tuple[Flag, ...] = ()
    raw: Mapping[Name, File]
    chain: Union[Name, None] = field(default=None, metadata=LATER)
    role: Union[Role, None] = field(default=None, metadata=LATER)
    cycle: Union[Count, None] = field(default=None, metadata=LATER)

    @property
    def reason(self) -> str:
        """Why it is not valid, in words; "" for a valid one."""
        return "; ".join(map(str, self.reasons))

    @property
    def hard(self) -> tuple[str, ...]:
        """Its hard flags in words."""
        return tuple(flag.reason for flag in self.flags if flag.hard)

    def check(self) -> None:
        """Raise ValueError where its status, results or place in a chain cannot be."""
        _has_stdout(self.raw)
        if not self.reason and self.status != "valid":
            raise ValueError(f"it is {self.status} without a reason")
        if not {result.cell for result in self.results} <= self.cells.keys():
            raise ValueError("it has results of cells that it does not name")
        if self.chain is not None and (self.role is None or self.cycle is None):
            raise ValueError("its place in the chain is not told")
        if self.role not in (None, BASELINE) and not self.cycle:
            raise ValueError(f"its {'cycle' if self.role == CANDIDATE else 'burn-in'} has no number")


@dataclass(frozen=True, kw_only=True)
class ChainEvent(Event):
    """How a chain is going, none of it about the candidate's values."""

    event = "chain"
    id: Name
    state: Name
    role: Role
    cycle: Count
    cycles: Count
    done: Count
    total: Count
    valid: Count
    drift: Union[Annotated[float, Within(0)], None]
    conditions: Mapping[str, tuple[float, float]]
    left_s: Union[Seconds, None]
    note: str


@dataclass(frozen=True, kw_only=True)
class ErrorEvent(Event):
    """Something failed; the last one told is why the job ended as it did."""

    event = "error"
    message: str
    next: str
    details: str


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The job is over; `raw` has the sha256 of each raw file, which earlier agents did not tell."""

    event = "end"
    exit_code: Exit
    status: Literal["done", "failed", "cancelled"]
    raw: Mapping[Path, Digest] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError unless exactly a job that is done has exit code 0."""
        if (self.status == "done") != (self.exit_code == 0):
            raise ValueError(f"it is {self.status} with exit code {self.exit_code}")


def _has_stdout(raw: Mapping[str, File]) -> None:
    if "stdout" not in raw:
        raise ValueError("raw: it lacks 'stdout'")


EVENTS: Mapping[str, type[Event]] = {
    kind.event: kind
    for kind in (
        *(JobEvent, StepEvent, ProgressEvent, NoteEvent, LockEvent, BuildEvent, ModelEvent, GateEvent, CheckEvent),
        *(RunEvent, ChainEvent, ErrorEvent, EndEvent),
    )
}


class Stamp(TypedDict):
    """What every line of a journal has."""

    seq: Count
    t: Time
    event: Name


def read(value: Any) -> Event:
    """Return an event of a journal; one that is not known, as a newer agent may tell it, keeps its stamp alone.

    Raises:
        ValueError: if a field is missing, or is not what it is declared to be.
    """
    stamp = from_json(Stamp, value)
    kind = EVENTS.get(stamp["event"], Event)
    try:
        event = from_json(kind, _in_codes(value) if kind is RunEvent else value)
        event.check()
    except ValueError as error:
        raise ValueError(f"{stamp['event']}: {error}") from error
    return event


def _in_codes(value: dict[str, Any]) -> dict[str, Any]:
    """Return a run of an older agent, which told sentences, with the sentences as parameters of codes."""
    known = dict(value)
    if "reasons" not in known:
        words = from_json(str, known.pop("reason", None))
        known["reasons"] = [{"code": Code.TOLD.value, "params": {"words": words}}] if words else []
    if isinstance(flags := known.get("flags"), list):
        known["flags"] = flags = list(flags)
        for number, flag in enumerate(flags):
            if isinstance(flag, dict) and "params" not in flag:
                if not (words := from_json(str, flag.get("reason"))):
                    raise ValueError("a flag has no reason")
                flags[number] = {**flag, "params": {"words": words}}
    return known


def written(event: Event, seq: int) -> dict[str, Any]:
    """Return an event as it is told now, at this place of the journal.

    Raises:
        ValueError: if it is not what is declared; no reader would take it.
    """
    value = {**to_json(event), "seq": seq, "t": time.time(), "event": event.event}
    read(value)
    return value
