"""What a job tells in its journal: each event's fields, their types and their limits.

The agent writes a journal through `written` and every reader takes its lines from `read`, so that neither can differ
from what is declared here. An event stays a dictionary, because the record keeps parts of it as the JSON they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict, Union

from dgxlab.model.checks import Check
from dgxlab.model.experiment import DerivedModel, ParityGate, SyntheticModel
from dgxlab.model.plan import BASELINE, CANDIDATE, Cell, Source
from dgxlab.model.result import CellResult, Count, Facts, Name, Toolchain
from dgxlab.model.wire import As, Within, from_json

Seconds = Annotated[float, Within(0, 1e10)]
Time = Annotated[float, Within(0, 1e11)]
"""Unix seconds, to the year 5138: later ones cannot be shown."""
Exit = Annotated[int, Within(0, 255)]
Digest = Annotated[str, Within(1, 128)]
Path = Annotated[str, Within(1, 4096)]
Texts = list[str]
Variables = Mapping[Name, str]


class Stamp(TypedDict):
    """What every line of a journal has: its place in it, and when it was written."""

    seq: Count
    t: Time
    event: Name


class File(TypedDict):
    """A raw file: its path in the job's folder, and its size in bytes."""

    path: Path
    sha256: Digest
    size: Count


class Stdout(TypedDict):
    """What every program leaves."""

    stdout: File


class Streams(Stdout, total=False):
    """What a program printed."""

    stderr: File


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


class Summary(TypedDict):
    """One quantity of one device during a run, of `n` samples."""

    device: Name
    name: Name
    unit: Name
    n: Annotated[int, Within(1)]
    median: float
    min: float
    max: float


class Flag(TypedDict):
    """Something that makes a run's numbers doubtful."""

    device: Name
    kind: Name
    hard: bool
    reason: Annotated[str, Within(1)]


class Command(TypedDict):
    """One launch of a check."""

    role: Name
    argv: Texts
    env: Variables
    rc: Union[int, None]


class Problem(TypedDict):
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
    failed: Texts
    verdict: str


class Divergence(TypedDict):
    """What llama-perplexity said of a model beside its reference."""

    kld: float
    ppl_ratio: float


class Reference(TypedDict):
    """What llama-perplexity said of the reference."""

    ppl: float


class JobEvent(Stamp):
    """The agent has begun: who it is and what the host looks like."""

    job_id: Name
    plan_digest: Digest
    protocol: Count
    agent_version: Name
    boot_id: Name
    facts: Annotated[Mapping[str, Any], As(Facts)]


class StepEvent(Stamp):
    """A step has begun or ended, or is left out."""

    id: Name
    kind: Name
    state: Name


class ProgressEvent(Stamp):
    """How far a step is; a `total` of 0 is not known."""

    id: Name
    done: Count
    total: Count
    note: str


class NoteEvent(Stamp):
    """A sentence for those who watch, from the agent or from the client itself."""

    note: str


class LockEvent(Stamp):
    """The device is waited for, or was let go."""

    state: Name
    path: str
    owner: str


class BuildEvent(Stamp):
    """An arm has its build."""

    arm: Name
    build_id: Digest
    source: Annotated[Mapping[str, Any], As(Source)]
    cmake: Variables
    toolchain: Annotated[Mapping[str, Any], As(Toolchain)]
    binaries: Mapping[Name, Digest]
    libraries: Mapping[Name, Digest]
    cmake_cache: str
    log: Path
    seconds: Seconds
    reused: bool


class ModelFile(TypedDict):
    """A model on the host."""

    model_id: Name
    path: Path
    size: Count
    digest: Digest


class ModelEvent(Stamp, ModelFile):
    """A model is there; `reused` is None where an earlier agent did not say it."""

    name: Name
    recipe: Union[Annotated[Mapping[str, Any], As(Union[SyntheticModel, DerivedModel])], None]
    seconds: Seconds
    reused: Union[bool, None]


class GateEvent(Stamp):
    """A parity gate was judged; earlier agents knew no lists of cases."""

    id: Name
    arm: Name
    build_id: Digest
    gate: Annotated[Mapping[str, Any], As(ParityGate)]
    env: Variables
    argv: Texts
    rc: Union[int, None]
    passed: Union[Count, None]
    total: Union[Count, None]
    unsupported: Union[Count, None]
    status: Literal["passed", "failed", "flaky"]
    reasons: Texts
    flaky: Texts
    failed: Texts
    cases: Union[str, None]
    case_list: Union[Texts, None]
    raw: Streams
    seconds: Seconds


class CheckEvent(Stamp):
    """A gate on a model was judged."""

    id: Name
    arm: Name
    build_id: Digest
    kind: Name
    gate: Annotated[Mapping[str, Any], As(Check)]
    inputs: Mapping[Name, Name]
    env: Variables
    commands: list[Command]
    readings: Mapping[Name, Union[Problem, Greedy, Tests, Divergence, Reference]]
    status: Literal["passed", "failed"]
    reasons: Texts
    raw: Mapping[Name, File]
    seconds: Seconds


class RunEvent(Stamp):
    """One launch of a benchmark, with every raw value; `chain`, `role` and `cycle` are None outside a chain."""

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
    reason: str
    results: list[Annotated[Mapping[str, Any], As(CellResult)]]
    cells: Mapping[Digest, Annotated[Mapping[str, Any], As(Cell)]]
    before: State
    after: State
    telemetry: list[Summary]
    flags: list[Flag]
    raw: Streams
    chain: Union[Name, None]
    role: Union[Literal["burn-in", "baseline", "candidate"], None]
    cycle: Union[Count, None]


class ChainEvent(Stamp):
    """How a chain is going, none of it about the candidate's values."""

    id: Name
    state: Name
    role: Literal["burn-in", "baseline", "candidate"]
    cycle: Count
    cycles: Count
    done: Count
    total: Count
    valid: Count
    drift: Union[Annotated[float, Within(0)], None]
    conditions: Mapping[str, Annotated[list[float], Within(2, 2)]]
    left_s: Union[Seconds, None]
    note: str


class ErrorEvent(Stamp):
    """Something failed; the last one told is why the job ended as it did."""

    message: str
    next: str
    details: str


class Ending(TypedDict):
    """How a job ended."""

    exit_code: Exit
    status: Literal["done", "failed", "cancelled"]


class FinalStatus(Ending, total=False):
    """A job's last word outside its journal; an earlier agent's has less."""

    message: str
    next: str
    journal_sha256: str


class EndEvent(Stamp, Ending):
    """The job is over; `raw` has the sha256 of each raw file, which earlier agents did not tell."""

    raw: Mapping[Path, Digest]


EVENTS: Mapping[str, Any] = {
    "job": JobEvent,
    "step": StepEvent,
    "progress": ProgressEvent,
    "note": NoteEvent,
    "lock": LockEvent,
    "build": BuildEvent,
    "model": ModelEvent,
    "gate": GateEvent,
    "check": CheckEvent,
    "run": RunEvent,
    "chain": ChainEvent,
    "error": ErrorEvent,
    "end": EndEvent,
}

UNTOLD: Mapping[str, Mapping[str, Any]] = {
    "model": {"reused": None},
    "gate": {"cases": None, "case_list": None},
    "run": {"telemetry": (), "flags": (), "chain": None, "role": None, "cycle": None},
    "end": {"raw": {}},
}
"""By event, what is said where the journal says nothing: it is of an earlier agent, or there is nothing to say."""


def read(value: Any) -> dict[str, Any]:
    """Return an event of a journal; one that is not known, as a newer agent may tell it, keeps its stamp alone.

    Raises:
        ValueError: if a field is missing, or is not what it is declared to be.
    """
    stamp: dict[str, Any] = {**from_json(Stamp, value)}
    kind = EVENTS.get(stamp["event"])
    if kind is None:
        return {name: stamp[name] for name in Stamp.__annotations__}
    try:
        event: dict[str, Any] = from_json(kind, {**UNTOLD.get(stamp["event"], {}), **value})
        _agree(event)
    except ValueError as error:
        raise ValueError(f"{stamp['event']}: {error}") from error
    return event


def _agree(event: Mapping[str, Any]) -> None:
    """Raise ValueError where the fields of an event contradict one another."""
    reasons = event.get("reasons")
    if reasons is not None and bool(reasons) != (event["status"] == "failed"):
        raise ValueError(f"it {event['status']}, with {len(reasons)} reasons against that")
    if event["event"] == "end" and (event["status"] == "done") != (event["exit_code"] == 0):
        raise ValueError(f"it is {event['status']} with exit code {event['exit_code']}")
    if event["event"] != "run":
        return
    if not event["reason"] and event["status"] != "valid":
        raise ValueError(f"it is {event['status']} without a reason")
    if not {result["cell"] for result in event["results"]} <= event["cells"].keys():
        raise ValueError("it has results of cells that it does not name")
    if event["chain"] is not None and (event["role"] is None or event["cycle"] is None):
        raise ValueError("its place in the chain is not told")
    if event["role"] not in (None, BASELINE) and not event["cycle"]:
        raise ValueError(f"its {'cycle' if event['role'] == CANDIDATE else 'burn-in'} has no number")


def written(seq: int, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event that is told now.

    Raises:
        ValueError: if it is not what is declared; no reader would take it.
    """
    event = {"seq": seq, "t": time.time(), "event": name, **fields}
    read(event)
    return event
