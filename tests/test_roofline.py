"""Peaks of known GPUs, and what a number of a tool implies of them."""

from typing import Any

import pytest

from dgxlab import roofline
from dgxlab.roofline import Peaks, Weights


def peaks_of(text: str) -> Peaks:
    peaks = roofline.peaks(text)
    assert peaks is not None
    return peaks


GB10, H200 = peaks_of("NVIDIA GB10"), peaks_of("NVIDIA H200")


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        *(("NVIDIA GB10", "GB10"), ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100")),
        *(("NVIDIA H100 NVL", "H100 NVL"), ("", ""), ("H200 (vm, NVIDIA A100-SXM4-80GB)", ""), ("vm NVIDIA H200", "")),
        *(("NVIDIA GB100", ""), ("NVIDIA GH200 480GB", ""), ("NVIDIA H100 PCIe", ""), ("Apple M4 16GB", "")),
    ],
)
def test_a_gpu_is_found_by_its_name(text: str, gpu: str) -> None:
    peaks = roofline.peaks(text)
    assert (peaks.gpu if peaks else "") == gpu


def test_the_peaks_of_a_gb10_are_the_documented_ones() -> None:
    assert GB10.bandwidth == 273e9
    assert GB10.flops == {"bf16": 107e12, "fp8": 213e12, "int8": 213e12, "fp4": 427e12}


@pytest.mark.parametrize(
    ("type", "path"),
    [
        *(("q4_0", "int8"), ("Q4_K_M", "int8"), ("Q8_0", "int8"), ("iq2_xxs", "int8"), ("int8", "int8")),
        *(("nvfp4", "fp4"), ("MXFP4_MOE", "fp4"), ("NVFP4, f32 state", "fp4"), ("FP8", "fp8")),
        *(("NVFP4A16 (W4A16 Marlin)", "bf16"), ("f16", "bf16"), ("BF16", "bf16"), ("f32", "bf16")),
        *(("", ""), ("n/a", ""), ("4bit", "")),
    ],
)
def test_a_type_of_weights_has_a_fastest_path(type: str, path: str) -> None:
    assert roofline.path_of(type) == path


@pytest.mark.parametrize(
    ("model", "type", "weights"),
    [
        ("Qwen3-32B-Q4_K_M.gguf", "Q4_K_M", Weights(32e9, 4, "int8")),
        ("Qwen3-Coder-30B-A3B-Instruct", "FP8", Weights(3e9, 8, "fp8")),
        ("Qwen3.5 dense q36-27b-nvfp4", "NVFP4, f32 state", Weights(27e9, 4, "fp4")),
        ("granite-3.0-1b-a400m", "f16", Weights(400e6, 16, "bf16")),
        ("gpt-oss-120b", "mxfp4", Weights(5.1e9, 4, "fp4")),
        ("Qwen2.5-0.5B", "q8_0", Weights(0.5e9, 8, "int8")),
        ("Qwen3-4B", "", Weights(4e9, 0, "")),
        ("NVFP4 W4Q8 8B", "NVFP4 W4Q8", Weights(8e9, 4, "fp4")),
    ],
)
def test_the_names_of_a_model_tell_its_weights(model: str, type: str, weights: Weights) -> None:
    assert roofline.weights_of(model, type) == weights


@pytest.mark.parametrize("model", ["", "op-level", "Mixtral-8x7B", "OLMoE-1B", "GB10", "4096x4096"])
def test_a_name_without_a_size_tells_nothing(model: str) -> None:
    assert roofline.weights_of(model, "Q4_K_M") is None


DENSE, PROMPT = roofline.weights_of("Qwen3-32B", "Q4_K_M"), roofline.weights_of("Qwen3-32B", "NVFP4A16")
SMALL = Weights(16e6, 4, "int8")
MUL_MAT = {"op_name": "MUL_MAT", "type_a": "q4_0", "k_v": "0"}
MOVED = {"moved": 32328 * 1024.0}


@pytest.mark.parametrize(
    ("gpu", "metric", "params", "value", "more", "sentence"),
    [
        # FLOPS are compared with the path of the weights; of an unknown type they could be fp4
        (GB10, "flops", {"type_a": "q4_K"}, 200e12, {}, ""),
        (GB10, "flops", {"type_a": "bf16"}, 200e12, {}, "200 TFLOPS are 1.9 times the 107 TFLOPS of GB10 in bf16"),
        (GB10, "flops", {}, 420e12, {}, ""),
        (GB10, "flops", {}, 600e12, {}, "600 TFLOPS are 1.4 times the 427 TFLOPS of GB10 in fp4"),
        # an H200 multiplies fp4 weights in fp8
        (H200, "flops", {"type_a": "nvfp4"}, 1900e12, {}, ""),
        (H200, "flops", {"type_a": "nvfp4"}, 2500e12, {}, "of H200 in fp8"),
        # a tenth above the peak could be the clock of a cool GPU
        (H200, "flops", {"type_a": "bf16"}, 1050e12, {}, ""),
        (H200, "flops", {"type_a": "bf16"}, 1100e12, {}, "1.1 times"),
        # test-backend-ops prints GB/s and means 2^30 bytes: 256 of them are 275 GB/s
        (GB10, "bandwidth_gb_s", {}, 254.0, {}, ""),
        (GB10, "bandwidth_gb_s", {}, 258.0, {}, "277 GB/s are 1.0 times the 273 GB/s of GB10"),
        # bytes that fit in the cache, as a recurrent state of 4 MB, may be faster than memory; the cache has limits too
        (GB10, "bandwidth_gb_s", {}, 1724.59, {"moved": 4160 * 1024}, ""),
        (GB10, "bandwidth_gb_s", {}, 1724.59, {"moved": 64e6}, "1852 GB/s, 39% of it from the cache, are 4.1 times"),
        (GB10, "bandwidth_gb_s", {}, 7500.0, {"moved": 4e6}, ""),
        (GB10, "bandwidth_gb_s", {}, 11200.0, {"moved": 0.0}, "12026 GB/s are 1.3 times the 9216 GB/s of GB10's cache"),
        # bytes that are counted and not touched imply nothing: rows of a table, a broadcast operand, gaps of a view
        (GB10, "bandwidth_gb_s", {"op_name": "GET_ROWS"}, 1e6, {"moved": 1e9}, ""),
        (GB10, "bandwidth_gb_s", {"op_name": "ADD"}, 1e6, {"moved": 1e9}, ""),
        (GB10, "bandwidth_gb_s", {"op_name": "ROPE", "v": 1}, 1e6, {"moved": 1e9}, ""),
        (GB10, "bandwidth_gb_s", {"op_name": "ROPE", "v": 0}, 1e6, {"moved": 1e9}, "times the 273 GB/s"),
        # the time of a multiplication implies bytes: 33 MB of weights in 14 us on an H200 and its L2 of 60 MiB
        (H200, "time_us", MUL_MAT, 14.39, MOVED, ""),
        (H200, "time_us", MUL_MAT, 1.439, MOVED, "16727 GB/s of H200's cache"),
        (H200, "time_us", {**MUL_MAT, "k_v": "4096"}, 1.439, MOVED, ""),
        (H200, "time_us", {**MUL_MAT, "op_name": "MUL_MAT_ID"}, 1.439, MOVED, ""),
        # a prompt is compared with what can be multiplied
        (
            *(GB10, "speed_pp", {"pl": 64}, 24444, {"weights": PROMPT}),
            "24444 t/s with 32B parameters: 1564 TFLOPS are 14.6 times the 107 TFLOPS of GB10 in bf16, "
            "and more than the 427 TFLOPS of fp4",
        ),
        (GB10, "avg_ts", {"n_prompt": 512}, 800, {"weights": PROMPT}, ""),
        # tokens one by one with what can be read: each pass reads all weights once, for all sequences
        (GB10, "avg_ts", {"n_gen": 128}, 10.2, {"weights": DENSE}, ""),
        (
            *(GB10, "avg_ts", {"n_gen": 128}, 20, {"weights": DENSE}),
            "20 t/s with 32B parameters of 4 bits: 320 GB/s are 1.2 times the 273 GB/s of GB10",
        ),
        (GB10, "speed_tg", {"pl": 32}, 235, {"weights": DENSE}, ""),
        (GB10, "speed_tg", {"pl": 8}, 160, {"weights": DENSE}, "read once for 8 sequences"),
        (GB10, "avg_ts", {"n_prompt": 512, "n_gen": 128}, 20, {"weights": DENSE}, ""),
        # 8 MB of weights at 50,000 passes a second are 400 GB/s that no memory sees
        (GB10, "avg_ts", {"n_gen": 128}, 5e4, {"weights": SMALL}, ""),
        # without weights, or for another metric, nothing is known
        (GB10, "avg_ts", {"n_gen": 128}, 1e9, {}, ""),
        (GB10, "time_us", {"type_a": "q4_0"}, 1e-9, {"weights": SMALL}, ""),
    ],
)
def test_what_cannot_be_is_said(
    gpu: Peaks, metric: str, params: dict[str, Any], value: float, more: dict[str, Any], sentence: str
) -> None:
    answer = roofline.implausible(metric, params, value, gpu, **more)
    assert sentence in answer
    assert bool(answer) == bool(sentence)


def test_several_gpus_reach_so_many_times_as_much() -> None:
    two = H200.times(2)
    assert (two.gpu, two.bandwidth, two.l2, two.flops["bf16"]) == ("2 H200", 9.6e12, 120 * 2**20, 1978e12)
    assert H200.times(1) is H200
