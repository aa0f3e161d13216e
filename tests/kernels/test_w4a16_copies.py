"""Packed copies of weights: none is ever older than the weights, whoever writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import run
from tests.kernels.emulate import EMULATOR, KERNELS, compile_emulated, copy_kernels, plant

FILE = "w4a16_gemm/w4a16_copies.cuh"
PROGRAM = EMULATOR / "w4a16_copies.cpp"

DEFECTS = {
    "the host's write unnoticed": "«pack_again(weights, copy, stream);→»\n",
    "the end of a write unnoticed": "meets(span(data, «size→1»))",
    "the other tensor packed too": "return «first < other.end→first <= other.end» &&",
    "a graph's write unnoticed": "«copy = nullptr;→»\n",
    "a graph's write forgotten": "        «by_graphs_.push_back(all);→»",
    "captured graphs not told": "                «++generation;→»",
    "the next buffer not told": "!copies_.empty() || «!by_graphs_.empty()→false»;",
    "packed while a graph is captured": "«capture != cudaStreamCaptureStatusNone→false»",
}
"""Defects of the bookkeeping."""


def test_no_copy_is_older_than_its_weights(tmp_path: Path) -> None:
    """The real packing, emulated: writes by the host and by graphs; no memory, captures, freed buffers."""
    ran = run(compile_emulated(KERNELS, PROGRAM, tmp_path / "copies"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("ok  ") == 17


@pytest.fixture(scope="session")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a proof that has every defect, none of them unless EMULATOR_DEFECT is its number."""
    folder = tmp_path_factory.mktemp("defective")
    kernels = copy_kernels(folder)
    plant(kernels / FILE, dict(enumerate(DEFECTS.values())))
    return compile_emulated(kernels, PROGRAM, folder / "program", "-O1")


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=list(DEFECTS))
def test_a_defect_is_found(defective: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setenv("EMULATOR_DEFECT", str(number))
    ran = run(defective)
    assert "FAIL" in ran.stderr
    assert ran.returncode != 0
