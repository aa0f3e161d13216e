"""Gates: parity gates of test-backend-ops, and checks, whose commands are run in order and judged together."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from resource import RLIM_INFINITY
from typing import Any

from dgxlab.agent.files import full_disk
from dgxlab.agent.measure import Bench, Launch, raw_file
from dgxlab.model import CheckCommand, CheckStep, GateStep, case_digest
from dgxlab.model.events import CheckEvent, File, GateEvent
from dgxlab.model.reasons import Code, reason
from dgxlab.tools import judge_check, parity, read_check
from dgxlab.tools.parity import GateReading

RERUNS = 3
"""How often a gate is run again, whole, after a case failed: a case may fail only after those before it."""
RERUN_AT_MOST = 20
"""With more failing cases than this the kernel is wrong, and running it again would only take long."""
ATTEMPTS = 3
"""llama.cpp's logger can lose what a program printed just before it exited, with status 0."""


@dataclass(frozen=True)
class Gated:
    """A parity gate that was judged, and what the program printed."""

    event: GateEvent
    reading: GateReading


def run_gate(bench: Bench, step: GateStep, argv: Sequence[str], build_id: str, baseline: Gated | None = None) -> Gated:
    """Run a parity gate and judge it.

    Args:
        baseline: The baseline's gate of the same operation, where this one is a candidate's.
    """
    launched, reading, rc = _launch_gate(bench, step.id, step, argv)
    reasons = _gate_reasons(step, launched, reading, rc)
    flaky = tuple(dict.fromkeys(reading.failed))
    # what it would have printed had its failing cases passed
    passed = None if reading.passed is None else reading.passed + len(reading.failed)
    forgiven = replace(reading, passed=passed, failed=(), backend_ok=True)
    alone = not _gate_reasons(step, launched, forgiven, 0 if rc == 1 else rc)  # nothing but these cases is wrong
    if alone and 0 < len(flaky) <= RERUN_AT_MOST:
        again: tuple[str, ...] = ()
        for number in range(1, RERUNS + 1):
            if again := _gate_reasons(step, *_launch_gate(bench, f"{step.id}-again{number}", step, argv)):
                break
        further = (f"run again: {'; '.join(again)}",) if again != reasons else ()
        reasons = (*reasons, *further) if again else ()
    if reasons:
        flaky = ()
    elif baseline and baseline.event.status != "failed":
        reasons = _beside(step, reading, flaky, baseline)
    event = GateEvent(
        id=step.id,
        arm=step.arm,
        build_id=build_id,
        gate=step.gate,
        env=step.env,
        argv=tuple(argv),
        rc=rc,
        passed=reading.passed,
        total=reading.total,
        unsupported=reading.unsupported,
        cases=case_digest(reading.cases) if reading.total else None,
        status="failed" if reasons else "flaky" if flaky else "passed",
        reasons=reasons,
        flaky=flaky,
        failed=tuple(case for case in reading.failed if case not in flaky),
        raw=launched.raw(),
        seconds=launched.ended.seconds,
    )
    return Gated(event, reading)


def _launch_gate(bench: Bench, name: str, step: GateStep, argv: Sequence[str]) -> tuple[Launch, GateReading, int]:
    launched = bench.launch(name, argv, step.env, step.limit_s)
    rc = -1 if launched.ended.rc is None else launched.ended.rc
    return launched, parity.read_gate(launched.text(), step.gate.backend), rc


def _gate_reasons(step: GateStep, launched: Launch, reading: GateReading, rc: int) -> tuple[str, ...]:
    """Return why one run of a gate did not pass, () when it did."""
    program = parity.PROGRAM
    reasons = parity.judge_gate(reading, rc, step.gate)
    if step.gate.engaged not in launched.errors():
        reasons = (*reasons, str(reason(Code.NOT_ENGAGED, marker=step.gate.engaged, program=program)))
    if (rc != 0 or launched.ended.stopped) and not reading.failed:
        reasons = (str(launched.ended.reason(program, step.limit_s)), *reasons)
    if reasons and not reading.failed:
        reasons = (*reasons[:-1], f"{reasons[-1]}{full_disk(launched.stdout.parent)}")
    return reasons


def _beside(step: GateStep, reading: GateReading, flaky: Sequence[str], baseline: Gated) -> tuple[str, ...]:
    """Return why a candidate's gate that passed by itself fails beside its baseline's, () when it does not."""
    reasons = []
    if new := [case for case in flaky if case not in baseline.event.flaky]:
        reasons.append(f"flaky here and not in the baseline: {', '.join(new)}")
    wanted, other = step.gate, baseline.event.gate
    if any(mine and its and mine != its for mine, its in ((wanted.expect, other.expect), (wanted.cases, other.cases))):
        return tuple(reasons)  # the specs declare that the arms have other cases
    if reading.total != baseline.reading.total:
        reasons.append(f"the candidate ran {reading.total} cases, the baseline {baseline.reading.total}")
    if differs := parity.unlike(reading.cases, baseline.reading.cases):
        reasons.append(f"not the baseline's cases: {differs}")
    return tuple(reasons)


# -- checks -----------------------------------------------------------------------------------------------------------


def run_check(
    bench: Bench,
    step: CheckStep,
    build_id: str,
    inputs: Mapping[str, str],
    fill: Callable[[Sequence[str], Mapping[str, str]], list[str]],
) -> CheckEvent:
    """Run a step's commands, none after one that failed, and judge them.

    Args:
        inputs: What it reads, by name.
        fill: Replaces a command's placeholders, given those of its step.
    """
    stem = step.id.replace(":", "-")
    words, logits, files = bench.raw / f"{stem}.txt", bench.raw.parent / f"{stem}.logits", bench.raw.parent / stem
    paths = {"text": str(words), "logits": str(logits), "files": str(files)}
    commands: list[Any] = []
    readings: dict[str, Any] = {}
    raw: dict[str, File] = {}
    if step.text:
        words.write_text(text(step.text.words, step.text.seed), encoding="utf-8")
        raw["text"] = raw_file(words)
    try:
        for name, content in step.files.items():
            path = files / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        for command in step.commands:
            argv, role = fill(command.argv, paths), command.role
            for name, launched in _attempts(bench, step, command, argv):
                rc, seconds = launched.ended.rc, launched.ended.seconds
                commands.append({"role": role, "argv": argv, "env": dict(command.env), "rc": rc, "seconds": seconds})
                raw |= {f"{name} {stream}": file for stream, file in launched.raw().items()}
                readings[role] = _read(step, command, launched)
                if not readings[role].get("cut"):
                    break
            if "problem" in readings[role]:
                break
    finally:
        # gigabytes where the model is large; both are made again from what is kept
        logits.unlink(missing_ok=True)
        shutil.rmtree(files, ignore_errors=True)
    reasons = judge_check(step.gate, readings)
    return CheckEvent(
        id=step.id,
        arm=step.arm,
        build_id=build_id,
        kind=step.gate.name,
        gate=step.gate,
        inputs=inputs,
        env=step.env,
        commands=commands,
        readings=readings,
        status="failed" if reasons else "passed",
        reasons=reasons,
        raw=raw,
        seconds=sum(command["seconds"] for command in commands),
    )


def _attempts(
    bench: Bench, step: CheckStep, command: CheckCommand, argv: Sequence[str]
) -> Iterator[tuple[str, Launch]]:
    for name in (command.role, *(f"{command.role}-{number}" for number in range(1, ATTEMPTS))):
        # no limit of files: logits are written, and kernels compiled
        yield name, bench.launch(f"{step.id}-{name}", argv, command.env, step.limit_s, file_limit=RLIM_INFINITY)


def _read(step: CheckStep, command: CheckCommand, launched: Launch) -> dict[str, Any]:
    """Return what one command of a check showed."""
    errors = launched.errors()
    stdout = b"" if launched.ended.too_long else launched.stdout.read_bytes()
    reading = read_check(step.gate, command.role, stdout, errors)
    if not launched.ended.ok and not reading.get("failed"):  # tests that failed say more than how make ended
        reading = {"problem": str(launched.failure(Path(command.argv[0]).name, step.limit_s))}
    marker = getattr(step.gate, "engaged", "")
    return reading | ({"engaged": marker in errors} if marker else {})


LIST = """
about after all also any back because before between both call change city come could day down each early end even
every far few find first food four from game get give good great group hand hard have help here high home house idea
into keep kind know large last late learn leave left letter life light line list little live long look made make many
mean might more most move much must name near need never new next night number often old once one only open other our
out over own page part people place plant point public read right river run same say school sea second see set she
should show side small some soon sound spell state still stop story study such sun take talk tell than that them then
there these they thing think this three time together took tree try turn under until use very walk want watch water
way well went were what when where which while white who why will with word work world would write year you young
"""

WORDS = LIST.split()
"""Common enough to be one token each in most vocabularies."""


def text(words: int, seed: int) -> str:
    """Return so many words in one line, the same for a seed everywhere and for ever."""
    # a digest for each place, because a random generator's choice may be another one in another Python
    draws = (hashlib.sha256(f"{seed}/{place}".encode()).digest() for place in range(words))
    return " ".join(WORDS[int.from_bytes(draw[:4], "big") % len(WORDS)] for draw in draws)
