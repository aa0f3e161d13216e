"""The steps that use the device: parity gates and benchmark runs, each a fresh process whose output is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dgxlab.agent import child, facts
from dgxlab.agent.boot import sync
from dgxlab.agent.contention import Watch
from dgxlab.agent.environment import measured_env
from dgxlab.agent.failure import full_disk
from dgxlab.agent.job import sha256
from dgxlab.agent.occupancy import ComputeProcess
from dgxlab.agent.processors import pinned
from dgxlab.agent.telemetry import Telemetry
from dgxlab.model import GateStep, ParityGate, RunStep, case_digest, digest, to_json
from dgxlab.tools import BENCHES, parity
from dgxlab.tools.parity import GateReading
from dgxlab.tools.rows import Parsed

LAST_WORDS = 4096
"""Bytes of a stream's end among which a program's last line is looked for."""
RERUNS = 3
"""How often a gate is run again, whole, after a case failed: a case may fail only after those before it."""
RERUN_AT_MOST = 20
"""With more failing cases than this the kernel is wrong, and running it again would only take long."""


@dataclass(frozen=True)
class Launch:
    """A finished program with its output."""

    ended: child.Ended
    stdout: Path
    stderr: Path

    def text(self) -> str:
        """Return stdout, "" of a program that printed too much; undecodable bytes are replaced: parsers see damage."""
        return self._read(self.stdout)

    def errors(self) -> str:
        """Return stderr, "" of a program that printed too much."""
        return self._read(self.stderr)

    def _read(self, path: Path) -> str:
        return "" if self.ended.too_long else path.read_text(errors="replace")

    def raw(self) -> dict[str, Any]:
        """Return path, digest and size of both files, relative to the job's folder."""
        files = {"stdout": self.stdout, "stderr": self.stderr}
        for path in files.values():
            sync(path)  # the record will name the digest
        return {
            name: {"path": f"raw/{path.name}", "sha256": sha256(path), "size": path.stat().st_size}
            for name, path in files.items()
        }

    def last_words(self) -> str:
        """Return the last line of stderr, or of stdout: usually the program's own reason."""
        for path in (self.stderr, self.stdout):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LAST_WORDS))
                said = file.read().decode(errors="replace").strip()
            if said:
                return said.splitlines()[-1].strip()[:300]
        return "it printed nothing"


@dataclass(frozen=True)
class Gated:
    """A parity gate that was run and judged.

    Attributes:
        fields: Those of its `gate` event, but for the list of cases.
        gate: What was asked.
        reading: What the program printed.
        flaky: The cases that failed and then passed in every rerun.
    """

    fields: dict[str, Any]
    gate: ParityGate
    reading: GateReading
    flaky: tuple[str, ...]


@dataclass(frozen=True)
class Attempt:
    """One benchmark run.

    Attributes:
        fields: Those of its `run` event; `flags` are what `conditions` says of it.
        again: Why another attempt may do better: "rows" when it ended well but without all of them, "disturbed" when
            others used the device or too much of the processors meanwhile, "" when there is nothing to hope for.
    """

    fields: dict[str, Any]
    again: str = ""


class Bench:
    """Launches programs for gates and runs, output under `raw`.

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
            self.tell(left_running(name, ended))
        return Launch(ended, stdout, stderr)

    def gate(self, step: GateStep, argv: Sequence[str], baseline: Gated | None = None) -> Gated:
        """Run a parity gate and judge it.

        Args:
            baseline: The baseline's gate of the same operation, where this one is a candidate's.
        """
        launched, reading, rc = self._launch_gate(step.id, step, argv)
        reasons = self._gate_reasons(step, launched, reading, rc)
        flaky = tuple(dict.fromkeys(reading.failed))
        alone = not self._gate_reasons(step, launched, *forgiven(reading, rc))  # nothing but these cases is wrong
        if alone and 0 < len(flaky) <= RERUN_AT_MOST:
            again = self._again(step, argv)
            further = (f"run again: {'; '.join(again)}",) if again != reasons else ()
            reasons = (*reasons, *further) if again else ()
        if reasons:
            flaky = ()
        elif baseline and baseline.fields["status"] != "failed":
            reasons = beside(step.gate, reading, flaky, baseline)
        fields = {
            "gate": to_json(step.gate),
            "env": dict(step.env),
            "argv": list(argv),
            "rc": rc,
            "passed": reading.passed,
            "total": reading.total,
            "unsupported": reading.unsupported,
            "cases": case_digest(reading.cases) if reading.total else None,
            "status": "failed" if reasons else "flaky" if flaky else "passed",
            "reasons": list(reasons),
            "flaky": list(flaky),
            "failed": [case for case in reading.failed if case not in flaky],
            "raw": launched.raw(),
            "seconds": launched.ended.seconds,
        }
        return Gated(fields, step.gate, reading, flaky)

    def _launch_gate(self, name: str, step: GateStep, argv: Sequence[str]) -> tuple[Launch, GateReading, int]:
        launched = self.launch(name, argv, step.env, step.limit_s)
        rc = -1 if launched.ended.rc is None else launched.ended.rc
        return launched, parity.read_gate(launched.text(), step.gate.backend), rc

    def _gate_reasons(self, step: GateStep, launched: Launch, reading: GateReading, rc: int) -> tuple[str, ...]:
        """Return why one run of a gate did not pass, () when it did."""
        reasons = parity.judge_gate(reading, rc, step.gate)
        if step.gate.engaged not in launched.errors():
            reasons = (*reasons, not_engaged(step.gate.engaged, parity.PROGRAM))
        if (rc != 0 or launched.ended.stopped) and not reading.failed:
            reasons = (launched.ended.sentence(parity.PROGRAM, step.limit_s), *reasons)
        if reasons and not reading.failed:
            reasons = (*reasons[:-1], f"{reasons[-1]}{full_disk(self.raw)}")
        return reasons

    def _again(self, step: GateStep, argv: Sequence[str]) -> tuple[str, ...]:
        """Run a gate again, whole; returns why a rerun did not pass, () when all of them did."""
        for number in range(1, RERUNS + 1):
            if reasons := self._gate_reasons(step, *self._launch_gate(f"{step.id}-again{number}", step, argv)):
                return reasons
        return ()

    def run(
        self,
        step: RunStep,
        argv: Sequence[str],
        name: str,
        disturbance: Callable[[Sequence[list[ComputeProcess] | None]], str],
        absent: Sequence[str] = (),
        *,
        pin: bool = False,
    ) -> Attempt:
        """Run one benchmark and read it.

        Whatever the end, the values that could be read are kept; only a `valid` run's count.

        Args:
            disturbance: Says who disturbed it, given who computed before and after it, None where that is not known.
            absent: None of these may be on its stderr.
            pin: Whether it gets processors of its own choice, as many as it has threads; `before` then names them.
        """
        before = self.telemetry.state()
        processors = pinned(argv) if pin else ()
        if processors:
            before = {**before, "pinned": list(processors)}
        watch = Watch(processors)
        launched = self.launch(name, argv, step.env, step.limit_s, watch.look, processors=processors)
        contention = watch.ended()
        after = self.telemetry.state()
        parsed = BENCHES[step.tool].parse(launched.text(), step.cells)
        conditions = self.telemetry.around(launched.ended, before, after, contention, threads(parsed))
        status, reason = verdict(step, launched, parsed, absent)
        again = "rows" if launched.ended.ok and parsed.problems else ""
        if status == "valid" and conditions.contended:  # its number is kept: the host may never be left alone
            again = "disturbed"
        if words := disturbance((before["gpu_processes"], after["gpu_processes"])):
            # whatever else went wrong may be the stranger's doing: device memory, mostly
            reason = "; ".join(filter(None, (words, reason)))
            status, again = "discarded", "disturbed"
        fields = {
            "tool": step.tool,
            "argv": list(argv),
            "env": dict(step.env),
            "env_digest": digest(step.env, 16),
            "rc": launched.ended.rc,
            "signal": launched.ended.signal,
            "started": launched.ended.started,
            "seconds": launched.ended.seconds,
            "status": status,
            "reason": reason,
            "results": to_json(parsed.results),
            "cells": {cell.key: to_json(cell) for cell in step.cells},
            "before": to_json(before),
            "after": to_json(after),
            "telemetry": to_json(conditions.telemetry()),
            "flags": to_json(conditions.flags(left_running(name, launched.ended))),
            "raw": launched.raw(),
        }
        return Attempt(fields, again)


def left_running(name: str, ended: child.Ended) -> str:
    """Say what a program left running, "" for nothing."""
    return f"{name} left processes running, which were ended: {', '.join(ended.left)}" if ended.left else ""


def forgiven(reading: GateReading, rc: int) -> tuple[GateReading, int]:
    """Return what a gate would have printed had its failing cases passed."""
    passed = None if reading.passed is None else reading.passed + len(reading.failed)
    return replace(reading, passed=passed, failed=(), backend_ok=True), 0 if rc == 1 else rc


def beside(wanted: ParityGate, reading: GateReading, flaky: Sequence[str], baseline: Gated) -> tuple[str, ...]:
    """Return why a candidate's gate that passed by itself fails beside its baseline's, () when it does not."""
    reasons = []
    if new := [case for case in flaky if case not in baseline.flaky]:
        reasons.append(f"flaky here and not in the baseline: {', '.join(new)}")
    asked = ((wanted.expect, baseline.gate.expect), (wanted.cases, baseline.gate.cases))
    if any(one and two and one != two for one, two in asked):
        return tuple(reasons)  # the specs declare that the arms have other cases
    if reading.total != baseline.reading.total:
        reasons.append(f"the candidate ran {reading.total} cases, the baseline {baseline.reading.total}")
    if differs := parity.unlike(reading.cases, baseline.reading.cases):
        reasons.append(f"not the baseline's cases: {differs}")
    return tuple(reasons)


def not_engaged(marker: str, program: str) -> str:
    """Say that what was to be tested or measured did not run."""
    return f"the path under test did not run: {marker!r} is not on {program}'s stderr"


def threads(parsed: Parsed) -> int:
    """Return with how many threads a tool computed: the most that a row names, whether they were asked for or not.

    test-backend-ops names none and starts one a processor.
    """
    named = (result.raw.get(name) for result in parsed.results for name in ("n_threads", "n_threads_batch"))
    return max((n for n in named if isinstance(n, int) and n > 0), default=facts.cpus())


def verdict(step: RunStep, launched: Launch, parsed: Parsed, absent: Sequence[str] = ()) -> tuple[str, str]:
    """Return a run's status and, unless valid, the reason in words."""
    program = Path(step.argv[0]).name
    if not launched.ended.ok:
        ended = launched.ended.sentence(program, step.limit_s)
        return "failed", f"{ended}: {launched.last_words()}{full_disk(launched.stdout.parent)}"
    if parsed.problems:
        return "failed", f"{program}: {'; '.join(parsed.problems)}{full_disk(launched.stdout.parent)}"
    errors = launched.errors() if step.markers or absent else ""
    for marker in step.markers:
        if marker not in errors:
            return "discarded", not_engaged(marker, program)
    for marker in absent:
        if marker in errors:
            return "discarded", f"the path under test ran in the baseline too: {marker!r} is on {program}'s stderr"
    assert all(math.isfinite(v) for r in parsed.results for m in r.measurements for v in m.samples)
    return "valid", ""
