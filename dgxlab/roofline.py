"""Detect impossible numbers: rates above the documented peaks of a known GPU.

A number is flagged only if it is certainly impossible: nothing is checked on an unknown GPU, weights of an unknown type
may use its fastest path, and bytes that fit in the cache may move faster than memory. A compute path is the type in
which the tensor cores multiply: bf16, fp8, int8 or fp4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dgxlab.model import Param

_BOOST = 1.1
"""Margin of FLOPS: they are documented at a nominal clock, which a cool GPU exceeds (H200: 1.83 against 1.98 GHz); and
a model's name rounds its size, and counts embeddings that a prompt only looks up."""

_ROUNDING = 1.01  # margin of bandwidth: memory has a fixed clock, but its documented bandwidth is rounded
_GIB_IN_GB = 2**30 / 1e9  # ggml's tools divide by 2^30 for the "GB/s" that they print


@dataclass(frozen=True)
class Peaks:
    """Documented peaks of a GPU."""

    gpu: str
    bandwidth: float  # memory bandwidth, in bytes per second
    l2: float  # size of the L2 cache, in bytes
    l2_bandwidth: float  # bandwidth of the L2, in bytes per second: 64 per clock and multiprocessor
    flops: Mapping[str, float]  # dense FLOPS by compute path; a path that the GPU lacks is left out

    def times(self, count: int) -> Peaks:
        """Return the peaks of `count` such GPUs together."""
        if count == 1:
            return self
        flops = {path: count * most for path, most in self.flops.items()}
        return Peaks(f"{count} {self.gpu}", count * self.bandwidth, count * self.l2, count * self.l2_bandwidth, flops)

    def path(self, wanted: str) -> tuple[str, float]:
        """Return the wanted compute path and its FLOPS; the GPU's fastest if `wanted` is "" or missing here."""
        name = wanted if wanted in self.flops else max(self.flops, key=self.flops.__getitem__)
        return name, self.flops[name]


@dataclass(frozen=True)
class Weights:
    """What a token rate is checked with: the weights of a model that each token uses."""

    parameters: float  # their number; in a mixture of experts, only the active ones
    bits: float  # minimum bits of one in memory; 0 if unknown
    path: str  # the fastest compute path for their type; "" if unknown


_HOPPER = {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12}

_GB10 = {"bf16": 107e12, "fp8": 213e12, "int8": 213e12, "fp4": 427e12}
_PER_CLOCK = 64.0

_GPUS = {
    r"GB10": Peaks("GB10", 273e9, 24 * 2**20, 48 * _PER_CLOCK * 3.0e9, _GB10),
    r"H200": Peaks("H200", 4.8e12, 60 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
    r"H100 NVL": Peaks("H100 NVL", 3.94e12, 50 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
    r"H100( 80GB HBM3)?": Peaks("H100", 3.35e12, 50 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
}
"""By a regex of the GPU's name after "NVIDIA"; an H100 PCIe is a different, slower GPU. The 1 PFLOPS of a GB10 and the
doubled figures of others are for sparse matrices."""

_ACTIVE = {r"gpt-oss-20b": 3.6e9, r"gpt-oss-120b": 5.1e9, r"deepseek-(v3|r1)": 37e9, r"qwen3-coder-next": 3e9}
"""Active parameters of mixtures of experts whose names contain only the total."""


def peaks(name: str) -> Peaks | None:
    """Return the peaks of a GPU by nvidia-smi's name for it; None if unknown."""
    return next((peaks for gpu, peaks in _GPUS.items() if re.fullmatch(f"(NVIDIA )?{gpu}", name)), None)


def together(names: Sequence[str], *, alone: bool = False) -> Peaks | None:
    """Return the summed peaks of the GPUs of a run; None for no GPU, an unknown one, or GPUs of different kinds.

    `names` has one name a GPU, as nvidia-smi prints it. With `alone` the peaks are those of a single one: an operation
    runs on one GPU, a model may be spread over all.
    """
    first, *others = [peaks(name) for name in names] or [None]
    if first is None or any(other != first for other in others):
        return None
    return first if alone else first.times(len(names))


_PATHS = (
    (r"a16|marlin", "bf16"),  # weights of 4 bits, activations of 16
    (r"fp4", "fp4"),
    (r"fp8|e4m3|e5m2", "fp8"),
    (r"q\d|int8", "int8"),
    (r"f16|fp16|f32|kbit", "bf16"),
)
_BITS = ((r"fp4", 4), (r"fp8|int8|e4m3|e5m2", 8), (r"q\d", 0), (r"f16|fp16", 16), (r"f32", 32))
_SIZE = re.compile(r"(?<![a-z0-9.])(a?)(\d+(?:\.\d+)?)([bm])(?![a-z0-9])")


def path_of(type: str) -> str:
    """Return the fastest compute path for weights of a type, as `int8` for Q4_K; "" for an unknown type."""
    name = type.lower()
    return next((path for pattern, path in _PATHS if re.search(pattern, name)), "")


def weights_of(model: str, type: str) -> Weights | None:
    """Return the weights of a model by its name (Qwen3-30B-A3B) and type (Q4_0); None if the name has no size."""
    name = model.lower()
    sizes: dict[str, float] = {}  # of active parameters by "a", of all by ""
    for a, number, unit in _SIZE.findall(name):
        size = float(number) * (1e9 if unit == "b" else 1e6)
        sizes[a] = min(size, sizes.get(a, size))
    parameters = None if "a" not in sizes and "moe" in name else sizes.get("a", sizes.get(""))
    parameters = next((active for pattern, active in _ACTIVE.items() if re.search(pattern, name)), parameters)
    return None if parameters is None else Weights(parameters, bits_of(type), path_of(type))


def bits_of(type: str) -> int:
    """Return the minimum bits per weight of a type, without scales; 0 for an unknown type."""
    name = type.lower()
    bits = next((bits for pattern, bits in _BITS if re.search(pattern, name)), 0)
    quantised = re.search(r"q(\d)", name)
    return bits or (int(quantised[1]) if quantised else 0)


def compute(flops: float, path: str, peaks: Peaks) -> str:
    """Return a sentence if a rate of FLOPS is above the GPU's peak on a compute path; "" if possible."""
    name, most = peaks.path(path)
    if flops <= _BOOST * most:
        return ""
    sentence = f"{_tera(flops)} are {flops / most:.1f} times the {_tera(most)} of {peaks.gpu} in {name}"
    fastest, best = peaks.path("")
    return f"{sentence}, and more than the {_tera(best)} of {fastest}" if most < best < flops else sentence


def memory(rate: float, peaks: Peaks, moved: float | None = None) -> str:
    """Return a sentence if a bandwidth is above that of memory and cache; "" if possible.

    `rate` is in bytes per second; `moved` are the bytes of one call, if the same ones are moved again and again: the L2
    may keep a part of them.
    """
    kept = 0.0 if moved is None else min(1.0, peaks.l2 / max(moved, 1.0))
    shown, needed = f"{rate / 1e9:.0f} GB/s", rate * (1 - kept)
    if needed > _ROUNDING * peaks.bandwidth:
        aside = f", {kept:.0%} of it from the cache," if kept >= 0.01 else ""
        return f"{shown}{aside} are {_times(needed, peaks.bandwidth)} of {peaks.gpu}"
    if rate > _BOOST * peaks.l2_bandwidth:
        return f"{shown} are {_times(rate, peaks.l2_bandwidth)} of {peaks.gpu}'s cache"
    return ""


def _times(rate: float, most: float) -> str:
    return f"{rate / most:.1f} times the {most / 1e9:.0f} GB/s"


def tokens(rate: float, weights: Weights, peaks: Peaks, streams: int | None = None) -> str:
    """Return a sentence if a token rate needs more than the GPU's FLOPS or bandwidth; "" if possible.

    `rate` is in tokens per second, of all sequences together; `streams` is the number of sequences generated in
    parallel, which read the weights once for a token of each. With None, for a prompt or an unknown number, bandwidth
    is not checked.
    """
    size = f"{rate:g} t/s with {weights.parameters / 1e9:g}B parameters"
    if excess := compute(rate * 2 * weights.parameters, weights.path, peaks):
        return f"{size}: {excess}"
    if streams is None:
        return ""
    size_bytes = weights.parameters * weights.bits / 8
    excess = memory(rate / streams * size_bytes, peaks, size_bytes)
    shared = f", read once for {streams} sequences" if streams > 1 else ""
    return f"{size} of {weights.bits:.3g} bits{shared}: {excess}" if excess else ""


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.4g} TFLOPS"


def implausible(
    metric: str,
    params: Mapping[str, Param],
    value: float,
    peaks: Peaks,
    *,
    weights: Weights | None = None,
    moved: float | None = None,
) -> str:
    """Return a sentence if a measured value is impossible on a GPU; "" if possible or not checked.

    Args:
        metric: Its name in `units.METRICS`.
        params: The cell's parameters. Used here: op_name and type_a, or n_prompt and n_gen, or pl (parallel sequences).
        value: In the metric's unit.
        weights: The model's; without them token rates are not checked.
        moved: Bytes of one call of an operation, as the tool counts them; without them times are not checked.
    """
    if metric == "flops":
        return compute(value, path_of(str(params.get("type_a", ""))), peaks)
    if metric == "bandwidth_gb_s" and _counts_what_it_moves(params):
        return memory(value * _GIB_IN_GB * 1e9, peaks, moved)
    if metric == "time_us" and params.get("op_name") == "MUL_MAT" and moved and _counts_what_it_moves(params):
        return memory(moved / value * 1e6, peaks, moved)
    if weights is None or metric not in ("avg_ts", "speed_pp", "speed_tg", "speed", "speed_out"):
        return ""
    if metric == "avg_ts" and params.get("n_gen") and not params.get("n_prompt"):
        return tokens(value, weights, peaks, 1)
    generated = metric in ("speed_tg", "speed_out") and "pl" in params
    return tokens(value, weights, peaks, int(params["pl"]) if generated else None)


_INFLATED = (
    *("ADD", "SUB", "MUL", "DIV", "ADD_ID", "ACC", "SET", "REPEAT", "REPEAT_BACK"),
    *("GET_ROWS", "GET_ROWS_BACK", "SET_ROWS"),
)
"""Operations whose counted bytes exceed the touched ones: a whole table of which some rows are read, a broadcast
operand counted with the size of its result."""


def _counts_what_it_moves(params: Mapping[str, Param]) -> bool:
    """Return whether a case touches all its counted bytes; the size of a view includes its gaps."""
    view = any(str(params.get(name, 0)) != "0" for name in ("v", "k_v"))
    return params.get("op_name") not in _INFLATED and not view
