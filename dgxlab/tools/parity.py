"""The parity gate: parse the console output of `test-backend-ops test`, and judge whether the gate passed.

The program prints OK and exits 0 for a missing backend, and when nothing ran: its own verdict is not enough.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dgxlab.model import Param, ParityGate, case_digest
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.tools.rows import plain
from dgxlab.tools.tool import text_of

PROGRAM = "test-backend-ops"

_SECTION = re.compile(r"Backend [0-9]+/[0-9]+: (.+)")
_STATUS = re.compile(r"  Backend (.+): (OK|FAIL)")
# A diagnostic without a line end may precede either of these; it ends in a space.
_SUMMARY = re.compile(r"(?:^| )  ([0-9]{1,9})/([0-9]{1,9}) tests passed$")
CASE = re.compile(r"(?:^| )  (\w+\(.*?\)):(?: |$)")
_LISTED = re.compile(r"  (\w+\(.*\))")
_UNSUPPORTED = re.compile(r"(?:^|: )not supported \[[^\]]*\]$")
_FAILED = re.compile(r"(?<!\w)FAIL$")
# Its green colour tells a case's OK from a diagnostic that ends in the same word without a line end.
_PASSED = re.compile(r"(?:\x1b\[1;32m|^|(?<=\): ))OK(?:\x1b\[0m)?$")
# For the offset of such a block CUDA adds up the activations before they are rounded, the CPU after. With random inputs
# and so few results that alone exceeds the tolerance of 5e-4 once in 500 runs, by less than fourfold.
_BY_ROUNDING = re.compile(r"MUL_MAT\(type_a=q[45]_1,type_b=f32,m=16,n=1,k=256\b.* ERR = 0\.00[01]\d* > 0\.0005\d*")


def command(gate: ParityGate) -> tuple[str, ...]:
    """Return the argv of a gate, as plans have it."""
    where = ("-p", f"^{selecting(gate.where)}") if gate.where else ()
    return (f"{{bin}}/{PROGRAM}", "test", "-o", gate.op, "-b", gate.backend, *where)


def selecting(where: Mapping[str, Sequence[Param]]) -> str:
    """Return what a regex (ECMAScript) for `-p` has after its ^ to match cases whose parameters have one value of each.

    It is lookaheads, because the order of the parameters in the tool's text is the test case's own.
    """
    return "".join(_lookahead(name, values) for name, values in where.items())


def _lookahead(key: str, values: Sequence[Param]) -> str:
    name, *texts = (
        "".join(f"\\{c}" if c in r".^$|()[]{}*+?\/" else c for c in text_of(text)) for text in (key, *values)
    )
    return f"(?=(.*,)?{name}=({'|'.join(texts)})(,|$))"


@dataclass(frozen=True)
class GateReading:
    """What the program printed about one backend, such as CUDA0."""

    backend: str
    seen: tuple[str, ...] = ()  # the backends that the program announced
    summaries: int = 0  # how many lines `P/T tests passed` there are for the backend
    passed: int | None = None
    total: int | None = None  # these two are P and T; None unless there is exactly one readable summary
    unsupported: int = 0
    failed: tuple[str, ...] = ()  # the cases that failed, each as `-o` takes it back, once for each failure
    how: Mapping[str, str] = field(default_factory=dict)  # by case, what was wrong, first: `ERR = 0.002 > 0.0005`
    backend_ok: bool = False  # the backend's section ends in `Backend <name>: OK`
    last_case: str = ""  # the last printed case. A case is printed when it has ended: a crash is in the next one
    contradictions: tuple[str, ...] = ()  # sentences for contradictions between the summary and the cases
    cases: tuple[str, ...] = ()  # every case that a line names, supported or not, sorted

    @property
    def by_rounding(self) -> bool:
        """Whether cases failed, and none but those that the rounding of llama.cpp's own kernels can make fail."""
        return bool(self.failed) and all(_BY_ROUNDING.fullmatch(f"{case} {self.how.get(case)}") for case in self.failed)


@dataclass
class Section:
    """The lines from `Backend 1/2: NAME`, exclusive, to the status `Backend NAME: OK` (or FAIL)."""

    backend: str  # "" for the lines before the first backend
    lines: list[tuple[int, str]] = field(default_factory=list)
    """(line number from 1, line as printed, without trailing spaces)"""
    status: str = ""  # OK or FAIL; "another" if it names another backend; "" if the output ends before it


def sections(text: str) -> list[Section]:
    """Return the sections of the program's output, which may have colours; lines between two of them are left out."""
    split = [Section("")]
    for number, printed in enumerate(text.split("\n"), 1):
        line, section = printed.rstrip(), split[-1]
        bare = plain(line) if "Backend" in line else ""  # most lines do without three searches
        if start := _SECTION.fullmatch(bare):
            split.append(Section(start[1]))
        elif status := _STATUS.fullmatch(bare):
            section.status = section.status or (status[2] if status[1] == section.backend else "another")
        elif not section.status:
            section.lines.append((number, line))
    return split


@dataclass
class _Counts:
    """The lines of one backend, counted."""

    summaries: list[str] = field(default_factory=list)
    ok: int = 0
    unsupported: int = 0
    failed: list[str] = field(default_factory=list)
    how: dict[str, str] = field(default_factory=dict)
    listed: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    open_case: str = ""
    listing: bool = False

    def read(self, line: str) -> None:
        """Count one line; diagnostics may come before a case, or between a case and its verdict."""
        text = plain(line)
        listed = _LISTED.fullmatch(text) if self.listing else None
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
            if wrong := text[: case.start()].partition("] ")[2].strip():
                self.how.setdefault(case[1], wrong)
        if _FAILED.search(text):
            self.failed.append(self.open_case)
        elif _UNSUPPORTED.search(text):
            self.unsupported += 1
        elif _PASSED.search(line):
            self.ok += 1
        else:
            return
        self.open_case = ""


def count_passed(text: str) -> int:
    """Return how many lines say that a case passed, or a backend; of output that is not whole yet."""
    return sum(bool(_PASSED.search(line)) for line in text.splitlines())


def read_gate(text: str, backend: str) -> GateReading:
    """Return the counts and cases of one backend, given the program's output, which may have colours."""
    announced = sections(text)[1:]
    own = [section for section in announced if section.backend == backend]
    counts = _Counts()
    for section in own:
        for _, line in section.lines:
            counts.read(line)
    summary = _SUMMARY.search(counts.summaries[0]) if len(counts.summaries) == 1 else None
    passed, total = (int(summary[1]), int(summary[2])) if summary else (None, None)
    return GateReading(
        backend,
        seen=tuple(section.backend for section in announced),
        summaries=len(counts.summaries),
        passed=passed,
        total=total,
        unsupported=counts.unsupported,
        # The list also has what failed before it could be printed as a case; a run that broke off has no list.
        failed=tuple(counts.listed or [case for case in counts.failed if case]),
        how=counts.how,
        backend_ok=[section.status for section in own if section.status] == ["OK"],
        last_case=counts.cases[-1] if counts.cases else "",
        contradictions=tuple(_contradictions(counts, passed, len(own))),
        cases=tuple(sorted(counts.cases)),
    )


def _contradictions(counts: _Counts, passed: int | None, announced: int) -> Iterator[str]:
    if announced > 1:
        yield f"the backend is announced {announced} times"
    if passed is None:
        return
    ended = counts.ok + counts.unsupported + len(counts.failed)
    if counts.ok != passed:
        yield f"the summary counts {passed} passed cases, but {counts.ok} cases say OK"
    if len(counts.failed) > len(counts.listed):
        yield f"the summary names {len(counts.listed)} failing cases, but {len(counts.failed)} lines say FAIL"
    elif announced <= 1 and counts.ok == passed and len(counts.cases) != ended:
        yield f"{len(counts.cases)} lines name a case, but {ended} say how one ended"


def judge_gate(reading: GateReading, wanted: ParityGate, ended: Reason | None = None) -> tuple[Reason, ...]:
    """Return why the gate `wanted` did not pass, () if it did; `ended` is how the program failed, if it did."""
    reasons = [*_count_reasons(reading, wanted)]
    reasons += [reason(Code.CONTRADICTION, what=what) for what in reading.contradictions]
    if ended:
        reasons.insert(0, ended)
    if not reading.backend_ok and not reasons:
        reasons.append(reason(Code.NO_OK, backend=reading.backend))
    return tuple(reasons)


def _count_reasons(reading: GateReading, wanted: ParityGate) -> Iterator[Reason]:
    backend, expect = reading.backend, wanted.expect
    if backend not in reading.seen:
        yield reason(Code.NOT_TESTED, backend=backend, seen=", ".join(reading.seen))
        return
    if reading.passed is None or reading.total is None:
        yield reason(Code.SUMMARY, backend=backend, summaries=reading.summaries, last_case=reading.last_case)
        return
    if reading.total == 0:
        yield reason(Code.NO_CASES)
    elif expect and (reading.passed, reading.total) != (expect.passed, expect.total):
        yield reason(Code.CASE_COUNT, wanted=str(expect), passed=reading.passed, total=reading.total)
    elif reading.passed != reading.total:
        yield reason(Code.SOME_PASSED, passed=reading.passed, total=reading.total)
    if reading.failed:
        first = reading.failed[0]
        yield reason(Code.CASES_FAILED, case=first, more=len(reading.failed) - 1, how=reading.how.get(first, ""))
    if wanted.unsupported is not None and reading.unsupported != wanted.unsupported:
        yield reason(Code.UNSUPPORTED, wanted=wanted.unsupported, unsupported=reading.unsupported)
    # the count alone would also fit 1103 runs of the easiest case
    cases = reading.cases
    others_ops = [case for case in cases if case.partition("(")[0] != wanted.op]
    if others_ops:
        yield reason(Code.OTHER_OPS, others=len(others_ops), cases=len(cases), op=wanted.op, case=others_ops[0])
    elif cases and wanted.cases and (listed := case_digest(cases)) != wanted.cases:
        repeated = len(cases) - len(set(cases))
        yield reason(Code.CASE_LIST, wanted=wanted.cases, got=listed, cases=len(cases), repeated=repeated)


def unlike(cases: Iterable[str], reference: Iterable[str]) -> str:
    """Return in words how `cases` differ from `reference`, repetitions included; "" if equal."""
    counts, expected = Counter(cases), Counter(reference)
    more = counts - expected
    differing = {
        "missing": expected - counts,
        "repeated more often": Counter({case: count for case, count in more.items() if case in expected}),
        "new": Counter({case: count for case, count in more.items() if case not in expected}),
    }
    return "; ".join(f"{how}: {some.total()}, as {min(some)}" for how, some in differing.items() if some)
