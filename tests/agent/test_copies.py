"""The bandwidth of copies, measured through a stand-in for CUDA's driver: two GPUs, whose copies take 2 and 4 ms."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dgxlab.agent.measure import Workbench
from dgxlab.model import RunStep
from dgxlab.model.events import COPY, NoteEvent
from tests.journals import read
from tests.machines import script

DRIVER = """
#include <string.h>
#include <stdlib.h>
static int current;
static size_t live;
int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 + ordinal; return ordinal > 1; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    memset(uuid, 0, 16); uuid[0] = 0xf2; uuid[15] = device;
    return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(long)device; return device < 7; }
int cuCtxSetCurrent(void *context) { current = (int)(long)context; return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 2000000000; *total = 16000000000; return current == 0; }
int cuMemAlloc_v2(unsigned long long *at, size_t size) {
    *at = 0x7f0000000000 + (live += size);
    return getenv("NO_MEMORY") || size != 500000000 ? 2 : 0;
}
int cuEventCreate(void **event, unsigned flags) { *event = malloc(1); return flags != 0; }
int cuEventRecord(void *event, void *stream) { return !event || stream; }
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t size, void *stream) {
    return to == from || to < 0x7f0000000000 || from < 0x7f0000000000 || size != 500000000 || stream;
}
int cuEventSynchronize(void *event) { return !event; }
int cuEventElapsedTime(float *ms, void *begin, void *end) { *ms = current == 7 ? 2 : 4; return begin == end; }
"""
FIRST, SECOND = "GPU-f2000000-0000-0000-0000-000000000007", "GPU-f2000000-0000-0000-0000-000000000008"


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "cuda.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder


def asked(*gpus: str, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dgxlab.agent", "copies", *gpus]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, **env})


def test_each_gpu_of_the_job_has_its_own_bandwidth(driver: Path) -> None:
    """A copy of 0.5 GB reads and writes 1 GB."""
    path = str(driver)
    assert json.loads(asked(FIRST, SECOND, LD_LIBRARY_PATH=path).stdout) == {FIRST: 500.0, SECOND: 250.0}
    assert json.loads(asked(SECOND, LD_LIBRARY_PATH=path).stdout) == {SECOND: 250.0}


def test_a_driver_that_refuses_is_named(driver: Path) -> None:
    ended = asked(FIRST, LD_LIBRARY_PATH=str(driver), NO_MEMORY="1")
    assert (ended.returncode, ended.stdout) == (4, "")
    assert json.loads(ended.stderr)["message"] == "CUDA's driver answers 2 to cuMemAlloc_v2"


@pytest.mark.parametrize(("python", "rates"), [("false", []), ("copies", [4190.5, 4190.5])])
def test_a_job_measures_once_and_goes_on_without(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, rates: list[float]
) -> None:
    """In place of the agent's Python, a program that fails, and one that has measured."""
    script(tmp_path / "copies", f"""#!/bin/sh\necho x >>{tmp_path}/calls\necho '{{"{FIRST}": 4190.5}}'\n""")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", python)
    bench.telemetry.gpus = {FIRST: "NVIDIA H200"}
    runs = [bench.measure(RunStep(f"run:{n}", "one", "llama-bench", ("true",), {}, ()), f"run:{n}").run for n in (0, 1)]
    assert [each.median for run in runs for each in run.telemetry if each.name == COPY] == rates
    notes = [event.note for event in read(bench.job.journal) if isinstance(event, NoteEvent)]
    assert len(notes) == (not rates)
    assert all(note.startswith("the bandwidth of copies was not measured") for note in notes)
    calls = tmp_path / "calls"
    assert (calls.read_text() if calls.exists() else "") == ("x\n" if rates else "")
