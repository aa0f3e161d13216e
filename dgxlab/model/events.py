"""Events of a job's journal: one class per event, with its fields, their types and their limits.

The agent encodes events with `written` and all readers decode them with `read`, so both follow these declarations. A
field with a default may be missing in the journals of older agents.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Union, cast, get_type_hints

from dgxlab.model.checks import ARM, Cases, CommandReading, Launched
from dgxlab.model.experiment import ParityGate, Recipe
from dgxlab.model.parts import (
    Contents,
    Count,
    Digest,
    Ending,
    Exit,
    Name,
    Path,
    Role,
    Seconds,
    State,
    Texts,
    Time,
    Variables,
)
from dgxlab.model.plan import BASELINE, CANDIDATE, Cell, LaunchedGate, Source
from dgxlab.model.reasons import Code, Reason, sentence
from dgxlab.model.result import CellResult, Facts, Toolchain
from dgxlab.model.wire import LATER, JsonHooks, Lenient, Within, decoder, from_json, to_json

HOST = "host"  # the device of values that belong to no GPU
COPY = "copy.bandwidth"  # in GB/s, how fast a GPU copies within its memory: measured once, before a job's first run


@dataclass(frozen=True)
class File(Lenient):
    """A file of raw output: its path in the job's folder, its digest and its size in bytes."""

    path: Path
    sha256: Digest
    size: Count


@dataclass(frozen=True)
class Summary(Lenient):
    """One quantity of one device during a run, from `n` samples; for a counter its growth, with `n` 1."""

    device: Name
    name: Name
    unit: Name
    n: Annotated[int, Within(1)]
    median: float
    min: float
    max: float


@dataclass(frozen=True)
class Flag(Lenient, JsonHooks):
    """Something that makes a run's numbers doubtful; verdicts leave out runs with a hard flag.

    `kind` is the key of a `Code`, `params` are the parameters of its sentence.
    """

    device: Name
    kind: Name
    hard: bool
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """The flag's sentence."""
        return sentence(self.kind, self.params)

    @staticmethod
    def pre_load(value: Any) -> Any:
        """Return the fields of a flag; an older agent wrote its sentence in place of the parameters."""
        if not isinstance(value, dict) or "params" in value:
            return value
        if not (words := from_json(str, value.get("reason"))):
            raise ValueError("a flag has no reason")
        return {**value, "params": {"words": words}}


def flag(code: Code, device: str = HOST, *, hard: bool, **params: Any) -> Flag:
    """Return the `Flag` for a code, given the parameters of its sentence."""
    return Flag(device, code.key, hard, params)


@dataclass(frozen=True, kw_only=True)
class Event(Lenient, JsonHooks):
    """Base of all events, with the line number and the Unix time.

    An instance of this class itself is an event of a newer agent, unknown to this program.
    """

    event: ClassVar[str] = ""  # its name in the journal: that of the class, as "job" of JobEvent
    seq: Count = 0
    t: Time = 0.0

    def __init_subclass__(cls) -> None:
        cls.event = cls.__name__.removesuffix("Event").lower()

    def check(self) -> None:
        """Raise ValueError if fields contradict each other."""


@dataclass(frozen=True, kw_only=True)
class JobEvent(Event):
    """The agent has started the job: what it runs, and the host's facts."""

    job_id: Name
    plan_digest: Digest
    protocol: Count
    agent_version: Name
    boot_id: Name
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """A step's state changed to started, done or skipped."""

    id: Name
    kind: Name
    state: Name


@dataclass(frozen=True, kw_only=True)
class ProgressEvent(Event):
    """`done` of `total` parts of the step `id` are done; `total` is 0 if unknown."""

    id: Name
    done: Count
    total: Count
    note: str


@dataclass(frozen=True, kw_only=True)
class NoteEvent(Event):
    """A sentence for the user, from the agent or the client."""

    note: str


@dataclass(frozen=True, kw_only=True)
class LockEvent(Event):
    """State of the lock or owner file at `path`: waiting (for `owner`), held, released or unwatched (no folder).

    With the state building, the job waits for the build of `owner` in the folder `path`.
    """

    state: Name
    path: str
    owner: str
    left_s: Seconds = field(default=0.0, metadata=LATER)  # how long the job waits at most, 0 where it does not wait


@dataclass(frozen=True, kw_only=True)
class BuildEvent(Event):
    """An arm's build is installed; `reused` if an earlier job installed it."""

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
    """A model is on the host; `reused` if it was there before (None from older agents)."""

    name: Name
    model_id: Name
    path: Path
    size: Count
    digest: Digest
    recipe: Union[Recipe, None]
    seconds: Seconds
    reused: Union[bool, None] = None
    contents: Union[Contents, None] = field(default=None, metadata=LATER)  # None from older agents


@dataclass(frozen=True, kw_only=True)
class GateEvent(Event):
    """A gate's commands were run and judged."""

    id: Name
    arm: Name
    build_id: Digest
    gate: LaunchedGate
    inputs: Mapping[Name, Name]
    env: Variables
    commands: list[Launched]
    readings: Mapping[Name, CommandReading]
    status: Literal["passed", "failed", "flaky"]
    reasons: tuple[Reason, ...]  # why the gate failed; () if it did not
    flaky: Texts = ()
    case_list: Union[Texts, None] = field(default=None, metadata=LATER)
    raw: Mapping[Name, File]
    seconds: Seconds

    @property
    def counts(self) -> Cases:
        """The numbers of cases that a parity gate's program printed."""
        return cast("Cases", self.readings[ARM])

    @staticmethod
    def pre_load(value: Any) -> Any:
        """Return the fields of a gate; an older agent wrote a parity gate's command and counts as further fields."""
        if "commands" in value:
            return value
        known = {"cases": None, "inputs": {}, **value}
        return {
            **known,
            "commands": [{"role": ARM, **{name: known.get(name) for name in ("argv", "env", "rc")}}],
            "readings": {ARM: {name: known[name] for name in get_type_hints(Cases) if name in known}},
        }

    def check(self) -> None:
        """Raise ValueError if status and reasons, or status and kind of gate, contradict each other.

        A parity gate must also have counts and stdout.
        """
        if bool(self.reasons) != (self.status == "failed"):
            raise ValueError(f"its status is {self.status}, with {len(self.reasons)} reasons")
        if isinstance(self.gate, ParityGate):
            _has_stdout(self.raw)
            decoder(Cases)(self.readings.get(ARM))
        elif self.status == "flaky":
            raise ValueError("it is flaky, and has no cases")


@dataclass(frozen=True, kw_only=True)
class RunEvent(Event):
    """One launch of a benchmark, with every raw value.

    `chain`, `role` and `cycle` say where it is in a chain; they are None outside a chain.
    """

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
    reasons: tuple[Reason, ...] = ()  # why it is not valid, or why cells of a valid run have no number
    results: tuple[CellResult, ...]
    cells: Mapping[Digest, Cell]
    before: Annotated[Mapping[str, Any], decoder(State)]
    after: Annotated[Mapping[str, Any], decoder(State)]
    telemetry: tuple[Summary, ...] = ()
    flags: tuple[Flag, ...] = ()
    raw: Mapping[Name, File]
    chain: Union[Name, None] = field(default=None, metadata=LATER)
    role: Union[Role, None] = field(default=None, metadata=LATER)
    cycle: Union[Count, None] = field(default=None, metadata=LATER)

    @property
    def reason(self) -> str:
        """The reasons in words; "" for none."""
        return "; ".join(map(str, self.reasons))

    @property
    def hard(self) -> tuple[str, ...]:
        """The sentences of the run's hard flags."""
        return tuple(flag.reason for flag in self.flags if flag.hard)

    @staticmethod
    def pre_load(value: Any) -> Any:
        """Return the fields of a run; an older agent wrote one sentence in place of the reasons."""
        if "reasons" in value:
            return value
        words = from_json(str, value.get("reason"))
        return {**value, "reasons": [words] if words else []}

    def check(self) -> None:
        """Raise ValueError if the fields on status, results or chain are inconsistent, or stdout is missing."""
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
    """Progress of a chain. It reveals no value of the candidate: the user must not stop a chain for its result."""

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
    """Something failed. The last such event of a job is the reason why the job failed."""

    message: str
    next: str
    details: str


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The job is over; `raw` has the sha256 of each raw file by path, {} from older agents."""

    exit_code: Exit
    status: Ending
    raw: Mapping[Path, Digest] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError if only one of these is true: the job is done, and its exit code is 0."""
        if (self.status == "done") != (self.exit_code == 0):
            raise ValueError(f"it is {self.status} with exit code {self.exit_code}")


def _has_stdout(raw: Mapping[str, File]) -> None:
    if "stdout" not in raw:
        raise ValueError("raw: it lacks 'stdout'")


EVENTS: Mapping[str, type[Event]] = {kind.event: kind for kind in Event.__subclasses__()}

_Stamp = TypedDict("_Stamp", {"seq": Count, "t": Time, "event": Name})  # noqa: UP013 - what every line has


def read(value: Any) -> Event:
    """Return the event in a journal line's JSON; raises ValueError if it violates its declaration."""
    stamp = from_json(_Stamp, value)
    # older agents had two kinds of gate
    kind = GateEvent if stamp["event"] == "check" else EVENTS.get(stamp["event"], Event)
    try:
        event = from_json(kind, value)
        event.check()
    except ValueError as error:
        raise ValueError(f"{stamp['event']}: {error}") from error
    return event


def written(event: Event, seq: int) -> dict[str, Any]:
    """Return an event as JSON with its line number and the time now; raises ValueError if `read` would refuse it."""
    value = {**to_json(event), "seq": seq, "t": time.time(), "event": event.event}
    read(value)
    return value
