"""The harnesses' parts that plain g++ compiles, and blocks to run them on."""

import ctypes
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from tests.kernels.emulate import EMULATOR, KERNELS, compile_emulated, copy_kernels, plant

Q4 = {"q4_0": (GGMLQuantizationType.Q4_0, 32, 18, 1), "q4_K": (GGMLQuantizationType.Q4_K, 256, 144, 2)}
"""By ggml's name: the type in gguf, weights and bytes of a block, f16 scales at its beginning."""


def blocks_of(kind: str, count: int) -> np.ndarray:
    """Return random blocks; their scales, f16, are finite, of every size and sign, zeros and denormals among them."""
    _, _, size, n_scales = Q4[kind]
    random = np.random.default_rng(9)
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    shape = (count, n_scales)
    scales = (random.integers(0, 0x7C00, shape) | random.integers(0, 2, shape) << 15).astype("<u2")
    scales[::7] &= 0x83FF
    scales[0] = 0
    blocks[:, : 2 * n_scales] = scales.view(np.uint8)
    return blocks


def ggml(llama_bin: Path, kind: str, blocks: np.ndarray, count: int) -> np.ndarray:
    """Return so many weights as the CPU's own conversion in the real library has them, in float."""
    out = np.full(count, np.nan, np.float32)
    convert = getattr(ctypes.CDLL(str(llama_bin / "libggml-base.so.0")), f"dequantize_row_{kind}")
    convert.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    convert.restype = None
    convert(blocks.ctypes.data, out.ctypes.data, out.size)
    return out


def reference(host: Path, kind: str, blocks: np.ndarray) -> np.ndarray:
    ran = subprocess.run([host, kind], input=blocks.tobytes(), capture_output=True, check=True)
    return np.frombuffer(ran.stdout, np.float64)


def run(program: Path, *args: str, reverse: bool = False) -> subprocess.CompletedProcess[str]:
    """Run an emulated proof; in reverse the last threads run first."""
    env = {**os.environ, **({"EMULATOR_REVERSED": "1"} if reverse else {})}
    return subprocess.run([program, *args], capture_output=True, text=True, env=env, check=False)


def fails(program: Path, *args: str, defect: int, reverse: bool = False) -> bool:
    """Whether a proof with this defect fails or crashes; it is ended at the first failure."""
    env = {**os.environ, "EMULATOR_DEFECT": str(defect), **({"EMULATOR_REVERSED": "1"} if reverse else {})}
    with subprocess.Popen([program, *args], stderr=subprocess.PIPE, text=True, env=env) as child:
        if failed := any("FAIL" in line for line in child.stderr or ()):
            child.kill()
    return failed or child.returncode != 0


both_orders = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def assert_right(program: Path, cases: int, *, reverse: bool) -> None:
    """Run a proof's edge cases: so many, and none fails."""
    ran = run(program, "edges", reverse=reverse)
    assert ran.returncode == 0, ran.stderr
    assert "FAIL" not in ran.stderr
    assert ran.stderr.count("ok  ") == cases


def compile_host(kernels: Path, out: Path) -> Path:
    """Compile host.cpp against a folder of kernels; warnings are errors."""
    source = Path(__file__).with_name("host.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    subprocess.run(["g++", *flags, f"-I{kernels}", str(source), "-o", str(out)], check=True)
    return out


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_host(KERNELS, tmp_path_factory.mktemp("host") / "host")


@pytest.fixture(scope="module")
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the proof of the kernel that the test module names, compiled for the CPU."""
    name = request.module.NAME
    return compile_emulated(KERNELS, EMULATOR / f"{name}.cpp", tmp_path_factory.mktemp("emulated") / name)


@pytest.fixture(scope="module")
def defective(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the proof with each of the module's defects, which a run has only if EMULATOR_DEFECT is its number."""
    name, folder = request.module.NAME, tmp_path_factory.mktemp("defective")
    kernels = copy_kernels(folder)
    plant(kernels / name / f"{name}.cuh", dict(enumerate(request.module.DEFECTS.values())))
    return compile_emulated(kernels, EMULATOR / f"{name}.cpp", folder / "program", "-O1")
