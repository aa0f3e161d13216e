"""The error of quantised weights against those that they were made from, by class of tensors.

NMSE is the sum of squared errors by the sum of squared weights of the source; SQNR is the same in dB. Both are
measured on runs of weights spread evenly over each tensor, the same for every host: a whole model would take hours.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from dgxlab.gguf_header import BLOCKS, Header, TensorInfo
from dgxlab.model.parts import Fidelity

RUN = 256  # weights in a sampled run: a whole number of blocks of every type
RUNS = 32  # most runs that are read of a tensor: 8,192 weights, in about a hundredth of a second

_CLASSES = (
    (r"token_embd", "embedding"),
    (r"^output", "output"),
    (r"_exps\.", "experts"),
    (r"\.ssm_", "ssm"),
    (r"\.attn_", "attention"),
    (r"\.ffn_", "ffn"),
)
"""Classes by a tensor's name; first match. A shared expert is a ffn: every token passes it."""


def fidelity(source: Path, before: Header, result: Path, after: Header) -> dict[str, Fidelity]:
    """Return NMSE and SQNR by class of tensors; tensors whose type did not change are left out.

    `before` is the header of the file that the model was made from, `after` that of the quantised one.
    """
    originals = {tensor.name: tensor for tensor in before.tensors}
    # a gated delta net projects into q, k, v and its gate by tensors that are named as an attention's
    nets = {tensor.name.partition(".ssm_")[0] for tensor in after.tensors if ".ssm_" in tensor.name}
    classes: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in after.tensors:
        if tensor.type != originals[tensor.name].type:
            layer, _, name = tensor.name.rpartition(".attn_")
            part_of_net = layer in nets and name.startswith(("qkv", "gate"))
            classes["ssm" if part_of_net else class_of(tensor.name)].append(tensor)
    with source.open("rb") as old, result.open("rb") as new:
        by_class = {}
        for name, tensors in sorted(classes.items()):
            pairs = [(originals[tensor.name], tensor) for tensor in tensors]
            by_class[name] = _of_class(pairs, (old, before.begin), (new, after.begin))
        return by_class


def class_of(name: str) -> str:
    """Return the class of a tensor by its name: attention, ffn, experts, ssm, embedding, output or other."""
    return next((kind for pattern, kind in _CLASSES if re.search(pattern, name)), "other")


def _of_class(
    pairs: list[tuple[TensorInfo, TensorInfo]], old: tuple[BinaryIO, int], new: tuple[BinaryIO, int]
) -> Fidelity:
    types = Counter(tensor.type for _, tensor in pairs)
    sampled, noise, signal = 0, 0.0, 0.0
    known = {each.type for pair in pairs for each in pair} <= DECODED.keys()
    for original, tensor in pairs if known else ():
        spots = sampled_runs(tensor.size)
        read = sum(count for _, count in spots)
        share = read / tensor.size  # a large tensor counts for more than a small one
        for start, count in spots:
            was, now = (_read(*file, each, start, count) for file, each in ((old, original), (new, tensor)))
            noise += math.fsum((a - b) ** 2 for a, b in zip(was, now, strict=True)) / share
            signal += math.fsum(a * a for a in was) / share
        sampled += read
    nmse = noise / signal if signal and math.isfinite(noise / signal) else None
    return {
        "types": ", ".join(kind for kind, _ in types.most_common()),
        "weights": sum(tensor.size for _, tensor in pairs),
        "sampled": sampled,
        "nmse": nmse,
        "sqnr_db": -10 * math.log10(nmse) if nmse else None,  # none where every weight is exact
    }


def sampled_runs(size: int) -> list[tuple[int, int]]:
    """Return (first weight, length) of each run that is read of a tensor of `size` weights."""
    runs = size // RUN
    if runs <= RUNS:
        return [(start, min(RUN, size - start)) for start in range(0, size, RUN)]
    return [(i * runs // RUNS * RUN, RUN) for i in range(RUNS)]


def _read(stream: BinaryIO, begin: int, tensor: TensorInfo, start: int, count: int) -> list[float]:
    length, size = BLOCKS[tensor.type]
    stream.seek(begin + tensor.offset + start // length * size)
    return weights(tensor.type, stream.read(count // length * size))


# -- decoders of ggml's types ------------------------------------------------------------------------------------------


_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of a 4-bit float, as ggml's scales of MXFP4 and NVFP4 expect."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS, which are not evenly spaced."""

_Q4 = tuple(range(-8, 8))  # the values of Q4_0


def weights(kind: str, content: bytes) -> list[float]:
    """Return the weights in whole blocks of the ggml type `kind`; KeyError unless the type is in DECODED."""
    length, size = BLOCKS[kind]
    decode = DECODED[kind]
    if length == 1:
        return list(decode(content))
    return [weight for start in range(0, len(content), size) for weight in decode(content[start : start + size])]


def _halves(content: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(content) // 2}e", content)


def _bfloats(content: bytes) -> tuple[float, ...]:
    wide = b"".join(b"\0\0" + content[i : i + 2] for i in range(0, len(content), 2))
    return struct.unpack(f"<{len(content) // 2}f", wide)


def _table(values: tuple[int, ...], scale: float, packed: bytes) -> list[float]:
    codes = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]  # all low halves, then all high ones
    return [scale * values[code] for code in codes]


def _of_table(values: tuple[int, ...]) -> Callable[[bytes], list[float]]:
    """Return the decoder of blocks of a scale and codes of a table."""
    return lambda block: _table(values, _halves(block[:2])[0], block[2:])


def _q8_0(block: bytes) -> list[float]:
    (scale,) = _halves(block[:2])
    return [scale * code for code in struct.unpack("<32b", block[2:])]


def _nvfp4(block: bytes) -> list[float]:
    parts = (_table(_E2M1, _ue4m3(block[i]), block[4 + 8 * i : 12 + 8 * i]) for i in range(4))
    return [weight for part in parts for weight in part]


def _ue4m3(code: int) -> float:
    """Return half of an unsigned float of 4 bits exponent and 3 bits mantissa; 0x7F is 0 in ggml."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if code == 0x7F:
        return 0.0
    return math.ldexp(mantissa, -10) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 11)


def _scales(packed: bytes) -> Iterator[tuple[int, int]]:
    """Yield the 6-bit scale and minimum of each of the eight parts of a Q4_K or Q5_K block."""
    for i in range(4):
        yield packed[i] & 63, packed[i + 4] & 63
    for i in range(4):
        low, scale, least = packed[i + 8], packed[i], packed[i + 4]
        yield low & 15 | scale >> 6 << 4, low >> 4 | least >> 6 << 4


def _k4(block: bytes, high: bytes | None = None) -> list[float]:
    """Return the weights of a Q4_K block, or of a Q5_K block whose fifth bits are `high`."""
    scale, least = _halves(block[:4])
    codes = block[-128:]
    result: list[float] = []
    for part, (factor, minimum) in enumerate(_scales(block[4:16])):
        packed = codes[part // 2 * 32 : part // 2 * 32 + 32]
        quants = [byte >> part % 2 * 4 & 15 for byte in packed]
        if high:
            quants = [code | (byte >> part & 1) << 4 for code, byte in zip(quants, high, strict=True)]
        result += [scale * factor * code - least * minimum for code in quants]
    return result


def _q6_k(block: bytes) -> list[float]:
    low, high, factors = block[:128], block[128:192], struct.unpack("<16b", block[192:208])
    (scale,) = _halves(block[208:])
    result = []
    for i in range(256):
        half, quarter, place = i // 128, i % 128 // 32, i % 32
        code = low[half * 64 + quarter % 2 * 32 + place] >> quarter // 2 * 4 & 15
        code |= (high[half * 32 + place] >> quarter * 2 & 3) << 4
        result.append(scale * factors[i // 16] * (code - 32))
    return result


def _iq4_xs(block: bytes) -> list[float]:
    (scale,) = _halves(block[:2])
    high = int.from_bytes(block[2:4], "little")
    result: list[float] = []
    for i in range(8):
        factor = (block[4 + i // 2] >> i % 2 * 4 & 15 | (high >> 2 * i & 3) << 4) - 32
        result += _table(_IQ4, scale * factor, block[8 + 16 * i : 24 + 16 * i])
    return result


DECODED: Mapping[str, Callable[[bytes], list[float] | tuple[float, ...]]] = {
    "F32": lambda content: struct.unpack(f"<{len(content) // 4}f", content),
    "F16": _halves,
    "BF16": _bfloats,
    "Q4_0": _of_table(_Q4),
    "Q8_0": _q8_0,
    "Q4_K": _k4,
    "Q5_K": lambda block: _k4(block, block[16:48]),
    "Q6_K": _q6_k,
    "IQ4_NL": _of_table(_IQ4),
    "IQ4_XS": _iq4_xs,
    "MXFP4": lambda block: _table(_E2M1, math.ldexp(1.0, block[0] - 128), block[1:]),
    "NVFP4": _nvfp4,
}
"""The decoder of each type that can be compared: of one block, or, where types have no blocks, of all bytes at once."""
