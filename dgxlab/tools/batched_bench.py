"""llama-batched-bench: speed with many sequences at once."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dgxlab.errors import SpecError
from dgxlab.model import Cell, CellResult, Measurement, Param
from dgxlab.tools import reading, tool
from dgxlab.tools.reading import Format, Line, Reading, Row
from dgxlab.tools.rows import Columns, Parsed, Refused, agree, equal, json_rows, match_rows, number, positive, speed
from dgxlab.tools.tool import Benchmark, Keep, Key, Launch, Tool, key

PROGRAM = "llama-batched-bench"

# -- the output of a launch -------------------------------------------------------------------------------------------


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Parse speed_pp, speed_tg and speed (t/s) of each cell, one sample each and a discarded cold one.

    The first half of the rows is cold. The last row is spare and may be missing. With any other number of rows there
    are no results: the program omits rows that do not fit the context and exits with 0.
    """
    rows, problems = json_rows(stdout, PROGRAM)
    if len(rows) == 2 * len(cells) + 1:
        last = [[row.get(name) for name in ("pp", "tg", "pl")] for row in rows[-2:] if row is not None]
        if all(size == last[0] for size in last) and rows.pop() is None:
            problems.pop()  # the spare row may be cut
    if len(rows) != 2 * len(cells):
        wanted = f"{2 * len(cells)}: {len(cells)} twice, to throw the first half away"
        return Parsed(problems=(*problems, f"{PROGRAM} printed {len(rows)} rows, not {wanted}"))
    half = len(cells)
    cold, warm = ([row for row in part if row is not None] for part in (rows[:half], rows[half:]))
    first = match_rows(cells, cold, _read)
    second = match_rows(cells, warm, _read, (*problems, *first.problems))
    before = {result.cell: result for result in first.results}
    results = []
    for result in second.results:
        if result.cell in before:  # a cell needs both
            pairs = zip(result.measurements, before[result.cell].measurements, strict=True)
            both = tuple(replace(counted, discarded=early.samples) for counted, early in pairs)
            results.append(replace(result, measurements=both))
    return Parsed(tuple(results), second.problems)


def _read(cell: Cell, row: Columns) -> CellResult:
    # The times are whole microseconds as printed, so they carry the measured value; the speeds are rounded from them.
    is_shared = not equal(0, row.get("is_pp_shared", 0))
    sizes = number(row, "pp"), number(row, "tg"), number(row, "pl")
    measurements = []
    for metric, time, tokens in _speeds(*sizes, is_shared):
        speed_of_time = agree(metric, speed(tokens, positive(row, time)), positive(row, metric))
        measurements.append(Measurement(cell.key, metric, "t/s", (speed_of_time,)))
    return CellResult(cell.key, tuple(measurements), row)


def _speeds(pp: float, tg: float, pl: float, is_shared: bool) -> Iterator[tuple[str, str, float]]:
    """Yield each speed of a row with the name of its time and its tokens; a shared prompt is computed once."""
    prompt, generated = pp * (1 if is_shared else pl), tg * pl
    yield "speed_pp", "t_pp", prompt
    yield "speed_tg", "t_tg", generated
    yield "speed", "t", prompt + generated


# -- launches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchedBench(Benchmark):
    """llama-batched-bench: prompt and generation speed with npl sequences at once."""

    name = "batched-bench"
    # a cell without a prompt, or without generation, has one speed only
    compared: ClassVar = {"speed_pp": "pp", "speed_tg": "tg"}
    axis_keys: ClassVar = {
        "n_ctx": Key("Count", "Context size, in tokens, for all sequences together.", ("-c", "--ctx-size")),
        **tool.AXES,
    }
    owned: ClassVar[tuple[str, ...]] = ("--output-format", "--log-disable", "--log-file", "--log-colors")
    rounds = 2
    # now and then it exits 0 before its logger has written the last rows; the spare row makes it rare
    attempts = 3
    form = "concurrency"
    parse = staticmethod(parse)

    model: str = key("Name", "A name under models.", flags=("-m", "--model"))
    npp: tuple[int, ...] = key("Many[Count]", "Prompt lengths, in tokens.", flags=("-npp",))
    ntg: tuple[int, ...] = key("Many[Count]", "Generated tokens of each sequence.", flags=("-ntg",))
    npl: tuple[int, ...] = key("Many[Count]", "Numbers of sequences at once.", flags=("-npl",))
    axes: Mapping[str, tuple[Param, ...]] = field(default_factory=dict)
    args: tuple[str, ...] = ()

    def launches(self, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
        """Yield a launch for each combination of npp, ntg and other axes, with all values of npl.

        The launch measures the list of npl twice, because the first call of a size also allocates buffers and loads
        kernels, and its last value once more, because the tool can lose output printed just before it exits.
        """
        for setting in tool.settings({"npp": self.npp, "ntg": self.ntg, **self.axes}):
            asked = [pl for pl in self.npl if not tool.excluded({**setting, "npl": pl}, self.exclude)]
            if not asked:
                continue
            axes = dict(setting)
            pp, tg = int(axes.pop("npp")), int(axes.pop("ntg"))
            fixed: dict[str, Param] = {**axes, "args": " ".join(self.args)}
            left: dict[int, Cell] = {}
            for pl in asked:
                label = f"pp{pp} tg{tg} B{pl}{tool.varying(axes, self.axes)}"
                cell = Cell(self.name, label, {"pp": pp, "tg": tg, "pl": pl}, fixed)
                left |= {pl: cell} if keep(self.model, cell) else {}
            # the tool silently skips rows that do not fit, and aborts if they fit only by its rounding
            need = max(asked) * tool.room(pp + tg)
            n_ctx = int(axes.pop("n_ctx", need))
            if n_ctx < need:
                raise SpecError(
                    f"batched-bench with n_ctx {n_ctx} would skip its largest rows: {max(asked)} sequences of "
                    f"{pp + tg} tokens need {need}",
                    next=f"set n_ctx to {need} or leave it out",
                )
            flags = (
                *("-c", str(n_ctx), "-npp", str(pp), "-ntg", str(tg)),
                *("-npl", ",".join(map(str, [*left, *left, *list(left)[-1:]]))),
                *tool.flags_of(axes, tool.AXES),
                *self.args,
                *("--output-format", "jsonl"),
            )
            yield tool.launch_on_model(PROGRAM, self, env, left.values(), flags)


# -- imported files ---------------------------------------------------------------------------------------------------

_HEADER = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")
"""Columns on the console; in JSON the same columns are _SIZES and _TIMES, in this order."""
_SIZES = ("pp", "tg", "pl", "n_kv")
_TIMES = {"t_pp": "s", "speed_pp": "t/s", "t_tg": "s", "speed_tg": "t/s", "t": "s", "speed": "t/s"}
_SETTING = re.compile(r"(\w+) = (-?\w+)(?:, |$)")
_SETTINGS = re.compile(r"^llama_batched_bench: (n_kv_max = .+)$", re.MULTILINE)
_DECIMALS = {"s": 3, "t/s": 2}  # digits that the console shows of a value, by its unit
COLD = "the first row was measured cold: llama-batched-bench warms up with 16 tokens only"


def console(text: str) -> Reading:
    """Parse the table on the console; raises Refused if a row cannot be read exactly, or runs differ in settings."""
    runs = [dict(_SETTING.findall(each)) for each in _SETTINGS.findall(text)]
    if len({tuple(each.items()) for each in runs}) > 1:
        raise Refused(f"it holds {len(runs)} runs with different settings: split it")
    of_run = {name: reading.number_or_text(setting) for name, setting in (runs[0] if runs else {}).items()}
    return _reading(list(reading.each_line(reading.markdown(text, "S t/s"), _printed)), of_run, rounded=True)


def _printed(line: Line) -> Line:
    if tuple(line.columns) != _HEADER:
        raise Refused("a header that llama-batched-bench does not print")
    columns = dict(zip((*_SIZES, *_TIMES), line.columns.values(), strict=True))
    if not all(re.fullmatch(r"[0-9]+", columns[name]) for name in _SIZES):
        raise Refused("its sizes are not whole numbers")
    for name, unit in _TIMES.items():
        if not re.fullmatch(rf"[0-9]+\.[0-9]{{{_DECIMALS[unit]}}}", columns[name]):
            raise Refused(f"{name} is {columns[name]}, not as llama-batched-bench prints it")
    return Line(line.number, {**columns, **{name: int(columns[name]) for name in _SIZES}})


def _reading(rows: Sequence[Line], of_run: Mapping[str, Any] | None = None, *, rounded: bool = False) -> Reading:
    """Return the rows of a run; `rounded` tells times of the console from those to a microsecond."""
    if not rows:
        return Reading((), {})
    names = [name for name in rows[0].columns if name not in (*_SIZES, *_TIMES)]
    same = {**(of_run or {}), **reading.shared([line.columns for line in rows], names)}
    imported = tuple(reading.each_line(rows, lambda line: _row(line.columns, same, rounded)))
    is_ours = "run_id" in rows[0].columns  # exported by dgxlab, which leaves out the cold rows of its own runs
    return Reading(imported, {"settings": same} if same else {}, () if is_ours else (COLD,))


def _row(columns: Mapping[str, Any], same: Mapping[str, Any], rounded: bool) -> Row:
    sizes = {name: reading.whole(columns, name) for name in _SIZES}
    values = tuple(reading.value(name, unit, columns) for name, unit in _TIMES.items())
    own = {name: columns[name] for name in columns if name not in (*_SIZES, *_TIMES, *same)}
    is_shared = {**same, **own}.get("is_pp_shared", 0) not in (0, False)
    printed = {each.metric: each.values[0] for each in values}
    for name, time, tokens in _speeds(sizes["pp"], sizes["tg"], sizes["pl"], is_shared):
        if not rounded:
            agree(name, speed(tokens, printed[time]), printed[name])
            continue
        # the time has but three decimals, the speed two
        longest, shortest = printed[time] + 0.0005, printed[time] - 0.0005
        fastest = tokens / shortest if shortest > 0 else float("inf")
        if not tokens / longest - 0.0051 <= printed[name] <= fastest + 0.0051:
            raise Refused(f"{name} is {printed[name]:g}, but {tokens} tokens took {printed[time]:g} s")
    label = f"pp{sizes['pp']} tg{sizes['tg']} B{sizes['pl']}" + "".join(f" {k}={v}" for k, v in own.items())
    return Row(label, {**sizes, **own}, values)


TOOL = Tool(
    PROGRAM,
    bench=BatchedBench,
    formats={
        "console": Format(console, " TG |", r"^\| +PP \| +TG \| +B \|"),
        "jsonl": Format(_reading, '"speed_pp": ', r'^\{.*"speed_pp": ', rows=reading.json_lines),
    },
)
