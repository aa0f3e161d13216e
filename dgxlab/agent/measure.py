"""Launch programs that use the device, each as a fresh process with its output kept, and run benchmarks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dgxlab.agent import child, facts
from dgxlab.agent.boot import sync
from dgxlab.agent.environment import measured_env
from dgxlab.agent.files import full_disk, sha256
from dgxlab.agent.journal import Journal
from dgxlab.agent.lease import DeviceLease
from dgxlab.agent.processors import Watch, pinned
from dgxlab.agent.telemetry import Telemetry
from dgxlab.errors import AGAIN, DgxlabError, GateFailed, HostBusy, RemoteError
from dgxlab.model import RunStep, digest
from dgxlab.model.events import File, RunEvent, flag
from dgxlab.model.reasons import Code, Reason, left_running, reason
from dgxlab.tools import BENCHES
from dgxlab.tools.rows import Parsed

LAST_WORDS = 4096
"""Bytes at a stream's end that are searched for a program's last line."""


@dataclass(frozen=True)
class Launch:
    """A finished program with its output."""

    ended: child.Ended
    stdout: Path
    stderr: Path

    def text(self) -> str:
        """Return stdout, "" if the program printed too much; undecodable bytes are replaced."""
        return "" if self.ended.too_long else self.stdout.read_text(errors="replace")

    def errors(self) -> str:
        """Return stderr, "" if the program printed too much."""
        return "" if self.ended.too_long else self.stderr.read_text(errors="replace")

    def raw(self) -> dict[str, File]:
        """Return both files as the journal names them."""
        return {"stdout": raw_file(self.stdout), "stderr": raw_file(self.stderr)}

    def last_words(self) -> str:
        """Return the last line of stderr, or of stdout: usually the program's own reason."""
        for path in (self.stderr, self.stdout):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LAST_WORDS))
                printed = file.read().decode(errors="replace").strip()
            if printed:
                return printed.splitlines()[-1].strip()[:300]
        return "it printed nothing"

    def failure(self, program: str, limit_s: float) -> Reason:
        """Return why the program failed, with its last line and whether the disk is full."""
        return self.ended.reason(program, limit_s, self.last_words() + full_disk(self.stdout.parent))


def raw_file(path: Path) -> File:
    """Flush a raw file to disk, since the record will have its digest, and return its journal entry."""
    sync(path)
    return File(f"raw/{path.name}", sha256(path), path.stat().st_size)


@dataclass
class Bench:
    """Launches programs, output in `raw`; `tell` is called with notes for the user."""

    raw: Path
    keep: Sequence[int]
    """Descriptors that programs inherit."""
    telemetry: Telemetry
    tell: Callable[[str], None]
    pids: set[int] = field(default_factory=set, init=False)
    """Pids of all programs launched so far."""

    def launch(self, name: str, argv: Sequence[str], env: Mapping[str, str], limit_s: float, **options: Any) -> Launch:
        """Run one program to its end; `name` becomes its raw files' names, the options are those of `child.run`."""
        stem = name.replace(":", "-")
        stdout, stderr = self.raw / f"{stem}.out", self.raw / f"{stem}.err"
        options |= {"stdout": stdout, "stderr": stderr, "limit_s": limit_s, "keep": self.keep}
        ended = child.run(argv, env=measured_env(env), **options)
        self.pids.add(ended.pid)
        if ended.left:
            self.tell(left_running(name, ended.left))
        return Launch(ended, stdout, stderr)


@dataclass(frozen=True)
class Attempt:
    """One benchmark run, and whether to repeat it."""

    run: RunEvent
    again: str = ""
    """"rows" if rows are missing, "disturbed" if others used the device or the processors, else ""."""


@dataclass
class Runs:
    """The benchmark runs of one job. Before each run the devices are held; after it the journal has its event."""

    job_id: str
    journal: Journal
    bench: Bench
    lease: DeviceLease
    fill: Callable[[Sequence[str], str], list[str]]
    """Replaces the placeholders in an arm's argv."""
    identify: Callable[[RunStep], tuple[str, str]]
    """Returns the ids of a run's build and model."""
    keep: list[int]
    """Descriptors that children inherit; lock descriptors are added and removed."""

    def __post_init__(self) -> None:
        self.telemetry = self.bench.telemetry
        self._lasting = tuple(self.keep)
        self._position = 0

    def hold(self) -> float:
        """Wait for the devices before the next launch; return the seconds waited."""
        waited = self.lease.hold()
        self.telemetry.start()
        self.keep[:] = [*self._lasting, *self.lease.fds]
        return waited

    def launch(self, step: RunStep, name: str, absent: Sequence[str] = (), *, pin: bool = False) -> Attempt:
        """Run one benchmark and parse its output; values that could be parsed are kept even if it failed.

        Its stderr must not have a text of `absent`; with `pin` it runs on as many processors as it has threads.
        """
        argv = self.fill(step.argv, step.arm)
        before = self.telemetry.state()
        processors = pinned(argv) if pin else ()
        if processors:
            before = {**before, "pinned": list(processors)}
        watch = Watch(processors)
        launched = self.bench.launch(name, argv, step.env, step.limit_s, look=watch.look, processors=processors)
        contention = watch.ended()
        after = self.telemetry.state()
        ended = launched.ended
        parsed = BENCHES[step.tool].parse(launched.text(), step.cells)
        conditions = self.telemetry.around(ended, (before, after), contention, threads(parsed))
        status, reasons = verdict(step, launched, parsed, absent)
        again = "rows" if ended.ok and parsed.problems else ""
        if status == "valid" and conditions.contended:  # its number is kept: the host may always be shared
            again = "disturbed"
        if stranger := self.lease.disturbance((before["gpu_processes"], after["gpu_processes"])):
            # the foreign process may be the cause of any other failure, mostly of lacking device memory
            status, reasons, again = "discarded", (stranger, *reasons), "disturbed"
        left = flag(Code.LEFT_RUNNING, hard=False, program=name, left=list(ended.left)) if ended.left else None
        build_id, model_id = self.identify(step)
        run = RunEvent(
            id=step.id,
            arm=step.arm,
            build_id=build_id,
            tool=step.tool,
            model_id=model_id,
            position=self._position,
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
            cells={cell.key: cell for cell in step.cells},
            before=before,
            after=after,
            telemetry=conditions.telemetry(),
            flags=conditions.flags(left),
            raw=launched.raw(),
        )
        return Attempt(run, again)

    def record(self, run: RunEvent) -> None:
        """Write a run's event."""
        self.journal.emit(run)
        self._position += 1

    def failure(self, name: str, attempt: Attempt, tries: int = 1) -> DgxlabError:
        """Return the error that the job ends with, for a run that gave no number."""
        words = attempt.run.reason + (f" ({tries} attempts)" if tries > 1 else "")
        if attempt.again == "disturbed":
            return HostBusy(f"{name} was not left alone: {words}", next=AGAIN)
        kind = GateFailed if attempt.run.status == "discarded" else RemoteError
        return kind(words, next=self.log(attempt.run))

    def log(self, run: RunEvent) -> str:
        """Return the command that shows what a run printed on stderr."""
        return f"dgxlab logs {self.job_id} {run.raw['stderr'].path}"


def threads(parsed: Parsed) -> int:
    """Return a tool's number of threads: the largest in its rows.

    If no row has it, the tool starts one thread per processor.
    """
    named = (result.raw.get(name) for result in parsed.results for name in ("n_threads", "n_threads_batch"))
    return max((n for n in named if isinstance(n, int) and n > 0), default=facts.cpus())


def verdict(
    step: RunStep, launched: Launch, parsed: Parsed, absent: Sequence[str] = ()
) -> tuple[Literal["valid", "discarded", "failed"], tuple[Reason, ...]]:
    """Return a run's status and, unless valid, the reason."""
    program = Path(step.argv[0]).name
    if not launched.ended.ok:
        return "failed", (launched.failure(program, step.limit_s),)
    if parsed.problems:
        disk = full_disk(launched.stdout.parent)
        return "failed", (reason(Code.ROWS, program=program, problems=list(parsed.problems), disk=disk),)
    errors = launched.errors() if step.markers or absent else ""
    for marker in step.markers:
        if marker not in errors:
            return "discarded", (reason(Code.NOT_ENGAGED, marker=marker, program=program),)
    for marker in absent:
        if marker in errors:
            return "discarded", (reason(Code.ENGAGED_TOO, marker=marker, program=program),)
    assert all(math.isfinite(v) for r in parsed.results for m in r.measurements for v in m.samples)
    return "valid", ()
