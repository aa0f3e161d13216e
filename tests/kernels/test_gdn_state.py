"""The gated delta net's step: the kernel's own source on an emulated GPU, and the reference that it is held against."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.conftest import assert_right, both_orders, fails

NAME = "gdn_state"

DEFECTS = {
    "one decay too many": "s[c][r] = g * s[c][r] + k[r] * «d→g * d»;",
    "the state's rows in another order": "int r) { return «r * LANES + lane→lane * ROWS + r»; }",
    "bf16 halves exchanged": "__uint_as_float(«r % 2→1 - r % 2» ? bits",
    "a state rounded down": "pack(«s[0]→s[0] * 0.99f», s[1])",
    "a sum of another column": "const bool upper = «lane & distance→!(lane & distance)»;",
    "another column's delta": "__shfl_sync(0xFFFFFFFF, delta, «c→(c ^ 1)» * PER_SUM, LANES)",
    "a key head for each pair": "«head % a.qk_heads→head / a.qk_heads» * a.qk_head_stride",
    "a state of another head": "(seq * a.heads + «head→(head + 1) % a.heads») * GDN_STATE_SIZE + first",
    "written where it was read": "mine::store(«a.to→const_cast<T *>(a.from)» + at",
    "columns left out": "(GDN_STATE_SIZE / columns * «a.heads→a.heads - 1»)",
}
"""Defects of the kernel."""


def test_the_reference_is_the_gated_delta_rule(host: Path) -> None:
    """S becomes e^g S, then S + beta k (v - S^T k)^T, as NumPy has it in matrices; the result is S^T q / sqrt(128)."""
    random = np.random.default_rng(4)
    q, k, v = random.normal(size=(3, 128)).astype(np.float32)
    g, beta = np.float32(-0.02), np.float32(0.7)
    state = random.normal(size=(128, 128))
    inputs = np.concatenate([q, k, v, [g, beta]]).astype(np.float32).tobytes() + state.T.tobytes()
    ran = subprocess.run([host, "gdn"], input=inputs, capture_output=True, check=True)
    out, after = np.split(np.frombuffer(ran.stdout, np.float64), [128])
    decayed = np.exp(np.float64(g)) * state
    expected = decayed + np.float64(beta) * np.outer(k, v - decayed.T @ k)
    assert np.allclose(after.reshape(128, 128).T, expected, rtol=1e-12, atol=1e-12)
    assert np.allclose(out, expected.T @ q / np.sqrt(128), rtol=1e-12, atol=1e-12)


@both_orders
def test_the_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Both types: against double and bit by bit, in place and not; faults of slots are seen; in both orders."""
    assert_right(emulated, 30, reverse=reverse)


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=list(DEFECTS))
def test_a_defect_of_the_kernel_is_found(defective: Path, number: int) -> None:
    assert fails(defective, "edges", defect=number)
