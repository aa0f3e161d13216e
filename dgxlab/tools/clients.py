"""Results of other clients of servers, as their JSON files have them: they are imported, never run. One is written too.

A metric has a name of `units.METRICS` where the client computes what that is, else the client's own name. Only `serve`
knows the steady window, so no client's generation speed is S_TG.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

from dgxlab.tools.reading import Format, Reading, Row, Values
from dgxlab.tools.rows import Refused, decode, finite
from dgxlab.tools.tool import Tool

Entry = Mapping[str, Any]
Named = Sequence[tuple[str, str, str]]
"""Of each metric its name here, its unit, and where it is: names of keys, with dots between."""


def _at(entry: Entry, path: str) -> Any:
    """Return what an entry has under names with dots between; None if it has nothing there."""
    value: Any = entry
    for name in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(name)
    return value


def _values(entry: Entry, named: Named) -> Iterator[Values]:
    for metric, unit, path in named:
        value = _at(entry, path)
        several = value if isinstance(value, list) else [] if value is None else [value]
        if several:
            yield Values(metric, unit, tuple(finite(each, path) for each in several))


def _row(params: Mapping[str, Any], entry: Entry, named: Named) -> Row:
    """Return a row; its parameters are mean tokens of prompt and answer, and `pl` streams or a `rate` of requests."""
    known = {name: round(value) if isinstance(value, float) else value for name, value in params.items() if value}
    short = {"pp": "pp", "tg": "tg", "pl": "B", "rate": "rate ", "depth": "d"}
    label = " ".join(f"{short[name]}{value}" for name, value in known.items())
    return Row(label, known, tuple(_values(entry, named)))


def _format(word: str, make: Callable[[Any], Reading]) -> Format:
    """Return the format of a JSON object that has a key which no other client writes."""

    def read(text: str) -> Reading:
        document, problem = decode(text)
        if not isinstance(document, dict):
            raise Refused(f"it is no JSON object: {problem or 'another value'}")
        try:
            return make(document)
        except (LookupError, TypeError, AttributeError) as error:
            raise Refused(f"it lacks what this client writes: {error!r}") from error

    return Format(read, f'"{word}":', rf'^\s*(\{{.*)?"{word}":')


def _failed(failed: Any, of: Any) -> Iterable[str]:
    return [f"{failed:g} of {of:g} requests failed, and are in no figure"] if failed else []


# -- llama-benchy -----------------------------------------------------------------------------------------------------

_BENCHY = (
    ("speed_pp", "t/s", "pp_throughput.values"),
    ("tg_throughput", "t/s", "tg_throughput.values"),
    ("peak_throughput", "t/s", "peak_throughput.values"),
    ("e2e_ttft", "ms", "e2e_ttft.values"),
)


def _benchy(report: Entry) -> Reading:
    rows = []
    for run in report["benchmarks"]:
        params = {"pp": run["prompt_size"], "tg": run["response_size"], "pl": run["concurrency"]}
        if not run["is_context_prefill_phase"]:
            rows.append(_row({**params, "depth": run["context_size"]}, run, _BENCHY))
    names = {"program": "llama-benchy", "model": report["model"], "version": report["version"]}
    cached = ["prefixes of prompts came from a cache"] if report["prefix_caching_enabled"] else []
    return Reading(tuple(rows), names, tuple(cached))


def benchy(rows: Sequence[Entry], version: str, timestamp: str) -> dict[str, Any]:
    """Return llama-benchy's report of exported rows of `serve`, which it would have measured by `--concurrency`.

    It has no peaks, which need the time of every token. Raises ValueError unless all rows have the same model.
    """
    (model,) = {row["model"] for row in rows}
    about = {"version": version, "timestamp": timestamp, "latency_mode": "none", "latency_ms": 0.0, "model": model}
    runs = [_benchy_run(row) for row in rows]
    most = max(row["pl"] for row in rows)
    return {**about, "prefix_caching_enabled": False, "max_concurrency": most, "benchmarks": runs}


def _benchy_run(row: Entry) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for wave in row["requests"]:
        begin = min(sent for sent, *_ in wave)
        firsts = [sent + first for sent, first, *_ in wave]
        last = max(sent + first + took for sent, first, took, _ in wave)
        of_wave = {
            "pp_throughput": [1e6 * row["pp"] * len(wave) / (max(firsts) - begin)],
            "pp_req_throughput": [1e6 * row["pp"] / first for _, first, *_ in wave],
            "tg_throughput": [1e6 * sum(count for *_, count in wave) / (last - min(firsts))],
            "tg_req_throughput": [1e6 * count / took for *_, took, count in wave],
            **{name: [first / 1e3 for _, first, *_ in wave] for name in ("ttfr", "est_ppt", "e2e_ttft")},
        }
        for name, several in of_wave.items():
            values.setdefault(name, []).extend(several)
    metrics = {name: {"mean": fmean(each), "std": pstdev(each), "values": each} for name, each in values.items()}
    sizes = {"concurrency": row["pl"], "context_size": 0, "prompt_size": row["pp"], "response_size": row["tg"]}
    return {**sizes, "is_context_prefill_phase": False, **metrics, "peak_throughput": None, "peak_req_throughput": None}


# -- vLLM's own -------------------------------------------------------------------------------------------------------

_VLLM = (
    ("speed_out", "t/s", "output_throughput"),
    *((f"ttft_p{share}_ms", "ms", f"p{share}_ttft_ms") for share in (50, 95)),
    *((f"itl_p{share}_ms", "ms", f"p{share}_itl_ms") for share in (50, 99)),
    ("mean_ttft_ms", "ms", "mean_ttft_ms"),
    ("mean_tpot_ms", "ms", "mean_tpot_ms"),
    ("request_throughput", "requests/s", "request_throughput"),
)


def _vllm(result: Entry) -> Reading:
    result = {"p50_ttft_ms": result["median_ttft_ms"], "p50_itl_ms": result.get("median_itl_ms"), **result}
    done = result["completed"]
    sizes = {"pp": result["total_input_tokens"] / done, "tg": result["total_output_tokens"] / done}
    rate = result["request_rate"]
    asked = {"pl": result["max_concurrency"], "rate": None if rate == "inf" else f"{rate:g}"}
    names = {"program": "vllm bench serve", "model": result["model_id"], "backend": result["backend"]}
    notes = _failed(result.get("failed"), result["num_prompts"])
    return Reading((_row({**sizes, **asked}, result, _VLLM),), names, tuple(notes))


# -- GuideLLM ---------------------------------------------------------------------------------------------------------

_GUIDE = (
    ("speed_out", "t/s", "output_tokens_per_second.successful.mean"),
    ("ttft_p50_ms", "ms", "time_to_first_token_ms.successful.median"),
    ("ttft_p95_ms", "ms", "time_to_first_token_ms.successful.percentiles.p95"),
    # of the means of requests
    ("inter_token_latency_ms", "ms", "inter_token_latency_ms.successful.median"),
    ("requests_per_second", "requests/s", "requests_per_second.successful.mean"),
)


def _guide(report: Entry) -> Reading:
    rows: list[Row] = []
    notes: list[str] = []
    for each in report["benchmarks"]:
        metrics, strategy = each["metrics"], each["config"]["strategy"]
        pp, tg = (_at(metrics, f"{side}_token_count.successful.mean") for side in ("prompt", "output"))
        rate = strategy.get("rate")
        asked = {"pl": strategy.get("streams"), "rate": rate and f"{rate:g}"}
        rows.append(_row({"pp": pp, "tg": tg, **asked}, metrics, _GUIDE))
        totals = metrics["request_totals"]
        notes += _failed(totals["errored"], totals["total"])
    names = {"program": "guidellm", "version": report["metadata"]["guidellm_version"]}
    return Reading(tuple(rows), names, tuple(notes))


# -- AIPerf -----------------------------------------------------------------------------------------------------------

_AIPERF = (
    ("speed_out", "t/s", "output_token_throughput.avg"),
    *((f"ttft_p{share}_ms", "ms", f"time_to_first_token.p{share}") for share in (50, 95)),
    *((f"itl_p{share}_ms", "ms", f"inter_chunk_latency.p{share}") for share in (50, 99)),
    # of the means of requests
    ("inter_token_latency", "ms", "inter_token_latency.p50"),
    ("request_throughput", "requests/s", "request_throughput.avg"),
)


def _aiperf(export: Entry) -> Reading:
    phase = export["input_config"]["phases"][-1]
    rate = phase.get("rate")
    sizes = {"pp": _at(export, "input_sequence_length.avg"), "tg": _at(export, "output_sequence_length.avg")}
    asked = {"pl": phase.get("concurrency"), "rate": rate and f"{rate:g}"}
    model = export["input_config"]["models"]["items"][0]["name"]
    names = {"program": "aiperf", "model": model, "version": export["aiperf_version"]}
    count = _at(export, "error_request_count.avg") or 0
    notes = _failed(count, count + export["request_count"]["avg"])
    return Reading((_row({**sizes, **asked}, export, _AIPERF),), names, tuple(notes))


TOOLS = tuple(
    Tool(program, formats={"json": _format(word, make)}, built=False)
    for program, word, make in (
        ("llama-benchy", "pp_req_throughput", _benchy),
        ("vllm-bench", "tokenizer_id", _vllm),
        ("guidellm", "guidellm_version", _guide),
        ("aiperf", "aiperf_version", _aiperf),
    )
)
