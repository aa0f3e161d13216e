"""The byte gate: the largest possible gain from rewriting a kernel, from its minimum traffic and its time.

A kernel cannot be faster than its minimum bytes at the memory's peak bandwidth. If it is already close to that, a
rewrite does not pay, and the gate says so before the work begins. Every input is observed (from a file, a
trace, a measured copy) or inferred; an inferred one may be wrong, so the gate never says build on it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Union

from dgxlab.errors import AGAIN, UsageError
from dgxlab.gguf_header import BLOCKS, Header


@dataclass(frozen=True)
class Input:
    """A number, or the name of a ggml type, that the gate is computed from."""

    value: Union[float, str]
    observed: bool  # False if it is an assumption, and was neither read nor measured
    origin: str  # where it comes from, or why it is assumed


class _Inputs:
    """The inputs of one kernel; `used` are those read so far. A missing one is assumed to be the default, if given.

    One without a default is in `missing`, with an example of its value, which is used in its place.
    """

    def __init__(self, known: Mapping[str, Input]) -> None:
        self._known = dict(known)
        self.used: dict[str, Input] = {}
        self.missing: dict[str, str] = {}

    def number(self, name: str, default: float | None = None, origin: str = "", example: str = "1") -> float:
        value = self._take(name, example, None if default is None else f"{default:g}", origin)
        try:
            number = float(value)
        except ValueError:
            raise UsageError(f"{name} must be a number, not {value!r}", next="dgxlab bytes --help") from None
        if not 0 < number < float("inf"):
            raise UsageError(f"{name} must be above 0, not {value}", next="dgxlab bytes --help")
        return number

    def width(self, default: str | None = None) -> float:
        """Return the bytes of a value of the input `type`, scales counted: 4 of F32, 0.5625 of Q4_0."""
        value = str(self._take("type", "F32", default, "llama.cpp's default")).upper()
        if value not in BLOCKS:
            raise UsageError(f"type {value} is no type of ggml: {', '.join(BLOCKS)}", next="dgxlab bytes --help")
        block, size = BLOCKS[value]
        return size / block

    def _take(self, name: str, example: str, default: str | None, origin: str) -> Union[float, str]:
        if name not in self._known and default is not None:
            self._known[name] = Input(default, False, origin)
        if name not in self._known:
            self.missing[name] = example
            return example
        self.used[name] = self._known[name]
        return self._known[name].value


Parts = dict[str, float]  # bytes of one call, by operand


def _product(inputs: _Inputs) -> Parts:
    m, n, k = (inputs.number(name) for name in ("m", "n", "k"))
    return {"weights": m * k * inputs.width(), "activations": n * k * 4, "result": n * m * 4}


def _grouped_product(inputs: _Inputs) -> Parts:
    m, k, tokens = (inputs.number(name) for name in ("m", "k", "tokens"))
    experts, used = inputs.number("experts", example="256"), inputs.number("used")
    # what uniform routing touches on average; a skewed router touches fewer
    touched = experts * (1 - (1 - used / experts) ** tokens)
    touched = inputs.number("touched", touched, "uniform routing")
    weights = touched * m * k * inputs.width()
    return {"weights": weights, "activations": tokens * k * 4, "result": tokens * used * m * 4}


def _delta_net(inputs: _Inputs) -> Parts:
    sequences, heads, state = (inputs.number(name) for name in ("sequences", "heads", "state"))
    tokens = sequences * inputs.number("tokens", 1, "decoding")
    k_heads = inputs.number("k_heads", heads, "as many as value heads")
    return {
        "state read": sequences * heads * state**2 * (width := inputs.width("F32")),
        "state written": sequences * heads * state**2 * width,
        "q, k": 2 * tokens * k_heads * state * 4,
        "v, result": 2 * tokens * heads * state * 4,
        "gates": 2 * tokens * heads * 4,
    }


def _convolution(inputs: _Inputs) -> Parts:
    sequences, channels = inputs.number("sequences"), inputs.number("channels")
    taps = inputs.number("taps", 4, "as in Qwen3.5")
    tokens = sequences * inputs.number("tokens", 1, "decoding")
    kept = sequences * channels * (taps - 1) * 4
    return {
        "state read": kept,
        "state written": kept,
        "input, result": 2 * tokens * channels * 4,
        "weights": channels * taps * 4,
    }


def _attention(inputs: _Inputs) -> Parts:
    sequences, depth = inputs.number("sequences"), inputs.number("depth")
    heads, kv_heads, dim = (inputs.number(name) for name in ("heads", "kv_heads", "dim"))
    cache = sequences * depth * kv_heads * dim * inputs.width("F16")
    return {"keys": cache, "values": cache, "q, result": 2 * sequences * heads * dim * 4}


def _rows(inputs: _Inputs) -> Parts:
    values = inputs.number("rows") * inputs.number("width")
    return {"read": values * inputs.width("F32"), "written": values * 4}


def _copy(inputs: _Inputs) -> Parts:
    moved = inputs.number("values") * inputs.width("F32")
    return {"read": moved, "written": moved}


_KERNELS: Mapping[str, Callable[[_Inputs], Parts]] = {
    "mul_mat": _product,
    "mul_mat_id": _grouped_product,
    "gated_delta_net": _delta_net,
    "ssm_conv": _convolution,
    "attention": _attention,
    "get_rows": _rows,
    "copy": _copy,
}
"""A kernel's minimum traffic by ggml's name of the operation: each operand is read once, the result written once."""


@dataclass(frozen=True)
class Decision:
    """Whether rewriting a kernel can pay."""

    kernel: str
    verdict: str  # "build", "not worth it", or "unknown": it would be "build", but an input is assumed
    bytes_min: float  # of a call, the sum of `parts`
    parts: Parts
    floor_us: float  # the time for these bytes at the memory's peak bandwidth
    gb_s: float  # the bandwidth that these bytes and the measured time give
    share: float  # gb_s by the peak
    cap: float  # the largest possible speedup, measured time by floor
    gain: float  # the wanted one
    inputs: Mapping[str, Input]  # defaults included

    @property
    def assumed(self) -> list[str]:
        """Names of inputs that were not observed."""
        return [name for name, each in self.inputs.items() if not each.observed]


def decide(kernel: str, known: Mapping[str, Input], *, gain: float = 1.2) -> Decision:
    """Compare a kernel's measured time with the time for its minimum bytes at peak bandwidth.

    Args:
        kernel: ggml's name of the operation, as `mul_mat`.
        known: `us`, the time of one call; `peak`, the memory's bandwidth in GB/s; and the kernel's sizes and types.
        gain: The wanted speedup, above 1.

    Raises:
        UsageError: if the kernel or an input is unknown, missing or no valid value, or if the measured time is below
            the minimum, so that an input must be wrong.
    """
    if kernel not in _KERNELS:
        near = difflib.get_close_matches(kernel.lower(), _KERNELS, n=1)
        others = f"; did you mean {near[0]}?" if near else f": {', '.join(_KERNELS)}"
        raise UsageError(f"no bytes are known for {kernel!r}{others}", next="dgxlab bytes --help")
    if not 1 < gain < float("inf"):
        raise UsageError(f"the wanted gain must be above 1, not {gain:g}", next="dgxlab bytes --help")
    inputs = _Inputs(known)
    parts = _KERNELS[kernel](inputs)
    us = inputs.number("us", example="1e6")  # so large that the floor is hardly above it
    peak = inputs.number("peak", example="4800")  # of an H200
    if strange := [name for name in known if name not in inputs.used]:
        has = ", ".join([*inputs.used, *inputs.missing])
        raise UsageError(f"{kernel} has no {strange[0]!r}; it has {has}", next="dgxlab bytes --help")
    if missing := inputs.missing:
        message = f"{kernel} needs {', '.join(missing)}: with --given what was read or measured, else with --assume"
        options = " ".join(f"--assume {name}={example}" for name, example in missing.items())
        raise UsageError(message, next=f"{AGAIN} with {options}")
    moved = sum(parts.values())
    floor_us = moved / peak / 1e3
    if us < floor_us:
        message = f"{us:g} us is below the floor of {floor_us:.4g} us: the geometry, the time or the peak is wrong"
        raise UsageError(message, next="measure the copy peak of this device, and check each input")
    cap = us / floor_us
    observed = all(each.observed for each in inputs.used.values())
    verdict = "not worth it" if cap < gain else "build" if observed else "unknown"
    return Decision(kernel, verdict, moved, parts, floor_us, moved / us / 1e3, floor_us / us, cap, gain, inputs.used)


def of_model(header: Header) -> Iterator[tuple[str, str, float]]:
    """Yield (kernel, name of its input, value) for each input that the header of a model's file gives."""
    prefix = f"{header.architecture}."
    keys = {
        "gated_delta_net": {"heads": "ssm.time_step_rank", "k_heads": "ssm.group_count", "state": "ssm.state_size"},
        "ssm_conv": {"taps": "ssm.conv_kernel"},
        "attention": {
            "heads": "attention.head_count",
            "kv_heads": "attention.head_count_kv",
            "dim": "attention.key_length",
        },
        "mul_mat_id": {"experts": "expert_count", "used": "expert_used_count"},
    }
    for kernel, names in keys.items():
        for name, key in names.items():
            value = header.metadata.get(prefix + key)
            if isinstance(value, (int, float)):
                yield kernel, name, float(value)
    for tensor in header.tensors:
        if tensor.name.endswith("ssm_conv1d.weight"):
            yield "ssm_conv", "channels", float(tensor.shape[1])
            return
