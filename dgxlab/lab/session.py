"""One pipeline for run, gate, ab, noise and screen.

Make the sources, settle unfinished jobs on the host, probe the host, plan the missing work, join a running job with the
same work or start one, and follow it. Kinds of jobs differ only in their plan. Verdicts are made when a job ends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dgxlab.errors import DgxlabError, GateFailed, HostBusy, edit, longer
from dgxlab.lab import Lab, Side, Watch, cluster, noted
from dgxlab.lab.jobs import join, settle, start_and_follow
from dgxlab.lab.missing import Place, build_of, device_of, everything, place
from dgxlab.lab.provision import prepare
from dgxlab.lab.request import Request, compared, sourced
from dgxlab.model import Device, Experiment, ParityGate, Plan, Source, events
from dgxlab.model.reasons import Code
from dgxlab.source import PinCache
from dgxlab.tools.profile_files import ALL
from dgxlab.transport.host import Host, Probe
from dgxlab.units import busy

_LOOK_S = 5.0  # pause between two looks at the jobs of others, each of which costs a processor of theirs 0.2 s

_EXPECTATIONS = {code.key for code in (Code.CASE_COUNT, Code.CASE_LIST, Code.UNSUPPORTED)}


@dataclass(frozen=True)
class Outcome:
    """How a request ended; what was measured before an error is in the record."""

    job_id: str  # the last job that ran, "" when everything was up to date
    experiment: Experiment  # with its own name if it was built from a checkout
    source: Source  # the tree of the experiment
    device: Device
    build: str  # its id
    planned: int = 0  # cells that the experiment names
    reused: int = 0  # cells that were up to date
    measured: int = 0  # cells with a valid run from this job
    disturbed: int = 0  # those of them whose every run a hard event disturbed
    gates: Sequence[str] = ()  # how each gate ended
    error: DgxlabError | None = None  # the error, None on success


def run(lab: Lab, request: Request, watch: Watch, sides: Sequence[Side] = ()) -> Outcome:
    """Measure what a request names and is not up to date, and record it.

    A job of the same subject that already runs, from a dead or another client, is followed first. Where Slurm ends a
    job for others, another one goes on. With `sides`, the request is as `sourced` returned it with them.

    Raises:
        SpecError: if arms cannot be compared, or a session would have too few cycles for its claims.
        DgxlabError: for any other error before a job runs; a job's own error is in the outcome.
        Interrupted: on Ctrl-C while a job runs; the job goes on.
    """
    compared(request)  # arms that cannot be compared and an unknown host are errors before anything is fetched
    host = lab.connect(request.experiments[0].host)
    if not sides:
        request, sides = sourced(lab.cache, request, watch)
    for sentence in compared(request):
        noted(watch)(sentence)
    for _ in range(cluster.RESTARTS):
        outcome = _once(lab, host, request, sides, watch)
        if (request.again and request.kind == "run") or not cluster.may_go_on(host, outcome.error):
            return outcome  # what --again has measured so far is like any other cell that is up to date
        noted(watch)(f"{outcome.error}: {cluster.GOES_ON}")
        request = replace(request, again=False)  # gates that passed are done
    return _once(lab, host, request, sides, watch)


def _once(lab: Lab, host: Host, request: Request, sides: Sequence[Side], watch: Watch) -> Outcome:
    """Follow or start a job for a request whose sources are made, as `run`."""
    followed = settle(lab, host, request.subject, watch)
    probe = prepare(host, sides, watch)
    if request.behind and not followed:
        probe = _behind_others(host, request, sides, probe, watch)
    at, followed = _left(lab, host, request, sides, probe, followed, watch)
    if at.job and cluster.build_first(lab, host, at.job, sides, at.probe, watch):  # others went on meanwhile
        at, followed = _left(lab, host, request, sides, prepare(host, sides, watch), followed, watch)
    todo, job, probe = at.todo, at.job, at.probe
    last = sides[-1]
    device, build = device_of(last, probe), build_of(last, probe)
    outcome = Outcome(followed, last.experiment, last.source, device, build, todo.planned, todo.reused)
    if job is None:
        if request.baseline:
            noted(watch)(f"session {followed} of the same arms went on without this command: its result is kept")
        return outcome
    measured: set[tuple[str, str]] = set()
    undisturbed: set[tuple[str, str]] = set()
    gates: list[str] = []
    failed: list[events.GateEvent] = []

    def see(event: events.Event) -> None:
        if isinstance(event, events.RunEvent) and event.status == "valid":
            cells = {result.cell: event.cells[result.cell] for result in event.results}
            # a profile also has a cell for each kernel that it finds, which no plan names
            named = {(event.id, key) for key, cell in cells.items() if cell.params.get("kernel", ALL) == ALL}
            measured.update(named)
            undisturbed.update(() if event.hard else named)
        elif isinstance(event, events.GateEvent):
            gates.append(event.status)
            if event.status == "failed":
                failed.append(event)
        watch(event)

    error = start_and_follow(lab, host, job, probe, see, request.begun)
    if isinstance(error, GateFailed) and failed and all(map(_expects_otherwise, failed)):
        error.next = edit(next(side.experiment.path for side in sides if side.experiment.name == failed[0].arm))
    device = next(reversed(lab.store.devices(job.job_id).values()), outcome.device)  # which node it was is known now
    outcome = replace(outcome, measured=len(measured), disturbed=len(measured - undisturbed), gates=gates)
    return replace(outcome, job_id=job.job_id, device=device, error=error)


def _expects_otherwise(gate: events.GateEvent) -> bool:
    """Return whether all cases passed, and the spec's file expects others: its output would show nothing wrong."""
    if not isinstance(gate.gate, ParityGate) or gate.gate.overridden:
        return False
    all_passed = gate.counts["passed"] == gate.counts["total"]
    return all_passed and {reason.code for reason in gate.reasons} <= _EXPECTATIONS


def _behind_others(host: Host, request: Request, sides: Sequence[Side], probe: Probe, watch: Watch) -> Probe:
    """Return the probe of a host on which no other job runs or waits; HostBusy if that takes more than `wait_s`."""
    end, first = time.monotonic() + request.wait_s, ""
    while host.entry.slurm is None:  # Slurm has a queue of its own
        others = [job_id for job_id, subject in probe.running.items() if subject != request.subject]
        if not others:
            break
        if (left_s := end - time.monotonic()) <= 0:
            message = f"host {host.name} {busy(request.wait_s)}, with job {others[0]}"
            raise HostBusy(message, next=longer(request.wait_s))
        if others[0] != first:
            first = others[0]
            watch(events.LockEvent(state="waiting", path=f"host {host.name}", owner=f"job {first}", left_s=left_s))
        time.sleep(_LOOK_S)
        probe = prepare(host, sides, watch)
    return probe


def _left(
    lab: Lab, host: Host, request: Request, sides: Sequence[Side], probe: Probe, followed: str, watch: Watch
) -> tuple[Place, str]:
    """Return what is left to do, and the job that was `followed`: another client's of the same, if one runs."""
    at = place(lab.store, host, request, sides, probe, followed)
    if at.job and not followed and request.kind != "gate":
        followed = join(lab, host, request.subject, sides, at.probe, watch)
        if followed:
            at = place(lab.store, host, request, sides, prepare(host, sides, watch), followed)
    return at, followed


def full_plan(cache: PinCache, request: Request, watch: Watch) -> Plan:
    """Return the plan that `run` would execute with an empty record and an empty host; SpecError as `run`."""
    compared(request)
    request, sides = sourced(cache, request, watch)
    return everything(request, sides, request.name)
