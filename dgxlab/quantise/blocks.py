"""Decoders of ggml's types, from bytes to weights, with the standard library only: hosts may lack numpy."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping

from dgxlab.gguf_header import BLOCKS

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of a 4-bit float, as ggml's scales of MXFP4 and NVFP4 expect."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of IQ4_NL and IQ4_XS, which are not evenly spaced."""

_Q4 = tuple(range(-8, 8))
"""The values of Q4_0."""


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


def _mxfp4(block: bytes) -> list[float]:
    return _table(_E2M1, math.ldexp(1.0, block[0] - 128), block[1:])


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
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
}
"""The decoder of each type that can be compared: of one block, or, where types have no blocks, of all bytes at once."""
