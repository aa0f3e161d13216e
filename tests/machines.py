"""Machines other than this one: what is not linked on PATH is not installed, a GPU is a capture, files can be old."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

from tests.conftest import GOLDEN

BARE = ("sh", "cat", "cut", "mkdir", "mv", "sha256sum", "setsid", "env")
"""What any Linux has and the agent's way to a host needs."""

UUID = "GPU-68b256c7-040d-b58e-160d-b23ae653d8e1"
GPU_ROW = f"0, {UUID}, NVIDIA H200, 580.159.04, 9.0, 143771"

SMI = """#!/bin/sh
case "$*" in
    --version) cat {versions} ;;
    --query-gpu=index,uuid,name,driver_version,compute_cap,memory.total*) echo "{row}" ;;
    --query-compute-apps=gpu_uuid,pid,process_name,used_memory*) {processes} ;;
    *) echo "nvidia-smi was asked something new: $*" >&2; exit 2 ;;
esac
"""

NVCC = """#!/bin/sh
echo "Cuda compilation tools, release {version}, V{version}.88"
echo "Build cuda_{version}.r{version}/compiler.36424714_0"
"""


def programs(folder: Path, *names: str) -> Path:
    """Make a folder with links to this machine's own programs of these names, and those that any Linux has."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*BARE, *names):
        found = shutil.which(name)
        assert found, f"{name} is not installed here"
        (folder / name).symlink_to(found)
    return folder


def h200(folder: Path, processes: str = "") -> None:
    """Add an nvidia-smi that says what one said on an H200, and lists these processes."""
    says = f'echo "{processes}"' if processes else ":"
    versions = GOLDEN / "h200" / "nvidia-smi-version.txt"
    _script(folder / "nvidia-smi", SMI.format(versions=versions, row=GPU_ROW, processes=says))


def broken_driver(folder: Path) -> None:
    """Add an nvidia-smi without a driver."""
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    _script(folder / "nvidia-smi", f'#!/bin/sh\necho "{words}"\nexit 9\n')


def nvcc(folder: Path, version: str) -> None:
    """Add an nvcc of this version."""
    folder.mkdir(parents=True, exist_ok=True)
    _script(folder / "nvcc", NVCC.format(version=version))


def age(path: Path, days: float) -> None:
    """Make a file, or a folder with all that is in it, as old as that."""
    then = time.time() - days * 86400
    for found in (*path.rglob("*"), path):
        os.utime(found, (then, then), follow_symlinks=False)


def _script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
