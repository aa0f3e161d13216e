"""FP4 products that are added up in the tensor cores: the kernel's own source on an emulated GPU, and its defects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.conftest import run
from tests.kernels.emulate import EMULATOR, KERNELS, compile_emulated, copy_kernels, plant

NAME = "fp4_accumulate"
PROGRAM = EMULATOR / "fp4_accumulate.cpp"
MMA = "fp4_mma<type>(sum + at, a, b, scale_a, scale_b);"
MX = "fp4_mma_mx(c, a, b, scale_a, scale_b);"

DEFECTS = {
    "earlier sums are lost": f"«{MMA}→for (int l = 0; l < 4; ++l) {{ sum[at + l] = 0.0f; }} {MMA}»",
    "earlier sums count twice": f"«{MX}→const float was = c[0]; {MX} c[0] += was;»",
    "scales of the other eight rows": "lane / 4 + «lane % 2 * 8→(1 - lane % 2) * 8») * FP4_X_STRIDE",
    "scales of the first half": "* FP4_X_STRIDE + 64 + «k0 / 8→0»;",
    "codes of the first half": "* FP4_X_STRIDE + «k0→0» + lane / 16 * 4;",
    "half a row of codes twice": "k0 + «lane / 16 * 4→0»;",
    "half a column of codes twice": "codes[«8 * f + 4→8 * f»];",
    "one column scale for all depths": "scale_b[f] = scales[«f→0»];",
    "both stripes in one sum": "multiply((«j / 8 + s→j / 8») * 4",
    "one stripe for both": "x + (row0 + «16 * s→0» + lane % 16)",
    "two warps on the same columns": "«threadIdx.y % STRIPES * 8→0» + lane / 4;",
    "scales of another format": f"«fp4_mma_nv(c, a, b, scale_a, scale_b);→{MX}»",
}
"""Defects of the kernel."""


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_the_kernel_is_right_on_the_emulator(tmp_path: Path, reverse: bool) -> None:
    """Both types, against double, in both orders of threads; the sums are as exact as those added outside."""
    ran = run(compile_emulated(KERNELS, PROGRAM, tmp_path / NAME), reverse=reverse)
    assert ran.returncode == 0, ran.stderr
    assert "FAIL" not in ran.stderr
    assert ran.stderr.count("ok  ") == 25


@pytest.fixture(scope="session")
def defective(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a proof that has every defect, none of them unless EMULATOR_DEFECT is its number."""
    folder = tmp_path_factory.mktemp("defective")
    kernels = copy_kernels(folder)
    plant(kernels / NAME / "fp4_accumulate.cuh", dict(enumerate(DEFECTS.values())))
    return compile_emulated(kernels, PROGRAM, folder / "program", "-O1")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=list(DEFECTS))
def test_a_defect_of_the_kernel_is_found(defective: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setenv("EMULATOR_DEFECT", str(number))
    assert run(defective).returncode == 1
