"""Files of test-backend-ops: `perf` and `test` from the console, as SQL, or as dgxlab exports them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dgxlab.tools.parity import CASE, SECTION, STATUS, read_gate
from dgxlab.tools.reading import (
    ORIGIN,
    Format,
    Line,
    Reading,
    Row,
    Values,
    csv_rows,
    finite_at,
    json_lines,
    number_or_text,
    shared,
    span,
    sql,
    value,
)
from dgxlab.tools.rows import Refused, case_params, equal

TABLE = "test_backend_ops"

OPTIONAL = (("flops", "FLOPS"), ("bandwidth_gb_s", "GiB/s"))
"""A case has one of the two; the other is printed as 0 and means that there is none."""


# -- the console ------------------------------------------------------------------------------------------------------

SCALE = {"k": "e3", "M": "e6", "G": "e9", "T": "e12"}
RUNS = r"(?<= {4})([0-9]{1,10}) runs - +([0-9]{1,12}\.[0-9]{2}) us/run - +"
FLOPS = re.compile(RUNS + r"([0-9]{1,12}\.[0-9]{2}) ([kMGT])FLOP/run - +([0-9]{1,12}\.[0-9]{2}) ([kMGT])FLOPS")
BYTES = re.compile(RUNS + r"([0-9]{1,15}) kB/run - +([0-9]{1,12}\.[0-9]{2}) GB/s")

DESCRIPTION = re.compile(r"  Device description: (.+)")
NO_SUPPORT = re.compile(r"(?:^|: )not supported(?: \[[^\]]*\])? *$")

HALF = 0.0050001
"""Half of the console's second decimal, and what binary fractions make of it."""


@dataclass
class _Section:
    """The lines of one backend, with their numbers; of none where the file has no such lines."""

    backend: str
    lines: list[tuple[int, str]] = field(default_factory=list)
    description: str = ""
    ended: bool = False

    def holds(self, words: str) -> int | None:
        """Return the number of the first line that holds these words, None without one."""
        return next((at for at, text in self.lines if words in text), None)


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
        elif at := section.holds("SUPPORTED"):
            raise Refused("it says what is supported, and has no values", at)
        else:
            for at, line in section.lines:
                if case := CASE.search(line):
                    raise Refused(f"the case {case[1]} has no result: the file was cut short", at)
    described = "; ".join(dict.fromkeys(section.description for section in sections if section.description))
    return Reading(tuple(rows), {"device_description": described} if described else {}, tuple(notes))


def _sections(text: str) -> Iterator[_Section]:
    section = _Section("")
    for at, line in enumerate(text.split("\n"), 1):
        shown = line.rstrip()
        # most lines have neither word, and a search costs ten times as much
        about = "Backend " in shown or "Device " in shown
        if about and (start := SECTION.fullmatch(shown)):
            yield section
            section = _Section(start[1])
        elif about and (status := STATUS.fullmatch(shown)):
            section.ended = status[1] == section.backend
        elif about and (described := DESCRIPTION.fullmatch(shown)):
            section.description = described[1]
        elif not section.ended:
            section.lines.append((at, shown))
    yield section


def _perf(section: _Section, notes: list[str]) -> Iterator[Row]:
    begun: tuple[int, str] | None = None
    unsupported = 0
    for at, text in section.lines:
        for case in CASE.finditer(text):
            if begun:
                raise Refused(f"the case {begun[1]} has no result", begun[0])
            begun = at, case[1]
        looks = " runs - " in text or "us/run" in text
        result = (FLOPS.search(text) or BYTES.search(text)) if looks else None
        if result and result.end() == len(text):
            if not begun:
                raise Refused("a result without its case", at)
            op, _, op_params = begun[1][:-1].partition("(")
            yield _row(op, section.backend, op_params, _result(result, at))
            begun = None
        elif looks:
            raise Refused("it looks like a result and cannot be read", at)
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


def _result(result: re.Match[str], at: int) -> list[Values]:
    """Return the values of a case's line, refused where its rounded numbers cannot come from one measurement."""
    runs, time = result[1], result[2]
    values = [value("time_us", "us", time, at, above=0), value("n_runs", "runs", runs, at, above=0)]
    if result.re is BYTES:
        values.append(Values("memory_kb", "kB", (float(result[3]),)))
        rate = float(result[4])
        return [*values, Values("bandwidth_gb_s", "GiB/s", (rate,))] if rate else values
    (least, most), (low, high) = _bounds(result[3], result[4]), _bounds(result[5], result[6])
    longest, shortest = float(time) + HALF, float(time) - HALF
    if least / longest * 1e6 > high or (shortest > 0 and most / shortest * 1e6 < low):
        raise Refused(f"{result[3]} {result[4]}FLOP in {time} us are not {result[5]} {result[6]}FLOPS", at)
    return [*values, value("flops", "FLOPS", result[5] + SCALE[result[6]], at, above=0)]


def _bounds(digits: str, scale: str) -> tuple[float, float]:
    """Return between what values a number was rounded to two decimals of its scale; FLOPs a run are cut to whole."""
    factor = float(f"1{SCALE[scale]}")
    return (float(digits) - HALF) * factor - 1, (float(digits) + HALF) * factor + 1


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
    return _counts(ops.pop() if len(ops) == 1 else "", section.backend, counts)


# -- rows with columns ------------------------------------------------------------------------------------------------

OF_THE_FILE = ("build_commit", "device_description", "backend_reg_name")
EXACT = 5.0001e-7
"""Half of the sixth decimal that SQL has."""

FACTORS = {"MUL_MAT": ("m", "n", "k", "bs", "nr"), "MUL_MAT_ID": ("m", "n", "k", "n_used")}
"""By operation the parameters whose product, doubled, is its FLOPs; others have formulas that change with llama.cpp."""


def statements(rows: Sequence[Line]) -> Reading:
    """Read what `--output sql` prints: a row a case of `perf`; of `test` the counts of each op.

    Raises:
        Refused: if a statement is broken or a value no finite number.
    """
    return _reading(rows, OF_THE_FILE)


def lines(text: str) -> Reading:
    """Read the rows that `dgxlab export` writes as JSON lines: the same columns, and where each comes from."""
    return _reading(list(json_lines(text)), (*OF_THE_FILE, *ORIGIN))


def without_values(text: str) -> Reading:
    """Refuse `--output csv`, which has neither times nor whether a case passed."""
    first = next(csv_rows(text, "backend_name"), None)
    raise Refused(
        "the csv of test-backend-ops has neither times nor verdicts; `--output sql` has both",
        first.number if first else 1,
    )


def _reading(lines: Sequence[Line], of_the_file: Sequence[str]) -> Reading:
    if not lines:
        return Reading((), {})
    rows: list[Row] = []
    unsupported: Counter[str] = Counter()
    tested: dict[tuple[str, str], list[Line]] = {}
    same = shared([line.columns for line in lines], of_the_file)
    for line in lines:
        mode = line.text("test_mode")
        if mode == "test":
            tested.setdefault((line.text("backend_name"), line.text("op_name")), []).append(line)
        elif mode != "perf":
            raise Refused(f"a row of mode {mode}, not of perf or test", line.number)
        elif _is(line, "supported"):
            rows.append(_of_columns(line, [name for name in of_the_file if name not in same]))
        else:
            unsupported[line.text("backend_name")] += 1
    rows = [*_labelled(rows)]
    for (backend, op), each in tested.items():
        supported = [line for line in each if _is(line, "supported")]
        passed = sum(_is(line, "passed") for line in supported)
        counts = {"passed": passed, "total": len(supported), "unsupported": len(each) - len(supported)}
        rows.append(_counts(op, backend, counts))
    times = [str(line.columns["test_time"]) for line in lines if line.columns.get("test_time")]
    provenance = {**{k: v for k, v in same.items() if v}, **({"test_time": span(times)} if times else {})}
    return Reading(tuple(rows), provenance, tuple(_unsupported(backend, n) for backend, n in unsupported.items()))


def _of_columns(line: Line, differing: Sequence[str]) -> Row:
    columns, at = line.columns, line.number
    values = [value("time_us", "us", columns.get("time_us"), at, above=0)]
    for metric, unit in (*OPTIONAL, ("memory_kb", "kB"), ("n_runs", "runs")):
        if metric in columns and (amount := finite_at(metric, columns[metric], at)):
            if amount < 0:
                raise Refused(f"{metric} is {columns[metric]}, below 0", at)
            values.append(Values(metric, unit, (amount,)))
    op, op_params = line.text("op_name"), line.text("op_params")
    _agree(op, case_params(op_params), {each.metric: each.values[0] for each in values}, at)
    if not _is(line, "passed"):
        why = f"it did not pass ({columns.get('error_message') or 'no reason given'})"
        values = [replace(each, discarded=why) for each in values]
    more = {name: columns[name] for name in differing if columns.get(name)}
    return _row(op, line.text("backend_name"), op_params, values, **more)


def _agree(op: str, params: Mapping[str, str], values: Mapping[str, float], at: int) -> None:
    """Refuse a row whose rate, times its time, is not what one run of its case computes or moves."""
    time = values["time_us"]
    if "flops" in values:
        flop, off = _product(values["flops"], time)
        # doubled, the product of all numbers of a case; None where its parameters do not tell them
        numbers = [re.findall(r"[0-9]+", params.get(name, "")) for name in FACTORS.get(op, ())]
        known = numbers and all(numbers)
        wanted = 2 * math.prod(float(digits) for factor in numbers for digits in factor) if known else None
        away = abs((flop + 0.5) % 1 - 0.5 if wanted is None else flop - wanted)
        if not away <= off:  # damaged sizes and rates can make inf and nan, which are no more than off either
            what = "no whole number" if wanted is None else f"not the {wanted:.15g} of its shape"
            raise Refused(f"{values['flops']:.6g} FLOPS for {time:g} us are {flop:.10g} FLOP, {what}", at)
    if "bandwidth_gb_s" in values and "memory_kb" in values:
        gib, off = _product(values["bandwidth_gb_s"], time)
        if gib + off < values["memory_kb"] * 2.0**-20:  # it may be more: nodes before the operation's are counted
            rate = f"{values['bandwidth_gb_s']:g} GiB/s for {time:g} us"
            raise Refused(f"{rate} are {gib * 2**20:.10g} KiB, less than the {values['memory_kb']:g} it says", at)


def _product(rate: float, time_us: float) -> tuple[float, float]:
    """Return a rate times a time, and by how much rounding of both may have changed it."""
    product = rate * time_us / 1e6
    return product, product * (EXACT / time_us + EXACT / rate + 1e-12)


def _is(line: Line, column: str) -> bool:
    """Return whether a column says 1, as one that is not there does.

    Raises:
        Refused: if it says neither 1 nor 0.
    """
    shown = line.columns.get(column, "1")
    if not (equal(column, 1, shown) or equal(column, 0, shown)):
        raise Refused(f"{column} is {shown}, neither 1 nor 0", line.number)
    return equal(column, 1, shown)


# -- rows of all formats ----------------------------------------------------------------------------------------------


def _row(op: str, backend: str, op_params: str, values: Sequence[Values], **more: Any) -> Row:
    """Return a row; `_labelled` completes its label."""
    params = {"op_name": op, **({"backend_name": backend} if backend else {}), **more}
    return Row(op, {**params, **{k: number_or_text(v) for k, v in case_params(op_params).items()}}, tuple(values))


def _labelled(rows: Iterable[Row]) -> Iterator[Row]:
    """Label each row with the parameters in which its op's rows differ, with all where they do not differ."""
    ops: dict[str, list[Row]] = {}
    kept = list(rows)
    for row in kept:
        ops.setdefault(row.params["op_name"], []).append(row)
    same = {}
    for op, each in ops.items():
        values = {name: {row.params.get(name) for row in each} for name in each[0].params}
        alone = {"op_name", "backend_name"}
        same[op] = alone if len(each) == 1 else {"op_name", *(k for k, v in values.items() if len(v) == 1)}
    for row in kept:
        own = {k: v for k, v in row.params.items() if k not in same[row.params["op_name"]]} or dict(row.params)
        yield replace(row, label=" ".join([row.label, *(f"{k}={v}" for k, v in own.items() if k != "op_name")]))


def _counts(op: str, backend: str, counts: Mapping[str, int]) -> Row:
    values = tuple(Values(name, "cases", (float(count),)) for name, count in counts.items())
    params = {"op_name": op, "backend_name": backend, "test_mode": "test"}
    return Row(f"test {op or 'of all ops'}", {k: v for k, v in params.items() if v}, values)


def _unsupported(backend: str, count: int) -> str:
    return f"{count} {'case is' if count == 1 else 'cases are'} not supported by {backend or 'the backend'}"


FORMATS = {
    "console": Format(console, "", r"^Backend \d+/\d+: |us/run - | tests passed$"),
    "sql": Format(
        statements,
        TABLE,
        r"INSERT INTO test_backend_ops |CREATE TABLE .*test_backend_ops",
        rows=lambda text: sql(text, TABLE),
        texts=(
            *("build_commit", "test_time", "backend_name", "op_name", "op_params", "test_mode", "error_message"),
            *("device_description", "backend_reg_name"),
        ),
    ),
    "csv": Format(without_values, '"op_name"', r'^"backend_name","op_name"'),
    "jsonl": Format(lines, '"op_name"', r'^\{(?=.*"op_name"\s*:)(?=.*"test_mode"\s*:)'),
}
