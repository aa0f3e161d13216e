"""W4A16: the kernels' own source on an emulated GPU, their reference, and what the compiler makes of them."""

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
from tests.kernels.emulate import EMULATOR, compile_emulated

NAME = "w4a16_gemm"
KERNEL = KERNELS / NAME / "w4a16_gemm.cuh"
PROGRAM = EMULATOR / "w4a16.cpp"

TYPES = {"q4_0": (GGMLQuantizationType.Q4_0, 32, 18, 1), "q4_K": (GGMLQuantizationType.Q4_K, 256, 144, 2)}
"""By ggml's name: the type in gguf, weights and bytes of a block, f16 scales at its beginning."""

STORED = "    next_x.store(stages[0], x_row, x_chunk);\n"

WRONG = {
    "no barrier before the first step": (f"{STORED}    __syncthreads();", STORED),
    "no barrier after a step": ("        }\n        __syncthreads();\n    }", "        }\n    }"),
    "registers of A exchanged": ("a[p][1] = w[8 * W4A16_STRIDE];", "a[p][1] = w[4];"),
    "a row beyond m written": ("if (row < m && col < n)", "if (row <= m && col < n)"),
    "a column beyond n written": ("if (row < m && col < n)", "if (row < m && col <= n)"),
    "the other row's scale": ("stage.d[top + e / 2 * 8]", "stage.d[top + e % 2 * 8]"),
    "a minimum's high bits": ("(s8 >> 4) | (s4 >> 6) << 4", "(s8 >> 4) | (s0 >> 6) << 4"),
    "the last step left out": ("(int) (k / W4A16_BK);", "(int) (k / W4A16_BK) - (k > W4A16_BK);"),
}
"""Defects of the kernel, as what they put in place of what."""


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the proof compiled for the CPU."""
    return compile_emulated(KERNELS, PROGRAM, tmp_path_factory.mktemp("emulated") / "w4a16")


def run(program: Path, *args: str, reverse: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a proof; in reverse the last threads run first."""
    env = {**os.environ, "EMULATOR_REVERSED": "1"} if reverse else dict(os.environ)
    return subprocess.run([program, *args], capture_output=True, text=True, env=env, check=False)


def blocks_of(kind: str, count: int) -> np.ndarray:
    """Return random blocks; their scales, f16, are finite, of both signs, zeros and denormals among them."""
    _, _, size, n_scales = TYPES[kind]
    random = np.random.default_rng(8)
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    scales = (random.integers(0, 0x7C00, (count, n_scales)) | random.integers(0, 2, (count, n_scales)) << 15).astype(
        "<u2"
    )
    scales[::7] &= 0x83FF
    scales[0] = 0
    blocks[:, : 2 * n_scales] = scales.view(np.uint8)
    return blocks


def reference(host: Path, kind: str, blocks: np.ndarray) -> np.ndarray:
    """Return the reference's weights as doubles."""
    ran = subprocess.run([host, kind], input=blocks.tobytes(), capture_output=True, check=True)
    return np.frombuffer(ran.stdout, np.float64)


@pytest.mark.parametrize("kind", TYPES)
def test_the_reference_agrees_with_gguf(host: Path, kind: str) -> None:
    """Random blocks, as the gguf package reads them in float: to the rounding of a term."""
    blocks = blocks_of(kind, 500)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(blocks, TYPES[kind][0]).reshape(-1)
    found = reference(host, kind, blocks)
    terms = np.repeat(np.abs(found).reshape(-1, 32).max(axis=1), 32)
    assert len(found) == 500 * TYPES[kind][1]
    assert (np.abs(found - expected) <= 2.0**-22 * terms).all()


@pytest.mark.llama
@pytest.mark.parametrize("kind", TYPES)
def test_the_reference_agrees_with_ggml(host: Path, kind: str, llama_bin: Path) -> None:
    """The same through the CPU's own conversion in the real library; Q4_0 bit for bit."""
    blocks = blocks_of(kind, 500)
    found = reference(host, kind, blocks)
    out = np.full(found.size, np.nan, np.float32)
    convert = getattr(ctypes.CDLL(str(llama_bin / "libggml-base.so.0")), f"dequantize_row_{kind}")
    convert.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    convert.restype = None
    convert(blocks.ctypes.data, out.ctypes.data, out.size)
    terms = np.repeat(np.abs(found).reshape(-1, 32).max(axis=1), 32)
    assert (np.abs(found - out) <= (0 if kind == "q4_0" else 2.0**-22) * terms).all()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_every_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Both rungs and types, tails in m, n and k, wild scales, odd addresses, refusals; whichever thread runs first."""
    ran = run(emulated, "edges", reverse=reverse)
    assert ran.returncode == 0, ran.stderr
    assert "FAIL" not in ran.stderr
    assert ran.stderr.count("ok  ") == 30


@pytest.mark.parametrize(("m", "n"), [(15, 1), (17, 31), (64, 8), (127, 129), (128, 128), (255, 2)])
@pytest.mark.parametrize("kind", TYPES)
def test_tails_are_right_on_the_emulator(emulated: Path, kind: str, m: int, n: int) -> None:
    """Just below, at and just above the tiles."""
    ran = run(emulated, "shape", kind, str(m), str(n), "256", "tiled")
    assert (ran.returncode, ran.stderr) == (0, f"ok   tiled {kind} m={m} n={n} k=256\n")


def test_the_error_is_a_part_of_mmqs(emulated: Path) -> None:
    """At most a fifth for Q4_0; for Q4_K at most 0.7 on uniform inputs, 0.4 on Gaussian ones."""
    ran = run(emulated, "nmse")
    ratios = re.findall(r"(q4_.) .* (uniform|Gaussian) nmse: .* ratio (\S+), limit (\S+)", ran.stderr)
    limits = {(kind, how): float(limit) for kind, how, _, limit in ratios}
    assert ran.returncode == 0, ran.stderr
    assert all(0 < float(ratio) <= float(limit) for _, _, ratio, limit in ratios)
    assert limits == {
        ("q4_0", "uniform"): 0.2,
        ("q4_0", "Gaussian"): 0.2,
        ("q4_K", "uniform"): 0.7,
        ("q4_K", "Gaussian"): 0.4,
    }


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_defect_of_the_kernel_is_found(tmp_path: Path, wrong: tuple[str, str]) -> None:
    """Each, put into a copy, fails one of two products, in one of two orders of the threads."""
    shutil.copytree(KERNELS, tmp_path / "kernels", ignore=shutil.ignore_patterns("build"))
    path = tmp_path / "kernels" / NAME / KERNEL.name
    text = path.read_text()
    assert text.count(wrong[0]) == 1
    path.write_text(text.replace(*wrong))
    program = compile_emulated(tmp_path / "kernels", PROGRAM, tmp_path / "wrong", "-O1")
    rans = [
        run(program, "shape", kind, "129", "17", "256", "tiled", reverse=reverse)
        for kind in TYPES
        for reverse in (False, True)
    ]
    assert "FAIL tiled" in "".join(ran.stderr for ran in rans)


def test_the_kernel_stands_alone() -> None:
    """It includes CUDA's headers only, so that it can be laid over any tree."""
    found = re.findall(r"#include (.+)", KERNEL.read_text())
    assert found == ["<cuda_bf16.h>", "<cuda_fp16.h>", "<cuda_runtime.h>", "<cstddef>", "<cstdint>"]


@pytest.mark.gpu
@needs_nvcc
def test_no_architecture_spills(tmp_path: Path) -> None:
    """Both rungs compile from sm_80 to sm_121 without a byte of local memory, as `make spills` says."""
    ran = make(NAME, "spills", out=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("_Z10w4a16_gemm") == ran.stdout.count("_Z10naive_gemm") == 2 * 3


@pytest.mark.gpu
@needs_nvcc
def test_two_blocks_fit_a_multiprocessor(tmp_path: Path) -> None:
    """Shared memory is below 49 KB a block, so that two have room in the 100 KB of an sm_121."""
    ran = make(NAME, "spills", "SPILL_ARCHS=sm_121", out=tmp_path)
    used = [int(size) for size in re.findall(r"(\d+) bytes smem", ran.stdout)]
    assert len(used) == 3
    assert 0 < max(used) <= 49152


@pytest.mark.gpu
@needs_nvcc
@needs_gpu
def test_the_harness_passes(tmp_path: Path) -> None:
    """Its own test, on the GPU that is here."""
    ran = make(NAME, "test", out=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith("passed\n")
