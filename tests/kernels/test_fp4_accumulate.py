"""FP4 products that are added up in the tensor cores: the kernel's own source on an emulated GPU, and its defects."""

from pathlib import Path

import pytest

from tests.kernels.conftest import assert_right, both_orders, fails

NAME = "fp4_accumulate"
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


@both_orders
def test_the_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Both types, against double; the sums are as exact as those added outside."""
    assert_right(emulated, 25, reverse=reverse)


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=list(DEFECTS))
def test_a_defect_of_the_kernel_is_found(defective: Path, number: int) -> None:
    assert fails(defective, defect=number)
