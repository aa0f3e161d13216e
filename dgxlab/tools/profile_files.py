"""Profiles: kernels by group, SQLite exports of Nsight Systems (nsys), and `ncu --csv` of Nsight Compute.

An export of nsys may have gigabytes, so the record keeps a summary: a line about the file, and a row for each kernel in
each NVTX range. The profiled program must put such a range around each prompt and each step.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dgxlab.gguf_header import TYPES
from dgxlab.tools.reading import Format, Line, Reading, Row, Values, csv_rows, each_line, json_lines, shared
from dgxlab.tools.rows import Refused, column, positive

Durations = Mapping[str, Sequence[int]]  # the duration of each launch, in ns, by kernel

NODES = "graph_nodes"
"""Metric of all kernels together: launches of a step that were nodes of a CUDA graph, if each repetition had some."""

UNITS = {
    "step_us": "us",
    "busy_us": "us",
    "wall_us": "us",
    "launch_us": "us",
    "launches": "launches",
    NODES: "launches",
}
"""Unit of each metric of a row."""

ALL = "all"  # a row's `kernel` if the row is of all kernels together


def summary(rounds: Sequence[Durations], steps: int) -> list[dict[str, Any]]:
    """Return a row for all kernels together, then one for each, by falling time.

    `rounds` are the launches of each repetition, which has so many `steps`: `launches` and `step_us` are per step.
    Raises Refused if the repetitions launched different kernels, or a kernel took no time.
    """
    rows: list[dict[str, Any]] = []
    for kernel in dict.fromkeys(kernel for each in rounds for kernel in each):
        counts = {len(each.get(kernel, ())) for each in rounds}
        if len(counts) > 1:
            differ = f"{kernel} was launched {min(counts)} times in one, {max(counts)} in another"
            raise Refused(f"repetitions differ: {differ}")
        durations = [ns for each in rounds for ns in each[kernel]]
        if not sum(durations):
            raise Refused(f"the time of {kernel} is 0")
        step_us = [sum(each[kernel]) / steps / 1e3 for each in rounds]
        launch_us = (median(durations) or 1) / 1e3  # at least one tick of the clock
        rows.append({"kernel": kernel, "launches": counts.pop() / steps, "launch_us": launch_us, "step_us": step_us})
    if not rows:
        raise Refused("no kernel ran: kernel time is 0")
    rows.sort(key=lambda row: -median(row["step_us"]))
    total = [sum(times) for times in zip(*(row["step_us"] for row in rows), strict=True)]
    return [{"kernel": ALL, "launches": sum(row["launches"] for row in rows), "step_us": total}, *rows]


def samples(row: Mapping[str, Any], metric: str) -> tuple[float, ...]:
    """Return a row's values of a metric, which are a list or a number; raises Refused if one is not above 0."""
    value = column(row, metric)
    return tuple(positive({metric: each}, metric) for each in (value if isinstance(value, list) else [value]))


# -- Nsight Systems ---------------------------------------------------------------------------------------------------

_KERNELS, _COPIES, _SETS = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
_GRAPHS, _CALLS, _RANGES = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_COLUMNS = {
    _KERNELS: "start end deviceId correlationId globalPid demangledName graphNodeId",
    _CALLS: "start end correlationId",
    _RANGES: "start end text textId domainId eventType",
    "StringIds": "id value",
    "META_DATA_EXPORT": "name value",
}
"""Columns that are read, by table; an export that lacks one is refused."""
_PUSHED, _STARTED = 59, 60  # eventType of both kinds of NVTX ranges

_MARKS = f"""SELECT n.start, n.end, coalesce(n.text, s.value, '') FROM {_RANGES} AS n
            LEFT JOIN StringIds AS s ON s.id = n.textId
            WHERE eventType IN (?, ?) AND coalesce(domainId, 0) = 0 AND n.end IS NOT NULL
            ORDER BY n.start"""  # noqa: S608 - our own
"""The program's own ranges: libraries have other domains."""
_WORK = {
    _KERNELS: f"""SELECT k.start AS start, k.end AS end, s.value, correlationId FROM {_KERNELS} AS k
                 JOIN StringIds AS s ON s.id = demangledName""",  # noqa: S608
    _COPIES: f"SELECT start, end, '[memcpy]', correlationId FROM {_COPIES}",  # noqa: S608
    _SETS: f"SELECT start, end, '[memset]', correlationId FROM {_SETS}",  # noqa: S608
}
"""Queries for what ran on the device, by table."""


def _nsys_summary(path: Path) -> str:
    """Return the summary of an nsys export as JSON lines; raises Refused if it cannot be read exactly."""
    import sqlite3  # a host's Python may lack it

    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            pages, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
            state = database.execute("PRAGMA quick_check(1)").fetchone()[0]
            if state != "ok" or pages * size != path.stat().st_size:
                raise Refused(f"it is a damaged SQLite database, or was cut short: {state}")
            lines = list(_nsys_lines(database))
    except sqlite3.Error as error:
        raise Refused(f"it is a damaged SQLite database, or was cut short: {error}") from error
    return "".join(json.dumps(line) + "\n" for line in lines)


def _nsys_lines(database: Any) -> Iterator[dict[str, Any]]:
    tables = {name for (name,) in database.execute("SELECT name FROM sqlite_schema")}
    for table, names in _COLUMNS.items():
        columns = {row[1] for row in database.execute(f"PRAGMA table_info({table})")}
        if columns and (missing := set(names.split()) - columns):
            raise Refused(f"unknown schema: {table} has no {', '.join(sorted(missing))}")
    if missing := {_KERNELS, _CALLS, "StringIds", "META_DATA_EXPORT"} - tables:
        raise Refused(f"unknown schema, or a trace without kernels: it has no table {min(missing)}")
    if _GRAPHS in tables and database.execute(f"SELECT 1 FROM {_GRAPHS}").fetchone():  # noqa: S608 - our own names
        raise Refused("its graphs were traced as wholes: nsys profile --cuda-graph-trace=node sees their kernels")
    for what, name in (("processes", "globalPid"), ("devices", "deviceId")):
        (count,) = database.execute(f"SELECT count(DISTINCT {name}) FROM {_KERNELS}").fetchone()  # noqa: S608
        if count > 1:
            raise Refused(f"it is of {count} {what}")
    meta = dict(database.execute("SELECT name, value FROM META_DATA_EXPORT"))
    yield {"nsys_schema": str(column(meta, "EXPORT_SCHEMA_VERSION"))}
    for phase, rounds in _ranges(database, tables).items():
        yield from ({"phase": phase, "ranges": len(rounds), **row} for row in summary(rounds, 1))


def _ranges(database: Any, tables: set[str]) -> dict[str, list[dict[str, list[int]]]]:
    """Return the durations of kernels and copies in each range, by the ranges' text; work is where it was launched."""
    ranges = database.execute(_MARKS, (_PUSHED, _STARTED)).fetchall() if _RANGES in tables else []
    if not ranges:
        raise Refused("no NVTX range marks a prompt or a step in it: prompt and generation may be in one window")
    if any(after[0] < before[1] for before, after in pairwise(ranges)):
        raise Refused("its NVTX ranges overlap, so that work belongs to several")
    works = " UNION ALL ".join(sql for table, sql in _WORK.items() if table in tables)
    rounds: dict[str, list[dict[str, list[int]]]] = {}
    place, kernels = -1, dict[str, list[int]]()
    sql = f"SELECT w.*, c.start FROM ({works}) AS w JOIN {_CALLS} AS c USING (correlationId) ORDER BY c.start, w.start"  # noqa: S608
    for start, end, name, _, called in database.execute(sql):
        while place + 1 < len(ranges) and ranges[place + 1][0] <= called:
            place, kernels = place + 1, {}
            rounds.setdefault(ranges[place][2], []).append(kernels)
        if place >= 0 and called < ranges[place][1]:
            kernels.setdefault(short(name), []).append(end - start)
    return rounds


def nsys(rows: Sequence[Line]) -> Reading:
    """Parse the summary of an nsys export; raises Refused if a column is missing or not above 0."""
    head, *kernels = rows
    return Reading(tuple(each_line(kernels, lambda line: _nsys_row(line.columns))), head.columns)


def _nsys_row(columns: Mapping[str, Any]) -> Row:
    kernel, phase = str(column(columns, "kernel")), str(column(columns, "phase"))
    params = {"phase": phase, "kernel": kernel, "group": ALL if kernel == ALL else group_of(kernel)}
    values = [Values(name, unit, samples(columns, name)) for name, unit in UNITS.items() if name in columns]
    return Row(f"{phase} {params['group']}: {kernel}", params, tuple(values))


# -- Nsight Compute ---------------------------------------------------------------------------------------------------

_FIRST = "ID"
_SHAPE = ("Kernel Name", "Grid Size", "Block Size")
_TIME = "gpu__time_duration.sum"
_SCALES = {
    **dict.fromkeys(("ns", "nsecond"), ("us", 1e-3)),
    **dict.fromkeys(("us", "usecond"), ("us", 1.0)),
    **dict.fromkeys(("ms", "msecond"), ("us", 1e3)),
    **dict.fromkeys(("s", "second"), ("us", 1e6)),
    **{f"{prefix}byte": ("byte", 1e3**power) for power, prefix in enumerate(("", "K", "M", "G"))},
}
"""ncu's units, which depend on the size of a value: (unit to record, factor to it)."""


def ncu(text: str) -> Reading:
    """Parse `ncu --csv`, of either page: a row for each kernel with its grid and block size, and a launch's metrics.

    Raises Refused if the text is of several processes or devices, a row is broken or missing, a kernel took no time, or
    its values of a metric have several units.
    """
    rows = list(csv_rows(text, _FIRST))
    if rows and "Metric Name" not in rows[0].columns:
        rows = [line for launch in rows[1:] for line in _metrics(launch, units=rows[0])]
    for name in ("Process ID", "Device"):
        if len(there := {line.text(name) for line in rows}) > 1:
            raise Refused(f"it is of {len(there)} values of {name}")
    counted = Counter(line.text(_FIRST) for line in rows)
    if len(set(counted.values())) > 1:
        raise Refused(
            f"launch {min(counted, key=counted.__getitem__)} lacks metrics that others have: it was cut short"
        )
    same = shared([line.columns for line in rows], ("Process Name", "Device", "CC", "Host Name"))
    kernels: dict[tuple[str, ...], dict[str, tuple[str, list[float]]]] = {}
    sections: dict[str, str] = {}  # the first one of each metric: another one may give it in another unit
    for line in rows:
        unit, factor = _SCALES.get(unit := line.text("Metric Unit"), (unit, 1.0))
        digits, metric = line.text("Metric Value").replace(",", ""), line.text("Metric Name")
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", digits) or (metric == _TIME and not float(digits)):
            raise Refused(f"{metric} is {digits[:40]!r}", line.number)
        section = line.columns.get("Section Name", "")
        metric = metric if sections.setdefault(metric, section) == section else f"{section}: {metric}"
        metrics = kernels.setdefault(tuple(line.text(name) for name in _SHAPE), {})
        first, values = metrics.setdefault(metric, (unit, []))
        if unit != first:
            raise Refused(f"{metric} is in {first}, and in {unit}: ncu --print-units base gives one unit", line.number)
        values.append(float(digits) * factor)
    return Reading(tuple(_ncu_row(*each) for each in kernels.items()), same)


def _metrics(launch: Line, units: Line) -> Iterator[Line]:
    """Yield a line a metric, as the details page has them, of a launch in a line of `--page raw`.

    That page adds attributes of the device, and the mean and extremes over a chip's units to each sum.
    """
    for name, unit in units.columns.items():
        if re.fullmatch(r"(?!device__|launch__)\w+__\w+\.\S*(?<!\.avg)(?<!\.max)(?<!\.min)", name):
            metric = {"Metric Name": name, "Metric Unit": unit, "Metric Value": launch.text(name)}
            yield Line(launch.number, {**launch.columns, **metric})


def _ncu_row(shape: Sequence[str], metrics: Mapping[str, tuple[str, Sequence[float]]]) -> Row:
    kernel, grid, block = shape
    params = {"kernel": short(kernel), "group": group_of(kernel), "grid": grid, "block": block}
    values = [Values({_TIME: "launch_us"}.get(name, name), unit, tuple(each)) for name, (unit, each) in metrics.items()]
    launches = max(len(each.values) for each in values)
    label = f"{params['group']}: {params['kernel']} {grid} {block}"
    return Row(label, params, (*values, Values("launches", "launches", (float(launches),))))


FORMATS = {
    "nsys": Format(
        nsys,
        '"nsys_schema"',
        r'^\{"nsys_schema"',
        rows=json_lines,
        profiler=True,
        binary=b"SQLite format 3\0",
        summary=_nsys_summary,
    ),
    "ncu": Format(ncu, '"Kernel Name"', r'^"ID","Process ID","Process Name"', profiler=True),
}


# -- groups of kernels -------------------------------------------------------------------------------------------------


_RULES = tuple(
    (re.compile(pattern), group)
    for pattern, group in (
        (r"\bmul_mat_(?:q|vec_q|vec_q_moe|q_stream_k_fixup)<[^,>]*?(?P<type>\d+)[,>]", "products {type}"),
        (r"\bnvfp4_grouped<", "products NVFP4"),
        (r"\bquantize_(?:mmq_)?(?:q8_1|mxfp4|nvfp4)\b|\bnvfp4_grouped_to_f16", "activation quantise"),
        (r"\bflash_attn|\bsoft_?max|\bsoftcap|\bdiag_mask", "attention"),
        (r"\b(?:rms|l2|group)?_?norm_f32", "norms"),
        (r"\brope_", "rope"),
        (
            r"\bgated_(?:delta_net|linear_attn)|\b(?:gdn|conv)_state|\bssm_(?:conv|scan)|\brwkv_|\bsolve_tri|\bcumsum|\btri_kernel",
            "state",
        ),
        (
            r"\btopk_moe|\bargsort|\bmm_ids_helper|\bnvfp4_grouped_route|\binit_(?:indices|offsets)|RadixSort|\bargmax",
            "routing",
        ),
        (r"\bdequantize_block", "dequantise"),
        (r"\bmul_mat_(?:f|f_ids|vec_f)\b|gemm|gemv|nvjet|cutlass|xmma|splitK|k_compute_batched_ptrs", "products float"),
        (r"^\[mem|\bcpy_|\bk_(?:get|set)_rows|\bconcat|\bconvert_unary|\bk_repeat|\bpad_f32|\bfill_kernel", "copies"),
        (
            r"\bk_bin_bcast|\bunary_|\bswiglu|\bscale_f32|\bop_clamp|\badd_id|\bsilu|\breduce_rows|\bxielu|\bacc_f32",
            "elementwise",
        ),
    )
)
"""(pattern, group); the first match decides. `{type}` is ggml's name of the weights' type: 40 in a name is NVFP4."""

OTHER = "other"  # the group of kernels that no rule matches


def group_of(kernel: str) -> str:
    """Return the group of a kernel, given its name: `attention`, `products q4_0`."""
    for pattern, group in _RULES:
        if match := pattern.search(kernel):
            number = int(match.groupdict().get("type") or -1)
            return group.format(type=TYPES.get(number, (f"type {number}",))[0])
    return OTHER


def short(kernel: str) -> str:
    """Return a kernel's name without return type and parameters, from CUPTI, nsys or ncu: `mul_mat_q<40, 128>`.

    Without what only one build calls it, so that a kernel has one name in all; three equal parameters are `float x3`.
    """
    name = re.sub(r"\((?:ggml_type|int|bool|unsigned int|long)\)(?=[\w-])", "", kernel)  # nsys and ncu write (int)64
    name = re.sub(r"\[clone .*\]$|<unnamed>::|\(anonymous namespace\)::|\b_INTERNAL_\w+::", "", name)
    name = re.sub(r"&\(void (\w+)[^()]*\([^()]*\)\)", r"&\1", name)  # a function as an argument
    name = re.sub(r"(, [^,<>]+)(?:\1(?=[,>])){2,}", lambda m: f"{m[1]} x{len(m[0]) // len(m[1])}", name)
    depth, end = 0, len(name)
    for place, char in enumerate(name):
        depth += (char in "<") - (char in ">")
        if char == "(" and depth == 0:
            end = place
            break
    return re.sub(r"^(?:static )?void ", "", name[:end]).strip()
