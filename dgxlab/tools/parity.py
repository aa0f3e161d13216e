"""`test-backend-ops test` on the console: what it says, and whether that is evidence that the gate passed.

The program prints OK and exits 0 for a backend that does not exist and when nothing ran, so its own verdict is only
one of the things that a gate asks for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dgxlab.model import ParityGate, case_digest
from dgxlab.tools.rows import plain

PROGRAM = "test-backend-ops"

SECTION = re.compile(r"Backend [0-9]+/[0-9]+: (.+)")
STATUS = re.compile(r"  Backend (.+): (OK|FAIL)")
# A diagnostic without a line end may precede either of these; it ends in a space.
SUMMARY = re.compile(r"(?:^| )  ([0-9]{1,9})/([0-9]{1,9}) tests passed$")
CASE = re.compile(r"(?:^| )  (\w+\(.*?\)):(?: |$)")
LISTED = re.compile(r"  (\w+\(.*\))")
UNSUPPORTED = re.compile(r"(?:^|: )not supported \[[^\]]*\]$")
FAILED = re.compile(r"(?<!\w)FAIL$")
# Its green colour tells a case's OK from a diagnostic that ends in the same word without a line end.
PASSED = re.compile(r"(?:\x1b\[1;32m|^|(?<=\): ))OK(?:\x1b\[0m)?$")


def command(gate: ParityGate) -> tuple[str, ...]:
    """Return the command of a gate."""
    return (f"{{bin}}/{PROGRAM}", "test", "-o", gate.op, "-b", gate.backend)


@dataclass(frozen=True)
class GateReading:
    """What a parity gate's output says of one backend.

    Attributes:
        backend: The backend that was asked for, e.g. CUDA0.
        seen: The backends that the program announced.
        summaries: How many `P/T tests passed` lines there are for the backend.
        passed: P, or None without exactly one readable summary.
        total: T, likewise.
        unsupported: Cases that the program left out of T as not supported.
        failed: The cases that failed, each as `-o` takes it back, once for each failure.
        backend_ok: The backend's section ends in `Backend <name>: OK`.
        last_case: The last case printed. A case is printed when it is over: a crash came in the one after it.
        contradictions: Sentences for what the summary and the cases disagree on.
        cases: Every case that a line names, supported or not, sorted: the program's own list, whatever the backend.
    """

    backend: str
    seen: tuple[str, ...] = ()
    summaries: int = 0
    passed: int | None = None
    total: int | None = None
    unsupported: int = 0
    failed: tuple[str, ...] = ()
    backend_ok: bool = False
    last_case: str = ""
    contradictions: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()


@dataclass
class _Section:
    """The lines of one backend, counted."""

    summaries: list[str] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    ok: int = 0
    unsupported: int = 0
    failed: list[str] = field(default_factory=list)
    listed: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    open_case: str = ""
    listing: bool = False

    def read(self, line: str) -> None:
        """Count one line; diagnostics may come before a case, or between a case and its verdict."""
        text = plain(line)
        listed = LISTED.fullmatch(text) if self.listing else None
        self.listing = bool(listed) or text == "Failing tests:"
        if listed:
            self.listed.append(listed[1])
            return
        if "tests passed" in text:
            self.summaries.append(text)
            return
        if case := CASE.search(text):
            self.open_case = case[1]
            self.cases.append(case[1])
        if FAILED.search(text):
            self.failed.append(self.open_case)
        elif UNSUPPORTED.search(text):
            self.unsupported += 1
        elif PASSED.search(line):
            self.ok += 1
        else:
            return
        self.open_case = ""


def read_gate(text: str, backend: str) -> GateReading:
    """Read what the program printed about `backend`; sections of other backends are skipped.

    Args:
        text: Standard output, or both streams together, colours and all.
        backend: Name of the device, e.g. CUDA0.
    """
    section, inside, seen = _Section(), False, []
    for printed in text.split("\n"):
        line = printed.rstrip()
        start, status = SECTION.fullmatch(plain(line)), STATUS.fullmatch(plain(line))
        if start:
            seen.append(start[1])
            inside = start[1] == backend
        elif status and inside:
            section.statuses.append(status[2] if status[1] == backend else "of another")
            inside = False
        elif inside:
            section.read(line)
    summary = SUMMARY.search(section.summaries[0]) if len(section.summaries) == 1 else None
    passed, total = (int(summary[1]), int(summary[2])) if summary else (None, None)
    return GateReading(
        backend,
        seen=tuple(seen),
        summaries=len(section.summaries),
        passed=passed,
        total=total,
        unsupported=section.unsupported,
        # The list also has what failed before it could be printed as a case; a run that broke off has no list.
        failed=tuple(section.listed or [case for case in section.failed if case]),
        backend_ok=section.statuses == ["OK"],
        last_case=section.cases[-1] if section.cases else "",
        contradictions=tuple(_contradictions(section, passed, seen.count(backend))),
        cases=tuple(sorted(section.cases)),
    )


def _contradictions(section: _Section, passed: int | None, sections: int) -> Iterator[str]:
    if sections > 1:
        yield f"the backend is announced {sections} times"
    if passed is None:
        return
    ended = section.ok + section.unsupported + len(section.failed)
    if section.ok != passed:
        yield f"the summary counts {passed} passed cases, but {section.ok} cases say OK"
    if len(section.failed) > len(section.listed):
        yield f"the summary names {len(section.listed)} failing cases, but {len(section.failed)} lines say FAIL"
    elif sections <= 1 and section.ok == passed and len(section.cases) != ended:
        yield f"{len(section.cases)} lines name a case, but {ended} say how one ended"


def judge_gate(reading: GateReading, rc: int | None, wanted: ParityGate) -> tuple[str, ...]:
    """Return why the gate did not pass, one sentence a reason; () when it did.

    Args:
        reading: What the program printed.
        rc: Its exit status; None or negative when a signal ended it.
        wanted: Its operation, and the counts and cases that it must have. What is None or "" there is not asked, but 0
            cases never pass.
    """
    reasons = [*_count_reasons(reading, wanted), *reading.contradictions]
    if rc is None or rc < 0:
        reasons.append(f"{PROGRAM} was ended by a signal")
    elif rc != 0 and (rc != 1 or not reasons):  # 1 repeats what was just said
        reasons.append(f"{PROGRAM} ended with exit status {rc}")
    if not reading.backend_ok and not reasons:
        reasons.append(f"the output does not say 'Backend {reading.backend}: OK'")
    return tuple(reasons)


def _count_reasons(reading: GateReading, wanted: ParityGate) -> Iterator[str]:
    backend, expect = reading.backend, wanted.expect
    if backend not in reading.seen:
        there = f"the program has {', '.join(reading.seen)}" if reading.seen else "the output names none"
        yield f"backend {backend} was not tested: {there}"
        return
    if reading.passed is None or reading.total is None:
        if reading.summaries == 1:
            yield f"the summary for backend {backend} cannot be read"
        elif reading.summaries:
            yield f"{reading.summaries} summaries for backend {backend}, not one"
        else:
            after = f"the program stopped after {reading.last_case}" if reading.last_case else "no case was run"
            yield f"no summary for backend {backend}: {after}"
        return
    if reading.total == 0:
        yield "ran 0 of 0 cases: nothing was tested"
    elif expect and (reading.passed, reading.total) != (expect.passed, expect.total):
        yield f"expected {expect}, got {reading.passed}/{reading.total}"
    elif reading.passed != reading.total:
        yield f"{reading.passed} of {reading.total} cases passed"
    if reading.failed:
        others = f" and {len(reading.failed) - 1} more" if len(reading.failed) > 1 else ""
        yield f"failed: {reading.failed[0]}{others}"
    if wanted.unsupported is not None and reading.unsupported != wanted.unsupported:
        yield f"expected {wanted.unsupported} unsupported cases, got {reading.unsupported}"
    # the count alone is right of 1103 runs of the easiest case too
    cases = reading.cases
    others_ops = [case for case in cases if case.partition("(")[0] != wanted.op]
    if others_ops:
        yield f"{len(others_ops)} of {len(cases)} cases are not of {wanted.op}, as {others_ops[0]}"
    elif cases and wanted.cases and (listed := case_digest(cases)) != wanted.cases:
        repeated = f"{len(cases) - len(set(cases))} of them repeated"
        yield f"expected the list of cases {wanted.cases}, got {listed}: {len(cases)} cases, {repeated}"


def unlike(cases: Iterable[str], reference: Iterable[str]) -> str:
    """Return how a list of cases differs from another, in words; "" where it does not."""
    here, there = Counter(cases), Counter(reference)
    more = here - there
    differing = {
        "missing": there - here,
        "repeated more often": Counter({case: count for case, count in more.items() if case in there}),
        "new": Counter({case: count for case, count in more.items() if case not in there}),
    }
    return "; ".join(f"{how}: {some.total()}, as {min(some)}" for how, some in differing.items() if some)
