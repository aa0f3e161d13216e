"""Carry out a job's plan: build, find models, check flags, gate, measure; every event goes to the journal."""

from __future__ import annotations

import itertools
import json
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from resource import RLIM_INFINITY

from dgxlab import __version__
from dgxlab.agent import child, models, slurm
from dgxlab.agent.boot import flush
from dgxlab.agent.build import Builder
from dgxlab.agent.chain import ChainRunner
from dgxlab.agent.environment import Root
from dgxlab.agent.facts import gather
from dgxlab.agent.files import clean_command, full_disk, remote_error
from dgxlab.agent.gates import run_gate
from dgxlab.agent.job import BY_USER, CANCELLED, Job
from dgxlab.agent.measure import Launched, Workbench
from dgxlab.errors import AGAIN, DgxlabError, GateFailed, JobLost, RemoteError, UsageError
from dgxlab.model import (
    PROTOCOL,
    BuildStep,
    ChainStep,
    GateStep,
    ModelStep,
    ParityGate,
    Plan,
    ProbeStep,
    RunStep,
    about,
    arms_of,
    from_json,
    model_id,
)
from dgxlab.model.events import EndEvent, ErrorEvent, GateEvent, JobEvent, StepEvent
from dgxlab.model.parts import FinalStatus

_DISTURBED_AGAIN = 2  # how often a run is repeated because others used the device or the processors


class _Cancelled(BaseException):
    """TERM arrived. Not an Exception, so that no step swallows it."""


class Worker:
    """Carries out the plan of one job."""

    def __init__(self, job: Job, root: Root, plan: Plan) -> None:
        self.plan, self.bench = plan, Workbench(job, root, plan, gather())
        self.emit = self.bench.journal.emit
        self.gates: dict[str, GateEvent] = {}  # by step id
        self.lists = {
            getattr(step.gate, "cases", None) for step in plan.steps if isinstance(step, GateStep) and step.listed
        }
        """Digests of the case lists that the record already has."""
        self.failures: list[DgxlabError] = []
        self.closed_arms: set[str] = set()
        self.cycles: dict[str, int] = {}  # of each chain so far, how many were run

    def carry_out(self) -> DgxlabError | None:
        """Run all steps, except those of arms whose gates failed; return the worst error, None if there is none."""
        facts = self.bench.facts
        if any(isinstance(step, GateStep | RunStep | ChainStep) for step in self.plan.steps):  # a build has no GPU
            slurm.remember(self.bench.root, facts)
        self.emit(
            JobEvent(
                job_id=self.bench.job.job_id,
                plan_digest=self.plan.digest,
                protocol=PROTOCOL,
                agent_version=__version__,
                boot_id=facts.boot_id,
                facts=facts,
            )
        )
        left_out = 0
        for step in self.plan.steps:
            # if no chain of the session has a cycle, a gate after the chains has nothing to check
            idle = isinstance(step, GateStep) and bool(self.cycles) and not any(self.cycles.values())
            skipped = not self.closed_arms.isdisjoint(arms_of(step)) or idle
            left_out += idle
            if isinstance(step, ChainStep):
                self.cycles[step.id] = 0
            self.emit(StepEvent(id=step.id, kind=step.kind, state="skipped" if skipped else "started"))
            if not skipped:
                getattr(self, f"_{step.kind}")(step)
                self.emit(StepEvent(id=step.id, kind=step.kind, state="done"))
        if left_out:
            self.bench.note("the gates after the chains are left out: no chain has a cycle that they could vouch for")
        # a failed gate matters more than a failed run
        worst = max(self.failures, key=lambda error: error.exit_code == GateFailed.exit_code, default=None)
        if worst and worst is not self.failures[-1]:
            self.report(worst)  # the last error in the journal is the reason for the job's end
        return worst

    def fail(self, error: DgxlabError) -> None:
        """Write an error to the journal and remember it for the job's end; the other steps go on."""
        self.failures.append(error)
        self.report(error)

    def report(self, error: DgxlabError) -> None:
        """Write an error to the journal; where it blames a full disk, what makes room is the command to type next."""
        if (full := full_disk(self.bench.job.raw)) and full in error.message:
            error.next = clean_command()
        self.emit(ErrorEvent(message=error.message, next=error.next, details=error.details))

    # -- steps --------------------------------------------------------------------------------------------------------

    def _build(self, step: BuildStep) -> None:
        event = Builder(self.bench, step).build()
        self.bench.builds[step.arm] = event.build_id
        self.emit(event)

    def _model(self, step: ModelStep) -> None:
        begin, bench = time.monotonic(), self.bench
        if step.recipe is None:
            bench.progress(step.id, 0, 0, f"reading {step.path}")
            event = models.find(bench.root, step)
        else:
            bench.progress(step.id, 0, 0, f"writing model {step.model}")
            source = bench.models[step.arm, step.of] if step.of else None
            files = models.files(bench.root, step)

            def launch(name: str, argv: Sequence[str]) -> Launched:
                argv = bench.fill(argv, step.arm)
                return bench.launch(name, argv, {}, step.limit_s, file_limit=RLIM_INFINITY)

            event = models.make(bench.root, step, model_id(step.recipe, files), launch, source=source, files=files)
        bench.models[step.arm, step.model] = event
        self.emit(replace(event, seconds=time.monotonic() - begin))

    def _probe(self, step: ProbeStep) -> None:
        launched = self.bench.launch(step.id, self.bench.fill(step.argv, step.arm), {}, step.limit_s)
        program = Path(step.argv[0]).name
        if launched.ended.stopped:
            ended = launched.ended.reason(program, step.limit_s)
            raise RemoteError(f"{program} does not say which flags it knows: {ended}", next=AGAIN)
        known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", launched.text() + launched.errors()))
        unknown = [flag for flag in step.flags if flag not in known]
        if unknown and (full := full_disk(self.bench.job.raw)):
            raise RemoteError(f"{program} could not say which flags it knows{full}", next=clean_command())
        if unknown:
            message = f"{program} of this build does not know {', '.join(unknown)}, which the spec asks for"
            raise UsageError(message, next=self.bench.log(f"raw/{launched.stdout.name}"))

    def _gate(self, step: GateStep) -> None:
        self.bench.hold()
        self.bench.progress(step.id, 0, 0, about(step.gate))
        event = run_gate(self.bench, step, self.gates.get(step.like))
        self.gates[step.id] = event
        role, reading = [(role, dict(reading)) for role, reading in event.readings.items()][-1]
        listed = reading.get("cases")
        if listed in self.lists:  # 150 kB for MUL_MAT, sent once
            event = replace(event, case_list=None)
        self.lists.add(listed)
        self.emit(event)
        if event.status == "failed":  # the other steps of its arm are left out
            self.closed_arms.add(step.arm)
            stream = "stderr" if "problem" in reading else getattr(step.gate, "failures_on", "stdout")
            last = [name for name in event.raw if name == stream or re.fullmatch(rf"{role}(-\d+)? {stream}", name)][-1]
            message = f"gate {about(step.gate)} failed for {step.arm}: {'; '.join(map(str, event.reasons))}"
            look = self.bench.log(event.raw[last].path)
            details = "\n".join(event.counts["failed"][:10]) if isinstance(step.gate, ParityGate) else ""
            self.fail(GateFailed(message, details=details, next=look))

    def _run(self, step: RunStep) -> None:
        left = {"": 0, "rows": step.attempts - 1, "disturbed": _DISTURBED_AGAIN}
        runs = [other.id for other in self.plan.steps if isinstance(other, RunStep)]
        for number in itertools.count():
            self.bench.hold()
            self.bench.progress(step.id, runs.index(step.id) + 1, len(runs), step.tool)
            attempt = self.bench.measure(step, f"{step.id}-{number}" if number else step.id)
            self.emit(attempt.run)
            if not left[attempt.again]:
                break
            self.bench.note(f"{step.id} is run again, try {number + 2} of {number + 1 + left[attempt.again]}")
            left[attempt.again] -= 1
        if attempt.run.reasons:
            self.fail(self.bench.failure(step.id, attempt, number + 1))

    def _chain(self, step: ChainStep) -> None:
        runner = ChainRunner(step, self.bench)
        if error := runner.carry_out():
            self.fail(error)
        self.cycles[step.id] = runner.done


def work(folder: Path) -> None:
    """Run the staged job in a folder to its end; does nothing if the job was started before."""

    def cancel(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # Slurm may send several
        raise _Cancelled

    job = Job(folder)
    # TERM may come as soon as `started` is there: it waits until it is caught, or the job would look lost
    signal.signal(signal.SIGTERM, cancel)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if job.begin() is None:
        return
    child.adopt()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        end = _carry_out(job, Root(folder.parent.parent))
    except _Cancelled:
        end = _terminated(job)
    except DgxlabError as error:
        end = _end_of(error)
    except OSError as error:  # mostly a full disk: the journal may have no space, but rc has reserved space
        end = _end_of(remote_error("the job", error))
    except Exception as error:  # a bug: report it, or the agent would look killed
        traceback.print_exc()
        end = _end_of(DgxlabError(f"the agent failed: {error!r}", next=f"dgxlab logs {job.job_id} agent.err"))
    job.finish(**end)


def _carry_out(job: Job, root: Root) -> FinalStatus:
    worker = Worker(job, root, from_json(Plan, json.loads(job.plan.read_text())))
    try:
        end = _end_of(worker.carry_out())
    except DgxlabError as error:
        worker.report(error)
        end = _end_of(error)
    except _Cancelled:
        end = _terminated(job, worker)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.bench.telemetry.stop()
        worker.bench.lease.release()
    flush(job.folder)  # the files whose digests are recorded
    worker.emit(EndEvent(exit_code=end["exit_code"], status=end["status"], raw=job.digests()))
    worker.bench.journal.close()
    return end


def _terminated(job: Job, worker: Worker | None = None) -> FinalStatus:
    """Return the end of a job that has got TERM: from the user, or from Slurm for a reason of its own."""
    if not (job.folder / slurm.FILE).exists() or (job.folder / CANCELLED).exists():
        return BY_USER
    lost = JobLost(f"Slurm ended the job: {slurm.why_ended()}; what it measured is kept", next=AGAIN)
    if worker:
        worker.report(lost)
    return _end_of(lost)


def _end_of(error: DgxlabError | None) -> FinalStatus:
    if error is None:
        return {"exit_code": 0, "status": "done", "message": "", "next": ""}
    return {"exit_code": error.exit_code, "status": "failed", "message": error.message, "next": error.next}
