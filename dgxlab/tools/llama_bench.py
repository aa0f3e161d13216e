"""llama-bench: prompt and generation speed at given sizes."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dgxlab.model import Cell, CellResult, LlamaBench, Measurement, Param
from dgxlab.tools import tool
from dgxlab.tools.reading import (
    Format,
    Line,
    Reading,
    Row,
    Values,
    agree_at,
    csv_rows,
    finite_at,
    json_array,
    json_lines,
    markdown,
    number_or_text,
    shared,
    span,
    sql,
    value,
    whole_at,
)
from dgxlab.tools.rows import (
    FLASH_ATTN,
    TRUTH,
    Parsed,
    PrintedRow,
    Refused,
    agree,
    finite,
    json_rows,
    match_rows,
    number,
    speed,
)

PROGRAM = "llama-bench"

KEYS = {
    "model": tool.MODEL,
    "n_prompt": tool.Key("Few[Count]", "Prompt lengths, in tokens; a cell each.", ("-p", "--n-prompt"), []),
    "n_gen": tool.Key("Few[Count]", "Numbers of generated tokens; a cell each.", ("-n", "--n-gen"), []),
    "repetitions": tool.Key(
        "Annotated[int, Field(ge=1, le=1000)]",
        "Counted repetitions of a cell; one more is run first and thrown away.",
        ("-r", "--repetitions"),
        5,
    ),
}

OWN_AXES = {
    "n_depth": tool.Key("Whole", "Tokens that are in the context before.", ("-d", "--n-depth")),
    **tool.AXES,
    "n_cpu_moe": tool.Key("Whole", "Layers whose experts stay on the CPU.", ("-ncmoe", "--n-cpu-moe")),
    "no_kv_offload": tool.Key("bool", "Keep the KV cache off the GPU.", ("-nkvo", "--no-kv-offload")),
    "use_mmap": tool.Key("bool", "Map the model file into memory.", ("-mmp", "--mmap")),
    "embeddings": tool.Key("bool", "Compute embeddings instead of logits.", ("-embd", "--embeddings")),
    "cpu_mask": tool.Key("CpuMask", 'CPUs to run on, in hexadecimal, as "0xff".', ("-C", "--cpu-mask")),
    "cpu_strict": tool.Key("bool", "Keep each thread on one CPU.", ("--cpu-strict",)),
    "poll": tool.Key("Percent", "How eagerly threads wait for work, 0 to 100.", ("--poll",)),
}
"""By the columns that the tool prints."""


# -- launches and their output ----------------------------------------------------------------------------------------


def launches(entry: LlamaBench, env: Mapping[str, str], keep: tool.Keep) -> Iterator[tool.Launch]:
    """Yield a launch for all sizes at one setting of the axes.

    It runs one repetition more than asked; the first is cold and thrown away.
    """
    fixed: dict[str, Param] = {"repetitions": entry.repetitions, "args": " ".join(entry.args)}
    sizes = [(n, 0) for n in entry.n_prompt if n] + [(0, n) for n in entry.n_gen if n]
    for setting in tool.settings(entry.axes):
        asked = [s for s in sizes if not tool.excluded({"n_prompt": s[0], "n_gen": s[1], **setting}, entry.exclude)]
        if not asked:
            continue
        # as a row of the tool has it: a number for the words of -fa
        words = {**FLASH_ATTN, **TRUTH, "1": 1, "0": 0, "-1": -1}
        row = {k: words.get(tool.text_of(v), v) if k == "flash_attn" else v for k, v in setting.items()}
        more = tool.varying({k: v for k, v in setting.items() if k != "n_depth"}, entry.axes)
        cells = {}
        for pp, tg in asked:
            label = _label(pp, tg, setting.get("n_depth")) + more
            cells[pp, tg] = Cell("llama-bench", label, {"n_prompt": pp, "n_gen": tg, **row}, fixed)
        left = {size: cell for size, cell in cells.items() if keep(entry.model, cell)}
        flags = (
            *("-p", tool.comma([pp for pp, _ in left if pp] or [0])),  # a size that is left out would be the tool's own
            *("-n", tool.comma([tg for _, tg in left if tg] or [0])),
            *tool.flags_of(setting, OWN_AXES),
            *("-r", str(entry.repetitions + 1)),
            *entry.args,
            *("-o", "jsonl"),
        )
        yield tool.launch_on_model("llama-bench", PROGRAM, entry, env, left.values(), flags)


def _label(pp: int, tg: int, depth: object) -> str:
    """Name a test as the tool does: `pp512`, `tg128 @ d4096`, `pp512+tg128`."""
    return "+".join([f"pp{pp}"] * (pp > 0) + [f"tg{tg}"] * (tg > 0)) + (f" @ d{depth}" if depth else "")


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Read avg_ts (t/s) of each cell: a sample a repetition, the first of them discarded because it is cold.

    Args:
        stdout: As printed; lines that do not start with `{` are ignored.
        cells: With params by llama-bench's column names and fixed["repetitions"], the counted ones.
    """
    rows, problems = json_rows(stdout, PROGRAM)
    return match_rows(cells, [PrintedRow(row, row) for row in rows if row is not None], _read, problems)


def _read(cell: Cell, row: PrintedRow) -> CellResult:
    # From samples_ns: samples_ts has six digits, avg_ts counts the cold repetition, stddev_ns overflows.
    tokens = number(row, "n_prompt") + number(row, "n_gen")
    speeds = [speed(tokens, ns / 1e9) for ns in _samples(cell, row, "samples_ns")]
    if "samples_ts" in row.printed:
        printed = _samples(cell, row, "samples_ts")
        speeds = [agree("a sample in samples_ts", ts, shown) for ts, shown in zip(speeds, printed, strict=True)]
    measurement = Measurement(cell.key, "avg_ts", "t/s", tuple(speeds[1:]), tuple(speeds[:1]))
    return CellResult(cell.key, (measurement,), row.printed)


def _samples(cell: Cell, row: PrintedRow, column: str) -> list[float]:
    samples = row.printed.get(column)
    if not isinstance(samples, list):
        raise Refused(f"its row has no {column}")
    counted = finite(cell.fixed.get("repetitions"), "the number of repetitions")
    if counted < 1 or len(samples) != counted + 1:
        raise Refused(f"it has {len(samples)} samples, not {counted:g} and a first one to throw away")
    return [finite(sample, f"a sample in {column}") for sample in samples]


def exported(raw: dict[str, Any], samples: tool.Samples) -> dict[str, Any]:
    """Return a row with mean and spread computed again: the tool's own count the cold repetition."""
    speeds = list(samples["avg_ts"])
    times = [(raw["n_prompt"] + raw["n_gen"]) / ts * 1e9 for ts in speeds]
    spread_ns, spread_ts = (statistics.stdev(v) if len(v) > 1 else 0.0 for v in (times, speeds))
    return {
        **raw,
        "avg_ns": round(statistics.fmean(times)),
        "stddev_ns": round(spread_ns),
        "avg_ts": statistics.fmean(speeds),
        "stddev_ts": spread_ts,
        "samples_ns": [round(time) for time in times],
        "samples_ts": speeds,
    }


# -- imported files ---------------------------------------------------------------------------------------------------

MADE_BY = ("build_commit", "build_number", "cpu_info", "gpu_info", "backends")
MODEL_COLUMNS = ("model_filename", "model_type", "model_size", "model_n_params")
TEXTS = (
    *("build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type"),
    *("tensor_split", "test_time"),
)
"""Columns that are texts, whatever their digits."""
TEST = ("n_prompt", "n_gen", "n_depth")
MEASURED = ("test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts")

SHOWN = {
    "model": "model_type",
    "size": "model_size",
    "params": "model_n_params",
    "backend": "backends",
    "ngl": "n_gpu_layers",
    "sm": "split_mode",
    "threads": "n_threads",
    "nkvo": "no_kv_offload",
    "fa": "flash_attn",
    "mmap": "use_mmap",
    "dio": "use_direct_io",
    "embd": "embeddings",
    "nopo": "no_op_offload",
    "noh": "no_host",
    "dev": "devices",
    "ts": "tensor_split",
    "ot": "tensor_buft_overrides",
    "fitt": "fit_target",
    "fitc": "fit_min_ctx",
}
"""The columns of the markdown by their names in JSON."""

TESTED = re.compile(r"(?:pp([0-9]{1,9}))?(?:(?:^|\+)tg([0-9]{1,9}))?(?: @ d([0-9]{1,9}))?")
SPEED = re.compile(r"([0-9]{1,12}\.[0-9]{2}) ± ([0-9]{1,12}\.[0-9]{2})")
BUILD = re.compile(r"build: (\S+) \(([0-9]{1,9})\)")


def _of_texts(rows: Sequence[Line]) -> Reading:
    """Read `-o sql` and `-o csv`, whose columns are all texts; a commit of digits alone stays one."""
    return _reading(
        [
            Line(row.number, {k: text if k in TEXTS else number_or_text(text) for k, text in row.columns.items()})
            for row in rows
        ]
    )


def page(text: str) -> Reading:
    """Read `-o md`: mean and spread of each test to two decimals, and the settings that it shows.

    Raises:
        Refused: if a row is broken, or the tables are of several builds.
    """
    builds = list(dict.fromkeys(BUILD.findall(text)))
    if len(builds) > 1:
        raise Refused(f"its tables are of {len(builds)} builds: split it after the first line `build: ...`")
    of_build = dict(zip(("build_commit", "build_number"), builds[0], strict=True)) if builds else {}
    rows = []
    for line in markdown(text, "t/s"):
        cells = {SHOWN.get(name, name): number_or_text(cell) for name, cell in line.columns.items()}
        tested, spread = TESTED.fullmatch(str(cells.pop("test", ""))), SPEED.fullmatch(str(cells.pop("t/s")))
        if not tested or not (tested[1] or tested[2]):
            raise Refused("its test is none of pp512, tg128, pp512+tg128, with or without @ d4096", line.number)
        if not spread:
            raise Refused("its speed is not of the form 123.45 ± 6.78", line.number)
        test = dict(zip(TEST, (int(digits or 0) for digits in tested.groups()), strict=True))
        rows.append(Line(line.number, {**of_build, **cells, **test, "avg_ts": spread[1], "stddev_ts": spread[2]}))
    notes = () if builds else ("no line `build: ...`, with which a table ends: more rows may have followed",)
    return _reading(rows, notes)


def _reading(rows: Sequence[Line], notes: Iterable[str] = ()) -> Reading:
    if not rows:
        return Reading((), {})
    columns = [row.columns for row in rows]
    names = [name for name in columns[0] if name not in (*MEASURED, *TEST)]
    same = shared(columns, names)
    provenance = {name: same[name] for name in (*MADE_BY, *MODEL_COLUMNS) if name in same}
    times = [str(row["test_time"]) for row in columns if "test_time" in row]
    if times:
        provenance["test_time"] = span(times)
    provenance["settings"] = {name: same[name] for name in names if name in same and name not in provenance}
    imported = []
    for row in rows:
        # older versions know no depth
        test = {n: whole_at(n, row.columns.get(n, 0 if n == "n_depth" else None), row.number) for n in TEST}
        own = {name: row.columns[name] for name in row.columns if name not in (*MEASURED, *TEST, *same)}
        label = _label(*test.values()) + "".join(f" {name}={setting}" for name, setting in own.items())
        imported.append(Row(label, {**test, **own}, _values(row, test["n_prompt"] + test["n_gen"])))
    return Reading(tuple(imported), provenance, tuple(notes))


def _values(row: Line, tokens: int) -> tuple[Values, ...]:
    """Return the mean and its spread as printed, and the repetitions' times where they are there."""
    columns, at = row.columns, row.number
    mean = value("avg_ts", "t/s", columns.get("avg_ts"), at, above=0)
    spread = value("stddev_ts", "t/s", columns.get("stddev_ts"), at)
    if spread.values[0] < 0:
        raise Refused(f"stddev_ts is {columns['stddev_ts']}, below 0", at)
    if "samples_ns" not in columns:
        return mean, spread
    times = columns["samples_ns"]
    if not isinstance(times, list) or not times:
        raise Refused("samples_ns is no list of times", at)
    numbers = [finite_at("a time in samples_ns", time, at, above=0) for time in times]
    agree_at("avg_ts", tokens, [ns / 1e9 for ns in numbers], mean.values[0], at)
    return mean, spread, Values("samples_ns", "ns", tuple(numbers))


TOOL = tool.Tool(
    PROGRAM,
    bench=tool.Benchmark(
        "llama-bench",
        "llama-bench: prompt and generation speed at the given sizes.",
        LlamaBench,
        KEYS,
        launches,
        parse,
        compared={"avg_ts": ""},
        exported=exported,
        axes=OWN_AXES,
        owned=("-o", "--output", "-oe", "--output-err", "-pg", "--progress", "--no-warmup", "--delay"),
        either=("n_prompt", "n_gen"),
    ),
    formats={
        "json": Format(_reading, '"n_prompt": ', r'^    "n_prompt": ', rows=json_array),
        "jsonl": Format(_reading, '"n_prompt": ', r'^\{.*"n_prompt": ', rows=json_lines),
        "sql": Format(
            _of_texts,
            "llama_bench",
            r"INSERT INTO llama_bench |CREATE TABLE .*llama_bench",
            rows=lambda text: sql(text, "llama_bench"),
            texts=TEXTS,
        ),
        "csv": Format(
            _of_texts,
            "build_commit",
            r'^"?build_commit"?,',
            rows=lambda text: csv_rows(text, "build_commit"),
            texts=TEXTS,
        ),
        "md": Format(page, " t/s |", r"^\| model +\|.*\| +t/s \|$"),
    },
)
