"""Q4_0 and Q4_K to f16: the kernel's own source on an emulated GPU, and its reference."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import quants

from tests.kernels.conftest import Q4, assert_right, blocks_of, both_orders, fails, ggml, run

NAME = "q4_dequant"

DEFECTS = {
    "no barrier": "«    __syncthreads();\n→»",
    "halves of a block exchanged": "words + 1 + «i % 2→1 - i % 2» * 4",
    "nibbles exchanged": "«i % 8 / 4 * 4→4 - i % 8 / 4 * 4»",
    "another zero": "«0x64086408→0x64076407»",
    "the high code first": "0x64, «0x4140→0x4041»",
    "a minimum's high bits": "(«other→first» >> 2 & 48)",
    "a scale rounded to f16": "«d.x * s→__half2float(emulated_half(d.x * s))», d.y",
    "a tile's last weights left out": "if («i * 8→i * 8 + 8» < n)",
    "weights beyond the last tile": "if (i * 8 < «n→n + 8»)",
    "wide loads from everywhere": " && «(uintptr_t) x % sizeof(uint4) == 0→true»",
    "the tail cut off": "k / Q4_DEQUANT_TILE + «(k % Q4_DEQUANT_TILE != 0)→0»",
}
"""Defects of the kernel."""


def output(program: Path, values: np.ndarray, *args: str) -> bytes:
    """Return what the program makes of an array's bytes."""
    return subprocess.run([program, *args], input=values.tobytes(), capture_output=True, check=True).stdout


def f16_of(values: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest f16 of each value."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).view(np.uint16)


def steps_of(bits: np.ndarray) -> np.ndarray:
    """Return f16 numbers counted in steps from zero."""
    return np.where(bits & 0x8000, -1, 1) * (bits & 0x7FFF).astype(np.int64)


def test_f16_is_counted_in_steps(emulated: Path) -> None:
    """The reference rounds as NumPy does: every f16, the middle of each two, beside it, the largest and beyond."""
    finite = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
    middles = (finite[:-1] + finite[1:]) / 2
    beyond = [65519.999, 65520.0, 65520.001, 1e9, np.inf]
    values = np.concatenate([finite, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9), beyond])
    values = np.concatenate([values, -values])
    steps = np.frombuffer(output(emulated, values, "steps"), np.float64)
    assert (steps == steps_of(f16_of(values))).all()
    assert (np.signbit(steps) == np.signbit(values)).all()


@pytest.mark.parametrize("kind", Q4)
def test_the_kernel_agrees_with_gguf(emulated: Path, kind: str) -> None:
    """Bit for bit the f16 of the float that the gguf package has, written apart from ours and from ggml's C."""
    blocks = blocks_of(kind, 2000)
    weights = np.frombuffer(output(emulated, blocks, "blocks", kind), np.uint16)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, Q4[kind][0]).reshape(-1)
    assert len(weights) == 2000 * Q4[kind][1]
    assert (steps_of(weights) == steps_of(f16_of(expected))).all()


@pytest.mark.llama
@pytest.mark.parametrize("kind", Q4)
def test_the_kernel_agrees_with_ggml(emulated: Path, kind: str, llama_bin: Path) -> None:
    """Bit for bit the f16 of the float that the CPU's own conversion in the real library has, signs of zeros too."""
    blocks = blocks_of(kind, 2000)
    out = ggml(llama_bin, kind, blocks, 2000 * Q4[kind][1])
    assert (np.frombuffer(output(emulated, blocks, "blocks", kind), np.uint16) == f16_of(out)).all()


def test_scales_far_apart_are_rounded_twice(emulated: Path) -> None:
    """1 + 2^-11 + 2^-24, beside the middle of two f16, is the middle as a float: the other neighbour, no further."""
    block = np.zeros(144, np.uint8)
    block[:4] = np.array([2.0**-24, -683 / 2048], "<f2").view(np.uint8)
    block[4], block[8], block[16] = 1, 3, 1
    exact = 2.0**-24 + 3 * 683 / 2048
    weights = np.frombuffer(output(emulated, block, "blocks", "q4_K"), np.uint16)
    assert exact == 1 + 2.0**-11 + 2.0**-24
    assert (f16_of(np.array([exact]))[0], weights[0]) == (0x3C01, 0x3C00)


@both_orders
def test_the_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Both types: every code under every scale, tails, odd addresses, refusals; whichever thread runs first."""
    assert_right(emulated, 67, reverse=reverse)


def test_without_a_defect_it_is_right(defective: Path) -> None:
    assert all(run(defective, "edges", reverse=reverse).returncode == 0 for reverse in (False, True))


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=list(DEFECTS))
def test_a_defect_of_the_kernel_is_found(defective: Path, number: int) -> None:
    """Each fails or crashes the small tests in one of two orders of the threads."""
    assert any(fails(defective, "edges", defect=number, reverse=reverse) for reverse in (False, True))
