"""Run gates: the commands of a step in order, judged together; a parity gate with failed cases is run again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from resource import RLIM_INFINITY
from typing import Any

from dgxlab.agent.child import Exit
from dgxlab.agent.files import full_disk, scratch_folder
from dgxlab.agent.measure import Launched, Workbench, raw_file
from dgxlab.model import ARM, Check, CheckCommand, GateStep, ParityGate, about, case_digest
from dgxlab.model.events import File, GateEvent
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.tools import judge_check, parity
from dgxlab.tools.parity import GateReading

_RERUNS = 3
"""How often a parity gate is run again after cases failed, each time with all cases: one may depend on another."""
_RERUN_AT_MOST = 20  # with more failed cases than this the kernel is wrong, and the gate is not run again
_LOOK_S, _LOOK_BYTES = 0.5, 4 << 20
"""Pause between looks at how many cases have passed, and the most that is read at once: output may have no end."""
_ATTEMPTS = 3
"""Max launches of a command whose output is cut: llama.cpp's logger can lose the last lines before an exit with 0."""

Reasons = tuple[Reason, ...]


@dataclass
class _Judged:
    """The results of a gate's commands: the fields of its event."""

    commands: list[Any] = field(default_factory=list)
    readings: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, File] = field(default_factory=dict)
    reasons: Reasons = ()
    flaky: tuple[str, ...] = ()
    case_list: tuple[str, ...] | None = None

    def add(self, role: str, argv: Sequence[str], env: Mapping[str, str], ended: Exit) -> None:
        how = {"rc": ended.rc, "seconds": ended.seconds}
        self.commands.append({"role": role, "argv": list(argv), "env": dict(env), **how})


def run_gate(bench: Workbench, step: GateStep, baseline: GateEvent | None = None) -> GateEvent:
    """Run a gate's commands, judge their output and return the event of the gate.

    For a candidate's parity gate, `baseline` is the event of the gate that `step.like` names. Both must run the same
    cases, and a case that is flaky here must be flaky there.
    """
    inputs = {name: bench.models[step.arm, name].model_id for name in {c.model for c in step.commands} if name}
    if isinstance(step.gate, ParityGate):
        judged = _parity(bench, step, step.gate, baseline)
    else:
        judged = _check(bench, step, step.gate)
        inputs |= step.gate.sources(step.files)
    return GateEvent(
        id=step.id,
        arm=step.arm,
        build_id=bench.builds[step.arm],
        gate=step.gate,
        inputs=inputs,
        env=step.env,
        status="failed" if judged.reasons else "flaky" if judged.flaky else "passed",
        seconds=sum(command["seconds"] for command in judged.commands),
        **vars(judged),
    )


# -- parity gates -----------------------------------------------------------------------------------------------------


def _parity(bench: Workbench, step: GateStep, gate: ParityGate, baseline: GateEvent | None) -> _Judged:
    argv = bench.fill(step.commands[0].argv, step.arm)
    judged = _Judged()

    def launch(name: str) -> tuple[Launched, GateReading]:
        look = _counting(bench, step, bench.printed(name))
        launched = bench.launch(name, argv, step.env, step.limit_s, look=look)
        judged.add(ARM, argv, step.env, launched.ended)
        return launched, parity.read_gate(launched.text(), gate.backend)

    launched, reading = launch(step.id)
    judged.raw = launched.raw()
    if reading.by_rounding:
        for case in dict.fromkeys(reading.failed):
            bench.note(f"{case} failed ({reading.how[case]}), as rounding can make it; run again with other inputs")
        launched, reading = launch(f"{step.id}-redrawn")
        judged.raw = launched.raw() | {f"by rounding {stream}": file for stream, file in judged.raw.items()}
        judged.commands.reverse()  # what is judged comes first
    reasons = _reasons(gate, step.limit_s, launched, reading)
    flaky = tuple(dict.fromkeys(reading.failed))
    if 0 < len(flaky) <= _RERUN_AT_MOST and not _reasons(gate, step.limit_s, launched, reading, forgiving=True):
        again: Reasons = ()
        for number in range(1, _RERUNS + 1):
            rerun, read = launch(f"{step.id}-again{number}")
            judged.raw |= {f"again {number} {stream}": file for stream, file in rerun.raw().items()}
            read = replace(read, how={**read.how, **reading.how})  # other inputs have other errors: it is the same case
            if again := _reasons(gate, step.limit_s, rerun, read):
                break
        sentence = "the same" if again == reasons else "; ".join(map(str, again))
        reasons = (*reasons, reason(Code.AGAIN, reasons=sentence)) if again else ()
    if reasons:
        flaky = ()
    elif baseline and baseline.status != "failed":
        reasons = _beside(gate, reading, flaky, baseline)
    for case in flaky:
        how = reading.how.get(case, "")
        bench.note(f"{case} failed{f' ({how})' if how else ''}, and not in {_RERUNS} runs more")
    counted = {name: getattr(reading, name) for name in ("passed", "total", "unsupported")}
    counted["failed"] = tuple(case for case in reading.failed if case not in flaky)
    counted["cases"] = case_digest(reading.cases) if reading.total else None
    judged.readings, judged.reasons, judged.flaky = {ARM: counted}, reasons, flaky
    judged.case_list = reading.cases if reading.total else None
    return judged


def _counting(bench: Workbench, step: GateStep, printed: Path) -> Callable[[int], float]:
    """Return a function that reports how many cases have passed so far, by what the program prints."""
    assert isinstance(step.gate, ParityGate)
    words, total = about(step.gate), step.gate.expect.total if step.gate.expect else 0
    done = at = 0

    def look(_: int) -> float:
        nonlocal done, at
        with printed.open("rb") as stream:
            stream.seek(at)
            lines = stream.read(_LOOK_BYTES).rpartition(b"\n")[0]
        at += len(lines)
        if passed := parity.count_passed(lines.decode(errors="replace")):
            done += passed
            bench.progress(step.id, min(done, total or done), total, words)  # a backend's own line may end in OK too
        return _LOOK_S

    return look


def _reasons(
    gate: ParityGate, limit_s: float, launched: Launched, reading: GateReading, *, forgiving: bool = False
) -> Reasons:
    """Return why a gate does not pass; if `forgiving`, as if the cases that failed had passed."""
    repeats = launched.ended.rc == 1 and reading.failed  # the status only says that cases failed
    ended = None if launched.ended.ok or repeats else launched.ended.reason(parity.PROGRAM, limit_s)
    if forgiving:
        passed = None if reading.passed is None else reading.passed + len(reading.failed)
        reading = replace(reading, passed=passed, failed=(), backend_ok=True)
    reasons = parity.judge_gate(reading, gate, ended)
    if gate.engaged not in launched.errors():
        reasons = (*reasons, reason(Code.NOT_ENGAGED, marker=gate.engaged, program=parity.PROGRAM))
    if reasons and not reading.failed and (disk := full_disk(launched.stdout.parent)):
        reasons = (*reasons[:-1], reason(Code.DISK, reason=str(reasons[-1]), disk=disk))
    return reasons


def _beside(wanted: ParityGate, reading: GateReading, flaky: Sequence[str], baseline: GateEvent) -> Reasons:
    """Return why a candidate's gate fails in comparison with its baseline's, () when it passes."""
    reasons = []
    if new := [case for case in flaky if case not in baseline.flaky]:
        reasons.append(reason(Code.FLAKY, cases=new))
    other, counts = baseline.gate, baseline.counts
    declared = ((getattr(gate, "expect", None), getattr(gate, "cases", "")) for gate in (wanted, other))
    if any(mine and its and mine != its for mine, its in zip(*declared, strict=True)):
        return tuple(reasons)  # the specs declare that the arms have different cases
    if reading.total != counts["total"]:
        reasons.append(reason(Code.BASELINE_COUNT, total=reading.total, baseline=counts["total"]))
    if differs := parity.unlike(reading.cases, baseline.case_list or ()):
        reasons.append(reason(Code.BASELINE_CASES, differs=differs))
    return tuple(reasons)


# -- gates on a model or a kernel -------------------------------------------------------------------------------------


def _check(bench: Workbench, step: GateStep, gate: Check) -> _Judged:
    stem = step.id.replace(":", "-")
    job = bench.job
    words, logits, files = job.raw / f"{stem}.txt", job.folder / f"{stem}.logits", job.folder / stem
    paths = {"text": str(words), "logits": str(logits), "files": str(files)}
    judged = _Judged()
    if step.text:
        words.write_text(random_text(step.text.words, step.text.seed), encoding="utf-8")
        judged.raw["text"] = raw_file(words)
    try:
        with scratch_folder(files, step.files):
            for command in step.commands:
                _attempt(bench, step, gate, command, bench.fill(command.argv, step.arm, **paths), judged)
                if "problem" in judged.readings[command.role]:
                    break
    finally:
        logits.unlink(missing_ok=True)  # gigabytes for a large model; it can be made again from the kept files
    judged.reasons = judge_check(gate, judged.readings)
    return judged


def _attempt(
    bench: Workbench, step: GateStep, gate: Check, command: CheckCommand, argv: Sequence[str], judged: _Judged
) -> None:
    """Launch a command; repeat it if its output was cut off."""
    for name in (command.role, *(f"{command.role}-{number}" for number in range(1, _ATTEMPTS))):
        # no limit of files: logits are written, and kernels compiled
        launched = bench.launch(f"{step.id}-{name}", argv, command.env, step.limit_s, file_limit=RLIM_INFINITY)
        judged.add(command.role, argv, command.env, launched.ended)
        judged.raw |= {f"{name} {stream}": file for stream, file in launched.raw().items()}
        errors = launched.errors()
        stdout = b"" if launched.ended.too_long else launched.stdout.read_bytes()
        reading = gate.read(command.role, stdout, errors)
        if not launched.ended.ok and not reading.get("failed"):  # failed tests say more than make's exit status
            reading = {"problem": str(launched.failure(Path(command.argv[0]).name, step.limit_s))}
        if marker := getattr(gate, "engaged", ""):
            reading["engaged"] = marker in errors
        judged.readings[command.role] = reading
        if not reading.get("cut"):
            return


_LIST = """
about after all also any back because before between both call change city come could day down each early end even
every far few find first food four from game get give good great group hand hard have help here high home house idea
into keep kind know large last late learn leave left letter life light line list little live long look made make many
mean might more most move much must name near need never new next night number often old once one only open other our
out over own page part people place plant point public read right river run same say school sea second see set she
should show side small some soon sound spell state still stop story study such sun take talk tell than that them then
there these they thing think this three time together took tree try turn under until use very walk want watch water
way well went were what when where which while white who why will with word work world would write year you young
"""

_WORDS = _LIST.split()  # words so common that each is one token in most vocabularies


def random_text(words: int, seed: int) -> str:
    """Return a line of `words` random words; the same seed gives the same text on every machine and Python."""
    # a digest per word: a random generator's choice may differ between Python versions
    draws = (hashlib.sha256(f"{seed}/{number}".encode()).digest() for number in range(words))
    return " ".join(_WORDS[int.from_bytes(draw[:4], "big") % len(_WORDS)] for draw in draws)
