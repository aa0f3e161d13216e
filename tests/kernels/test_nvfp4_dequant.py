"""NVFP4 to bf16: the reference that the kernel is held against."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from dgxlab.imported import open_file
from tests.kernels.conftest import ggml, reference

BENCH = Path(__file__).with_name("nvfp4_dequant.jsonl")


def every_block(scales: int) -> np.ndarray:
    """Return blocks in which each scale byte meets each code in each place of a sub-block."""
    scale, turn = np.divmod(np.arange(scales * 16), 16)
    code = (np.arange(16) + turn[:, None]) % 16
    codes = (code[:, :8] | code[:, 8:] << 4).astype(np.uint8)
    return np.concatenate([scale.astype(np.uint8).reshape(-1, 4), codes.reshape(-1, 32)], axis=1)


def test_every_weight_is_a_bf16(host: Path) -> None:
    """All 256 scale bytes x 16 codes: the exact weight is finite and loses no bit in bf16, nor a zero its sign."""
    weights = reference(host, "nvfp4", every_block(256))
    bits = weights.astype(np.float32).view(np.uint32)
    kept = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    assert len(weights) == 256 * 16 * 16
    assert np.isfinite(weights).all()
    assert (kept.view(np.uint64) == weights.view(np.uint64)).all()
    assert (np.abs(weights[weights != 0]).min(), np.abs(weights).max()) == (2.0**-10, 2880.0)


def test_the_reference_agrees_with_gguf(host: Path) -> None:
    """The valid scales, as the gguf package reads them: written apart from ours and from ggml's C."""
    blocks = every_block(128)
    expected = quants.dequantize(blocks, GGMLQuantizationType.NVFP4).reshape(-1)
    assert (reference(host, "nvfp4", blocks) == expected).all()


@pytest.mark.llama
def test_the_reference_is_bit_equal_to_ggml(host: Path, llama_bin: Path) -> None:
    """All 256 scale bytes, through the CPU's own conversion in the real library."""
    blocks = every_block(256)
    out = ggml(llama_bin, "nvfp4", blocks, blocks.size // 36 * 64)
    assert (out.view(np.uint32) == reference(host, "nvfp4", blocks).astype(np.float32).view(np.uint32)).all()


def test_bench_rows_are_read() -> None:
    """What `./harness bench` printed on an H200: times, bandwidth in the record's unit and clock, sample by sample."""
    file = open_file(BENCH)
    assert (file.tool, file.format, len(file.reading.rows)) == ("harness", "jsonl", 25)
    assert file.reading.provenance["gpu"] == "NVIDIA H200"
    labels = [row.label for row in file.reading.rows]
    assert "kernel=nvfp4_dequant variant=tile case=ffn_down rows=4096 cols=14336 cache=cold" in labels
    assert len(set(labels)) == 25
    for row in file.reading.rows:
        assert {each.metric: (each.unit, len(each.values)) for each in row.values} == {
            "time_us": ("us", 21),
            "bandwidth_gb_s": ("GiB/s", 21),
            "sm_clock_mhz": ("MHz", 21),
        }
