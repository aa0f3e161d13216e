"""Detect impossible numbers: the peaks of known GPUs, and the rates that a figure implies.

A figure is flagged only if it is impossible. Unknowns count in its favour: a GPU without an entry has no peaks,
weights of an unknown type use the GPU's fastest path, and bytes that fit in the cache may move faster than memory.
It cannot tell whether a possible number was measured well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dgxlab.model import Param

BOOST = 1.1
"""Margin of FLOPS: they are documented at a nominal clock, which a cool GPU exceeds (H200: 1.83 against 1.98 GHz); and
a model's name rounds its size, and counts embeddings that a prompt only looks up."""

ROUNDING = 1.01
"""Margin of bandwidth: memory has a fixed clock, but its documented bandwidth is rounded."""

GIB_IN_GB = 2**30 / 1e9
"""ggml's tools divide by 2^30 for the "GB/s" that they print."""


@dataclass(frozen=True)
class Peaks:
    """Documented peaks of a GPU."""

    gpu: str
    bandwidth: float
    """Memory bandwidth, in bytes per second."""
    cache: float
    """Size of its L2, in bytes."""
    cached: float
    """Bandwidth of the L2, in bytes per second: 64 per clock and multiprocessor."""
    flops: Mapping[str, float]
    """Dense FLOPS by compute path: bf16, fp8, int8, fp4; missing paths are left out."""

    def times(self, count: int) -> Peaks:
        """Return the peaks of `count` such GPUs together."""
        if count == 1:
            return self
        flops = {path: count * most for path, most in self.flops.items()}
        return Peaks(f"{count} {self.gpu}", count * self.bandwidth, count * self.cache, count * self.cached, flops)

    def path(self, wanted: str) -> tuple[str, float]:
        """Return a compute path and its FLOPS: the wanted one, or the fastest if that is unknown or missing."""
        name = wanted if wanted in self.flops else max(self.flops, key=self.flops.__getitem__)
        return name, self.flops[name]


@dataclass(frozen=True)
class Weights:
    """The part of a model that every token passes through."""

    parameters: float
    """Number of parameters; for a mixture of experts the active ones."""
    bits: int
    """Minimum bits of a parameter in memory, 0 if unknown."""
    path: str
    """The fastest compute path for it, "" if unknown."""


_HOPPER = {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12}

_GB10 = {"bf16": 107e12, "fp8": 213e12, "int8": 213e12, "fp4": 427e12}
_PER_CLOCK = 64.0

GPUS = {
    r"GB10": Peaks("GB10", 273e9, 24 * 2**20, 48 * _PER_CLOCK * 3.0e9, _GB10),
    r"H200": Peaks("H200", 4.8e12, 60 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
    r"H100 NVL": Peaks("H100 NVL", 3.94e12, 50 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
    r"H100( 80GB HBM3)?": Peaks("H100", 3.35e12, 50 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
}
"""By a GPU's whole name after "NVIDIA"; an H100 PCIe is a different, slower GPU. The 1 PFLOPS of a GB10 and the
doubled figures of others are for sparse matrices."""

ACTIVE = {r"gpt-oss-20b": 3.6e9, r"gpt-oss-120b": 5.1e9, r"deepseek-(v3|r1)": 37e9, r"qwen3-coder-next": 3e9}
"""Active parameters of mixtures of experts whose names contain only the total."""


def peaks(name: str) -> Peaks | None:
    """Return the peaks of a GPU by nvidia-smi's name for it; None if unknown."""
    return next((peaks for gpu, peaks in GPUS.items() if re.fullmatch(f"(NVIDIA )?{gpu}", name)), None)


def together(names: Sequence[str], *, alone: bool = False) -> Peaks | None:
    """Return the peaks of several GPUs together; None if there is none, or one is unknown or of another kind.

    With `alone` only one of them computes: an operation runs on one GPU, a model may be spread over all.
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
    """Return the fastest compute path (`bf16`, `int8`, ...) for weights of a type; "" for an unknown type."""
    name = type.lower()
    return next((path for pattern, path in _PATHS if re.search(pattern, name)), "")


def weights_of(model: str, type: str) -> Weights | None:
    """Return the weights implied by the names of a model and its type; None if the name has no size."""
    name = model.lower()
    sizes: dict[str, float] = {}  # of active parameters by "a", of all by ""
    for a, number, unit in _SIZE.findall(name):
        size = float(number) * (1e9 if unit == "b" else 1e6)
        sizes[a] = min(size, sizes.get(a, size))
    parameters = None if "a" not in sizes and "moe" in name else sizes.get("a", sizes.get(""))
    parameters = next((active for pattern, active in ACTIVE.items() if re.search(pattern, name)), parameters)
    return None if parameters is None else Weights(parameters, bits_of(type), path_of(type))


def bits_of(type: str) -> int:
    """Return the minimum bits per weight of a type, without scales; 0 for an unknown type."""
    name = type.lower()
    bits = next((bits for pattern, bits in _BITS if re.search(pattern, name)), 0)
    quantised = re.search(r"q(\d)", name)
    return bits or (int(quantised[1]) if quantised else 0)


def compute(flops: float, path: str, peaks: Peaks) -> str:
    """Return by how much FLOPS exceed the GPU's peak on a compute path, in words; "" if they do not."""
    name, most = peaks.path(path)
    if flops <= BOOST * most:
        return ""
    sentence = f"{_tera(flops)} are {flops / most:.1f} times the {_tera(most)} of {peaks.gpu} in {name}"
    fastest, best = peaks.path("")
    return f"{sentence}, and more than the {_tera(best)} of {fastest}" if most < best < flops else sentence


def memory(rate: float, peaks: Peaks, moved: float | None = None) -> str:
    """Return by how much a bandwidth exceeds memory and cache, in words; `moved` is bytes per repeated call."""
    kept = 0.0 if moved is None else min(1.0, peaks.cache / max(moved, 1.0))
    shown, needed = f"{rate / 1e9:.0f} GB/s", rate * (1 - kept)
    if needed > ROUNDING * peaks.bandwidth:
        aside = f", {kept:.0%} of it from the cache," if kept >= 0.01 else ""
        return f"{shown}{aside} are {_times(needed, peaks.bandwidth)} of {peaks.gpu}"
    return f"{shown} are {_times(rate, peaks.cached)} of {peaks.gpu}'s cache" if rate > BOOST * peaks.cached else ""


def _times(rate: float, most: float) -> str:
    return f"{rate / most:.1f} times the {most / 1e9:.0f} GB/s"


def tokens(rate: float, weights: Weights, peaks: Peaks, streams: int | None = None) -> str:
    """Return by how much a token rate exceeds the GPU's compute peak, or for generation its bandwidth; "" if not.

    `streams` sequences get one token in each pass over the weights; None for a prompt, or where it is not known.
    """
    size = f"{rate:g} t/s with {weights.parameters / 1e9:g}B parameters"
    if excess := compute(rate * 2 * weights.parameters, weights.path, peaks):
        return f"{size}: {excess}"
    if streams is None:
        return ""
    size_bytes = weights.parameters * weights.bits / 8
    excess = memory(rate / streams * size_bytes, peaks, size_bytes)
    shared = f", read once for {streams} sequences" if streams > 1 else ""
    return f"{size} of {weights.bits} bits{shared}: {excess}" if excess else ""


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
    """Return why a number of one of llama.cpp's tools is impossible on a GPU; "" if possible.

    Args:
        metric: Its name in `units`; some metrics have no check.
        params: The cell's: type_a, n_prompt and n_gen, or pl.
        value: In the metric's unit.
        weights: For token rates; without weights they are not checked.
        moved: For times and bandwidth, bytes of one call, as the tool counts them.
    """
    if metric == "flops":
        return compute(value, path_of(str(params.get("type_a", ""))), peaks)
    if metric == "bandwidth_gb_s" and _counts_what_it_moves(params):
        return memory(value * GIB_IN_GB * 1e9, peaks, moved)
    if metric == "time_us" and params.get("op_name") == "MUL_MAT" and moved and _counts_what_it_moves(params):
        return memory(moved / value * 1e6, peaks, moved)
    if weights is None or metric not in ("avg_ts", "speed_pp", "speed_tg", "speed"):
        return ""
    if metric == "avg_ts" and params.get("n_gen") and not params.get("n_prompt"):
        return tokens(value, weights, peaks, 1)
    return tokens(value, weights, peaks, int(params["pl"]) if metric == "speed_tg" and "pl" in params else None)


INFLATED = (
    *("ADD", "SUB", "MUL", "DIV", "ADD_ID", "ACC", "SET", "REPEAT", "REPEAT_BACK"),
    *("GET_ROWS", "GET_ROWS_BACK", "SET_ROWS"),
)
"""Operations whose counted bytes exceed the touched ones: a whole table of which some rows are read, a broadcast
operand counted with the size of its result."""


def _counts_what_it_moves(params: Mapping[str, Param]) -> bool:
    """Return whether a case touches all its counted bytes; the size of a view includes its gaps."""
    view = any(str(params.get(name, 0)) != "0" for name in ("v", "k_v"))
    return params.get("op_name") not in INFLATED and not view
