"""Carry out a plan: build, find models, check flags, gate, measure; every event goes to the journal."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from resource import RLIM_INFINITY

from dgxlab import __version__
from dgxlab.agent import child, facts, models
from dgxlab.agent.boot import flush
from dgxlab.agent.build import Builder
from dgxlab.agent.chain import ChainRunner
from dgxlab.agent.environment import Root
from dgxlab.agent.files import clean, full_disk, refused
from dgxlab.agent.gates import run_gate
from dgxlab.agent.inventory import hold
from dgxlab.agent.job import Job
from dgxlab.agent.journal import Journal
from dgxlab.agent.lease import DeviceLease, devices
from dgxlab.agent.measure import Bench, Runs
from dgxlab.agent.telemetry import Telemetry
from dgxlab.errors import AGAIN, DgxlabError, GateFailed, RemoteError, UsageError
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
from dgxlab.model.events import (
    EndEvent,
    ErrorEvent,
    GateEvent,
    JobEvent,
    LockEvent,
    ModelEvent,
    NoteEvent,
    ProgressEvent,
    StepEvent,
)
from dgxlab.model.parts import FinalStatus

PROGRESS_S = 0.5
"""Minimum time between progress events of one step: ninja counts faster than one can read."""
DISTURBED_AGAIN = 2
"""Max repeats of a run because others used the device or the processors."""


class Cancelled(BaseException):
    """TERM arrived. Not an Exception, so that no step swallows it."""


class Worker:
    """One job being carried out."""

    def __init__(self, job: Job, root: Root, plan: Plan) -> None:
        self.job, self.root, self.plan = job, root, plan
        self.keep = [hold(root)]
        self.journal = Journal(job.journal)
        self.facts = facts.gather()
        gpus = self.facts.details["gpus"]
        measured = {gpu["uuid"]: gpu["name"] or "" for gpu in gpus if gpu["uuid"] in devices(plan, gpus)}
        self.bench = Bench(job.raw, self.keep, Telemetry(job.raw, job.folder / "agent.pyz", measured), self._note)
        self.lease = DeviceLease(plan, gpus, self.bench.pids, self._lock)
        self.runs = Runs(job.job_id, self.journal, self.bench, self.lease, self.fill, self.identify, self.keep)
        self.builds: dict[str, str] = {}
        self.models: dict[tuple[str, str], ModelEvent] = {}
        """By arm and name: the same name may be a different model in another arm."""
        self.gates: dict[str, GateEvent] = {}
        """By step id."""
        self.lists = {
            getattr(step.gate, "cases", None) for step in plan.steps if isinstance(step, GateStep) and step.listed
        }
        """Digests of the case lists that the record already has."""
        self.failures: list[DgxlabError] = []
        self.closed_arms: set[str] = set()
        self._last_progress = ("", 0.0)

    def carry_out(self) -> DgxlabError | None:
        """Run every step and return the worst failure; earlier results are in the journal."""
        self.journal.emit(
            JobEvent(
                job_id=self.job.job_id,
                plan_digest=self.plan.digest,
                protocol=PROTOCOL,
                agent_version=__version__,
                boot_id=self.facts.boot_id,
                facts=self.facts,
            )
        )
        chains: list[tuple[str, ...]] = []
        for step in self.plan.steps:
            # if no chain of the session ran, a gate after the chains has nothing to check
            idle = isinstance(step, GateStep) and bool(chains) and all(map(self._closed, chains))
            skipped = self._closed(arms_of(step)) or idle
            if isinstance(step, ChainStep):
                chains.append(step.arms)
            self.journal.emit(StepEvent(id=step.id, kind=step.kind, state="skipped" if skipped else "started"))
            if not skipped:
                getattr(self, f"_{step.kind}")(step)
                self.journal.emit(StepEvent(id=step.id, kind=step.kind, state="done"))
        # a failed gate matters more than a failed run
        worst = max(self.failures, key=lambda error: error.exit_code == GateFailed.exit_code, default=None)
        if worst and worst is not self.failures[-1]:
            self.report(worst)  # the last error in the journal is the reason for the job's end
        return worst

    def _closed(self, arms: Iterable[str]) -> bool:
        return not self.closed_arms.isdisjoint(arms)

    def fail(self, error: DgxlabError) -> None:
        """Record a failure; the other steps go on."""
        self.failures.append(error)
        self.report(error)

    def report(self, error: DgxlabError) -> None:
        """Write an error to the journal."""
        self.journal.emit(ErrorEvent(message=error.message, next=error.next, details=error.details))

    def fill(self, argv: Sequence[str], arm: str, **extra: str) -> list[str]:
        """Replace the placeholders that only the host knows; raises RemoteError if one has no value."""
        known = {
            "python": sys.executable,
            "agent": str(self.job.folder / "agent.pyz"),
            "jobs": str(facts.cpus()),
            "models": str(self.root.models),
            **{f"model:{name}": model.path for (of, name), model in self.models.items() if of == arm},
            **extra,
        }
        if arm in self.builds:
            known["bin"] = str(self.root.build(self.builds[arm]) / "bin")

        def replace(match: re.Match[str]) -> str:
            if match[1] not in known:
                raise RemoteError(f"the plan's placeholder {match[0]} has no value yet on the host")
            return known[match[1]]

        return [re.sub(r"\{([a-z]+(?::[\w.-]+)?)\}", replace, arg) for arg in argv]

    def identify(self, step: RunStep) -> tuple[str, str]:
        """Return the ids of a run's build and model; "" if it reads no model."""
        return self.builds[step.arm], self.models[step.arm, step.model].model_id if step.model else ""

    # -- steps --------------------------------------------------------------------------------------------------------

    def _build(self, step: BuildStep) -> None:
        arm = self.plan.arm(step.arm)
        log = self.job.folder / f"{step.id.replace(':', '-')}.log"
        progress = partial(self._progress, step.id)
        builder = Builder(
            self.root,
            self.facts.toolchain,
            fill=self.fill,
            log=log,
            on_progress=progress,
            tell=self._note,
            keep=self.keep,
        )
        event = builder.build(arm, step)
        self.builds[step.arm] = event.build_id
        self.journal.emit(event)

    def _model(self, step: ModelStep) -> None:
        begin = time.monotonic()
        if step.recipe is None:
            event = models.find(step)
        else:
            path = Path(self.fill((step.path,), step.arm)[0])
            self._progress(step.id, 0, 0, f"writing {path.name}")
            event = models.synthesize(
                self.root,
                step,
                model_id(step.recipe),
                path,
                lambda name, argv: self.bench.launch(
                    name, self.fill(tuple(argv), step.arm), {}, step.limit_s, file_limit=RLIM_INFINITY
                ),
                source=Path(self.models[step.arm, step.of].path) if step.of else None,
            )
        self.models[step.arm, step.model] = event
        self.journal.emit(replace(event, seconds=time.monotonic() - begin))

    def _probe(self, step: ProbeStep) -> None:
        launched = self.bench.launch(step.id, self.fill(step.argv, step.arm), {}, step.limit_s)
        program = Path(step.argv[0]).name
        if launched.ended.stopped:
            ended = launched.ended.reason(program, step.limit_s)
            raise RemoteError(f"{ended}, asked which flags it knows", next=AGAIN)
        known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", launched.text() + launched.errors()))
        unknown = [flag for flag in step.flags if flag not in known]
        if unknown and (full := full_disk(self.job.raw)):
            raise RemoteError(f"{program} could not say which flags it knows{full}", next=clean())
        if unknown:
            raise UsageError(
                f"{program} of this build does not know {', '.join(unknown)}, which the spec asks for",
                next=f"dgxlab logs {self.job.job_id} raw/{launched.stdout.name}",
            )

    def _gate(self, step: GateStep) -> None:
        self.runs.hold()
        self._progress(step.id, 0, 0, about(step.gate))
        read = {name: self.models[step.arm, name].model_id for name in {c.model for c in step.commands} if name}
        if not isinstance(step.gate, ParityGate):
            read |= step.gate.sources(step.files)
        event = run_gate(
            self.bench,
            step,
            self.builds[step.arm],
            read,
            lambda argv, files: self.fill(argv, step.arm, **files),
            self.gates.get(step.like),
        )
        self.gates[step.id] = event
        role, reading = [(role, dict(reading)) for role, reading in event.readings.items()][-1]
        listed = reading.get("cases")
        if listed in self.lists:  # 150 kB for MUL_MAT, sent once
            event = replace(event, case_list=None)
        self.lists.add(listed)
        self.journal.emit(event)
        if event.status == "failed":  # the other steps of its arm are left out
            self.closed_arms.add(step.arm)
            stream = "stderr" if "problem" in reading else getattr(step.gate, "told_on", "stdout")
            last = [name for name in event.raw if name == stream or re.fullmatch(rf"{role}(-\d+)? {stream}", name)][-1]
            message = f"gate {about(step.gate)} failed for {step.arm}: {'; '.join(map(str, event.reasons))}"
            look = f"dgxlab logs {self.job.job_id} {event.raw[last].path}"
            details = "\n".join(event.counts["failed"][:10]) if isinstance(step.gate, ParityGate) else ""
            self.fail(GateFailed(message, details=details, next=look))

    def _run(self, step: RunStep) -> None:
        left = {"": 0, "rows": step.attempts - 1, "disturbed": DISTURBED_AGAIN}
        runs = [other.id for other in self.plan.steps if isinstance(other, RunStep)]
        for number in itertools.count():
            self.runs.hold()
            self._progress(step.id, runs.index(step.id) + 1, len(runs), step.tool)
            attempt = self.runs.launch(step, f"{step.id}-{number}" if number else step.id)
            self.runs.record(attempt.run)
            if not left[attempt.again]:
                break
            left[attempt.again] -= 1
        if attempt.run.status != "valid":
            self.fail(self.runs.failure(step.id, attempt, number + 1))

    def _chain(self, step: ChainStep) -> None:
        if error := ChainRunner(step, self.runs, self._progress).carry_out():
            self.fail(error)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _lock(self, state: str, path: str, owner: str) -> None:
        self.journal.emit(LockEvent(state=state, path=path, owner=owner))

    def _note(self, note: str) -> None:
        self.journal.emit(NoteEvent(note=note))

    def _progress(self, step: str, done: int, total: int, note: str) -> None:
        now, (last, at) = time.monotonic(), self._last_progress
        if step != last or now - at >= PROGRESS_S or done == total:
            self._last_progress = (step, now)
            self.journal.emit(ProgressEvent(id=step, done=done, total=total, note=note))


def work(folder: Path) -> None:
    """Run a staged job to its end; does nothing if it was started before."""

    def cancel(number: int, frame: object) -> None:
        raise Cancelled

    job = Job(folder)
    if job.begin() is None:
        return
    child.adopt()
    signal.signal(signal.SIGTERM, cancel)
    try:
        end = _carry_out(job, Root(folder.parent.parent))
    except Cancelled:
        end = CANCELLED
    except DgxlabError as error:
        end = _end_of(error)
    except OSError as error:  # mostly a full disk: the journal may have no space, but rc has reserved space
        end = _end_of(refused("the job", error))
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
    except Cancelled:
        end = CANCELLED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.bench.telemetry.stop()
        worker.lease.release()
    flush(job.folder)  # the files whose digests are recorded
    worker.journal.emit(EndEvent(exit_code=end["exit_code"], status=end["status"], raw=job.digests()))
    worker.journal.close()
    return end


CANCELLED: FinalStatus = {"exit_code": 130, "status": "cancelled", "message": "", "next": ""}


def _end_of(error: DgxlabError | None) -> FinalStatus:
    if error is None:
        return {"exit_code": 0, "status": "done", "message": "", "next": ""}
    return {"exit_code": error.exit_code, "status": "failed", "message": error.message, "next": error.next}
