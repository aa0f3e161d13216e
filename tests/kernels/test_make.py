"""What the compiler makes of the kernels, and their own tests where there is a GPU."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dgxlab.tools.harness import kernel_files
from tests.conftest import PROJECT
from tests.kernels.emulate import KERNELS

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
needs_gpu = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA GPU")

INCLUDES = {
    "conv_state/conv_state": ["<cuda_runtime.h>", "<cstdint>"],
    "fp4_accumulate/fp4_accumulate": ["<cuda_runtime.h>", "<cstdint>"],
    "gdn_state/gdn_state": ["<cuda_bf16.h>", "<cuda_runtime.h>", "<cstdint>"],
    "kbit/kbit": ["<cuda_bf16.h>", "<cuda_fp16.h>", "<cuda_runtime.h>", "<cstdint>", "<cstring>"],
    "kbit/kbit_gemm": ['"kbit.cuh"', '"w4a16_gemm.cuh"'],
    "nvfp4_dequant/nvfp4_dequant": ["<cuda_bf16.h>", "<cuda_runtime.h>", "<cstdint>"],
    "nvfp4_grouped/nvfp4_grouped": ['"w4a16_wgmma.cuh"'],
    "nvfp4_grouped/nvfp4_grouped_plan": ['"nvfp4_grouped.cuh"'],
    "q4_dequant/q4_dequant": ["<cuda_fp16.h>", "<cuda_runtime.h>", "<cstdint>"],
    "w4a16_gemm/w4a16_gemm": ["<cuda_fp16.h>", "<cuda_runtime.h>", "<cstddef>", "<cstdint>", "<cstring>"],
    "w4a16_gemm/w4a16_stages": ['"w4a16_gemm.cuh"'],
    "w4a16_gemm/w4a16_wgmma": ['"w4a16_stages.cuh"'],
    "w4a16_gemm/w4a16_packed": ['"w4a16_stages.cuh"'],
    "w4a16_gemm/w4a16_packed_mma": ['"w4a16_packed.cuh"'],
    "w4a16_gemm/w4a16_packed_wgmma": ['"w4a16_packed.cuh"', '"w4a16_wgmma.cuh"'],
    "w4a16_gemm/w4a16_plan": ['"w4a16_packed_mma.cuh"', '"w4a16_packed_wgmma.cuh"'],
    "w4a16_gemm/w4a16_copies": ["<cuda_runtime.h>", "<atomic>", "<cstdint>", "<map>", "<mutex>", "<tuple>", "<vector>"],
    "w4a16_gemm/w4a16_columns": ['"w4a16_gemm.cuh"'],
}

COMPILED = {
    "conv_state": {"_Z15conv_state_step": 3 * 3},
    "fp4_accumulate": {"_Z11fp4_product": 2 * 11 * 2},
    "gdn_state": {"_Z14gdn_state_step": 2 * 3},
    "kbit": {
        "_Z9kbit_gemm": 2 * 22 * 3,
        "_Z13kbit_quantise": 3 * 2 * 4 * 3,
        "_Z15kbit_dequantise": 3 * 2 * 4 * 3,
        "_Z11kbit_repack": 4 * 3,
        "_Z11kbit_unpack": 3 * 4 * 3,
    },
    "nvfp4_dequant": {"nvfp4_dequant_bf16": 2 * 3},
    "nvfp4_grouped": {"_Z13nvfp4_grouped": 5 * 5, "_Z19nvfp4_grouped_route": 3 * 5, "_Z20nvfp4_grouped_to_f16": 2 * 5},
    "q4_dequant": {"_Z14q4_dequant_f16": 2 * 2 * 3},
    "w4a16_gemm": {
        "_Z16w4a16_wgmma_gemm": 2 * 6 * 5,
        "_Z16w4a16_packed_mma": 2 * 6 * 5,
        "_Z18w4a16_packed_wgmma": 2 * 4 * 5,
        "_Z12w4a16_to_f16": 2 * 3 * 5,
        "_Z10w4a16_packI": 2 * 5,
        "_Z15w4a16_pack_rows": 2 * 5,
    },
}
"""By kernel: how often each function is reported, over its types, configurations and architectures."""


def make(kernel: str, *args: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Run make in a kernel's folder, its files elsewhere."""
    argv = ["make", "-C", str(KERNELS / kernel), f"OUT={out}", *args]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", INCLUDES)
def test_the_kernel_stands_alone(name: str) -> None:
    """It includes CUDA's headers and the kernel only, so that it can be laid over any tree."""
    assert re.findall(r"#include (.+)", (KERNELS / f"{name}.cuh").read_text()) == INCLUDES[name]


@pytest.mark.parametrize("kernel", COMPILED)
def test_a_gate_sends_what_the_harness_includes(kernel: str) -> None:
    """What harness.cu includes, and what that includes, is there, other kernels' files too."""
    # its own files before those of others
    texts = {Path(name).name: text for name, text in reversed(kernel_files(str(PROJECT), kernel).items())}
    wanted, seen = {"harness.cu"}, set[str]()
    while wanted:
        name = wanted.pop()
        seen.add(name)
        wanted |= {Path(each).name for each in re.findall(r'#include "(.+)"', texts[name])} - seen
    assert len(seen) > 3


@pytest.mark.parametrize("unset", ["SRC", "PROFILE"])
def test_a_makefile_names_its_harness(tmp_path: Path, unset: str) -> None:
    """An unset variable is an error that names it, not an empty command."""
    ran = make("nvfp4_dequant", f"{unset}=", "test", out=tmp_path)
    assert ran.returncode == 2
    assert f"{unset} is not set" in ran.stderr


@pytest.mark.gpu
@needs_nvcc
@pytest.mark.parametrize("kernel", COMPILED)
def test_the_harness_compiles(tmp_path: Path, kernel: str) -> None:
    """Whole, so also what it only times; for an old GPU that hardly any kernel is for, as that takes seconds."""
    arch = "sm_80" if kernel == "kbit" else "sm_75"
    ran = make(kernel, f"ARCH={arch}", str(tmp_path / f"harness-{arch}"), out=tmp_path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
@needs_nvcc
@pytest.mark.parametrize("kernel", COMPILED)
def test_no_architecture_spills(tmp_path: Path, kernel: str) -> None:
    """Every configuration compiles without a byte of local memory; make finds what ptxas says of serialised wgmma."""
    ran = make(kernel, "spills", out=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert {name: ran.stdout.count(name) for name in COMPILED[kernel]} == COMPILED[kernel]
    if kernel == "w4a16_gemm":
        assert ran.stdout.count("_Z10w4a16_gemm") >= 2 * 8 * 5


@pytest.mark.gpu
@needs_nvcc
def test_spills_are_found(tmp_path: Path) -> None:
    """An array that is indexed at run time is in local memory, and `make spills` fails."""
    source = tmp_path / "spills.cu"
    body = "int a[64]; for (int i = 0; i < n; ++i) a[p[i] & 63] = i; p[n] = a[n & 63];"
    source.write_text(f"__global__ void k(int * p, int n) {{ {body} }}\n")
    ran = make("nvfp4_dequant", "spills", f"SRC={source}", "SPILL_ARCHS=sm_90", out=tmp_path)
    assert ran.returncode == 2
    assert "256 bytes stack frame" in ran.stdout


@pytest.mark.gpu
@needs_nvcc
@needs_gpu
@pytest.mark.parametrize("kernel", COMPILED)
def test_the_harness_passes(tmp_path: Path, kernel: str) -> None:
    ran = make(kernel, "test", out=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.endswith("passed\n")
