"""The checker of kernels' outputs, and whether its own test would notice a broken one."""

import subprocess
from pathlib import Path

import pytest

from tests.kernels.conftest import compile_host
from tests.kernels.emulate import copy_kernels

ERROR_TEST = "!std::isfinite(out) || !(std::fabs(out - ref) <= tol.max_abs)"
NMSE_TEST = "!(v.nmse <= tol.nmse)"

BROKEN = {
    "NaN passes": {ERROR_TEST: "std::fabs(out - ref) > tol.max_abs", NMSE_TEST: "v.nmse > tol.nmse"},
    "a zero's sign is lost": {"std::signbit(out) == std::signbit(ref)": "true"},
    "nmse is not looked at": {NMSE_TEST: "false"},
    "only nmse is looked at": {"if (v.n_bad++ == 0)": "if (false)"},
    "the last column is left out": {"col < cols;": "col < cols - 1;"},
    "nothing passes": {"v.passed = v.why.empty()": "v.passed = false"},
}


def test_the_checker_fails_what_is_wrong(host: Path) -> None:
    """NaN, Inf, zeros, a flipped or exchanged element, a transposed or unwritten output fail; the right one passes."""
    ran = subprocess.run([host, "selftest"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_checker_fails_its_own_test(tmp_path: Path, broken: dict[str, str]) -> None:
    kernels = copy_kernels(tmp_path)
    path = kernels / "common" / "check.cuh"
    text = path.read_text()
    for right, wrong in broken.items():
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    path.write_text(text)
    program = compile_host(kernels, tmp_path / "broken")
    ran = subprocess.run([program, "selftest"], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("checker: ")
