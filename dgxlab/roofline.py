"""The guard against numbers that no machine can reach: peaks of known GPUs, and what a figure implies.

A figure is flagged only where it cannot be true. Everything unknown is read in its favour: a GPU without an entry has
no peaks, weights of an unknown type take the GPU's fastest path, and bytes that fit in the cache may move faster than
memory does. What it cannot tell is whether a possible number was measured well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dgxlab.model import Param

BOOST = 1.1
"""Documented FLOPS are at a nominal clock, which a cool GPU leaves behind (H200: 1.83 against 1.98 GHz); and a model's
name rounds, and counts embeddings that a prompt only looks up."""

ROUNDING = 1.01
"""Memory has one clock; only what is written down of its bandwidth is rounded."""

GIB_IN_GB = 2**30 / 1e9
"""test-backend-ops divides by 2^30 and prints GB/s."""


@dataclass(frozen=True)
class Peaks:
    """What a GPU can do at most, as documented.

    Attributes:
        gpu: Its name in sentences.
        bandwidth: Of its memory, in bytes a second.
        cache: Its L2, in bytes.
        cached: What its multiprocessors can take from the L2, in bytes a second: 64 a clock and multiprocessor.
        flops: Dense, a second, by path: bf16, fp8, int8, fp4; a path that it lacks is left out.
    """

    gpu: str
    bandwidth: float
    cache: float
    cached: float
    flops: Mapping[str, float]

    def times(self, count: int) -> Peaks:
        """Return what so many of them reach together."""
        if count == 1:
            return self
        sums = {name: count * getattr(self, name) for name in ("bandwidth", "cache", "cached")}
        flops = {path: count * most for path, most in self.flops.items()}
        return replace(self, gpu=f"{count} {self.gpu}", flops=flops, **sums)

    def path(self, wanted: str) -> tuple[str, float]:
        """Return a path and its FLOPS: the wanted one, or the fastest where it is not known or there is none."""
        name = wanted if wanted in self.flops else max(self.flops, key=self.flops.__getitem__)
        return name, self.flops[name]


@dataclass(frozen=True)
class Weights:
    """The part of a model that every token passes through.

    Attributes:
        parameters: How many; of a mixture of experts those that are active.
        bits: What one takes in memory at least, 0 where that is not known.
        path: The fastest way to multiply with it, "" where that is not known.
    """

    parameters: float
    bits: int
    path: str


_HOPPER = {"bf16": 989e12, "fp8": 1979e12, "int8": 1979e12}

_GB10 = {"bf16": 107e12, "fp8": 213e12, "int8": 213e12, "fp4": 427e12}
_PER_CLOCK = 64.0

GPUS = {
    r"GB10": Peaks("GB10", 273e9, 24 * 2**20, 48 * _PER_CLOCK * 3.0e9, _GB10),
    r"H200": Peaks("H200", 4.8e12, 60 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
    r"H100 NVL": Peaks("H100 NVL", 3.94e12, 50 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
    r"H100( 80GB HBM3)?": Peaks("H100", 3.35e12, 50 * 2**20, 132 * _PER_CLOCK * 1.98e9, _HOPPER),
}
"""By a GPU's whole name behind "NVIDIA"; an H100 for PCIe is another, slower one. The 1 PFLOPS of a GB10 and the
doubled figures of others are for sparse matrices."""

ACTIVE = {r"gpt-oss-20b": 3.6e9, r"gpt-oss-120b": 5.1e9, r"deepseek-(v3|r1)": 37e9, r"qwen3-coder-next": 3e9}
"""Active parameters of mixtures of experts whose names tell only how many there are."""


def peaks(name: str) -> Peaks | None:
    """Return the peaks of a GPU by nvidia-smi's name for it; None for one that is not known."""
    return next((peaks for gpu, peaks in GPUS.items() if re.fullmatch(f"(NVIDIA )?{gpu}", name)), None)


def together(names: Sequence[str], *, alone: bool = False) -> Peaks | None:
    """Return what GPUs reach together; None where there is none, or one is not known or of another kind.

    Args:
        alone: Whether only one of them computes: an operation has one, a model may be spread over all.
    """
    first, *others = [peaks(name) for name in names] or [None]
    if first is None or any(other != first for other in others):
        return None
    return first if alone else first.times(len(names))


# -- what a name tells ------------------------------------------------------------------------------------------------

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
    """Return the fastest path for weights of a type, as ggml or a document calls it; "" for an unknown one."""
    name = type.lower()
    return next((path for pattern, path in _PATHS if re.search(pattern, name)), "")


def weights_of(model: str, type: str) -> Weights | None:
    """Return what the names of a model and of its weights' type tell; None where no size is in them."""
    name = model.lower()
    sizes: dict[str, float] = {}  # of active parameters by "a", of all by ""
    for a, number, unit in _SIZE.findall(name):
        size = float(number) * (1e9 if unit == "b" else 1e6)
        sizes[a] = min(size, sizes.get(a, size))
    parameters = None if "a" not in sizes and "moe" in name else sizes.get("a", sizes.get(""))
    parameters = next((active for pattern, active in ACTIVE.items() if re.search(pattern, name)), parameters)
    return None if parameters is None else Weights(parameters, bits_of(type), path_of(type))


def bits_of(type: str) -> int:
    """Return the bits that a weight of a type takes at least, its scales not counted; 0 for an unknown type."""
    name = type.lower()
    quantised = re.search(r"q(\d)", name)
    bits = next((bits for pattern, bits in _BITS if re.search(pattern, name)), 0)
    return bits or (int(quantised[1]) if quantised else 0)


# -- what a figure implies --------------------------------------------------------------------------------------------


def compute(flops: float, path: str, peaks: Peaks) -> str:
    """Say by how much FLOPS exceed what the GPU reaches on a path; "" where they do not."""
    name, most = peaks.path(path)
    if flops <= BOOST * most:
        return ""
    sentence = f"{_tera(flops)} are {flops / most:.1f} times the {_tera(most)} of {peaks.gpu} in {name}"
    fastest, best = peaks.path("")
    return f"{sentence}, and more than the {_tera(best)} of {fastest}" if most < best < flops else sentence


def memory(rate: float, peaks: Peaks, moved: float | None = None) -> str:
    """Say by how much bytes a second exceed what the GPU's memory, or its cache, can deliver; "" where they do not.

    Args:
        moved: Bytes of one call, which is repeated: those that fit in the cache stay there; None where none does.
    """
    kept = 0.0 if moved is None else min(1.0, peaks.cache / max(moved, 1.0))
    shown, needed = f"{rate / 1e9:.0f} GB/s", rate * (1 - kept)
    if needed > ROUNDING * peaks.bandwidth:
        aside = f", {kept:.0%} of it from the cache," if kept >= 0.01 else ""
        return f"{shown}{aside} are {_times(needed, peaks.bandwidth)} of {peaks.gpu}"
    return f"{shown} are {_times(rate, peaks.cached)} of {peaks.gpu}'s cache" if rate > BOOST * peaks.cached else ""


def _times(rate: float, most: float) -> str:
    return f"{rate / most:.1f} times the {most / 1e9:.0f} GB/s"


def tokens(rate: float, weights: Weights, peaks: Peaks, streams: int | None = None) -> str:
    """Say by how much tokens a second exceed what the GPU can multiply, or, one at a time, what it can read.

    Args:
        streams: How many sequences get one token in each pass over the weights; None for a prompt, whose tokens share
            a pass, and where it is not known.
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
    """Say why a number of one of llama.cpp's tools cannot be true on a GPU; "" where it can.

    Args:
        metric: Its name in `units`; for one that this knows nothing about the answer is "".
        params: The cell's: type_a, n_prompt and n_gen, or pl.
        value: In the metric's unit.
        weights: For tokens a second, see `weights_of`; without them nothing is known.
        moved: For the time of a matrix multiplication and for bandwidth, bytes of one call, as test-backend-ops counts
            them.
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


INFLATED = frozenset(
    [
        *("ADD", "SUB", "MUL", "DIV", "ADD_ID", "ACC", "SET", "REPEAT", "REPEAT_BACK"),
        *("GET_ROWS", "GET_ROWS_BACK", "SET_ROWS"),
    ]
)
"""Operations of which test-backend-ops counts more bytes than they touch: whole tables of which they take some rows, a
broadcast operand with the size of its result."""


def _counts_what_it_moves(params: Mapping[str, Param]) -> bool:
    """Tell whether the bytes of a case are those that it touches; the size of a view counts the gaps in it."""
    view = any(str(params.get(name, 0)) != "0" for name in ("v", "k_v"))
    return params.get("op_name") not in INFLATED and not view
