"""Launch the programs of a job, each as a fresh process with its output in raw files, and run benchmarks."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

from dgxlab.agent import child
from dgxlab.agent.boot import sync
from dgxlab.agent.environment import Root, measured_env, settings
from dgxlab.agent.facts import cpus
from dgxlab.agent.files import Journal, full_disk, scratch_folder, sha256, tail
from dgxlab.agent.inventory import hold
from dgxlab.agent.job import Job
from dgxlab.agent.lease import DeviceLease
from dgxlab.agent.processors import SHORTEST_S, ContentionWatch, pinned
from dgxlab.agent.telemetry import Telemetry
from dgxlab.errors import AGAIN, DgxlabError, GateFailed, HostBusy, RemoteError, one_line
from dgxlab.model import FILES, Facts, Plan, RunStep, digest, program_of
from dgxlab.model.events import File, ModelEvent, NoteEvent, ProgressEvent, RunEvent, flag
from dgxlab.model.reasons import Code, Reason, left_running, reason
from dgxlab.tools import BENCHES
from dgxlab.tools.rows import Parsed

_PROGRESS_S = 0.5  # minimum time between progress events of one step: ninja counts faster than one can read
_COPIES_S = 20.0  # max seconds for copies on the job's GPUs, which take one
_TOLD_S = 5.0  # how much later than a program its agent may get Slurm's TERM
_LAST_WORDS = 4096  # bytes at a stream's end that are searched for a program's last line
_OF_MAKE = re.compile(r"g?make(\[\d+\])?: ((\*\*\* )?\[.*\] Error|\*\*\* (Waiting|Deleting)|Target|Entering|Leaving)")
"""Lines that make adds when a command has failed; its other errors, as a missing rule or a signal, are reasons."""


@dataclass(frozen=True)
class Launched:
    """A program that has ended, with the files of its output."""

    ended: child.Exit
    stdout: Path
    stderr: Path

    def text(self) -> str:
        """Return stdout, "" if the program printed too much; undecodable bytes are replaced."""
        return "" if self.ended.too_long else self.stdout.read_text(errors="replace")

    def errors(self) -> str:
        """Return stderr, "" if the program printed too much."""
        return "" if self.ended.too_long else self.stderr.read_text(errors="replace")

    def raw(self) -> dict[str, File]:
        """Return both files as entries of an event's `raw`."""
        return {"stdout": raw_file(self.stdout), "stderr": raw_file(self.stderr)}

    def last_words(self) -> str:
        """Return the last line of stderr, else of stdout, that make did not add: usually the reason for a failure."""
        printed = "\n".join(tail(path, _LAST_WORDS) for path in (self.stdout, self.stderr))
        lines = [line.strip() for line in printed.splitlines() if line.strip()] or ["it printed nothing"]
        return next((line for line in reversed(lines) if not _OF_MAKE.match(line)), lines[-1])[:300]

    def failure(self, program: str, limit_s: float) -> Reason:
        """Return `Exit.reason` of a failure, with the program's last line and whether the disk is full."""
        return self.ended.reason(program, limit_s, self.last_words() + full_disk(self.stdout.parent))


def raw_file(path: Path) -> File:
    """Flush a file of the folder raw/ to disk, and return its entry for an event."""
    sync(path)
    return File(f"raw/{path.name}", sha256(path), path.stat().st_size)


@dataclass(frozen=True)
class Attempt:
    """One benchmark run, and whether to repeat it."""

    run: RunEvent
    again: str = ""
    """Why the run should be repeated: "rows" are missing, others "disturbed" device or processors; "" if not."""


class Workbench:
    """What the steps of one job share: the journal, the devices, their samplers, the builds and models, launching."""

    def __init__(self, job: Job, root: Root, plan: Plan, facts: Facts) -> None:
        self.job, self.root, self.plan, self.facts = job, root, plan, facts
        self._in_use = hold(root)  # before anything else: what the job will use may be being removed
        self.journal = Journal(job.journal)
        self.builds: dict[str, str] = {}  # build ids by arm
        self.models: dict[tuple[str, str], ModelEvent] = {}
        """By arm and name: the same name may be a different model in another arm."""
        self._pids: set[int] = set()
        gpus = facts.details["gpus"]
        self.lease = DeviceLease(plan, gpus, self._pids, self.journal.emit)
        measured = {gpu["uuid"]: gpu["name"] or "" for gpu in gpus if gpu["uuid"] in self.lease.devices}
        self.telemetry = Telemetry(job.raw, job.folder / "agent.pyz", measured, [gpu["uuid"] for gpu in gpus])
        self._positions = count()
        self._last_progress = ("", 0.0)

    @property
    def keep(self) -> list[int]:
        """Descriptors of locks that programs inherit, so that a process that outlives the agent still holds them."""
        return [self._in_use, *self.lease.fds]

    def note(self, note: str) -> None:
        """Write a sentence for the user to the journal."""
        self.journal.emit(NoteEvent(note=note))

    def progress(self, step: str, done: int, total: int, note: str) -> None:
        """Write the progress of a step to the journal, twice a second at most."""
        now, (last, at) = time.monotonic(), self._last_progress
        if step != last or now - at >= _PROGRESS_S or done == total:
            self._last_progress = (step, now)
            self.journal.emit(ProgressEvent(id=step, done=done, total=total, note=note))

    def fill(self, argv: Sequence[str], arm: str, **extra: str) -> list[str]:
        """Return an argv with the placeholders of a `Plan` replaced, those of an arm by its build and models.

        `extra` has values of further placeholders by name. Raises RemoteError if a placeholder has no value.
        """
        known = {
            "python": sys.executable,
            "agent": str(self.job.folder / "agent.pyz"),
            "jobs": str(cpus()),
            "models": str(self.root.models),
            **{f"model:{name}": model.path for (of, name), model in self.models.items() if of == arm},
            **extra,
        }
        if arm in self.builds:
            known["bin"] = str(self.root.builds / self.builds[arm] / "bin")

        def replace(match: re.Match[str]) -> str:
            if match[1] not in known:
                raise RemoteError(f"the plan's placeholder {match[0]} has no value yet on the host")
            return known[match[1]]

        return [re.sub(r"\{([a-z]+(?::[\w.-]+)?)\}", replace, arg) for arg in argv]

    def hold(self) -> float:
        """Wait for exclusive use of the devices, start the samplers, and return the seconds waited."""
        waited = self.lease.hold()
        self.telemetry.start()
        return waited

    def launch(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], limit_s: float, **options: Any
    ) -> Launched:
        """Run one program for at most `limit_s` seconds, with its output in raw files called `name`.

        `env` has the variables that the plan adds, `options` are further arguments of `child.run`.
        """
        stdout, stderr = self.printed(name), self.printed(name).with_suffix(".err")
        options |= {"stdout": stdout, "stderr": stderr, "limit_s": limit_s, "keep": self.keep}
        ended = child.run(argv, env=measured_env(env), **options)
        self._pids.add(ended.pid)
        if ended.signal == signal.SIGTERM and not ended.stopped and settings().slurm is not None:
            time.sleep(_TOLD_S)  # Slurm may end the job: it tells each process, and this one perhaps later
        if ended.left:
            self.note(left_running(name, ended.left))
        return Launched(ended, stdout, stderr)

    def printed(self, name: str) -> Path:
        """Return the raw file of what the launch `name` prints on stdout."""
        return self.job.raw / f"{name.replace(':', '-')}.out"

    def measure(self, step: RunStep, name: str, absent: Sequence[str] = (), *, pin: bool = False) -> Attempt:
        """Run one benchmark and parse its output, also if it failed; the caller writes the event to the journal.

        Its raw files are called `name`, and its stderr must not have a text of `absent`. With `pin` it runs on as many
        processors as it has threads.
        """
        files = self.job.folder / FILES
        argv = self.fill(step.argv, step.arm, files=str(files))
        if self.telemetry.copies is None:
            self.telemetry.copies = self._copies()
        before = self.telemetry.state()
        watch = ContentionWatch(processors := pinned(argv) if pin else ())
        if processors:
            before = {**before, "pinned": list(processors)}
        with scratch_folder(files, step.files):
            launched = self.launch(name, argv, step.env, step.limit_s, look=watch.look, processors=processors)
        contention, after, ended = watch.ended(), self.telemetry.state(), launched.ended
        parsed = BENCHES[step.tool].parse(launched.text(), step.cells)
        conditions = self.telemetry.around(ended, (before, after), contention, threads(parsed))
        status, reasons = run_status(step, launched, parsed, absent)
        again = "rows" if ended.ok and parsed.problems else ""
        if status == "valid" and conditions.contended:  # its number is kept: the host may always be shared
            again = "disturbed"
        if stranger := self.lease.disturbance((before["gpu_processes"], after["gpu_processes"])):
            # the foreign process may be the cause of any other failure, mostly of lacking device memory
            status, reasons, again = "discarded", (stranger, *reasons), "disturbed"
        others = [flag(Code.LEFT_RUNNING, hard=False, program=name, left=list(ended.left))] if ended.left else []
        if status == "valid" and ended.seconds < SHORTEST_S:  # a program that failed may have been as short
            others.append(flag(Code.TOO_SHORT, hard=False, least=SHORTEST_S))
        run = RunEvent(
            id=step.id,
            arm=step.arm,
            build_id=self.builds[step.arm],
            tool=step.tool,
            model_id=self.models[step.arm, step.model].model_id if step.model else "",
            position=next(self._positions),
            argv=tuple(argv),
            env=step.env,
            env_digest=digest(step.env, 16),
            rc=ended.rc,
            signal=ended.signal,
            started=ended.started,
            seconds=ended.seconds,
            status=status,
            reasons=reasons,
            results=parsed.results,
            cells={cell.key: cell for cell in (*step.cells, *parsed.parts)},
            before=before,
            after=after,
            telemetry=conditions.telemetry(),
            flags=conditions.flags(*others),
            raw=launched.raw(),
        )
        return Attempt(run, again)

    def _copies(self) -> Mapping[str, float]:
        """Measure how fast the job's GPUs copy; {} without GPUs, or if that fails: no other number depends on it."""
        if not (gpus := self.telemetry.gpus):
            return {}
        argv = (sys.executable, "-ES", str(self.job.folder / "agent.pyz"), "copies", *gpus)
        launched = self.launch("copies", argv, {}, _COPIES_S)
        if not launched.ended.ok:
            self.note(f"the bandwidth of copies was not measured: {one_line(launched.errors(), 200)}")
            return {}
        rates: Mapping[str, float] = json.loads(launched.text())
        return rates

    def failure(self, name: str, attempt: Attempt, tries: int = 1) -> DgxlabError:
        """Return the error for the run called `name`, whose last of `tries` attempts does not count as a whole."""
        words = attempt.run.reason + (f" ({tries} attempts)" if tries > 1 else "")
        if attempt.again == "disturbed" and attempt.run.status != "valid":
            return HostBusy(f"{name} was not left alone: {words}", next=AGAIN)
        kind = GateFailed if attempt.run.status == "discarded" else RemoteError
        return kind(words, next=self.log(attempt.run.raw["stderr"].path))

    def log(self, path: str) -> str:
        """Return the client's command that shows a file of the job."""
        return f"dgxlab logs {self.job.job_id} {path}"


def threads(parsed: Parsed) -> int:
    """Return how many threads a tool used: the largest number in its rows, else one per processor."""
    named = (result.raw.get(name) for result in parsed.results for name in ("n_threads", "n_threads_batch"))
    return max((n for n in named if isinstance(n, int) and n > 0), default=cpus())


def run_status(
    step: RunStep, launched: Launched, parsed: Parsed, absent: Sequence[str] = ()
) -> tuple[Literal["valid", "discarded", "failed"], tuple[Reason, ...]]:
    """Return a run's status, and why it or some of its cells do not count; stderr must not have a text of `absent`."""
    program = Path(program_of(step.argv)).name
    refused: tuple[Reason, ...] = ()
    if not launched.ended.ok:
        return "failed", (launched.failure(program, step.limit_s),)
    if parsed.problems:
        disk = full_disk(launched.stdout.parent)
        refused = (reason(Code.ROWS, program=program, problems=list(parsed.problems), disk=disk),)
        if not (BENCHES[step.tool].apart and parsed.results):
            return "failed", refused
    errors = launched.errors() if step.markers or absent else ""
    for marker in step.markers:
        if marker not in errors:
            return "discarded", (reason(Code.NOT_ENGAGED, marker=marker, program=program),)
    for marker in absent:
        if marker in errors:
            return "discarded", (reason(Code.ENGAGED_TOO, marker=marker, program=program),)
    return "valid", refused
