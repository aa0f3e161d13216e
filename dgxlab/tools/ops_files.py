"""Imported output of test-backend-ops: the console of `perf` and `test`, and rows with columns (SQL, JSON lines)."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dgxlab.tools import reading
from dgxlab.tools.parity import CASE, Section, read_gate, sections
from dgxlab.tools.reading import ORIGIN, Line, Reading, Row, Values
from dgxlab.tools.rows import Columns, Refused, case_params, equal, number

OPTIONAL = (("flops", "FLOPS"), ("bandwidth_gb_s", "GiB/s"))
"""(metric, unit) of which a case has one; the program prints the other as 0."""


def measured(columns: Columns, optional: Sequence[tuple[str, str]]) -> list[Values]:
    """Return a row's time_us, and its values of the `optional` metrics (name, unit) that are not 0 or missing."""
    values = [reading.value("time_us", "us", columns)]
    for metric, unit in optional:
        amount = number(columns, metric) if metric in columns else 0.0
        if amount < 0:
            raise Refused(f"{metric} is {columns[metric]}, below 0")
        values += [Values(metric, unit, (amount,))] if amount else []
    return values


# -- imported from the console ----------------------------------------------------------------------------------------

_SCALE = {"k": "e3", "M": "e6", "G": "e9", "T": "e12"}
_RUNS = r"(?<= {4})([0-9]{1,10}) runs - +([0-9]{1,12}\.[0-9]{2}) us/run - +"
FLOPS = re.compile(_RUNS + r"([0-9]{1,12}\.[0-9]{2}) ([kMGT])FLOP/run - +([0-9]{1,12}\.[0-9]{2}) ([kMGT])FLOPS")
_BYTES = re.compile(_RUNS + r"([0-9]{1,15}) kB/run - +([0-9]{1,12}\.[0-9]{2}) GB/s")

_DESCRIPTION = re.compile(r"^  Device description: (.*\S)", re.MULTILINE)
_NO_SUPPORT = re.compile(r"(?:^|: )not supported(?: \[[^\]]*\])? *$")
_HALF = 0.0050001  # half of the console's second decimal, and what binary fractions make of it


def console(text: str) -> Reading:
    """Parse the console output of `perf` or `test`; raises Refused if it cannot be read exactly."""
    rows: list[Row] = []
    notes: list[str] = []
    for section in sections(text):
        if _holds(section, "us/run") or _holds(section, " runs - "):
            rows += _labelled(_perf(section, notes))
        elif at := _holds(section, "tests passed"):
            rows.append(_test(text, section.backend, at, notes))
        elif at := _holds(section, "SUPPORTED"):
            raise Refused("it says what is supported, and has no values", at)
        else:
            for at, line in section.lines:
                if case := CASE.search(line):
                    raise Refused(f"the case {case[1]} has no result: the file was cut short", at)
    described = "; ".join(dict.fromkeys(_DESCRIPTION.findall(text)))
    return Reading(tuple(rows), {"device_description": described} if described else {}, tuple(notes))


def _holds(section: Section, words: str) -> int:
    """Return the number of the first line that holds these words, 0 without one."""
    return next((number for number, line in section.lines if words in line), 0)


def _perf(section: Section, notes: list[str]) -> list[Row]:
    rows: list[Row] = []
    begun, begun_at, unsupported = "", 0, 0  # the case whose result is still to come
    for at, text in section.lines:
        for case in CASE.finditer(text):
            if begun:
                raise Refused(f"the case {begun} has no result", begun_at)
            begun, begun_at = case[1], at
        looks = " runs - " in text or "us/run" in text
        result = (FLOPS.search(text) or _BYTES.search(text)) if looks else None
        if result and result.end() == len(text):
            if not begun:
                raise Refused("a result without its case", at)
            op, _, op_params = begun[:-1].partition("(")
            with reading.at_line(at):
                rows.append(_row(op, section.backend, op_params, _result(result)))
            begun = ""
        elif looks:
            raise Refused("it looks like a result and cannot be read", at)
        elif begun and _NO_SUPPORT.search(text):
            unsupported += 1
            begun = ""
    ended = section.status in ("OK", "FAIL")
    if begun and ended:
        raise Refused(f"the case {begun} has no result", begun_at)
    if unsupported:
        notes.append(_unsupported(section.backend, unsupported))
    if not ended:
        after = f" after {begun}, which has no result" if begun else ""
        notes.append(f"it was cut short{after}: no line says that backend {section.backend or 'tested'} was through")
    return rows


def _result(result: re.Match[str]) -> list[Values]:
    """Return the values of a case's line, refused where its rounded numbers cannot come from one measurement."""
    printed = {"n_runs": result[1], "time_us": result[2]}
    values = [reading.value("time_us", "us", printed), reading.value("n_runs", "runs", printed)]
    if result.re is _BYTES:
        values.append(Values("memory_kb", "kB", (float(result[3]),)))
        rate = float(result[4])
        return [*values, Values("bandwidth_gb_s", "GiB/s", (rate,))] if rate else values
    (least, most), (low, high) = _bounds(result[3], result[4]), _bounds(result[5], result[6])
    longest, shortest = float(result[2]) + _HALF, float(result[2]) - _HALF
    if least / longest * 1e6 > high or (shortest > 0 and most / shortest * 1e6 < low):
        raise Refused(f"{result[3]} {result[4]}FLOP in {result[2]} us are not {result[5]} {result[6]}FLOPS")
    return [*values, reading.value("flops", "FLOPS", {"flops": result[5] + _SCALE[result[6]]})]


def _bounds(digits: str, scale: str) -> tuple[float, float]:
    """Return between what values a number was rounded to two decimals of its scale; FLOPs a run are cut to whole."""
    factor = float(f"1{_SCALE[scale]}")
    return (float(digits) - _HALF) * factor - 1, (float(digits) + _HALF) * factor + 1


def _test(text: str, backend: str, line: int, notes: list[str]) -> Row:
    """Read a parity test as its gate does, which sees every contradiction; `line` has the summary."""
    gate = read_gate(text, backend)
    if gate.passed is None or gate.total is None:
        raise Refused(f"backend {backend} has no one readable summary", line)
    if gate.contradictions:
        raise Refused(gate.contradictions[0], line)
    if not gate.total:
        raise Refused(f"backend {backend} ran 0 of 0 cases: nothing was tested", line)
    ops = {case.partition("(")[0] for case in gate.cases}
    notes += [f"failed: {case}" for case in gate.failed]
    return _counts(ops.pop() if len(ops) == 1 else "", backend, gate.passed, gate.total, gate.unsupported)


# -- imported rows with columns ---------------------------------------------------------------------------------------

_OF_THE_FILE = ("build_commit", "device_description", "backend_reg_name", *ORIGIN)
"""Columns that become provenance of the file if all of its rows agree on them."""
_EXACT = 5.0001e-7  # half of the sixth decimal that SQL has
_FACTORS = {"MUL_MAT": ("m", "n", "k", "bs", "nr"), "MUL_MAT_ID": ("m", "n", "k", "n_used")}
"""By operation, the parameters whose product is half its FLOPs; other formulas change with llama.cpp."""


def rows_of_columns(lines: Sequence[Line]) -> Reading:
    """Parse the rows of `--output sql` or `dgxlab export` to a row per case of `perf`, and one per op of `test`."""
    same = reading.shared([line.columns for line in lines], _OF_THE_FILE)
    differing = [name for name in _OF_THE_FILE if name not in same]
    rows: list[Row] = []
    tested: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    unsupported: Counter[str] = Counter()
    for line in lines:
        with reading.at_line(line.number):
            mode, supported = line.text("test_mode"), is_set(line.columns, "supported")
            if mode == "test":
                cases = tested[line.text("backend_name"), line.text("op_name")]
                cases["total" if supported else "unsupported"] += 1
                cases["passed"] += is_set(line.columns, "passed") and supported
            elif mode != "perf":
                raise Refused(f"a row of mode {mode}, not of perf or test")
            elif supported:
                rows.append(_of_columns(line, differing))
            else:
                unsupported[line.text("backend_name")] += 1
    counts = [_counts(op, backend, n["passed"], n["total"], n["unsupported"]) for (backend, op), n in tested.items()]
    provenance = {**{k: v for k, v in same.items() if v}, **reading.span(line.columns for line in lines)}
    notes = tuple(_unsupported(backend, n) for backend, n in unsupported.items())
    return Reading((*_labelled(rows), *counts), provenance, notes)


def _of_columns(line: Line, differing: Sequence[str]) -> Row:
    columns = line.columns
    values = measured(columns, (*OPTIONAL, ("memory_kb", "kB"), ("n_runs", "runs")))
    op, op_params = line.text("op_name"), line.text("op_params")
    _agree(op, case_params(op_params), {each.metric: each.values[0] for each in values})
    if why := failure(columns):
        values = [replace(each, discarded=why) for each in values]
    more = {name: columns[name] for name in differing if columns.get(name)}
    return _row(op, line.text("backend_name"), op_params, values, **more)


def _agree(op: str, params: Mapping[str, str], values: Mapping[str, float]) -> None:
    """Refuse a row whose rate, times its time, is not what one run of its case computes or moves."""
    time = values["time_us"]
    if "flops" in values:
        flop, off = _product(values["flops"], time)
        # doubled, the product of all numbers of a case; None where its parameters do not tell them
        numbers = [re.findall(r"[0-9]+", params.get(name, "")) for name in _FACTORS.get(op, ())]
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
    return product, product * (_EXACT / time_us + _EXACT / rate + 1e-12)


# -- rows of all formats ----------------------------------------------------------------------------------------------


def is_set(columns: Columns, name: str) -> bool:
    """Return whether the column `name` is 1 or missing; raises Refused if it is neither 1 nor 0."""
    shown = columns.get(name, "1")
    if not (equal(1, shown) or equal(0, shown)):
        raise Refused(f"{name} is {shown}, neither 1 nor 0")
    return equal(1, shown)


def failure(columns: Columns) -> str:
    """Return why a row's values do not count, if its case did not pass; "" if it passed."""
    return "" if is_set(columns, "passed") else f"it did not pass ({columns.get('error_message') or 'no reason given'})"


def _row(op: str, backend: str, op_params: str, values: Sequence[Values], **more: Any) -> Row:
    params = {"op_name": op, **({"backend_name": backend} if backend else {}), **more}
    params |= {k: reading.number_or_text(v) for k, v in case_params(op_params).items()}
    return Row(op, params, tuple(values))


def _labelled(rows: Sequence[Row]) -> Iterator[Row]:
    """Label each row with the parameters in which its op's rows differ, with all where they do not differ."""
    ops: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        ops[row.params["op_name"]].append(row)
    same = {}
    for op, each in ops.items():
        values = {name: {row.params.get(name) for row in each} for name in each[0].params}
        alike = {name for name, some in values.items() if len(some) == 1}
        same[op] = {"op_name", "backend_name"} if len(each) == 1 else alike
    for row in rows:
        own = {k: v for k, v in row.params.items() if k not in same[row.label]} or dict(row.params)
        yield replace(row, label=" ".join([row.label, *(f"{k}={v}" for k, v in own.items() if k != "op_name")]))


def _counts(op: str, backend: str, passed: int, total: int, unsupported: int) -> Row:
    counts = {"passed": passed, "total": total, "unsupported": unsupported}
    values = tuple(Values(name, "cases", (float(count),)) for name, count in counts.items())
    params = {"op_name": op, "backend_name": backend, "test_mode": "test"}
    return Row(f"test {op or 'of all ops'}", {k: v for k, v in params.items() if v}, values)


def _unsupported(backend: str, count: int) -> str:
    return f"{count} {'case is' if count == 1 else 'cases are'} not supported by {backend or 'the backend'}"
