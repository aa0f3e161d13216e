"""What test-backend-ops wrote elsewhere, to be imported: the console of `perf` and `test`, and rows of columns."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from dgxlab.tools import reading
from dgxlab.tools.parity import CASE, SECTION, STATUS, read_gate
from dgxlab.tools.reading import Line, Reading, Row, Values
from dgxlab.tools.rows import Refused, case_params, equal, number

OPTIONAL = (("flops", "FLOPS"), ("bandwidth_gb_s", "GiB/s"))
"""A case has one of the two; the other is printed as 0 and means that there is none."""


def measured(columns: Mapping[str, Any], optional: Sequence[tuple[str, str]]) -> list[Values]:
    """Return the time of a row, and those of the optional metrics that it has."""
    values = [reading.value("time_us", "us", columns)]
    for metric, unit in optional:
        amount = number(columns, metric) if metric in columns else 0.0
        if amount < 0:
            raise Refused(f"{metric} is {columns[metric]}, below 0")
        values += [Values(metric, unit, (amount,))] if amount else []
    return values


# -- imported from the console ----------------------------------------------------------------------------------------

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
    """The lines of one backend, with their numbers; of "" before the first backend is announced."""

    backend: str
    lines: list[Line] = field(default_factory=list)
    description: str = ""
    ended: bool = False

    def holds(self, words: str) -> int | None:
        """Return the number of the first line that holds these words, None without one."""
        return next((line.number for line in self.lines if words in line.columns["text"]), None)


def console(text: str) -> Reading:
    """Read what `perf` or `test` print on the console, diagnostics in the middle of a result included."""
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
            for line in section.lines:
                if case := CASE.search(line.columns["text"]):
                    raise Refused(f"the case {case[1]} has no result: the file was cut short", line.number)
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
            section.lines.append(Line(at, {"text": shown}))
    yield section


def _perf(section: _Section, notes: list[str]) -> Iterator[Row]:
    begun = ""  # the case whose result is still to come
    begun_at = unsupported = 0

    def read(line: Line) -> Iterator[Row]:
        nonlocal begun, begun_at, unsupported
        text = line.columns["text"]
        for case in CASE.finditer(text):
            if begun:
                raise Refused(f"the case {begun} has no result", begun_at)
            begun, begun_at = case[1], line.number
        looks = " runs - " in text or "us/run" in text
        result = (FLOPS.search(text) or BYTES.search(text)) if looks else None
        if result and result.end() == len(text):
            if not begun:
                raise Refused("a result without its case")
            op, _, op_params = begun[:-1].partition("(")
            yield _row(op, section.backend, op_params, _result(result))
            begun = ""
        elif looks:
            raise Refused("it looks like a result and cannot be read")
        elif begun and NO_SUPPORT.search(text):
            unsupported += 1
            begun = ""

    yield from chain.from_iterable(reading.each_line(section.lines, lambda line: list(read(line))))
    if begun and section.ended:
        raise Refused(f"the case {begun} has no result", begun_at)
    if unsupported:
        notes.append(_unsupported(section.backend, unsupported))
    if not section.ended:
        after = f" after {begun}, which has no result" if begun else ""
        notes.append(f"it was cut short{after}: no line says that backend {section.backend or 'tested'} was through")


def _result(result: re.Match[str]) -> list[Values]:
    """Return the values of a case's line, refused where its rounded numbers cannot come from one measurement."""
    printed = {"n_runs": result[1], "time_us": result[2]}
    values = [reading.value("time_us", "us", printed), reading.value("n_runs", "runs", printed)]
    if result.re is BYTES:
        values.append(Values("memory_kb", "kB", (float(result[3]),)))
        rate = float(result[4])
        return [*values, Values("bandwidth_gb_s", "GiB/s", (rate,))] if rate else values
    (least, most), (low, high) = _bounds(result[3], result[4]), _bounds(result[5], result[6])
    longest, shortest = float(result[2]) + HALF, float(result[2]) - HALF
    if least / longest * 1e6 > high or (shortest > 0 and most / shortest * 1e6 < low):
        raise Refused(f"{result[3]} {result[4]}FLOP in {result[2]} us are not {result[5]} {result[6]}FLOPS")
    return [*values, reading.value("flops", "FLOPS", {"flops": result[5] + SCALE[result[6]]})]


def _bounds(digits: str, scale: str) -> tuple[float, float]:
    """Return between what values a number was rounded to two decimals of its scale; FLOPs a run are cut to whole."""
    factor = float(f"1{SCALE[scale]}")
    return (float(digits) - HALF) * factor - 1, (float(digits) + HALF) * factor + 1


def _test(text: str, section: _Section, notes: list[str]) -> Row:
    """Read a parity test as its gate does, which finds every contradiction."""
    gate = read_gate(text, section.backend)
    line = section.holds("tests passed")
    if gate.passed is None or gate.total is None:
        raise Refused(f"backend {section.backend} has no one readable summary", line)
    if gate.contradictions:
        raise Refused(gate.contradictions[0], line)
    if not gate.total:
        raise Refused(f"backend {section.backend} ran 0 of 0 cases: nothing was tested", line)
    ops = {case.partition("(")[0] for case in gate.cases}
    notes += [f"failed: {case}" for case in gate.failed]
    return _counts(ops.pop() if len(ops) == 1 else "", section.backend, gate.passed, gate.total, gate.unsupported)


# -- imported rows with columns ---------------------------------------------------------------------------------------

OF_THE_FILE = ("build_commit", "device_description", "backend_reg_name")
EXACT = 5.0001e-7
"""Half of the sixth decimal that SQL has."""

FACTORS = {"MUL_MAT": ("m", "n", "k", "bs", "nr"), "MUL_MAT_ID": ("m", "n", "k", "n_used")}
"""By operation the parameters whose product, doubled, is its FLOPs; others have formulas that change with llama.cpp."""


def statements(lines: Sequence[Line], of_the_file: Sequence[str] = OF_THE_FILE) -> Reading:
    """Read what `--output sql` prints: a row a case of `perf`; of `test` the counts of each op."""
    same = reading.shared([line.columns for line in lines], of_the_file)
    tested: dict[tuple[str, str], list[tuple[bool, bool]]] = {}
    unsupported: Counter[str] = Counter()

    def read(line: Line) -> list[Row]:
        mode, supported = line.text("test_mode"), _is(line.columns, "supported")
        if mode not in ("test", "perf"):
            raise Refused(f"a row of mode {mode}, not of perf or test")
        if mode == "test":
            counted = tested.setdefault((line.text("backend_name"), line.text("op_name")), [])
            counted.append((supported, _is(line.columns, "passed")))
        elif supported:
            return [_of_columns(line, [name for name in of_the_file if name not in same])]
        else:
            unsupported[line.text("backend_name")] += 1
        return []

    rows = list(_labelled(chain.from_iterable(reading.each_line(lines, read))))
    for (backend, op), cases in tested.items():
        passed = [ok for supported, ok in cases if supported]
        rows.append(_counts(op, backend, sum(passed), len(passed), len(cases) - len(passed)))
    provenance = {**{k: v for k, v in same.items() if v}, **reading.span(line.columns for line in lines)}
    return Reading(tuple(rows), provenance, tuple(_unsupported(backend, n) for backend, n in unsupported.items()))


def without_values(text: str) -> Reading:
    """Refuse `--output csv`, which has neither times nor whether a case passed."""
    first = next(reading.csv_rows(text, "backend_name"), None)
    raise Refused(
        "the csv of test-backend-ops has neither times nor verdicts; `--output sql` has both",
        first.number if first else 1,
    )


def _of_columns(line: Line, differing: Sequence[str]) -> Row:
    columns = line.columns
    values = measured(columns, (*OPTIONAL, ("memory_kb", "kB"), ("n_runs", "runs")))
    op, op_params = line.text("op_name"), line.text("op_params")
    _agree(op, case_params(op_params), {each.metric: each.values[0] for each in values})
    if not _is(columns, "passed"):
        why = f"it did not pass ({columns.get('error_message') or 'no reason given'})"
        values = [replace(each, discarded=why) for each in values]
    more = {name: columns[name] for name in differing if columns.get(name)}
    return _row(op, line.text("backend_name"), op_params, values, **more)


def _agree(op: str, params: Mapping[str, str], values: Mapping[str, float]) -> None:
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
            raise Refused(f"{values['flops']:.6g} FLOPS for {time:g} us are {flop:.10g} FLOP, {what}")
    if "bandwidth_gb_s" in values and "memory_kb" in values:
        gib, off = _product(values["bandwidth_gb_s"], time)
        if gib + off < values["memory_kb"] * 2.0**-20:  # it may be more: nodes before the operation's are counted
            rate = f"{values['bandwidth_gb_s']:g} GiB/s for {time:g} us"
            raise Refused(f"{rate} are {gib * 2**20:.10g} KiB, less than the {values['memory_kb']:g} it says")


def _product(rate: float, time_us: float) -> tuple[float, float]:
    """Return a rate times a time, and by how much rounding of both may have changed it."""
    product = rate * time_us / 1e6
    return product, product * (EXACT / time_us + EXACT / rate + 1e-12)


# -- rows of all formats ----------------------------------------------------------------------------------------------


def _is(columns: Mapping[str, Any], name: str) -> bool:
    """Return whether a column says 1, as one that is not there does; refuse any other word than 1 and 0."""
    shown = columns.get(name, "1")
    if not (equal(name, 1, shown) or equal(name, 0, shown)):
        raise Refused(f"{name} is {shown}, neither 1 nor 0")
    return equal(name, 1, shown)


def _row(op: str, backend: str, op_params: str, values: Sequence[Values], **more: Any) -> Row:
    """Return a row; `_labelled` completes its label."""
    params = {"op_name": op, **({"backend_name": backend} if backend else {}), **more}
    return Row(
        op, {**params, **{k: reading.number_or_text(v) for k, v in case_params(op_params).items()}}, tuple(values)
    )


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


def _counts(op: str, backend: str, passed: int, total: int, unsupported: int) -> Row:
    counts = {"passed": passed, "total": total, "unsupported": unsupported}
    values = tuple(Values(name, "cases", (float(count),)) for name, count in counts.items())
    params = {"op_name": op, "backend_name": backend, "test_mode": "test"}
    return Row(f"test {op or 'of all ops'}", {k: v for k, v in params.items() if v}, values)


def _unsupported(backend: str, count: int) -> str:
    return f"{count} {'case is' if count == 1 else 'cases are'} not supported by {backend or 'the backend'}"
