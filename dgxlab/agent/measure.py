"""Programs that use the device: each a fresh process whose output is kept, and benchmark runs with what they gave."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
"""Bytes of a stream's end among which a program's last line is looked for."""


@dataclass(frozen=True)
class Launch:
    """A finished program with its output."""

    ended: child.Ended
    stdout: Path
    stderr: Path

    def text(self) -> str:
        """Return stdout, "" of a program that printed too much; undecodable bytes are replaced: parsers see damage."""
        return "" if self.ended.too_long else self.stdout.read_text(errors="replace")

    def errors(self) -> str:
        """Return stderr, "" of a program that printed too much."""
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
        """Return how it ended, for one that did not end well, with its last words and whether the disk is full."""
        return self.ended.reason(program, limit_s, self.last_words() + full_disk(self.stdout.parent))


def raw_file(path: Path) -> File:
    """Return a raw file as the journal names it, written to the disk itself: the record will have its digest."""
    sync(path)
    return File(f"raw/{path.name}", sha256(path), path.stat().st_size)


class Bench:
    """Launches programs, output under `raw`.

    Attributes:
        pids: Of every program launched so far.
        telemetry: What is sampled beside them.
        tell: Called with a note for the user.
    """

    def __init__(self, raw: Path, keep: Sequence[int], telemetry: Telemetry, tell: Callable[[str], None]) -> None:
        self.raw = raw
        self.keep = keep
        self.telemetry = telemetry
        self.tell = tell
        self.pids: set[int] = set()

    def launch(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        limit_s: float,
        look: Callable[[int], float] | None = None,
        file_limit: int = child.FILE_LIMIT,
        processors: Sequence[int] = (),
    ) -> Launch:
        """Run one program to its end; `name` becomes its raw files' names, the rest is as in `child.run`."""
        stem = name.replace(":", "-")
        stdout, stderr = self.raw / f"{stem}.out", self.raw / f"{stem}.err"
        ended = child.run(
            argv,
            env=measured_env(env),
            stdout=stdout,
            stderr=stderr,
            limit_s=limit_s,
            keep=self.keep,
            look=look,
            file_limit=file_limit,
            processors=processors,
        )
        self.pids.add(ended.pid)
        if ended.left:
            self.tell(left_running(name, ended.left))
        return Launch(ended, stdout, stderr)


@dataclass(frozen=True)
class Attempt:
    """One benchmark run.

    Attributes:
        run: Its event.
        again: Why another attempt may do better: "rows" when it ended well but without all of them, "disturbed" when
            others used the device or too much of the processors meanwhile, "" when there is nothing to hope for.
    """

    run: RunEvent
    again: str = ""


class Runs:
    """The benchmark runs of one job: the devices are held before each, and it is in the journal after it.

    Args:
        fill: Replaces the placeholders in an arm's argv.
        identify: Says what a run measures: its build and its model.
        keep: Descriptors that children inherit; those of the locks come and go in it.

    Attributes:
        journal: Where everything is told.
        telemetry: What is sampled beside them.
    """

    def __init__(
        self,
        job_id: str,
        journal: Journal,
        bench: Bench,
        lease: DeviceLease,
        fill: Callable[[Sequence[str], str], list[str]],
        identify: Callable[[RunStep], tuple[str, str]],
        keep: list[int],
    ) -> None:
        self.journal = journal
        self.telemetry = bench.telemetry
        self._job_id = job_id
        self._bench = bench
        self._lease = lease
        self._fill = fill
        self._identify = identify
        self._keep = keep
        self._lasting = tuple(keep)
        self._position = 0

    def hold(self) -> float:
        """Have the devices for the next launch, never before the builds are done; return the seconds that it took."""
        waited = self._lease.hold()
        self.telemetry.start()
        self._keep[:] = [*self._lasting, *self._lease.fds]
        return waited

    def launch(self, step: RunStep, name: str, absent: Sequence[str] = (), *, pin: bool = False) -> Attempt:
        """Run one benchmark and read it; whatever the end, the values that could be read are kept.

        Args:
            name: Becomes its raw files' names.
            absent: None of these may be on its stderr.
            pin: Whether it gets processors of its own, as many as it has threads; `before` then names them.
        """
        argv = self._fill(step.argv, step.arm)
        before = self.telemetry.state()
        processors = pinned(argv) if pin else ()
        if processors:
            before = {**before, "pinned": list(processors)}
        watch = Watch(processors)
        launched = self._bench.launch(name, argv, step.env, step.limit_s, watch.look, processors=processors)
        contention = watch.ended()
        after = self.telemetry.state()
        ended = launched.ended
        parsed = BENCHES[step.tool].parse(launched.text(), step.cells)
        conditions = self.telemetry.around(ended, before, after, contention, threads(parsed))
        status, reasons = verdict(step, launched, parsed, absent)
        again = "rows" if ended.ok and parsed.problems else ""
        if status == "valid" and conditions.contended:  # its number is kept: the host may never be left alone
            again = "disturbed"
        if stranger := self._lease.disturbance((before["gpu_processes"], after["gpu_processes"])):
            # whatever else went wrong may be the stranger's doing: device memory, mostly
            status, reasons, again = "discarded", (stranger, *reasons), "disturbed"
        left = flag(Code.LEFT_RUNNING, hard=False, program=name, left=list(ended.left)) if ended.left else None
        build_id, model_id = self._identify(step)
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
        """Return why a run gave no number, as the error that the job ends with."""
        words = attempt.run.reason + (f" ({tries} attempts)" if tries > 1 else "")
        if attempt.again == "disturbed":
            return HostBusy(f"{name} was not left alone: {words}", next=AGAIN)
        kind = GateFailed if attempt.run.status == "discarded" else RemoteError
        return kind(words, next=self.log(attempt.run))

    def log(self, run: RunEvent) -> str:
        """Return the command that shows what a run printed on stderr."""
        return f"dgxlab logs {self._job_id} {run.raw['stderr'].path}"


def threads(parsed: Parsed) -> int:
    """Return with how many threads a tool computed: the most that a row names, whether they were asked for or not.

    test-backend-ops names none and starts one a processor.
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
