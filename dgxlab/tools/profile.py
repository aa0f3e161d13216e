"""llama-batched-bench under our tracer: how much time of a step each GPU kernel takes.

It gives no speeds, because tracing lowers them. The tracer, kernels/trace, is compiled on the host. It marks every
pass, that is, every call of llama_decode. The command line determines sizes and order of the passes, so each is known
to belong to loading, warming up, a prompt or generation.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, ClassVar

from dgxlab.model import Cell, CellResult, Measurement, Param
from dgxlab.tools import batched_bench, profile_files
from dgxlab.tools.batched_bench import BatchedBench
from dgxlab.tools.harness import kernel_files
from dgxlab.tools.profile_files import ALL, NODES, UNITS, Durations, samples, short, summary
from dgxlab.tools.reading import whole
from dgxlab.tools.rows import Columns, Parsed, Refused, json_rows, match_rows
from dgxlab.tools.tool import Keep, Launch, Tool, key

_TRACER = "trace"  # the tracer's folder in kernels/
_PHASES = ("prompt", "decode")
_WARM_UP = 16  # tokens of the program's first pass

# -- the trace --------------------------------------------------------------------------------------------------------


@dataclass
class Pass:
    """One call of llama_decode; times are in ns."""

    tokens: int
    wall: int  # duration by the host's clock
    busy: int = 0  # time in which at least one kernel ran
    kernels: dict[str, list[int]] = field(default_factory=dict)
    """Durations of the launches that began in the pass, by the kernel's short name."""
    nodes: int = 0  # how many of them were nodes of a CUDA graph


FIELDS = {"trace": 3, "kernel": 6, "pass": 3, "launch": 5, "end": 3}
"""Number of values on a line, by its first word; kernels/trace/trace.cpp says what they are."""


def passes(text: str) -> list[Pass]:
    """Return the passes of a trace, in order.

    Raises Refused if the trace was cut short, lost records, or is of another program or of several devices.
    """
    lines: dict[str, list[list[str]]] = {kind: [] for kind in FIELDS}
    for line in text.split("\n"):
        kind, *values = line.split("\t")
        if values and len(values) == FIELDS.get(kind):
            lines[kind].append(values)
    if [version for version, *_ in lines["trace"]] != ["1"] or len(lines["end"]) != 1:
        raise Refused("the trace has no beginning or no end: the program ended early, or used no GPU")
    (_, program, _), (marked, launched, dropped) = lines["trace"][0], map(int, lines["end"][0])
    if PurePosixPath(program).name != batched_bench.PROGRAM:
        raise Refused(f"the trace is of another process, {program}")
    if (marked, launched, 0) != (len(lines["pass"]), len(lines["launch"]), dropped):
        whole = f"{len(lines['launch'])} of {launched} launches, {dropped} were dropped"
        raise Refused(f"the trace is not whole: it has {whole}")
    if len(devices := {device for _, device, *_ in lines["kernel"]}) > 1:
        raise Refused(f"the trace is of {len(devices)} devices")
    names = {number: short(name) for number, *_, name in lines["kernel"]}
    result = [Pass(int(tokens), int(end) - int(begin)) for tokens, begin, end in lines["pass"]]
    begins, ends = ([int(values[place]) for values in lines["pass"]] for place in (1, 2))
    until = 0  # kernels of several streams overlap
    launches = ((int(start), int(ns), names[kernel], int(node)) for kernel, _, node, start, ns in lines["launch"])
    for start, ns, kernel, node in sorted(launches):
        at = bisect.bisect_right(begins, start) - 1
        if at >= 0 and start < ends[at]:  # else it belongs to loading
            result[at].kernels.setdefault(kernel, []).append(ns)
            result[at].nodes += node != 0
            result[at].busy += max(0, start + ns - max(start, until))
            until = max(until, start + ns)
    return result


def _rows(traced: Sequence[Pass], cells: Sequence[Cell], printed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a trace, given what was asked for and a row of the program; the first repetition is cold."""
    n_batch = whole(printed, "n_batch")
    pp, tg, repetitions = (int(cells[0].params[name]) for name in ("pp", "tg", "repetitions"))
    asked = _chunks(_WARM_UP, n_batch)
    places: dict[tuple[str, int], list[slice]] = {}
    for pl in _order([int(cell.params["pl"]) for cell in cells], repetitions):
        for phase, chunks in zip(_PHASES, (_chunks(pp * pl, n_batch), _chunks(pl, n_batch) * tg), strict=True):
            places.setdefault((phase, pl), []).append(slice(len(asked), len(asked) + len(chunks)))
            asked += chunks
    if [each.tokens for each in traced] != asked:
        raise Refused(f"its {len(traced)} passes are not the {len(asked)} of these prompts and generations")
    for cell in cells:
        size = {name: cell.params[name] for name in ("phase", "pp", "tg", "pl", "repetitions")}
        rounds = [traced[place] for place in places[str(size["phase"]), int(size["pl"])]][: repetitions + 1]
        steps = tg if size["phase"] == "decode" else 1
        cold = {row["kernel"]: row["step_us"] for row in summary([_together(rounds[0])], steps)}
        for row in summary([_together(each) for each in rounds[1:]], steps):
            more: dict[str, Any] = {"cold_us": cold.get(row["kernel"], [])}
            if row["kernel"] == ALL:
                more |= {name: printed[name] for name in ("n_threads", "n_threads_batch") if name in printed}
                for name in ("busy", "wall"):
                    more[f"{name}_us"] = [sum(getattr(p, name) for p in each) / steps / 1e3 for each in rounds[1:]]
                if all(nodes := [sum(p.nodes for p in each) / steps for each in rounds[1:]]):
                    more[NODES] = nodes
            yield {**size, **row, **more}


def _chunks(tokens: int, n_batch: int) -> list[int]:
    return [min(n_batch, tokens - done) for done in range(0, tokens, n_batch)]


def _order(sizes: Sequence[int], repetitions: int) -> list[int]:
    """Return npl of every row: a cold round, the repetitions, and a spare row, as llama-batched-bench may lose one."""
    once = list(dict.fromkeys(sizes))
    return [*once * (repetitions + 1), once[-1]]


def _together(traced: Sequence[Pass]) -> Durations:
    kernels: dict[str, list[int]] = {}
    for each in traced:
        for name, durations in each.kernels.items():
            kernels.setdefault(name, []).extend(durations)
    return kernels


# -- the output of a launch -------------------------------------------------------------------------------------------


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Parse the metrics in UNITS of each cell, and of each kernel in a cell, which becomes a cell in `Parsed.parts`.

    The output is a trace, or rows that were computed from one: the record keeps only the rows.
    """
    printed, problems = json_rows(stdout, batched_bench.PROGRAM)
    rows = [row for row in printed if row is not None and "kernel" in row]
    try:
        if not rows:
            rows = list(_rows(passes(stdout), cells, next(filter(None, printed), {})))
            problems = []  # the program's own rows, which it may lose, give no number
    except Refused as error:
        return Parsed(problems=(*problems, str(error)))
    except (ValueError, LookupError) as error:
        return Parsed(problems=(*problems, f"the trace is broken: {error}"))
    parts = tuple(
        Cell(cell.tool, f"{cell.label}: {row['kernel']}", {**cell.params, "kernel": row["kernel"]}, cell.fixed)
        for cell in cells
        for row in rows
        if row["kernel"] != ALL and {**row, "kernel": ALL}.items() >= cell.params.items()
    )
    matched = match_rows([*cells, *parts], rows, _read, problems)
    return replace(matched, parts=parts)


def _read(cell: Cell, row: Columns) -> CellResult:
    measurements = []
    for metric, unit in UNITS.items():
        if metric in row:
            cold = samples(row, "cold_us") if metric == "step_us" else ()
            measurements.append(Measurement(cell.key, metric, unit, samples(row, metric), cold))
    return CellResult(cell.key, tuple(measurements), row)


@dataclass(frozen=True)
class ProfileBench(BatchedBench):
    """llama-batched-bench under a tracer: the time of every kernel in a prompt and in a step of generation."""

    name = "profile"
    compared: ClassVar = {}
    owned: ClassVar[tuple[str, ...]] = (*BatchedBench.owned, "-pps", "-tgs")
    rounds = 1
    attempts = 1
    form = "profile"
    parse = staticmethod(parse)

    _: KW_ONLY
    phase: tuple[str, ...] = key("Few[Literal['prompt', 'decode']]", "What to record; both, when left out.", [])
    repetitions: int = key(
        "Annotated[int, Field(ge=1, le=100)]", "Counted repetitions; one more is run first and thrown away.", 3
    )

    def launches(self, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
        """Yield the launches of llama-batched-bench under the tracer, with a cell for each phase of each size."""

        def kept(cell: Cell) -> list[Cell]:
            return [each for each in self._phases(cell) if keep(self.model, each)]

        for launch in super().launches(env, lambda _, cell: bool(kept(cell))):
            cells = tuple(each for cell in launch.cells for each in kept(cell))
            argv = list(launch.argv)
            if cells:
                order = _order([int(cell.params["pl"]) for cell in cells], self.repetitions)
                argv[argv.index("-npl") + 1] = ",".join(map(str, order))
            yield replace(launch, cells=cells, argv=("sh", f"{{files}}/{_TRACER}/run.sh", *argv))

    def _phases(self, cell: Cell) -> list[Cell]:
        more: dict[str, Param] = {"repetitions": self.repetitions, "kernel": ALL}
        return [
            replace(cell, label=f"{phase} {cell.label}", params={"phase": phase, **cell.params, **more})
            for phase in self.phase or _PHASES
        ]

    @classmethod
    def files(cls, root: str) -> dict[str, str]:
        """Return the source code of the tracer, by path."""
        files = kernel_files(root, _TRACER)
        return {path: text for path, text in files.items() if path.startswith(f"{_TRACER}/")}


TOOL = Tool("profile", bench=ProfileBench, formats=profile_files.FORMATS, runs=batched_bench.PROGRAM)
