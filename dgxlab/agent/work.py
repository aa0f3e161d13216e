"""Carry out a plan: build, find models, check flags, gate, measure; every event goes to the journal."""

from __future__ import annotations

import itertools
import json
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from resource import RLIM_INFINITY
from typing import ClassVar, Literal

from dgxlab import __version__, tools
from dgxlab.agent import child, facts, models
from dgxlab.agent.boot import flush
from dgxlab.agent.build import Builder
from dgxlab.agent.chain import ChainRunner
from dgxlab.agent.environment import Root
from dgxlab.agent.files import clean, full_disk, refused
from dgxlab.agent.gates import Gated, run_check, run_gate
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
    CheckStep,
    GateStep,
    ModelStep,
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
    JobEvent,
    LockEvent,
    ModelEvent,
    NoteEvent,
    ProgressEvent,
    StepEvent,
)

PROGRESS_S = 0.5
"""At most this often a progress event of one step: ninja counts faster than one can read."""
DISTURBED_AGAIN = 2
"""How often a run is repeated because others used the device or the processors meanwhile."""


class Cancelled(BaseException):
    """TERM arrived. Not an Exception, so that no step swallows it."""


class Worker:
    """One job being carried out."""

    def __init__(self, job: Job, root: Root, plan: Plan) -> None:
        self.job = job
        self.root = root
        self.plan = plan
        self.keep = [hold(root)]
        self.journal = Journal(job.journal)
        self.facts = facts.gather()
        gpus = self.facts.details["gpus"]
        measured = {gpu["uuid"]: gpu["name"] or "" for gpu in gpus if gpu["uuid"] in devices(plan, gpus)}
        self.bench = Bench(job.raw, self.keep, Telemetry(job.raw, job.folder / "agent.pyz", measured), self._note)
        self.lease = DeviceLease(
            plan,
            gpus,
            self.bench.pids,
            lambda state, path, owner: self.journal.emit(LockEvent(state=state, path=path, owner=owner)),
        )
        self.runs = Runs(job.job_id, self.journal, self.bench, self.lease, self.fill, self.identify, self.keep)
        self.builds: dict[str, str] = {}
        self.models: dict[tuple[str, str], ModelEvent] = {}
        """By arm and name: two arms may mean different models by one name."""
        self.gates: dict[str, Gated] = {}
        """By step id."""
        self.lists = {step.gate.cases for step in plan.steps if isinstance(step, GateStep) and step.listed}
        """Digests of the lists of cases that the record has."""
        self.failures: list[DgxlabError] = []
        self.closed_arms: set[str] = set()
        self._last_progress = ("", 0.0)

    def carry_out(self) -> DgxlabError | None:
        """Run every step and return the worst failure; what was measured before it is in the journal."""
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
        for step in self.plan.steps:
            chains = [
                arms_of(other) for other in self.plan.steps[: self.plan.steps.index(step)] if other.kind == "chain"
            ]
            # a gate after the chains of a session that held none of them has nothing to vouch for
            idle = isinstance(step, (GateStep, CheckStep)) and bool(chains) and all(map(self._closed, chains))
            skipped = self._closed(arms_of(step)) or idle
            self.journal.emit(StepEvent(id=step.id, kind=step.kind, state="skipped" if skipped else "started"))
            if not skipped:
                self._STEPS[type(step)](self, step)
                self.journal.emit(StepEvent(id=step.id, kind=step.kind, state="done"))
        # a gate that failed matters more than a run that did
        worst = max(self.failures, key=lambda error: error.exit_code == GateFailed.exit_code, default=None)
        if worst and worst is not self.failures[-1]:
            self.report(worst)  # the last error told is why the job ended as it did
        return worst

    def _closed(self, arms: Iterable[str]) -> bool:
        return not self.closed_arms.isdisjoint(arms)

    def fail(self, error: DgxlabError) -> None:
        """Record a failure that lets other steps go on."""
        self.failures.append(error)
        self.report(error)

    def report(self, error: DgxlabError) -> None:
        """Write an error to the journal."""
        self.journal.emit(ErrorEvent(message=error.message, next=error.next, details=error.details))

    def fill(self, argv: Sequence[str], arm: str, **extra: str) -> list[str]:
        """Replace the placeholders that only the host knows.

        Raises:
            RemoteError: if the plan names one that this agent does not know.
        """
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
        """Return the ids of the build and the model that a run measures; the model's is "" where it reads none."""
        return self.builds[step.arm], self.models[step.arm, step.model].model_id if step.model else ""

    # -- steps --------------------------------------------------------------------------------------------------------

    def _build(self, step: BuildStep) -> None:
        arm = self.plan.arm(step.arm)
        log = self.job.folder / f"{step.id.replace(':', '-')}.log"
        builder = Builder(
            self.root,
            self.facts.toolchain,
            fill=self.fill,
            log=log,
            on_progress=lambda done, total, note: self._progress(step.id, done, total, note),
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
        argv = self.fill(step.argv, step.arm)
        gated = run_gate(self.bench, step, argv, self.builds[step.arm], self.gates.get(step.like))
        self.gates[step.id], event = gated, gated.event
        if event.cases and event.cases not in self.lists:  # 150 kB of MUL_MAT, told once
            self.lists.add(event.cases)
            event = replace(event, case_list=tuple(gated.reading.cases))
        self.journal.emit(event)
        if event.status == "failed":
            about = f"{step.gate.op} on {step.gate.backend}"
            self._close(step.arm, about, event.reasons, event.raw["stdout"].path, "\n".join(event.failed[:10]))

    def _check(self, step: CheckStep) -> None:
        self.runs.hold()
        self._progress(step.id, 0, 0, about(step.gate))
        read = {name: self.models[step.arm, name].model_id for name in {c.model for c in step.commands} if name}
        read |= tools.sources(step.gate, step.files)
        event = run_check(
            self.bench, step, self.builds[step.arm], read, lambda argv, files: self.fill(argv, step.arm, **files)
        )
        self.journal.emit(event)
        if event.status == "failed":
            role, reading = list(event.readings.items())[-1]
            stream = "stderr" if "problem" in reading else tools.CHECKS[type(step.gate)].told_on
            look = [name for name in event.raw if name.startswith(role) and name.endswith(stream)][-1]
            self._close(step.arm, about(step.gate), event.reasons, event.raw[look].path)

    def _close(self, arm: str, gate: str, reasons: Sequence[str], raw: str, details: str = "") -> None:
        """Leave out the other steps of an arm whose gate failed."""
        self.closed_arms.add(arm)
        message = f"gate {gate} failed for {arm}: {'; '.join(reasons)}"
        self.fail(GateFailed(message, details=details, next=f"dgxlab logs {self.job.job_id} {raw}"))

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

    _STEPS: ClassVar[dict[type, Callable[..., None]]] = {
        BuildStep: _build,
        ModelStep: _model,
        ProbeStep: _probe,
        GateStep: _gate,
        CheckStep: _check,
        RunStep: _run,
        ChainStep: _chain,
    }

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _note(self, note: str) -> None:
        self.journal.emit(NoteEvent(note=note))

    def _progress(self, step: str, done: int, total: int, note: str) -> None:
        now, (last, at) = time.monotonic(), self._last_progress
        if step != last or now - at >= PROGRESS_S or done == total:
            self._last_progress = (step, now)
            self.journal.emit(ProgressEvent(id=step, done=done, total=total, note=note))


@dataclass(frozen=True)
class End:
    """A job's last word, as `rc` holds it."""

    exit_code: int
    status: Literal["done", "failed", "cancelled"]
    message: str = ""
    next: str = ""


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
        end = End(130, "cancelled")
    except DgxlabError as error:
        end = _failed(error)
    except OSError as error:  # a full disk, mostly: the journal may not take it, the space set aside for rc does
        end = _failed(refused("the job", error))
    except Exception as error:  # a bug: it must be told, not look like an agent that was killed
        traceback.print_exc()
        end = End(1, "failed", f"the agent failed: {error!r}", f"dgxlab logs {job.job_id} agent.err")
    job.finish(**vars(end))


def _carry_out(job: Job, root: Root) -> End:
    worker = Worker(job, root, from_json(Plan, json.loads(job.plan.read_text())))
    try:
        error = worker.carry_out()
        end = _failed(error) if error else End(0, "done")
    except DgxlabError as error:
        worker.report(error)
        end = _failed(error)
    except Cancelled:
        end = End(130, "cancelled")
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker.bench.telemetry.stop()
        worker.lease.release()
    flush(job.folder)  # what the digests are of
    worker.journal.emit(EndEvent(exit_code=end.exit_code, status=end.status, raw=job.digests()))
    worker.journal.close()
    return end


def _failed(error: DgxlabError) -> End:
    return End(error.exit_code, "failed", error.message, error.next)
