"""One pipeline for run, gate, ab, noise and screen.

Resolve the trees, settle what was left on the host, look at the host, plan what is left to do, join a job that does it
already or start one, follow it. The kinds differ in their plan alone; the record judges a job when it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dgxlab import compare, judgement, plan, series, tools
from dgxlab.chains import comparisons
from dgxlab.errors import ConditionsError, DgxlabError, UsageError, edit
from dgxlab.lab import Lab, Side, Watch, noted
from dgxlab.lab.jobs import join, settle, start_and_follow
from dgxlab.lab.outlook import command
from dgxlab.lab.provision import prepare
from dgxlab.model import (
    PROTOCOL,
    WAIT_S,
    Cell,
    ChainStep,
    Check,
    Device,
    Experiment,
    FileModel,
    GateStep,
    ParityGate,
    Plan,
    Source,
    build_id,
    digest,
    events,
    model_id,
    subject,
    to_json,
)
from dgxlab.source import PinCache
from dgxlab.store import Store, gate_digest
from dgxlab.transport.host import Probe


@dataclass(frozen=True)
class Request:
    """What a command asks for.

    Attributes:
        kind: "run", "gate" for the gates alone, which then always run; "ab", "noise" for an A/A session, "screen" for
            one bracket.
        baseline: What an A/B session compares the experiment with; the experiment itself for an A/A session.
        again: Measure everything, up to date or not. A session always does.
        tree: A llama.cpp checkout to build instead of the experiment's series; its results are marked dirty.
        allow: Kinds of `compare.MUST_AGREE` in which the arms may differ.
        wait_s: How long the job may wait for its devices, 0 for not at all.
        max_s: How long the chains of a session may take, 0 for as long as they need.
    """

    kind: str
    experiment: Experiment
    baseline: Experiment | None = None
    again: bool = False
    tree: Path | None = None
    allow: Collection[str] = ()
    wait_s: float = WAIT_S
    max_s: float = 0.0

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments, the baseline first; one where nothing differs."""
        both = [self.baseline] if self.baseline and self.baseline.digest != self.experiment.digest else []
        return [*both, self.experiment]

    @property
    def name(self) -> str:
        """What its job is called."""
        return plan.session_name(self.baseline, self.experiment) if self.baseline else self.experiment.name

    @property
    def subject(self) -> str:
        """What its job is about, as in `Plan.subject`."""
        return subject(self.kind, self.experiment.digest, self.baseline.digest if self.baseline else "")


@dataclass(frozen=True)
class Outcome:
    """How a request ended; what was measured before an error is in the record.

    Attributes:
        job_id: The last job that ran, "" when everything was up to date.
        source: The tree of the experiment.
        device: What it computes on.
        planned: Cells that the experiment names.
        reused: Those that needed no measuring.
        measured: Those that have a valid run from this job.
        gates: How each gate ended.
        error: What went wrong, None when nothing did.
    """

    job_id: str
    source: Source
    device: Device
    planned: int = 0
    reused: int = 0
    measured: int = 0
    gates: Sequence[str] = ()
    error: DgxlabError | None = None


def run(lab: Lab, request: Request, watch: Watch) -> Outcome:
    """Do what is not done yet of a request, and record it.

    A job of the same subject that still runs, left by a client that died or started by another, is followed first.

    Raises:
        SpecError: if arms cannot be compared, or a session would have too few cycles for its claims.
        DgxlabError: for whatever else ends it before a job runs; what a job itself reports is in the outcome.
        Interrupted: on Ctrl-C while a job runs; the job goes on.
    """
    for sentence in _compared(request):
        noted(watch)(sentence)
    host = lab.connect(request.experiments[0].host)  # an unknown name is an error before anything is fetched
    sides = [Side(each, resolve(lab.cache, each, request.tree, watch)) for each in request.experiments]
    followed = settle(lab, host, request.subject, watch)
    probe = prepare(host, sides, watch)
    todo, job = planned(lab.store, request, sides, probe, followed)
    if job and not followed and request.kind != "gate":
        followed = join(lab, host, request.subject, sides, probe, watch)
        todo, job = planned(lab.store, request, sides, probe, followed) if followed else (todo, job)
    outcome = Outcome(followed, sides[-1].source, device_of(sides[-1], probe), todo.planned, todo.reused)
    if job is None:
        if request.baseline:
            noted(watch)(f"session {followed} of the same arms went on without this command: its result is kept")
        return outcome
    measured: set[tuple[str, str]] = set()
    gates: list[str] = []

    def see(event: events.Event) -> None:
        if isinstance(event, events.RunEvent) and event.status == "valid":
            measured.update((event.id, result.cell) for result in event.results)
        elif isinstance(event, events.JudgedEvent):
            gates.append(event.status)
        watch(event)

    error = start_and_follow(lab, host, job, probe, see, of=request.experiments)
    return replace(outcome, job_id=job.job_id, measured=len(measured), gates=gates, error=error)


def full_plan(cache: PinCache, request: Request, watch: Watch) -> Plan:
    """Return the plan of everything that a request asks for, whatever the record and the host have of it.

    Raises:
        SpecError: as `run`.
    """
    _compared(request)
    sides = [Side(each, resolve(cache, each, request.tree, watch)) for each in request.experiments]
    return _everything(request, sides, request.name)


def resolve(cache: PinCache, experiment: Experiment, tree: Path | None, watch: Watch) -> Source:
    """Return the tree to build, made in the client's cache before any network call to the host.

    Raises:
        SpecError: if no source has the pin.
        PatchError: if the series does not apply to it.
    """

    def tell(note: str) -> None:  # git's percentages move the bar
        progress = events.ProgressEvent(id="pin", done=0, total=0, note=note)
        watch(progress if "%" in note else events.NoteEvent(note=note))

    cache.ensure(experiment.pin, experiment.sources, tell)
    if tree is not None:
        return series.apply_tree(cache, experiment.pin, tree)
    root = Path(experiment.root)
    return series.apply(cache, experiment.pin, [series.read(root, name) for name in experiment.series])


def device_of(side: Side, probe: Probe) -> Device:
    """Return what an experiment computes on, on the host that was asked."""
    return Device.of(to_json(probe.facts), plan.make_arm(side.experiment, side.source).cmake)


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Todo:
    """What is left of a request on one host."""

    planned: int = 0
    """Cells that the experiment of a run names."""
    cells: frozenset[tuple[str, str, str]] = frozenset()
    """Those to measure, each as (model name, environment digest, cell key)."""
    gates: tuple[ParityGate | Check, ...] = ()
    """Those to run."""

    @property
    def reused(self) -> int:
        """Cells that are up to date."""
        return self.planned - len(self.cells)


def planned(
    store: Store, request: Request, sides: Sequence[Side], probe: Probe, followed: str = ""
) -> tuple[Todo, Plan | None]:
    """Return what is left of a request, and the plan that does just that; None where nothing is left.

    Args:
        followed: A job of the same subject that has just ended, "" for none; a session that ended well is not repeated.

    Raises:
        SpecError: if the arms have nothing in common to measure, or a session has too few cycles for its claims.
        ConditionsError: if a screen has no noise floor to judge by.
    """
    job_id = plan.new_job_id(request.name)
    if request.baseline is None:
        todo = left_to_do(store, request, sides[0], probe, again=request.again and not followed)
        if not todo.cells and not todo.gates:
            return todo, None
        return todo, _with_expectations(store, _everything(request, sides, job_id, todo), probe)
    job = _everything(request, sides, job_id)
    device, baseline = device_of(sides[0], probe), sides[0].experiment

    def with_noise(step: ChainStep) -> ChainStep:
        model = _identity(baseline, step.baseline.model, probe)
        cells = [cell.key for cell in step.baseline.cells]
        return replace(step, noise=tuple(judgement.noise_floors(store, device.id, cells, model)))

    steps = tuple(with_noise(step) if isinstance(step, ChainStep) else step for step in job.steps)
    job = _with_expectations(store, replace(job, steps=steps), probe)
    for chain in job.chains if request.kind == "screen" else ():
        known = {(floor.cell, floor.metric) for floor in chain.noise}
        for comparison in comparisons(chain):
            if (comparison.baseline, comparison.metric) not in known:
                cell = next(cell.label for cell in chain.baseline.cells if cell.key == comparison.baseline)
                raise ConditionsError(
                    f"a screen needs the noise floor of host {baseline.host} for {cell}, and no A/A session has"
                    " measured it",
                    next=command("noise", baseline),
                )
    if followed and (done := store.job(followed)).state == "done" and done.plan.arms == job.arms:
        return Todo(), None
    return Todo(), job


def left_to_do(store: Store, request: Request, side: Side, probe: Probe, *, again: bool = False) -> Todo:
    """Return the open gates, and the cells without a valid run of this build, model, environment and device."""
    experiment, bench = side.experiment, request.kind != "gate"
    build = build_id(side.source, plan.make_arm(experiment, side.source).cmake, probe.facts.toolchain)
    device = device_of(side, probe)
    asked: dict[tuple[str, str, str], tuple[str, str, str]] = {}

    def note(model: str, env: Mapping[str, str], cell: Cell) -> bool:
        env_digest = digest(env, 16)
        asked[model, env_digest, cell.key] = (cell.key, _identity(experiment, model, probe), env_digest)
        return True

    for _ in tools.launches(experiment, note) if bench else ():
        pass
    done = set() if again else store.up_to_date(build, device.id, list(asked.values()), PROTOCOL)
    cells = frozenset(name for name, stored in asked.items() if stored not in done)
    gates = plan.own(experiment)
    if bench and not again:
        gates = [gate for gate in gates if not _passed(store, experiment, gate, build, device, probe)]
    if not bench and not gates:
        raise UsageError(f"{experiment.name} has no gate that runs by itself under gates:", next=edit(experiment.path))
    return Todo(len(asked), cells, tuple(gates))


def _passed(
    store: Store, experiment: Experiment, gate: ParityGate | Check, build: str, device: Device, probe: Probe
) -> bool:
    asked = gate_digest(gate, plan.gate_env(experiment, gate))
    if isinstance(gate, ParityGate):
        return store.gate_passed(build, device.id, asked, gate)
    inputs = {name: _identity(experiment, name, probe) for name in tools.models_of(gate)}
    inputs |= tools.sources(gate, tools.files_of(gate, experiment.root))
    return store.check_passed(build, device.id, asked, inputs)


def _everything(request: Request, sides: Sequence[Side], job_id: str, todo: Todo | None = None) -> Plan:
    if request.baseline is not None:
        return plan.make_ab(
            request.baseline,
            request.experiment,
            (sides[0].source, sides[-1].source),
            job_id=job_id,
            kind=request.kind,
            wait_s=request.wait_s,
            max_s=request.max_s,
        )
    return plan.make(
        request.experiment,
        sides[0].source,
        job_id=job_id,
        wanted=lambda model, env, cell: todo is None or (model, digest(env, 16), cell.key) in todo.cells,
        gates=todo.gates if todo else None,
        bench=request.kind != "gate",
        wait_s=request.wait_s,
    )


def _compared(request: Request) -> list[str]:
    """Return what differs between the arms, a line each; refuses what may not differ."""
    baseline, candidate = request.baseline, request.experiment
    if baseline is None:
        return []
    differing = compare.differences(baseline, candidate)
    compare.refuse(differing, request.allow, candidate.path)
    if differing:
        return [f"{candidate.name} against {baseline.name}, which differ in", *(f"  {each}" for each in differing)]
    if candidate.digest == baseline.digest:
        return [f"{candidate.name} against {baseline.name}: nothing differs, an A/A session"]
    return [f"{candidate.name} against {baseline.name}: their specs differ in nothing but the name"]


def _with_expectations(store: Store, job: Plan, probe: Probe) -> Plan:
    """Return the plan with what earlier clean baselines recorded filled into gates that expect nothing yet."""

    def known(step: GateStep) -> GateStep:
        arm, gate = job.arm(step.arm), step.gate
        compute_cap = Device.of(to_json(probe.facts), arm.cmake).compute_cap
        recorded = store.expectation(arm.source.pin, arm.source.tree, gate_digest(gate, step.env), compute_cap)
        if recorded and not step.like:  # a candidate's gate is held against the baseline's in its own session
            expect, unsupported, cases = recorded
            if gate.expect is None:
                gate = replace(gate, expect=expect, unsupported=unsupported)
            if gate.expect == expect and not gate.cases:
                gate = replace(gate, cases=cases)
        return replace(step, gate=gate, listed=store.case_list(gate.cases) is not None)

    return replace(job, steps=tuple(known(step) if isinstance(step, GateStep) else step for step in job.steps))


def _identity(experiment: Experiment, name: str, probe: Probe) -> str:
    """Return what a model is stored as: the recipe's digest, or what the host says of the file; "" for no model."""
    if not name:
        return ""
    model = experiment.models[name]
    if not isinstance(model, FileModel):
        return model_id(model)
    file = probe.models[model.path]
    return str(file["model_id"]) if file else ""
