"""The use cases: run an experiment, follow what runs, settle what was left behind.

A job's intent is in the store before the host hears of it, and everything after that is reading a journal: whatever
dies in between, the next command finds the job and goes on from where the store stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgxlab import __version__, matrix, plan, series
from dgxlab.errors import DgxlabError, Interrupted, JobLost, SpecError, UsageError, by_exit_code
from dgxlab.ingest import ingest
from dgxlab.model import (
    PROTOCOL,
    Cell,
    Experiment,
    FileModel,
    ParityGate,
    Plan,
    Source,
    build_id,
    digest,
    model_id,
)
from dgxlab.source import PinCache
from dgxlab.store import Store, gate_digest
from dgxlab.transport import retry
from dgxlab.transport.host import Host, JobStatus, Probe

Watch = Callable[[Mapping[str, Any]], None]
"""Sees every journal event as it is ingested, and the client's own {"event": "note", "note": sentence}."""


@dataclass(frozen=True)
class Lab:
    """What a use case works with: the record, the pins at hand, and a way to hosts by name."""

    store: Store
    cache: PinCache
    connect: Callable[[str], Host]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        job_id: The last job that ran, "" when everything was up to date.
        planned: Cells that the experiment names.
        reused: Those that needed no measuring.
        source: The tree that it was about.
        measured: Cells that have a valid run from this job.
        error: What went wrong, None when nothing did; what was measured before it is in the store.
    """

    job_id: str
    planned: int
    reused: int
    source: Source
    measured: int = 0
    error: DgxlabError | None = None


@dataclass(frozen=True)
class Todo:
    """What is left of an experiment on one host."""

    cells: frozenset[tuple[str, str, str]]
    """(model name, environment digest, cell key) to measure."""
    planned: int
    gates: tuple[ParityGate, ...]

    @property
    def nothing(self) -> bool:
        """Whether everything is up to date."""
        return not self.cells and not self.gates


def run(
    lab: Lab,
    experiment: Experiment,
    *,
    watch: Watch,
    again: bool = False,
    tree: Path | None = None,
    bench: bool = True,
) -> Outcome:
    """Build, gate and measure what is not up to date, and record it.

    Args:
        again: Measure everything, up to date or not.
        tree: A llama.cpp checkout to build instead of the experiment's series; its results are marked dirty.
        bench: False for the parity gates alone, which then always run.

    Raises:
        DgxlabError: for whatever ends it before a job runs; what a job itself reports is in the outcome.
        Interrupted: on Ctrl-C while a job runs; the job goes on.
    """
    source = resolve(lab, experiment, tree, watch)
    host = lab.connect(experiment.host)
    resumed = settle(lab, host, experiment, watch)
    probe = ask(host, experiment, source)
    todo = left_to_do(lab.store, experiment, source, probe, again=again and not resumed, bench=bench)
    reused = todo.planned - len(todo.cells)
    if todo.nothing:
        return Outcome(resumed, todo.planned, reused, source)
    job = make_plan(lab.store, experiment, source, todo, bench=bench)
    measured: list[str] = []
    with _interruptible(lab.store, job.job_id):
        status = start(lab, host, experiment, job, probe, watch)
        error = _until_its_end(lab, host, status, _noting(measured, watch))
    return Outcome(job.job_id, todo.planned, reused, source, len(measured), error)


def _noting(measured: list[str], watch: Watch) -> Watch:
    """Return a watch that also notes every cell that gets a valid run."""

    def see(event: Mapping[str, Any]) -> None:
        if event["event"] == "run" and event["status"] == "valid":
            measured.extend(result["cell"] for result in event["results"])
        watch(event)

    return see


def _until_its_end(lab: Lab, host: Host, status: JobStatus, watch: Watch) -> DgxlabError | None:
    """Follow a job that was started and return what went wrong, its loss too: there may be results to report."""
    try:
        return conclude(lab, host, status) if status.state == "lost" else follow(lab, host, status.job_id, watch)
    except JobLost as lost:
        return lost


def resolve(lab: Lab, experiment: Experiment, tree: Path | None, watch: Watch) -> Source:
    """Return the tree to build, made in the client's cache before any network call to the host.

    Raises:
        SpecError: if no source has the pin.
        PatchError: if the series does not apply to it.
    """
    lab.cache.ensure(experiment.pin, experiment.sources, lambda note: watch(_told(note)))
    if tree is not None:
        return series.apply_tree(lab.cache, experiment.pin, tree)
    root = Path(experiment.root)
    return series.apply(lab.cache, experiment.pin, [series.read(root, name) for name in experiment.series])


def _told(note: str) -> dict[str, Any]:
    """Return what git says: a sentence is a note, a percentage moves the bar."""
    if "%" in note:
        return {"event": "progress", "id": "pin", "done": 0, "total": 0, "note": note}
    return {"event": "note", "note": note}


def left_to_do(
    store: Store, experiment: Experiment, source: Source, probe: Probe, *, again: bool = False, bench: bool = True
) -> Todo:
    """Return the cells without a valid run of this build, model, environment, host and protocol, and the open gates."""
    build = build_id(source, plan.make_arm(experiment, source).cmake, probe.facts.toolchain)
    asked: dict[tuple[str, str, str], tuple[str, str, str]] = {}

    def note(model: str, env: Mapping[str, str], cell: Cell) -> bool:
        env_digest = digest(env, 16)
        asked[model, env_digest, cell.key] = (cell.key, _identity(experiment, model, probe), env_digest)
        return True

    if bench:
        for _ in matrix.launches(experiment, note):
            pass
    host_id = probe.facts.host_id
    done = set() if again else store.up_to_date(build, host_id, list(asked.values()), PROTOCOL)
    cells = frozenset(name for name, stored in asked.items() if stored not in done)
    parity = [gate for gate in experiment.gates if isinstance(gate, ParityGate)]
    gates = tuple(gate for gate in parity if again or not bench or not _passed(store, experiment, gate, build, host_id))
    if not bench and not gates:
        raise UsageError(f"{experiment.name} has no parity gate", next="add one under gates: in the spec")
    return Todo(cells, len(asked), gates)


def _passed(store: Store, experiment: Experiment, gate: ParityGate, build: str, host_id: str) -> bool:
    asked = gate_digest(gate, plan.gate_env(experiment, gate))
    return store.gate_passed(build, host_id, asked, expect=gate.expect, unsupported=gate.unsupported)


def make_plan(store: Store, experiment: Experiment, source: Source, todo: Todo, *, bench: bool = True) -> Plan:
    """Return the plan for what is left, with recorded expectations filled in."""
    made = plan.make(
        experiment,
        source,
        job_id=plan.new_job_id(experiment.name),
        wanted=lambda model, env, cell: (model, digest(env, 16), cell.key) in todo.cells,
        gates=todo.gates,
        bench=bench,
    )

    def known(gate: ParityGate) -> ParityGate:
        if gate.expect is not None:
            return gate
        asked = gate_digest(gate, plan.gate_env(experiment, gate))
        recorded = store.expectation(source.pin, source.tree, asked)
        return replace(gate, expect=recorded[0], unsupported=recorded[1]) if recorded else gate

    return plan.with_expectations(made, known)


def ask(host: Host, experiment: Experiment, source: Source) -> Probe:
    """Return what the host has of what a run needs, in one round trip.

    Raises:
        SpecError: if a model file is not there.
    """
    paths = [model.path for model in experiment.models.values() if isinstance(model, FileModel)]
    probe = host.probe([source.pin, source.commit], paths)
    _need_models(experiment, probe)
    return probe


def start(lab: Lab, host: Host, experiment: Experiment, job: Plan, probe: Probe, watch: Watch) -> JobStatus:
    """Send what the host lacks, record the intent, and start the job detached."""
    for arm in job.arms:
        _send(lab.cache, host, arm.source, probe, watch)
    lab.store.intend(job, experiment, host.name, __version__)
    status = retry.again(host, lambda: host.submit(job), _noted(watch))
    watch({"event": "note", "note": f"job {job.job_id} runs on {host.name}"})
    return status


def follow(lab: Lab, host: Host, job_id: str, watch: Watch) -> DgxlabError | None:
    """Ingest a job's journal as it grows, from where the store stands; return what went wrong in it.

    Raises:
        Interrupted: on Ctrl-C; the job goes on.
    """
    with _interruptible(lab.store, job_id):
        offset = lab.store.job(job_id).journal_bytes
        for piece in retry.follow(host, job_id, offset, _noted(watch)):
            for event in ingest(lab.store, job_id, piece.splitlines(keepends=True)):
                watch(event)
        return conclude(lab, host, retry.again(host, lambda: host.status(job_id), _noted(watch)))


def _noted(watch: Watch) -> Callable[[str], None]:
    """Return what tells a sentence to those who watch."""
    return lambda sentence: watch({"event": "note", "note": sentence})


def conclude(lab: Lab, host: Host, status: JobStatus) -> DgxlabError | None:
    """Record how a job ended and return its error, None for a good end.

    Raises:
        JobLost: if the agent died without a final word; what it measured before is kept.
    """
    job_id = status.job_id
    if status.state != "done" or status.rc is None:
        lab.store.set_state(job_id, "lost")
        raise JobLost(
            f"job {job_id} was lost: its agent on {host.name} is gone and left no final status (killed, or a reboot)",
            next="dgxlab run again: what it measured is kept, only the rest is measured",
        )
    code = int(status.rc["exit_code"])
    job = lab.store.job(job_id)
    lab.store.set_state(job_id, status.rc["status"], exit_code=code)
    if code == 0:
        return None
    if status.rc["status"] == "cancelled":
        return Interrupted(f"job {job_id} was cancelled", next="dgxlab run again to go on")
    message = status.rc.get("message") or job.error or f"job {job_id} ended with exit code {code}"
    return by_exit_code(code)(message, next=status.rc.get("next") or job.next or "", details=job.details or "")


def settle(lab: Lab, host: Host, experiment: Experiment | None, watch: Watch) -> str:
    """Bring every unfinished job of a host to where the host has it; wait only for this experiment's own.

    A job whose client died is finished here: staged or started as it was intended, its journal ingested.

    Returns:
        The id of the experiment's job that was waited for, "" when there was none.
    """
    resumed = ""
    for job in lab.store.unfinished(host.name):
        mine = experiment is not None and job.experiment == experiment.digest
        status = host.status(job.job_id)
        if mine and status.state in ("absent", "staged"):
            status = host.submit(job.plan)
        if mine and status.state == "running":
            watch({"event": "note", "note": f"job {job.job_id} of this experiment still runs: following it"})
        if status.state == "absent":
            lab.store.set_state(job.job_id, "lost")
        elif status.state in ("done", "lost") or mine:
            resumed = job.job_id if mine else resumed
            _follow_quietly(lab, host, job.job_id, watch)
    return resumed


def _follow_quietly(lab: Lab, host: Host, job_id: str, watch: Watch) -> None:
    """Follow an old job; how it ended is recorded, and what is left of it is measured now."""
    try:
        error = follow(lab, host, job_id, watch)
    except JobLost as lost:
        error = lost
    if error is not None:
        watch({"event": "note", "note": f"an earlier job ended badly: {error.message}"})


def _send(cache: PinCache, host: Host, source: Source, probe: Probe, watch: Watch) -> None:
    """Send the objects that the host lacks: the pin once, a patched tree as its few changed objects."""
    if source.pin in probe.missing:
        watch({"event": "note", "note": f"sending pin {source.pin[:12]} to {host.name}"})
        host.send_objects(source.pin, [source.pin], cache.pack([source.pin], []))
    if source.commit != source.pin and source.commit in probe.missing:
        host.send_objects(source.commit, [source.pin], cache.pack([source.commit], [source.pin]))


@contextmanager
def _interruptible(store: Store, job_id: str) -> Iterator[None]:
    """Turn Ctrl-C into how to go on, once there is a job."""
    try:
        yield
    except KeyboardInterrupt:
        if store.find_job(job_id) is None:
            raise
        raise Interrupted(
            f"stopped watching; job {job_id} goes on", next=f"dgxlab attach {job_id}, or dgxlab cancel {job_id}"
        ) from None


def _need_models(experiment: Experiment, probe: Probe) -> None:
    for name, model in experiment.models.items():
        if isinstance(model, FileModel) and probe.models[model.path] is None:
            raise SpecError(
                f"model {name} is not on host {experiment.host}: there is no file {model.path}",
                next=f"put it there, or change models.{name}.path in {experiment.path}",
            )


def _identity(experiment: Experiment, name: str, probe: Probe) -> str:
    """Return what a model is stored as: the recipe's digest, or what the host says of the file; "" for no model."""
    if not name:
        return ""
    model = experiment.models[name]
    if isinstance(model, FileModel):
        found = probe.models[model.path]
        return str(found["model_id"]) if found else ""
    return model_id(model)
