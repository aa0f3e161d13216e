"""Machines other than this one: what is not linked on PATH is not installed, a GPU is a capture, files can be old."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import GOLDEN

BARE = ("sh", "cat", "cut", "mkdir", "mv", "setsid", "env")
"""What any Linux has and the agent's way to a host needs."""

UUID = "GPU-68b256c7-040d-b58e-160d-b23ae653d8e1"
GPU_ROW = f"0, {UUID}, NVIDIA H200, 580.159.04, 9.0, 143771"

SMI = """#!/bin/sh
case "$*" in
    --version) cat {versions} ;;
    --query-gpu=index,uuid,name,driver_version,compute_cap,memory.total*) echo "{row}" ;;
    --query-gpu=compute_cap*) echo 9.0 ;;
    --query-compute-apps=gpu_uuid,pid,process_name,used_memory*) {processes} ;;
    *) echo "nvidia-smi was asked something new: $*" >&2; exit 2 ;;
esac
"""

SAMPLED = """#!/bin/sh
cd {folder}
case "$*" in
    --help-query-gpu) cat {help} ;;
    --query-gpu=index,uuid,name,driver_version,compute_cap,memory.total*) cat gpus ;;
    --query-gpu=uuid,temperature.gpu,*) echo x >>calls; sed "s/CALLS/$(wc -l <calls)/" state ;;
    --query-compute-apps=gpu_uuid,pid,process_name,used_memory*) cat apps ;;
    "-i {uuids} --query-gpu=timestamp,uuid,temperature.gpu,"*"--format=csv,nounits -lms 500") {loop} ;;
    --version) ;;
    *) echo "nvidia-smi was asked something new: $*" >&2; exit 2 ;;
esac
"""
LOOP = """head -1 {capture}; echo $$ >sampler
    while :; do now=$(date -u '+%Y/%m/%d %H:%M:%S.%3N'); sed "s|^|$now, |; s/CALLS/0/" state; sleep 0.25; done"""

NVCC = """#!/bin/sh
echo "Cuda compilation tools, release {version}, V{version}.88"
echo "Build cuda_{version}.r{version}/compiler.36424714_0"
"""


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def programs(folder: Path, *names: str) -> Path:
    """Make a folder with links to this machine's own programs of these names, and those that any Linux has."""
    folder.mkdir(parents=True, exist_ok=True)
    path = f"{os.environ['PATH']}:{Path(sys.executable).parent}"  # cmake and ninja from PyPI are beside the interpreter
    for name in (*BARE, *names):
        program = shutil.which(name, path=path)
        assert program, f"{name} is not installed here"
        (folder / name).symlink_to(program)
    return folder


def h200(folder: Path, processes: str = "") -> None:
    """Add an nvidia-smi that says what one said on an H200, and lists these processes."""
    says = f'echo "{processes}"' if processes else ":"
    versions = GOLDEN / "h200" / "nvidia-smi-version.txt"
    script(folder / "nvidia-smi", SMI.format(versions=versions, row=GPU_ROW, processes=says))


def sampled(folder: Path, gpus: Mapping[str, str], row: str, *, watched: Sequence[str] = (), loop: str = LOOP) -> None:
    """Add an nvidia-smi with these GPUs (name by uuid) that are always in one state, also when it is asked to go on.

    The file `apps` has the compute processes that it lists, none at first.

    Args:
        row: What it says of each but the uuid, in the order of `smi.FIELDS`; CALLS grows by one with every question.
        watched: The GPUs that it may be asked to sample; all by default.
        loop: What it does then, in sh. By itself it leaves its pid in `sampler`.
    """
    folder.mkdir(exist_ok=True)
    capture = GOLDEN / "h200" / "telemetry-gpu.csv"
    rows = (f"{i}, {uuid}, {name}, 580.159.04, 9.0, 1000\n" for i, (uuid, name) in enumerate(gpus.items()))
    (folder / "gpus").write_text("".join(rows))
    (folder / "state").write_text("".join(f"{uuid}, {row}\n" for uuid in gpus))
    (folder / "apps").touch()
    fields = {"folder": folder, "help": GOLDEN / "h200" / "help-query-gpu.txt", "uuids": ",".join(watched or gpus)}
    script(folder / "nvidia-smi", SAMPLED.format(**fields, loop=loop.replace("{capture}", str(capture))))


def broken_driver(folder: Path) -> None:
    """Add an nvidia-smi without a driver."""
    words = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    script(folder / "nvidia-smi", f'#!/bin/sh\necho "{words}"\nexit 9\n')


def nvcc(folder: Path, version: str) -> None:
    script(folder / "nvcc", NVCC.format(version=version))


def ccache(folder: Path) -> None:
    """Add a ccache, which no test machine needs."""
    script(folder / "ccache", "#!/bin/sh\necho ccache version 4.8\n")


def age(path: Path, days: float) -> None:
    then = time.time() - days * 86400
    for each in (*path.rglob("*"), path):
        os.utime(each, (then, then), follow_symlinks=False)


BUSY = ("sh", "-c", "while :; do :; done")


@contextmanager
def one_processor() -> Iterator[None]:
    """Have one processor only, as do all programs that are started meanwhile."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(usable)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


@contextmanager
def busy_processor() -> Iterator[None]:
    """Have `one_processor`, and a program on it that never rests."""
    with one_processor():
        loop = subprocess.Popen(BUSY)
        try:
            yield
        finally:
            loop.kill()
            loop.wait()
