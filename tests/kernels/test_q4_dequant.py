"""Q4_0 and Q4_K to f16: the kernel's own source on an emulated GPU, its reference, what the compiler makes of it."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from tests.kernels.conftest import KERNELS, make, needs_gpu, needs_nvcc
from tests.kernels.emulate import EMULATOR, Defect, compile_emulated, plant

NAME = "q4_dequant"
KERNEL = KERNELS / NAME / "q4_dequant.cuh"
PROGRAM = EMULATOR / "q4_dequant.cpp"

TYPES = {"q4_0": (GGMLQuantizationType.Q4_0, 32, 18, 1), "q4_K": (GGMLQuantizationType.Q4_K, 256, 144, 2)}
"""By ggml's name: the type in gguf, weights and bytes of a block, f16 scales at its beginning."""

DEFECTS = {
    "no barrier": Defect("«    __syncthreads();\n»", ("",)),
    "halves of a block exchanged": Defect("words + 1 + «i % 2» * 4", ("1 - i % 2",)),
    "nibbles exchanged": Defect("«i % 8 / 4 * 4»", ("4 - i % 8 / 4 * 4",)),
    "another zero": Defect("«0x64086408»", ("0x64076407",)),
    "the high code first": Defect("0x64, «0x4140»", ("0x4041",)),
    "a minimum's high bits": Defect("(«other» >> 2 & 48)", ("first",)),
    "a scale rounded to f16": Defect("«d.x * s», d.y", ("__half2float(emulated_half(d.x * s))",)),
    "a tile's last weights left out": Defect("if («i * 8» < n)", ("i * 8 + 8",)),
    "weights beyond the last tile": Defect("if (i * 8 < «n»)", ("n + 8",)),
    "wide loads from everywhere": Defect(" && «(uintptr_t) x % sizeof(uint4) == 0»", ("true",)),
    "the tail cut off": Defect("k / Q4_DEQUANT_TILE + «(k % Q4_DEQUANT_TILE != 0)»", ("0",)),
}
"""Defects of the kernel."""


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the proof compiled for the CPU."""
    return compile_emulated(KERNELS, PROGRAM, tmp_path_factory.mktemp("emulated") / NAME)


def edges(program: Path, *, reverse: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the small tests; in reverse the last threads run first."""
    env = {**os.environ, "EMULATOR_REVERSED": "1"} if reverse else dict(os.environ)
    return subprocess.run([program, "edges"], capture_output=True, text=True, env=env, check=False)


def run(program: Path, values: np.ndarray, *args: str) -> bytes:
    """Return what the program makes of an array's bytes."""
    return subprocess.run([program, *args], input=values.tobytes(), capture_output=True, check=True).stdout


def blocks_of(kind: str, count: int) -> np.ndarray:
    """Return random blocks; their scales, f16, are finite, of every size and sign, zeros and denormals among them."""
    _, _, size, n_scales = TYPES[kind]
    random = np.random.default_rng(9)
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    shape = (count, n_scales)
    scales = (random.integers(0, 0x7C00, shape) | random.integers(0, 2, shape) << 15).astype("<u2")
    scales[::7] &= 0x83FF
    scales[0] = 0
    blocks[:, : 2 * n_scales] = scales.view(np.uint8)
    return blocks


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
    found = np.frombuffer(run(emulated, values, "steps"), np.float64)
    assert (found == steps_of(f16_of(values))).all()
    assert (np.signbit(found) == np.signbit(values)).all()


@pytest.mark.parametrize("kind", TYPES)
def test_the_kernel_agrees_with_gguf(emulated: Path, kind: str) -> None:
    """Bit for bit the f16 of the float that the gguf package has, written apart from ours and from ggml's C."""
    blocks = blocks_of(kind, 2000)
    found = np.frombuffer(run(emulated, blocks, "blocks", kind), np.uint16)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, TYPES[kind][0]).reshape(-1)
    assert len(found) == 2000 * TYPES[kind][1]
    assert (steps_of(found) == steps_of(f16_of(expected))).all()


@pytest.mark.llama
@pytest.mark.parametrize("kind", TYPES)
def test_the_kernel_agrees_with_ggml(emulated: Path, kind: str, llama_bin: Path) -> None:
    """Bit for bit the f16 of the float that the CPU's own conversion in the real library has, signs of zeros too."""
    blocks = blocks_of(kind, 2000)
    out = np.full(2000 * TYPES[kind][1], np.nan, np.float32)
    convert = getattr(ctypes.CDLL(str(llama_bin / "libggml-base.so.0")), f"dequantize_row_{kind}")
    convert.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    convert.restype = None
    convert(blocks.ctypes.data, out.ctypes.data, out.size)
    assert (np.frombuffer(run(emulated, blocks, "blocks", kind), np.uint16) == f16_of(out)).all()


def test_scales_far_apart_are_rounded_twice(emulated: Path) -> None:
    """1 + 2^-11 + 2^-24, beside the middle of two f16, is the middle as a float: the other neighbour, no further."""
    block = np.zeros(144, np.uint8)
    block[:4] = np.array([2.0**-24, -683 / 2048], "<f2").view(np.uint8)
    block[4], block[8], block[16] = 1, 3, 1
    exact = 2.0**-24 + 3 * 683 / 2048
    found = np.frombuffer(run(emulated, block, "blocks", "q4_K"), np.uint16)
    assert exact == 1 + 2.0**-11 + 2.0**-24
    assert (f16_of(np.array([exact]))[0], found[0]) == (0x3C01, 0x3C00)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_the_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Both types: every code under every scale, tails, odd addresses, refusals; whichever thread runs first."""
    ran = edges(emulated, reverse=reverse)
    assert ran.returncode == 0, ran.stderr
    assert "FAIL" not in ran.stderr
    assert ran.stderr.count("ok  ") == 67


@pytest.fixture(scope="session")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a proof that has every defect, none of them unless EMULATOR_DEFECT is its number."""
    folder = tmp_path_factory.mktemp("defective")
    shutil.copytree(KERNELS, folder / "kernels", ignore=shutil.ignore_patterns("build"))
    plant(folder / "kernels" / NAME / KERNEL.name, dict(enumerate(DEFECTS.values())))
    return compile_emulated(folder / "kernels", PROGRAM, folder / "program", "-O1")


@pytest.mark.slow
def test_without_a_defect_it_is_right(defective: Path) -> None:
    """So that it is the defect that the next test finds."""
    assert all(edges(defective, reverse=reverse).returncode == 0 for reverse in (False, True))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=list(DEFECTS))
def test_a_defect_of_the_kernel_is_found(defective: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Each fails or crashes the small tests in one of two orders of the threads."""
    monkeypatch.setenv("EMULATOR_DEFECT", str(number))
    assert any(edges(defective, reverse=reverse).returncode != 0 for reverse in (False, True))


def test_the_kernel_stands_alone() -> None:
    """It includes CUDA's headers only, so that it can be laid over any tree."""
    found = re.findall(r"#include (.+)", KERNEL.read_text())
    assert found == ["<cuda_fp16.h>", "<cuda_runtime.h>", "<cstdint>"]


@pytest.mark.gpu
@needs_nvcc
def test_no_architecture_spills(tmp_path: Path) -> None:
    """Both types compile from sm_80 to sm_121 without a byte of local memory, as `make spills` says."""
    ran = make(NAME, "spills", out=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("_Z14q4_dequant_f16") == 2 * 2 * 3


@pytest.mark.gpu
@needs_nvcc
@needs_gpu
def test_the_harness_passes(tmp_path: Path) -> None:
    """Its own test, on the GPU that is here."""
    ran = make(NAME, "test", out=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith("passed\n")
