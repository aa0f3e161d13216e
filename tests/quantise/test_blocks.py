"""Decoded blocks against the gguf package's."""

import math
import random
import struct

import gguf
import numpy as np
import pytest

from dgxlab.gguf_header import BLOCKS
from dgxlab.quantise.fidelity import DECODED, weights

SCALES = {"Q4_0": 1, "Q8_0": 1, "IQ4_NL": 1, "IQ4_XS": 1, "Q4_K": 2, "Q5_K": 2}
"""Halves at the beginning of a block; Q6_K has one at the end."""


def blocks_of(kind: str, count: int) -> bytes:
    """Return blocks of random bits whose scales are finite halves."""
    rng = random.Random(kind)  # noqa: S311 - the same blocks each time
    result = b""
    for _ in range(count):
        block = rng.randbytes(BLOCKS[kind][1])
        scales = struct.pack("<2e", rng.gauss(0, 1), rng.gauss(0, 1e-6))[: 2 * SCALES.get(kind, 0)]
        block = scales + block[len(scales) :]
        result += block[:-2] + struct.pack("<e", rng.gauss(0, 1)) if kind == "Q6_K" else block
    return result


@pytest.mark.parametrize("kind", sorted(set(DECODED) - {"F32", "F16"}))
def test_blocks_are_decoded_as_the_gguf_package_does(kind: str) -> None:
    content = blocks_of(kind, 300)
    rows = np.frombuffer(content, np.uint8).reshape(300, -1)
    with np.errstate(all="ignore"):  # random bits are also infinite
        theirs = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind]).reshape(-1).tolist()
    ours = weights(kind, content)
    assert len(ours) == 300 * BLOCKS[kind][0]
    for mine, other in zip(ours, theirs, strict=True):
        if math.isfinite(other):  # theirs are rounded to 32 bits, terms of Q4_K and Q5_K one by one
            assert mine == pytest.approx(other, rel=1e-6, abs=1e-6)


def test_floats() -> None:
    values = [0.0, -1.5, 2.0**-14, 65504.0]
    assert weights("F32", struct.pack("<4f", *values)) == values
    assert weights("F16", struct.pack("<4e", *values)) == values
    assert weights("BF16", b"\x80\x3f\x00\xc0") == [1.0, -2.0]
