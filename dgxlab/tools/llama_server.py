"""Servers under concurrent streams: what a user gets of llama-server or vLLM, by the times at which tokens arrive.

The client is `load`, which prints every time; `streams` makes metrics of them, or says why they give none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, ClassVar

from dgxlab import units
from dgxlab.errors import SpecError
from dgxlab.model import Cell, CellResult, Measurement, Param, canonical
from dgxlab.tools import tool
from dgxlab.tools.reading import whole
from dgxlab.tools.rows import Columns, Parsed, Refused, above_zero, json_rows, match_rows
from dgxlab.tools.streams import METRICS, OPEN, STEADY, incomplete, latencies, metrics, off, unfair
from dgxlab.tools.tool import Benchmark, Keep, Key, Launch, Samples, Tool, key

PROGRAM = "llama-server"
LOOPBACK = "127.0.0.1"
BUSY = 0.8  # share of a processor above which the client is too slow to be believed
CLIENT = ("cpu", "late_us", "off")
"""Of a wave, the client's share of a processor, by how much a time can be late, and what `off` returns."""

# -- the output of a launch -------------------------------------------------------------------------------------------


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Read the METRICS of each cell, a sample a wave, the first discarded.

    What was printed are the times of `load`, or rows that were made of them before.
    """
    lines, problems = json_rows(stdout, PROGRAM)
    rows = [row for row in lines if row is not None]
    about: Columns = next((row["server"] for row in rows if "server" in row), {})
    problems += [str(row["problem"]) for row in rows if "problem" in row]
    if problems:  # they say why the rows of other cells are missing
        printed = {row.get("pl", row.get("rate")) for row in rows}
        cells = [cell for cell in cells if cell.params.get("pl", cell.params.get("rate")) in printed]

    def read(cell: Cell, row: Columns) -> CellResult:
        try:
            return _read(cell, _row(row, about) if "waves" in row else row)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise error if isinstance(error, Refused) else Refused(f"its times are broken: {error!r}") from error

    return match_rows(cells, rows, read, problems)


def _row(line: Columns, about: Columns) -> dict[str, Any]:
    """Return the row of a cell, given the times of its waves; raises Refused if they give no number."""
    pp, tg, at_once = whole(line, "pp"), whole(line, "tg"), "pl" in line
    pl = whole(line, "pl") if at_once else 1  # requests that arrive may have to wait for a slot
    if pl > (about["slots"] or math.inf):
        raise Refused(f"the server has {about['slots']} slots, too few for {pl} streams")
    if pp + tg > (about["n_ctx"] or math.inf):
        raise Refused(f"the server has a context of {about['n_ctx']} tokens, too small for {pp + tg}")
    for wave in line["waves"]:
        if wrong := list(incomplete(wave["streams"], pp, tg)):
            raise Refused(f"{wrong[0]}{f', and {len(wrong) - 1} more' if wrong[1:] else ''}")
    for wave in line["waves"][1:]:  # the first warms up, and counts for nothing
        if wave["cpu"] > BUSY:
            raise Refused(f"the client used {wave['cpu']:.2f} of a processor: above {BUSY} it may be late")
        if why := next(unfair(wave["streams"], at_once=at_once), ""):
            raise Refused(why)
    several = [wave["streams"] for wave in line["waves"]]
    measured = [_measured(each, pp, tg) if at_once else latencies(each, tg) for each in several]
    waves = [
        {**wave, **values, "off": off(wave["streams"])} for wave, values in zip(line["waves"], measured, strict=True)
    ]
    return {
        **{name: line[name] for name in ("pp", "tg", "pl", "rate") if name in line},
        **{name: [wave[name] for wave in waves] for name in (*measured[0], *CLIENT)},
        "requests": [[_request(each) for each in wave] for wave in several],
        "server": about,
    }


def _measured(streams: Sequence[Mapping[str, Any]], pp: int, tg: int) -> Mapping[str, float | None]:
    """Return METRICS of a wave; all are None for one without a steady window, which only the first may be."""
    try:
        return metrics(streams, pp, tg)
    except Refused:
        return dict.fromkeys(METRICS)


def _request(stream: Mapping[str, Any]) -> list[int]:
    """Return when a request was sent, its times to the first event and on to the last, in us, and tokens of that."""
    return [stream["sent_us"], stream["at_us"][0], sum(stream["at_us"][1:]), sum(stream["tokens"][1:])]


def _read(cell: Cell, row: Columns) -> CellResult:
    measurements = []
    for name in OPEN if "rate" in cell.params else METRICS:
        warm = [above_zero(value, name) for value in row[name][:1] if value]
        counted = [above_zero(value, name) for value in row[name][1:]]
        if len(counted) != cell.fixed.get("repetitions"):
            raise Refused(f"it has {len(counted)} waves that count, not {cell.fixed.get('repetitions')}")
        measurements.append(Measurement(cell.key, name, units.metric(name).unit, tuple(counted), tuple(warm)))
    return CellResult(cell.key, tuple(measurements), row)


# -- what engines differ in -------------------------------------------------------------------------------------------


def setup(cell: Cell, weights: str, env: Mapping[str, str], cmake: Mapping[str, str]) -> dict[str, str]:
    """Return what the figures of a cell depend on besides its engine, in words; what is not set is `auto`.

    `weights` is the type of the model's weights in the spec, which vLLM's model has not.
    """
    fixed = cell.fixed
    if fixed.get("engine") == "vllm":
        return _of_vllm(f"{fixed['command']}".split())
    own = _flags(f"{fixed['args']}".split())
    room = tool.room(int(cell.params["pp"]) + int(cell.params["tg"]))
    off = cmake.get("GGML_CUDA") != "ON" or cmake.get("GGML_CUDA_GRAPHS") == "OFF" or "GGML_CUDA_DISABLE_GRAPHS" in env
    return {
        "weights": weights,
        "KV": f"{fixed.get('type_k', 'f16')}, {fixed.get('type_v', 'f16')}",
        "state": own.get("--cache-type-ssm", env.get("LLAMA_CACHE_TYPE_SSM", "f32")),  # of the series gdn-state
        "prompt cache": "off",
        "kernels": "one by one" if off else "CUDA graphs",
        "context": f"{fixed['n_ctx']} for all" if "n_ctx" in fixed else f"{room}",
    }


def _of_vllm(command: Sequence[str]) -> dict[str, str]:
    flags = _flags(command)
    model = flags.get("--model") or next((after for word, after in pairwise(command) if word == "serve"), "")
    types = [flags[name] for name in ("--quantization", "--dtype") if name in flags] or ["auto"]
    return {
        "weights": ", ".join(filter(None, [PurePosixPath(model).name, *types])),
        "KV": flags.get("--kv-cache-dtype", "auto"),
        "state": flags.get("--mamba-ssm-cache-dtype", flags.get("--mamba-cache-dtype", "auto")),
        "prompt cache": "off",
        "kernels": "one by one" if "--enforce-eager" in flags else "CUDA graphs",
        "context": flags.get("--max-model-len", "auto"),
    }


def _flags(words: Sequence[str]) -> dict[str, str]:
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return {word: after for word, after in pairwise([*split, ""]) if word.startswith("--")}


# -- launches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServeBench(Benchmark):
    """A server under concurrent requests: speed and latency as a client on the same host sees them."""

    name = "serve"
    compared: ClassVar = {"speed_tg": "pl", "ttft_p50_ms": "rate"}
    axis_keys: ClassVar = {
        "n_ctx": Key("Count", "Context size, in tokens, for all slots together.", ("-c", "--ctx-size")),
        "n_parallel": Key("Count", "Slots; as many as streams has at most, when left out.", ("-np", "--parallel")),
        **tool.AXES,
    }
    owned: ClassVar[tuple[str, ...]] = (
        *("--host", "--port", "--reuse-port", "--api-prefix", "--api-key", "--api-key-file", "--alias", "-a"),
        *("--ssl-key-file", "--ssl-cert-file", "--cache-ram", "-cram", "--log-disable", "--log-file", "-fit", "--fit"),
    )
    pins = False
    apart = True
    vocabulary = True
    form = "serving"
    parse = staticmethod(parse)

    model: str = key(
        "Name", "A name under models, for llama-server; it needs a vocabulary.", "", flags=("-m", "--model")
    )
    n_prompt: tuple[int, ...] = key("Many[Count]", "Prompt lengths, in tokens.", [], must=True)
    n_gen: tuple[int, ...] = key(
        f"Many[Annotated[int, Field(ge={STEADY + 2}, le=2**31 - 1)]]", "Generated tokens of each stream.", [], must=True
    )
    streams: tuple[int, ...] = key("Few[Count]", "Numbers of streams at once.", [])
    rates: tuple[float, ...] = key(
        "Few[Ratio]",
        "In the place of streams: requests a second that arrive at random times, as a Poisson process.",
        [],
        later=True,
    )
    requests: int = key("Count", "Requests of a wave, at each of the rates.", 256, later=True)
    engine: str = key(
        "Literal['llama-server', 'vllm']", "The build's own llama-server, or a vLLM on the host.", PROGRAM
    )
    command: tuple[str, ...] = key(
        "Args", "For vllm its command line, as [vllm, serve, /models/x], without host and port.", []
    )
    repetitions: int = key(
        "Annotated[int, Field(ge=1, le=1000)]", "Counted waves; one more is run first and thrown away.", 3
    )
    ready_s: float = key("Seconds", "How long the server may take until it is ready, in seconds.", 300.0)
    stall_s: float = key("Seconds", "How long all streams together may be silent, in seconds.", 60.0)
    axes: Mapping[str, tuple[Param, ...]] = field(default_factory=dict)
    args: tuple[str, ...] = ()

    def launches(self, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
        """Yield a launch of the server for all numbers of streams, or rates, at one (n_prompt, n_gen, other axes)."""
        mode, name = ("rate", "rates") if self.rates else ("pl", "streams")
        for setting in tool.settings({"n_prompt": self.n_prompt, "n_gen": self.n_gen, **self.axes}):
            asked = [much for much in getattr(self, name) if not tool.excluded({**setting, name: much}, self.exclude)]
            if not asked:
                continue
            axes = dict(setting)
            pp, tg = int(axes.pop("n_prompt")), int(axes.pop("n_gen"))
            fixed: dict[str, Param] = {**axes, "repetitions": self.repetitions, "args": " ".join(self.args)}
            own = {} if self.rates else {"slots": "0 to B-1"}  # not those that the server would choose
            fixed |= own if self.engine == PROGRAM else {"engine": self.engine, "command": " ".join(self.command)}
            several = {"requests": self.requests} if self.rates else {}
            cells = {}
            for much in asked:
                at = f"{much:g}/s" if self.rates else f"B{much}"
                label = f"pp{pp} tg{tg} {at}{tool.varying(axes, self.axes)}"
                cells[much] = Cell(self.name, label, {"pp": pp, "tg": tg, mode: much}, {**fixed, **several})
            left = {much: cell for much, cell in cells.items() if keep(self.model, cell)}
            waves = {"waves": self.repetitions + 1, "ready_s": self.ready_s, "stall_s": self.stall_s, **several}
            client = canonical({"engine": self.engine, "pp": pp, "tg": tg, mode: list(left), **waves})
            most = max(self.streams, default=1)  # n_parallel says how many of those that arrive are served at once
            server = (*self.command, "--no-enable-prefix-caching", "--enable-prompt-tokens-details")
            server = self._llama_server(axes, most, pp + tg) if self.engine == PROGRAM else server
            where = ("--host", LOOPBACK, "--port", "0")  # the kernel chooses a free one
            argv = ("{python}", "{agent}", "drive", PROGRAM, client, *server, *self.args, *where)
            yield Launch(self.name, tuple(left.values()), argv, self.model, env, self.limit_s)

    def _llama_server(self, axes: dict[str, Param], most: int, tokens: int) -> tuple[str, ...]:
        """Return the command of a server for so many streams of so many tokens; raises SpecError without room."""
        slots = int(axes.pop("n_parallel", most))
        if slots < most:
            text = f"{most} streams do not fit into n_parallel {slots}: some would wait for a slot"
            raise SpecError(text, next=f"set n_parallel to {most} or leave it out")
        need = slots * tool.room(tokens)  # the last token is sent and not decoded, so that a slot may be full
        n_ctx = int(axes.pop("n_ctx", need))
        if n_ctx < need:
            text = f"n_ctx {n_ctx} is too small for {slots} slots of {tokens} tokens, which need {need}"
            raise SpecError(text, next=f"set n_ctx to {need} or leave it out")
        own = ("-np", str(slots), "-c", str(n_ctx), "-fit", "off", "--cache-ram", "0")
        return (f"{{bin}}/{PROGRAM}", "-m", f"{{model:{self.model}}}", *own, *tool.flags_of(axes, tool.AXES))

    @staticmethod
    def exported(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
        """Return a recorded row, flat, with the `requests` of the waves that count."""
        row = Benchmark.exported(raw, samples)
        served = row.pop("server")
        about = {"model": served.get("model"), "version": served.get("version")}
        return {**row, **about, "requests": row.get("requests", [])[1:]}

    def flaws(self) -> Iterator[str]:
        """Yield which keys do not fit the engine."""
        own = self.engine == PROGRAM
        if bool(self.streams) == bool(self.rates):
            yield "it needs either streams or rates"
        if self.rates and own and "n_parallel" not in self.axes:
            yield "with rates, n_parallel must say how many requests are served at once"
        if own != bool(self.model) or own == bool(self.command):
            yield "llama-server needs model and no command, vllm a command and no model"
        if not own and (self.axes or self.args):
            yield f"{', '.join([*self.axes, *['args'] * bool(self.args)])}: what vllm is given belongs into command"


def _drive(*words: str) -> None:
    from dgxlab.tools import load  # here: its HTTP client would slow each start of the agent

    load.main(*words)


TOOL = Tool(PROGRAM, bench=ServeBench, drive=_drive)
