"""llama-bench: prompt and generation speed at given sizes."""

import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dgxlab.model import Cell, CellResult, Measurement, Param
from dgxlab.tools import reading, tool
from dgxlab.tools.reading import Format, Line, Reading, Row, Values
from dgxlab.tools.rows import Columns, Parsed, Refused, agree, finite, json_rows, match_rows, number, positive, speed
from dgxlab.tools.tool import Benchmark, Keep, Key, Launch, Samples, Tool, key

PROGRAM = "llama-bench"

AXES = {
    "n_depth": Key("Whole", "Tokens that are in the context before.", ("-d", "--n-depth")),
    **tool.AXES,
    "n_cpu_moe": Key("Whole", "Layers whose experts stay on the CPU.", ("-ncmoe", "--n-cpu-moe")),
    "no_kv_offload": Key("bool", "Keep the KV cache off the GPU.", ("-nkvo", "--no-kv-offload")),
    "use_mmap": Key("bool", "Map the model file into memory.", ("-mmp", "--mmap")),
    "embeddings": Key("bool", "Compute embeddings instead of logits.", ("-embd", "--embeddings")),
    "cpu_mask": Key("CpuMask", 'CPUs to run on, in hexadecimal, as "0xff".', ("-C", "--cpu-mask")),
    "cpu_strict": Key("bool", "Keep each thread on one CPU.", ("--cpu-strict",)),
    "poll": Key("Percent", "How eagerly threads wait for work, 0 to 100.", ("--poll",)),
}
"""Settings that an entry may vary, by the columns that the tool prints."""


# -- the output of a launch -------------------------------------------------------------------------------------------


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Parse JSON lines of llama-bench: of each cell, avg_ts (t/s) with its `samples_ts`; the first one is discarded.

    The first repetition is slower than the others, as it is cold.
    """
    rows, problems = json_rows(stdout, PROGRAM)
    return match_rows(cells, [row for row in rows if row is not None], _read, problems)


def _read(cell: Cell, row: Columns) -> CellResult:
    # From samples_ns: samples_ts has six digits, avg_ts counts the cold repetition, stddev_ns overflows.
    tokens = number(row, "n_prompt") + number(row, "n_gen")
    speeds = [speed(tokens, ns / 1e9) for ns in _samples(cell, row, "samples_ns")]
    if "samples_ts" in row:
        printed = _samples(cell, row, "samples_ts")
        speeds = [agree("a sample in samples_ts", ts, shown) for ts, shown in zip(speeds, printed, strict=True)]
    measurement = Measurement(cell.key, "avg_ts", "t/s", tuple(speeds[1:]), tuple(speeds[:1]))
    return CellResult(cell.key, (measurement,), row)


def _samples(cell: Cell, row: Columns, column: str) -> list[float]:
    samples = row.get(column)
    if not isinstance(samples, list):
        raise Refused(f"its row has no {column}")
    counted = finite(cell.fixed.get("repetitions"), "the number of repetitions")
    if counted < 1 or len(samples) != counted + 1:
        raise Refused(f"it has {len(samples)} samples, not {counted:g} and a first one to throw away")
    return [finite(sample, f"a sample in {column}") for sample in samples]


def exported(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
    """Return a recorded row with mean and spread of `samples`; the tool's own include the cold repetition."""
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


@dataclass(frozen=True)
class LlamaBench(Benchmark):
    """llama-bench: prompt and generation speed at the given sizes."""

    name = "llama-bench"
    compared: ClassVar = {"avg_ts": ""}
    axis_keys = AXES
    owned = ("-o", "--output", "-oe", "--output-err", "-pg", "--progress", "--no-warmup", "--delay")
    either = ("n_prompt", "n_gen")
    form = "single-stream"
    parse = staticmethod(parse)
    exported = staticmethod(exported)

    model: str = key("Name", "A name under models.", flags=("-m", "--model"))
    n_prompt: tuple[int, ...] = key(
        "Few[Count]", "Prompt lengths, in tokens; a cell each.", [], flags=("-p", "--n-prompt")
    )
    n_gen: tuple[int, ...] = key("Few[Count]", "Numbers of generated tokens; a cell each.", [], flags=("-n", "--n-gen"))
    axes: Mapping[str, tuple[Param, ...]] = field(default_factory=dict)  # values by key of AXES
    repetitions: int = key(
        "Annotated[int, Field(ge=1, le=1000)]",
        "Counted repetitions of a cell; one more is run first and thrown away.",
        5,
        flags=("-r", "--repetitions"),
    )
    args: tuple[str, ...] = ()

    def launches(self, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
        """Yield a launch for each combination of the axes, with all sizes."""
        fixed: dict[str, Param] = {"repetitions": self.repetitions, "args": " ".join(self.args)}
        sizes = [(n, 0) for n in self.n_prompt if n] + [(0, n) for n in self.n_gen if n]
        for setting in tool.settings(self.axes):
            asked = [s for s in sizes if not tool.excluded({"n_prompt": s[0], "n_gen": s[1], **setting}, self.exclude)]
            if not asked:
                continue
            more = tool.varying({k: v for k, v in setting.items() if k != "n_depth"}, self.axes)
            cells = {}
            for pp, tg in asked:
                label = name_of_test({"n_prompt": pp, "n_gen": tg, **setting}) + more
                cells[pp, tg] = Cell(self.name, label, {"n_prompt": pp, "n_gen": tg, **setting}, fixed)
            left = {size: cell for size, cell in cells.items() if keep(self.model, cell)}
            flags = (
                # an omitted size would be the tool's default
                *("-p", ",".join(str(pp) for pp, _ in left if pp) or "0"),
                *("-n", ",".join(str(tg) for _, tg in left if tg) or "0"),
                *tool.flags_of(setting, AXES),
                *("-r", str(self.repetitions + 1)),  # the first is cold and discarded
                *self.args,
                *("-o", "jsonl"),
            )
            yield tool.launch_on_model(PROGRAM, self, env, left.values(), flags)


def name_of_test(params: Mapping[str, Any]) -> str:
    """Return the tool's name of a test: `pp512`, `tg128`, `pp512+tg128`, `tg128 @ d4096`."""
    parts = [f"{word}{params[key]}" for word, key in (("pp", "n_prompt"), ("tg", "n_gen")) if params.get(key)]
    return "+".join(parts) + (f" @ d{params['n_depth']}" if params.get("n_depth") else "")


# -- imported files ---------------------------------------------------------------------------------------------------

_MADE_BY = ("build_commit", "build_number", "cpu_info", "gpu_info", "backends")
_MODEL_COLUMNS = ("model_filename", "model_type", "model_size", "model_n_params")
_TEXTS = (
    *("build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type"),
    *("tensor_split", "test_time"),
)
"""Columns that are texts, whatever their digits."""
_TEST = ("n_prompt", "n_gen", "n_depth")
MEASURED = ("test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts")

_SHOWN = {
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

_TESTED = re.compile(r"(?:pp([0-9]{1,9}))?(?:(?:^|\+)tg([0-9]{1,9}))?(?: @ d([0-9]{1,9}))?")
_SPEED = re.compile(r"([0-9]{1,12}\.[0-9]{2}) ± ([0-9]{1,12}\.[0-9]{2})")
_BUILD = re.compile(r"build: (\S+) \(([0-9]{1,9})\)")


def page(text: str) -> Reading:
    """Read `-o md`: mean and spread of each test to two decimals, and the settings that it shows."""
    builds = list(dict.fromkeys(_BUILD.findall(text)))
    if len(builds) > 1:
        raise Refused(f"its tables are of {len(builds)} builds: split it after the first line `build: ...`")
    of_build = dict(zip(("build_commit", "build_number"), builds[0], strict=True)) if builds else {}
    notes = () if builds else ("no line `build: ...`, with which a table ends: more rows may have followed",)
    rows = list(
        reading.each_line(reading.markdown(text, "t/s"), lambda line: Line(line.number, {**of_build, **_shown(line)}))
    )
    return _reading(rows, notes)


def _shown(line: Line) -> dict[str, Any]:
    cells: dict[str, Any] = {
        _SHOWN.get(name, name): reading.number_or_text(cell) for name, cell in line.columns.items()
    }
    tested, spread = _TESTED.fullmatch(str(cells.pop("test", ""))), _SPEED.fullmatch(str(cells.pop("t/s")))
    if not tested or not (tested[1] or tested[2]):
        raise Refused("its test is none of pp512, tg128, pp512+tg128, with or without @ d4096")
    if not spread:
        raise Refused("its speed is not of the form 123.45 ± 6.78")
    test = dict(zip(_TEST, (int(digits or 0) for digits in tested.groups()), strict=True))
    return {**cells, **test, "avg_ts": spread[1], "stddev_ts": spread[2]}


def _reading(rows: Sequence[Line], notes: Iterable[str] = ()) -> Reading:
    columns = [row.columns for row in rows]
    names = [name for name in (columns[0] if columns else ()) if name not in (*MEASURED, *_TEST)]
    same = reading.shared(columns, names)
    provenance: dict[str, Any] = {name: same[name] for name in (*_MADE_BY, *_MODEL_COLUMNS) if name in same}
    provenance |= reading.span(columns)
    if rows:
        provenance["settings"] = {name: same[name] for name in names if name in same and name not in provenance}
    return Reading(tuple(reading.each_line(rows, lambda row: _row(row.columns, same))), provenance, tuple(notes))


def _row(columns: Mapping[str, Any], same: Mapping[str, Any]) -> Row:
    """Return a row with mean and spread as printed, and the repetitions' times where they are there."""
    test = {name: reading.whole({"n_depth": 0, **columns}, name) for name in _TEST}  # older versions know no depth
    own = {name: columns[name] for name in columns if name not in (*MEASURED, *_TEST, *same)}
    label = name_of_test(test) + "".join(f" {name}={setting}" for name, setting in own.items())
    mean, spread = reading.value("avg_ts", "t/s", columns), reading.value("stddev_ts", "t/s", columns, above_0=False)
    if spread.values[0] < 0:
        raise Refused(f"stddev_ts is {columns['stddev_ts']}, below 0")
    values = [mean, spread]
    if "samples_ns" in columns:
        times = columns["samples_ns"]
        if not isinstance(times, list) or not times:
            raise Refused("samples_ns is no list of times")
        numbers = [positive({"a time in samples_ns": time}, "a time in samples_ns") for time in times]
        tokens = test["n_prompt"] + test["n_gen"]
        agree("avg_ts", statistics.fmean(speed(tokens, ns / 1e9) for ns in numbers), mean.values[0])
        values.append(Values("samples_ns", "ns", tuple(numbers)))
    return Row(label, {**test, **own}, tuple(values))


TOOL = Tool(
    PROGRAM,
    bench=LlamaBench,
    formats={
        "json": Format(_reading, '"n_prompt": ', r'^    "n_prompt": ', rows=reading.json_array),
        "jsonl": Format(_reading, '"n_prompt": ', r'^\{.*"n_prompt": ', rows=reading.json_lines),
        "sql": Format(
            _reading,
            "llama_bench",
            r"INSERT INTO llama_bench |CREATE TABLE .*llama_bench",
            rows=lambda text: reading.sql(text, "llama_bench"),
            texts=_TEXTS,
        ),
        "csv": Format(
            _reading,
            "build_commit",
            r'^"?build_commit"?,',
            rows=lambda text: reading.csv_rows(text, "build_commit"),
            texts=_TEXTS,
        ),
        "md": Format(page, " t/s |", r"^\| model +\|.*\| +t/s \|$"),
    },
)
