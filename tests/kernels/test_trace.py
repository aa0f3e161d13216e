"""The tracer: it compiles wherever CUPTI is, and a program under it calls its own llama_decode, marked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.emulate import KERNELS

TRACE = KERNELS / "trace"
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")

LLAMA = """#include <cstdint>
#include <cstdio>
struct batch { int32_t n_tokens; void * six[6]; };
static int synchronized = 0;
extern "C" int32_t llama_decode(int * calls, batch b) { ++*calls; return b.n_tokens + (b.six[5] == calls); }
extern "C" void llama_synchronize(int *) { ++synchronized; }
extern "C" int synchronizations() { return synchronized; }
"""
MAIN = """#include <cstdint>
#include <cstdio>
struct batch { int32_t n_tokens; void * six[6]; };
extern "C" int32_t llama_decode(int *, batch);
extern "C" int synchronizations();
int main() {
    int calls = 0;
    int status = llama_decode(&calls, {41, {0, 0, 0, 0, 0, &calls}});
    printf("%d %d %d\\n", status, calls, synchronizations());
    return 3;
}
"""


def build(folder: Path) -> Path:
    """Return a program whose library has the two functions of libllama that the tracer knows."""
    (folder / "llama.cpp").write_text(LLAMA)
    (folder / "main.cpp").write_text(MAIN)
    library, program = folder / "libllama.so", folder / "llama-batched-bench"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, folder / "llama.cpp"], check=True)
    argv = ["g++", "-o", program, folder / "main.cpp", f"-L{folder}", "-lllama", f"-Wl,-rpath,{folder}"]
    subprocess.run(argv, check=True)
    return program


@pytest.mark.gpu
@needs_nvcc
def test_a_program_under_the_tracer_is_what_it_was(tmp_path: Path) -> None:
    """Its output and its status are its own; the batch arrives whole, and each call ends synchronised."""
    program, copy = build(tmp_path), tmp_path / "trace"
    shutil.copytree(TRACE, copy, ignore=shutil.ignore_patterns("build"))
    alone = subprocess.run([program], capture_output=True, text=True, check=False)
    # a user's OUT is not the tracer's
    env = {**os.environ, "OUT": str(tmp_path / "elsewhere")}
    traced = subprocess.run(["sh", copy / "run.sh", program], capture_output=True, text=True, check=False, env=env)
    assert (alone.stdout, alone.returncode) == ("42 1 0\n", 3)
    assert (traced.stdout, traced.returncode, traced.stderr) == ("42 1 1\n", 3, "")
    assert (copy / "build" / "libtrace.so").exists()


def test_the_tracer_is_small() -> None:
    """It is read by people who run it on their machines."""
    assert len((TRACE / "trace.cpp").read_text().splitlines()) <= 200
