"""test-backend-ops: kernel times of `perf` and counts of `test`, from the console, as SQL, or as dgxlab exports it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dgxlab.agent.parse.backend_ops import OPTIONAL, case_params
from dgxlab.agent.parse.gate import CASE, SECTION, STATUS, read_gate
from dgxlab.agent.parse.parsed import equal
from dgxlab.imported import agreement
from dgxlab.imported.agreement import SCALE
from dgxlab.imported.reading import (
    Reading,
    Refused,
    Row,
    Values,
    finite_at,
    number_or_text,
    shared,
    span,
    value,
)
from dgxlab.imported.tables import Line, csv_rows, json_lines, sql

TABLE = "test_backend_ops"

RUNS = r"(?<= {4})([0-9]{1,10}) runs - +([0-9]{1,12}\.[0-9]{2}) us/run - +"
FLOPS = re.compile(RUNS + r"([0-9]{1,12}\.[0-9]{2}) ([kMGT])FLOP/run - +([0-9]{1,12}\.[0-9]{2}) ([kMGT])FLOPS")
BYTES = re.compile(RUNS + r"([0-9]{1,15}) kB/run - +([0-9]{1,12}\.[0-9]{2}) GB/s")

DESCRIPTION = re.compile(r"  Device description: (.+)")
NO_SUPPORT = re.compile(r"(?:^|: )not supported(?: \[[^\]]*\])? *$")

OF_THE_FILE = ("build_commit", "device_description", "backend_reg_name")
HANDED_ON = ("job_id", "run_id", "arm", "build_id", "pin", "tree", "series", "dirty", "env", "device_id")
"""What `dgxlab export` adds of where a row comes from."""


@dataclass
class _Section:
    """The lines of one backend; of none where the file has no such lines."""

    backend: str
    start: int
    lines: list[tuple[int, str]] = field(default_factory=list)
    description: str = ""
    ended: bool = False

    def holds(self, words: str) -> int | None:
        """Return the first line that holds these words, None without one."""
        return next((number for number, text in self.lines if words in text), None)


def console(text: str) -> Reading:
    """Read what `perf` or `test` print on the console, diagnostics in the middle of a result included.

    Raises:
        Refused: if a case has no result, a result no case, or a line looks like one and cannot be read.
    """
    rows: list[Row] = []
    notes: list[str] = []
    sections = [section for section in _sections(text) if section.lines]
    for section in sections:
        if section.holds("us/run") or section.holds(" runs - "):
            rows += _labelled(_perf(section, notes))
        elif section.holds("tests passed"):
            rows.append(_test(text, section, notes))
        elif line := section.holds("SUPPORTED"):
            raise Refused("it says what is supported, and has no values", line)
        elif case := _first_case(section):
            raise Refused(f"the case {case[1]} has no result: the file was cut short", case[0])
    measured = [section for section in sections if section.description]
    provenance = {"device_description": "; ".join(dict.fromkeys(section.description for section in measured))}
    return Reading(tuple(rows), {k: v for k, v in provenance.items() if v}, tuple(notes))


def statements(text: str) -> Reading:
    """Read what `--output sql` prints: a row a case of `perf`; of `test` the counts of each op.

    Raises:
        Refused: if a statement is broken or a value no finite number.
    """
    return _reading(list(sql(text, TABLE)), OF_THE_FILE)


def lines(text: str) -> Reading:
    """Read the rows that `dgxlab export` writes as JSON lines: the same columns, and where each comes from.

    Raises:
        Refused: if a row is broken or a value no finite number.
    """
    return _reading(list(json_lines(text)), (*OF_THE_FILE, *HANDED_ON))


def _reading(lines: Sequence[Line], of_the_file: Sequence[str]) -> Reading:
    if not lines:
        return Reading((), {})
    rows: list[Row] = []
    unsupported: Counter[str] = Counter()
    same = shared([line.columns for line in lines], of_the_file)
    for line in lines:
        mode = line.text("test_mode")
        if mode not in ("perf", "test"):
            raise Refused(f"a row of mode {mode}, not of perf or test", line.number)
        if mode == "perf" and not _is(line, "supported"):
            unsupported[line.text("backend_name")] += 1
        elif mode == "perf":
            rows.append(_of_statement(line, [name for name in of_the_file if name not in same]))
    rows = [*_labelled(rows)]
    rows += _counted([line for line in lines if line.columns["test_mode"] == "test"])
    times = [str(line.columns["test_time"]) for line in lines if line.columns.get("test_time")]
    provenance = {**{k: v for k, v in same.items() if v}, **({"test_time": span(times)} if times else {})}
    return Reading(tuple(rows), provenance, tuple(_unsupported(backend, n) for backend, n in unsupported.items()))


def without_values(text: str) -> Reading:
    """Refuse `--output csv`, which has neither times nor whether a case passed.

    Raises:
        Refused: always.
    """
    first = next(csv_rows(text, "backend_name"), None)
    raise Refused(
        "the csv of test-backend-ops has neither times nor verdicts; `--output sql` has both",
        first.number if first else 1,
    )


def _sections(text: str) -> Iterator[_Section]:
    section = _Section("", 1)
    for number, line in enumerate(text.split("\n"), 1):
        printed = line.rstrip()
        about = (
            "Backend " in printed or "Device " in printed
        )  # most lines are not, and a search costs ten times as much
        if about and (start := SECTION.fullmatch(printed)):
            yield section
            section = _Section(start[1], number)
        elif about and (status := STATUS.fullmatch(printed)):
            section.ended = status[1] == section.backend
        elif about and (described := DESCRIPTION.fullmatch(printed)):
            section.description = described[1]
        elif not section.ended:
            section.lines.append((number, printed))
    yield section


def _first_case(section: _Section) -> tuple[int, str] | None:
    return next(((number, case[1]) for number, text in section.lines if (case := CASE.search(text))), None)


def _perf(section: _Section, notes: list[str]) -> Iterator[Row]:
    begun: tuple[int, str] | None = None
    unsupported = 0
    for number, text in section.lines:
        for case in CASE.finditer(text):
            if begun:
                raise Refused(f"the case {begun[1]} has no result", begun[0])
            begun = number, case[1]
        looks = " runs - " in text or "us/run" in text
        found = (FLOPS.search(text) or BYTES.search(text)) if looks else None
        if found and found.end() == len(text):
            if not begun:
                raise Refused("a result without its case", number)
            yield _of_case(begun[1], section.backend, found, number)
            begun = None
        elif looks:
            raise Refused("it looks like a result and cannot be read", number)
        elif begun and NO_SUPPORT.search(text):
            unsupported += 1
            begun = None
    if begun and section.ended:
        raise Refused(f"the case {begun[1]} has no result", begun[0])
    if unsupported:
        notes.append(_unsupported(section.backend, unsupported))
    if not section.ended:
        after = f" after {begun[1]}, which has no result" if begun else ""
        notes.append(f"it was cut short{after}: no line says that backend {section.backend or 'tested'} was through")


def _of_case(case: str, backend: str, found: re.Match[str], number: int) -> Row:
    runs, time = found[1], found[2]
    values = [_above_0("time_us", "us", time, number), _above_0("n_runs", "runs", runs, number)]
    if found.re is FLOPS:
        agreement.printed(time, (found[3], found[4]), (found[5], found[6]), number)
        values.append(_above_0("flops", "FLOPS", found[5] + SCALE[found[6]], number))
    else:
        values.append(Values("memory_kb", "kB", (float(found[3]),)))
        values += [Values("bandwidth_gb_s", "GiB/s", (rate,))] if (rate := float(found[4])) else []
    op, _, op_params = case[:-1].partition("(")
    return _row(op, backend, op_params, values)


def _above_0(metric: str, unit: str, digits: str, number: int) -> Values:
    """Return a value that a pattern found, which made sure that it is a number."""
    if (found := float(digits)) <= 0:
        raise Refused(f"{metric} is {digits}, not above 0", number)
    return Values(metric, unit, (found,))


def _test(text: str, section: _Section, notes: list[str]) -> Row:
    """Read a parity test as its gate does, which finds every contradiction."""
    reading = read_gate(text, section.backend)
    line = section.holds("tests passed")
    if reading.passed is None or reading.total is None:
        raise Refused(f"backend {section.backend} has no one readable summary", line)
    if reading.contradictions:
        raise Refused(reading.contradictions[0], line)
    if not reading.total:
        raise Refused(f"backend {section.backend} ran 0 of 0 cases: nothing was tested", line)
    ops = {case.partition("(")[0] for case in reading.cases}
    notes += [f"failed: {case}" for case in reading.failed]
    counts = {"passed": reading.passed, "total": reading.total, "unsupported": reading.unsupported}
    return _gate(ops.pop() if len(ops) == 1 else "", section.backend, counts)


def _gate(op: str, backend: str, counts: dict[str, int]) -> Row:
    values = tuple(Values(name, "cases", (float(count),)) for name, count in counts.items())
    params = {"op_name": op, "backend_name": backend, "test_mode": "test"}
    return Row(f"test {op or 'of all ops'}", {k: v for k, v in params.items() if v}, values)


def _row(op: str, backend: str, op_params: str, values: Sequence[Values], **more: Any) -> Row:
    """Return a row whose label is `_labelled`'s."""
    params = {"op_name": op, **({"backend_name": backend} if backend else {}), **more}
    return Row(op, {**params, **{k: number_or_text(v) for k, v in case_params(op_params).items()}}, tuple(values))


def _labelled(rows: Iterable[Row]) -> Iterator[Row]:
    """Label each row with what its op's rows differ in, with all of its parameters where they do not differ."""
    ops: dict[str, list[Row]] = {}
    kept = list(rows)
    for row in kept:
        ops.setdefault(row.params["op_name"], []).append(row)
    same = {op: {"op_name": op, **_same(each)} for op, each in ops.items()}
    for row in kept:
        alike = same[row.params["op_name"]]
        own = {name: said for name, said in row.params.items() if name not in alike} or dict(row.params)
        yield replace(row, label=" ".join([row.label, *(f"{k}={v}" for k, v in own.items() if k != "op_name")]))


def _same(rows: Sequence[Row]) -> dict[str, Any]:
    if len(rows) == 1:
        return {"backend_name": ""}
    values = {name: {row.params.get(name) for row in rows} for name in rows[0].params}
    return {name: said for name, (said, *others) in values.items() if not others}


def _of_statement(line: Line, differing: Sequence[str]) -> Row:
    found, number = line.columns, line.number
    values = [value("time_us", "us", found.get("time_us"), number, above=0)]
    for metric, unit in (*OPTIONAL, ("memory_kb", "kB"), ("n_runs", "runs")):
        if metric in found and (amount := finite_at(metric, found[metric], number)):
            if amount < 0:
                raise Refused(f"{metric} is {found[metric]}, below 0", number)
            values.append(Values(metric, unit, (amount,)))
    op, op_params = line.text("op_name"), line.text("op_params")
    agreement.columns(op, case_params(op_params), {each.metric: each.values[0] for each in values}, number)
    if not _is(line, "passed"):
        why = f"it did not pass ({found.get('error_message') or 'no reason given'})"
        values = [Values(each.metric, each.unit, each.values, why) for each in values]
    more = {name: found[name] for name in differing if found.get(name)}
    return _row(op, line.text("backend_name"), op_params, values, **more)


def _counted(lines: Sequence[Line]) -> Iterator[Row]:
    """Yield a row for each backend and op that was tested."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.text("backend_name"), line.text("op_name")), []).append(line)
    for (backend, op), each in groups.items():
        supported = [line for line in each if _is(line, "supported")]
        passed = sum(_is(line, "passed") for line in supported)
        counts = {"passed": passed, "total": len(supported), "unsupported": len(each) - len(supported)}
        yield _gate(op, backend, counts)


def _is(line: Line, column: str) -> bool:
    """Tell whether a column says 1; one that is not there cannot say no.

    Raises:
        Refused: if it says neither 1 nor 0.
    """
    printed = line.columns.get(column, "1")
    if not (equal(column, 1, printed) or equal(column, 0, printed)):
        raise Refused(f"{column} is {printed}, neither 1 nor 0", line.number)
    return equal(column, 1, printed)


def _unsupported(backend: str, count: int) -> str:
    return f"{count} {'case is' if count == 1 else 'cases are'} not supported by {backend or 'the backend'}"
