"""NVFP4 to bf16: the reference that the kernel is held against, and what the compiler makes of the kernel."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from dgxlab.imported import open_file
from tests.kernels.conftest import KERNELS, make, needs_gpu, needs_nvcc

FOLDER = KERNELS / "nvfp4_dequant"
BENCH = Path(__file__).with_name("nvfp4_dequant.jsonl")


def every_block(scales: int) -> np.ndarray:
    """Return blocks in which each scale byte meets each code in each place of a sub-block."""
    scale, turn = np.divmod(np.arange(scales * 16), 16)
    code = (np.arange(16) + turn[:, None]) % 16
    codes = (code[:, :8] | code[:, 8:] << 4).astype(np.uint8)
    return np.concatenate([scale.astype(np.uint8).reshape(-1, 4), codes.reshape(-1, 32)], axis=1)


def reference(host: Path, blocks: np.ndarray) -> np.ndarray:
    """Return the reference's weights as doubles."""
    ran = subprocess.run([host, "nvfp4"], input=blocks.tobytes(), capture_output=True, check=True)
    return np.frombuffer(ran.stdout, np.float64)


def test_every_weight_is_a_bf16(host: Path) -> None:
    """All 256 scale bytes x 16 codes: the exact weight is finite and loses no bit in bf16, nor a zero its sign."""
    weights = reference(host, every_block(256))
    bits = weights.astype(np.float32).view(np.uint32)
    kept = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    assert len(weights) == 256 * 16 * 16
    assert np.isfinite(weights).all()
    assert (kept.view(np.uint64) == weights.view(np.uint64)).all()
    assert (np.abs(weights[weights != 0]).min(), np.abs(weights).max()) == (2.0**-10, 2880.0)


def test_the_reference_agrees_with_gguf(host: Path) -> None:
    """The valid scales, as the gguf package reads them: written apart from ours and from ggml's C."""
    blocks = every_block(128)
    expected = quants.dequantize(blocks, GGMLQuantizationType.NVFP4).reshape(-1)
    assert (reference(host, blocks) == expected).all()


@pytest.mark.llama
def test_the_reference_is_bit_equal_to_ggml(host: Path, llama_bin: Path) -> None:
    """All 256 scale bytes, through the CPU's own conversion in the real library."""
    blocks = every_block(256)
    out = np.full(blocks.size // 36 * 64, np.nan, np.float32)
    convert = ctypes.CDLL(str(llama_bin / "libggml-base.so.0")).dequantize_row_nvfp4
    convert.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    convert.restype = None
    convert(blocks.ctypes.data, out.ctypes.data, out.size)
    assert (out.view(np.uint32) == reference(host, blocks).astype(np.float32).view(np.uint32)).all()


def test_the_kernel_stands_alone() -> None:
    """It includes CUDA's headers only, so that it can be laid over any tree."""
    found = re.findall(r"#include (.+)", (FOLDER / "nvfp4_dequant.cuh").read_text())
    assert found == ["<cuda_bf16.h>", "<cuda_runtime.h>", "<cstdint>"]


def test_bench_rows_are_read() -> None:
    """What `./harness bench` printed on an H200: times, bandwidth in the record's unit and clock, sample by sample."""
    found = open_file(BENCH)
    assert (found.tool, found.format, len(found.reading.rows)) == ("harness", "jsonl", 25)
    assert found.reading.provenance["gpu"] == "NVIDIA H200"
    labels = [row.label for row in found.reading.rows]
    assert "kernel=nvfp4_dequant variant=tile case=ffn_down rows=4096 cols=14336 cache=cold" in labels
    assert len(set(labels)) == 25
    for row in found.reading.rows:
        assert {each.metric: (each.unit, len(each.values)) for each in row.values} == {
            "time_us": ("us", 21),
            "bandwidth_gb_s": ("GiB/s", 21),
            "sm_clock_mhz": ("MHz", 21),
        }


def test_a_makefile_names_its_harness(tmp_path: Path) -> None:
    """An unset variable is an error that names it, not an empty command."""
    for unset in ("SRC", "PROFILE"):
        ran = make(FOLDER.name, f"{unset}=", "test", out=tmp_path)
        assert ran.returncode == 2
        assert f"{unset} is not set" in ran.stderr


@pytest.mark.gpu
@needs_nvcc
def test_no_architecture_spills(tmp_path: Path) -> None:
    """The kernel compiles from sm_80 to sm_121 without a byte of local memory, as `make spills` says."""
    ran = make(FOLDER.name, "spills", out=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("nvfp4_dequant_bf16") == 2 * 3


@pytest.mark.gpu
@needs_nvcc
def test_spills_are_found(tmp_path: Path) -> None:
    """An array that is indexed at run time lies in local memory, and `make spills` fails."""
    source = tmp_path / "spills.cu"
    body = "int a[64]; for (int i = 0; i < n; ++i) a[p[i] & 63] = i; p[n] = a[n & 63];"
    source.write_text(f"__global__ void k(int * p, int n) {{ {body} }}\n")
    ran = make(FOLDER.name, "spills", f"SRC={source}", "SPILL_ARCHS=sm_90", out=tmp_path)
    assert ran.returncode == 2
    assert "256 bytes stack frame" in ran.stdout


@pytest.mark.gpu
@needs_nvcc
@needs_gpu
def test_the_harness_passes(tmp_path: Path) -> None:
    """Its own test, on the GPU that is here."""
    ran = make(FOLDER.name, "test", out=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith("passed\n")
