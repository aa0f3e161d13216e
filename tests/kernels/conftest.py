"""The harnesses' parts that plain g++ compiles."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PROJECT

KERNELS = PROJECT / "kernels"

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
needs_gpu = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA GPU")


def make(kernel: str, *args: str, out: Path) -> subprocess.CompletedProcess[str]:
    """Run make in a kernel's folder, its files elsewhere."""
    argv = ["make", "-C", str(KERNELS / kernel), f"OUT={out}", *args]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


def compile_host(kernels: Path, out: Path) -> Path:
    """Compile host.cpp against a folder of kernels; warnings are errors."""
    source = Path(__file__).with_name("host.cpp")
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    subprocess.run(["g++", *flags, f"-I{kernels}", str(source), "-o", str(out)], check=True)
    return out


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program made of the kernels as they are."""
    return compile_host(KERNELS, tmp_path_factory.mktemp("host") / "host")
