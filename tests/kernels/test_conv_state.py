"""The convolution's step: the kernel's own source on an emulated GPU, and the reference that it is held against."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.conftest import assert_right, both_orders, fails

NAME = "conv_state"

DEFECTS = {
    "a window that does not move": "next[c * KEPT + j - 1] = «input→kept[s][c * KEPT + j - 1]»;",
    "a window in another order": "next[c * KEPT + «j - 1→KEPT - j»] = input;",
    "the oldest input left out": "sum += «input→(j ? input : 0.0f)» * w[",
    "weights of another channel": "(a.weights + «chan→(chan + chans) % a.channels» * TAPS, w)",
    "a neighbour's state": "(a.from + ((first + s) * a.channels + «chan→(chan + chans) % a.channels») * KEPT, kept[s])",
    "a neighbour's slot": "(a.to + ((first + «s→(s ^ 1)») * a.channels + chan) * KEPT, next)",
    "written where it was read": "conv_state_store<WIDE>(«a.to→const_cast<float *>(a.from)» + ((first",
    "written before it is read": "const int64_t  first = «(int64_t) blockIdx.y→(int64_t) (blockIdx.y / 2)» * batch;",
    "inputs as if contiguous": "* «a.x_seq_stride→a.channels» + chan, x[s])",
    "no SiLU": "out[c] = sum / (1.0f + «expf(-sum)→0.0f»);",
    "channels left out": "((a.channels + «columns - 1→0») / columns)",
    "sequences left out": "((a.seqs + «batch - 1→0») / batch)",
    "channels beyond the last": "if (chan >= «a.channels→a.channels + chans») {",
}
"""Defects of the kernel."""


def test_the_reference_is_a_convolution(host: Path) -> None:
    """Over 7 tokens of 3 channels: NumPy's own, of each channel, with SiLU; the state is the last 3 inputs."""
    random = np.random.default_rng(4)
    inputs = random.normal(size=(7, 3)).astype(np.float32)
    weights = random.normal(size=(3, 4)).astype(np.float32)
    ran = subprocess.run([host, "conv"], input=weights.tobytes() + inputs.tobytes(), capture_output=True, check=True)
    out, state = np.split(np.frombuffer(ran.stdout, np.float64), [21])
    sums = np.array([np.convolve(inputs[:, c].astype(np.float64), weights[c, ::-1])[:7] for c in range(3)]).T
    assert np.allclose(out.reshape(7, 3), sums / (1 + np.exp(-sums)), rtol=1e-12, atol=1e-12)
    assert np.array_equal(state.reshape(3, 3), inputs[-3:].T)


@both_orders
def test_the_kernel_is_right_on_the_emulator(emulated: Path, reverse: bool) -> None:
    """Against double and bit by bit, in place and not, every tail; faults of slots and of order are seen."""
    assert_right(emulated, 39, reverse=reverse)


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=list(DEFECTS))
def test_a_defect_of_the_kernel_is_found(defective: Path, number: int) -> None:
    assert fails(defective, "edges", defect=number)
