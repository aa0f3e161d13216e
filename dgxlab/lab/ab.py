"""`ab` and `noise`: two arms built, gated, measured by turns and gated again, in one session on one host."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dgxlab import judgement, plan
from dgxlab.agent.slots import comparisons
from dgxlab.compare import Difference, differences, refuse
from dgxlab.errors import ConditionsError, DgxlabError
from dgxlab.lab.base import Lab, Side, Watch, noted
from dgxlab.lab.jobs import carry_out, join, settle
from dgxlab.lab.outlook import command
from dgxlab.lab.provision import prepare
from dgxlab.lab.run import resolve
from dgxlab.lab.todo import device_of, identity, with_expectations
from dgxlab.model import WAIT_S, ChainStep, Experiment, Plan, subject
from dgxlab.store import Job, Store
from dgxlab.transport.host import Probe


@dataclass(frozen=True)
class Session:
    """How an A/B session ended; its verdicts are in the record.

    Attributes:
        job_id: The job that held it: this command's own, or one of the same subject that ran already.
        error: What went wrong, None when nothing did.
    """

    job_id: str
    error: DgxlabError | None = None


def ab(
    lab: Lab,
    baseline: Experiment,
    candidate: Experiment,
    *,
    watch: Watch,
    kind: str = "ab",
    allow: Collection[str] = (),
    wait_s: float = WAIT_S,
    max_s: float = 0.0,
) -> Session:
    """Hold a session that compares a candidate with its baseline, and record it.

    A session measures anew whatever is known, but one that still runs, left by a client that died or started by
    another, is followed instead.

    Args:
        kind: "ab", "noise" for an A/A session, "screen" for one bracket.
        allow: Kinds of `compare.MUST_AGREE` in which the arms may differ.
        wait_s: How long the job may wait for its devices, 0 for not at all.
        max_s: How long its chains may take, 0 for as long as they need.

    Raises:
        SpecError: if the arms cannot be compared, or the session would have too few cycles for its claims.
        DgxlabError: for whatever else ends it before a job runs; what a job itself reports is in the session.
        Interrupted: on Ctrl-C while a job runs; the job goes on.
    """
    tell = noted(watch)
    found = differences(baseline, candidate)
    refuse(found, allow, candidate.path)
    tell(_compared(baseline, candidate, found))
    for difference in found:
        tell(f"  {difference}")
    host = lab.connect(baseline.host)
    sides = [Side(each, resolve(lab, each, None, watch)) for each in (baseline, candidate)]
    about = subject(kind, candidate.digest, baseline.digest)
    left = settle(lab, host, about, watch)
    probe = prepare(host, sides, watch)
    job = _plan(lab.store, sides, probe, kind, wait_s, max_s)
    of = [baseline, candidate]
    left = left or join(lab, host, about, [arm.source for arm in job.arms], probe, watch, of=of)
    if left and _answers(lab.store.job(left), job):
        tell(f"session {left} of the same arms went on without this command: its result stands")
        return Session(left)
    error = carry_out(lab, host, job, probe, watch, of=of)
    return Session(job.job_id, error)


def _answers(job: Job, made: Plan) -> bool:
    """Return whether a job that was followed is what a plan would do; one that ended badly is held again."""
    return job.state == "done" and job.plan.arms == made.arms


def _compared(baseline: Experiment, candidate: Experiment, found: Sequence[Difference]) -> str:
    if found:
        return f"{candidate.name} against {baseline.name}, which differ in"
    if candidate.digest == baseline.digest:
        return f"{candidate.name} against {baseline.name}: nothing differs, an A/A session"
    return f"{candidate.name} against {baseline.name}: their specs differ in nothing but the name"


def _plan(store: Store, sides: Sequence[Side], probe: Probe, kind: str, wait_s: float, max_s: float) -> Plan:
    """Return the plan of a session, with what the record knows of this host in it."""
    one, two = sides
    name = plan.session_name(one.experiment, two.experiment)
    made = plan.make_ab(
        one.experiment,
        two.experiment,
        (one.source, two.source),
        job_id=plan.new_job_id(name),
        kind=kind,
        wait_s=wait_s,
        max_s=max_s,
    )
    steps = tuple(_with_noise(store, one, step, probe) if isinstance(step, ChainStep) else step for step in made.steps)
    made = with_expectations(store, replace(made, steps=steps), probe)
    if kind == "screen":
        _knows(made, one.experiment)
    return made


def _with_noise(store: Store, side: Side, step: ChainStep, probe: Probe) -> ChainStep:
    model = identity(side.experiment, step.baseline.model, probe)
    cells = [cell.key for cell in step.baseline.cells]
    device = device_of(side.experiment, side.source, probe)
    return replace(step, noise=tuple(judgement.noise_floors(store, device.id, cells, model)))


def _knows(made: Plan, experiment: Experiment) -> None:
    """Refuse a screen without the noise floor that it judges by."""
    for chain in made.chains:
        known = {(floor.cell, floor.metric) for floor in chain.noise}
        for comparison in comparisons(chain):
            if (comparison.baseline, comparison.metric) not in known:
                cell = _label(chain, comparison.baseline)
                raise ConditionsError(
                    f"a screen needs the noise floor of host {experiment.host} for {cell}, and no A/A session has"
                    " measured it",
                    next=command("noise", experiment),
                )


def _label(chain: ChainStep, key: str) -> str:
    return next(cell.label for cell in chain.baseline.cells if cell.key == key)
