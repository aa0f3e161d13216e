"""Peaks of known GPUs, and what a number of a tool implies of them."""

import pytest

from dgxlab import roofline
from dgxlab.roofline import Peaks, Weights


def _peaks(text: str) -> Peaks:
    found = roofline.peaks(text)
    assert found is not None
    return found


GB10, H200 = _peaks("NVIDIA GB10"), _peaks("NVIDIA H200")


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        ("NVIDIA GB10", "GB10"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
    ],
)
def test_a_gpu_is_found_by_its_name(text: str, gpu: str) -> None:
    """As nvidia-smi says it."""
    assert _peaks(text).gpu == gpu


@pytest.mark.parametrize(
    "text",
    [
        "",
        "H200 (vm, NVIDIA A100-SXM4-80GB)",
        "vm NVIDIA H200",
        "NVIDIA GB100",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
        "Apple M4 16GB",
        "AMD EPYC 9654",
    ],
)
def test_an_unknown_gpu_has_no_peaks(text: str) -> None:
    """A name that contains another one is another GPU."""
    assert roofline.peaks(text) is None


def test_the_peaks_of_a_gb10_are_the_documented_ones() -> None:
    """273 GB/s, and dense FLOPS by path."""
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
    """In ggml's words and in those of documents; none for an unknown one."""
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
    """Of a mixture, what is active counts."""
    assert roofline.weights_of(model, type) == weights


@pytest.mark.parametrize("model", ["", "op-level", "Mixtral-8x7B", "OLMoE-1B", "GB10", "4096x4096"])
def test_a_name_without_a_size_tells_nothing(model: str) -> None:
    """Nor does the size of a mixture that does not say how much of it is active."""
    assert roofline.weights_of(model, "Q4_K_M") is None


def test_flops_are_compared_with_the_path_of_the_weights() -> None:
    """200 TFLOPS can be int8 on a GB10 and not bf16; of an unknown type they could be fp4."""
    assert roofline.implausible("flops", {"type_a": "q4_K"}, 200e12, GB10) == ""
    assert roofline.implausible("flops", {"type_a": "bf16"}, 200e12, GB10) == (
        "200 TFLOPS are 1.9 times the 107 TFLOPS of GB10 in bf16"
    )
    assert roofline.implausible("flops", {}, 420e12, GB10) == ""
    assert roofline.implausible("flops", {}, 600e12, GB10) == "600 TFLOPS are 1.4 times the 427 TFLOPS of GB10 in fp4"


def test_a_path_that_the_gpu_lacks_is_its_fastest() -> None:
    """An H200 multiplies fp4 weights in fp8."""
    assert roofline.implausible("flops", {"type_a": "nvfp4"}, 1900e12, H200) == ""
    assert "of H200 in fp8" in roofline.implausible("flops", {"type_a": "nvfp4"}, 2500e12, H200)


def test_a_cool_gpu_above_its_nominal_clock_is_believed() -> None:
    """What was measured on an H200 is a third below the peak, and a tenth above it could still be its clock."""
    assert roofline.implausible("flops", {"type_a": "bf16"}, 1050e12, H200) == ""
    assert roofline.implausible("flops", {"type_a": "bf16"}, 1100e12, H200) != ""


def test_the_bandwidth_of_test_backend_ops_is_in_gib() -> None:
    """It prints GB/s and means 2^30 bytes: 256 of them are 275 GB/s."""
    assert roofline.implausible("bandwidth_gb_s", {}, 254.0, GB10) == ""
    assert roofline.implausible("bandwidth_gb_s", {}, 258.0, GB10) == "277 GB/s are 1.0 times the 273 GB/s of GB10"


def test_bytes_that_fit_in_the_cache_may_be_faster_than_memory() -> None:
    """A recurrent state of 4 MB never leaves it."""
    assert roofline.implausible("bandwidth_gb_s", {}, 1724.59, GB10, moved=4160 * 1024) == ""
    assert roofline.implausible("bandwidth_gb_s", {}, 1724.59, GB10, moved=64e6) == (
        "1852 GB/s, 39% of it from the cache, are 4.1 times the 273 GB/s of GB10"
    )


def test_not_even_the_cache_is_without_limits() -> None:
    """Its multiprocessors take 64 bytes a clock each from it: 8 TB/s are believed on a GB10, 12 are not."""
    assert roofline.implausible("bandwidth_gb_s", {}, 7500.0, GB10, moved=4e6) == ""
    assert roofline.implausible("bandwidth_gb_s", {}, 11200.0, GB10, moved=0.0) == (
        "12026 GB/s are 1.3 times the 9216 GB/s of GB10's cache"
    )


def test_the_time_of_a_multiplication_implies_bytes() -> None:
    """33 MB of weights in 14 us on an H200 and its L2 of 60 MiB; in a tenth of that on nothing."""
    case, moved = {"op_name": "MUL_MAT", "type_a": "q4_0", "k_v": "0"}, 32328 * 1024.0
    assert roofline.implausible("time_us", case, 14.39, H200, moved=moved) == ""
    assert "16727 GB/s of H200's cache" in roofline.implausible("time_us", case, 1.439, H200, moved=moved)
    assert roofline.implausible("time_us", {**case, "k_v": "4096"}, 1.439, H200, moved=moved) == ""
    assert roofline.implausible("time_us", {**case, "op_name": "MUL_MAT_ID"}, 1.439, H200, moved=moved) == ""


@pytest.mark.parametrize("case", [{"op_name": "GET_ROWS"}, {"op_name": "ADD"}, {"op_name": "ROPE", "v": 1}])
def test_bytes_that_are_counted_and_not_touched_imply_nothing(case: dict[str, str | int]) -> None:
    """Rows of a table, a broadcast operand, the gaps of a view."""
    assert roofline.implausible("bandwidth_gb_s", case, 1e6, GB10, moved=1e9) == ""
    assert roofline.implausible("bandwidth_gb_s", {"op_name": "ROPE", "v": 0}, 1e6, GB10, moved=1e9) != ""


def test_several_gpus_reach_so_many_times_as_much() -> None:
    """Of everything; one is itself."""
    two = H200.times(2)
    assert (two.gpu, two.bandwidth, two.cache, two.flops["bf16"]) == ("2 H200", 9.6e12, 120 * 2**20, 1978e12)
    assert H200.times(1) is H200


def test_a_prompt_is_compared_with_what_can_be_multiplied() -> None:
    """24,444 t/s of a 32B model cannot be, 800 can."""
    dense = roofline.weights_of("Qwen3-32B", "NVFP4A16")
    assert roofline.implausible("speed_pp", {"pl": 64}, 24444, GB10, weights=dense) == (
        "24444 t/s with 32B parameters: 1564 TFLOPS are 14.6 times the 107 TFLOPS of GB10 in bf16, "
        "and more than the 427 TFLOPS of fp4"
    )
    assert roofline.implausible("avg_ts", {"n_prompt": 512}, 800, GB10, weights=dense) == ""


def test_tokens_one_by_one_are_compared_with_what_can_be_read() -> None:
    """Each pass reads all weights once, for as many sequences as there are."""
    dense = roofline.weights_of("Qwen3-32B", "Q4_K_M")
    assert roofline.implausible("avg_ts", {"n_gen": 128}, 10.2, GB10, weights=dense) == ""
    assert roofline.implausible("avg_ts", {"n_gen": 128}, 20, GB10, weights=dense) == (
        "20 t/s with 32B parameters of 4 bits: 320 GB/s are 1.2 times the 273 GB/s of GB10"
    )
    assert roofline.implausible("speed_tg", {"pl": 32}, 235, GB10, weights=dense) == ""
    assert "read once for 8 sequences" in roofline.implausible("speed_tg", {"pl": 8}, 160, GB10, weights=dense)
    assert roofline.implausible("avg_ts", {"n_prompt": 512, "n_gen": 128}, 20, GB10, weights=dense) == ""


def test_a_model_that_fits_in_the_cache_is_read_from_there() -> None:
    """8 MB of weights at 50,000 passes a second are 400 GB/s that no memory sees."""
    assert roofline.implausible("avg_ts", {"n_gen": 128}, 5e4, GB10, weights=Weights(16e6, 4, "int8")) == ""


def test_without_weights_or_for_another_metric_nothing_is_said() -> None:
    """A time implies nothing by itself."""
    assert roofline.implausible("avg_ts", {"n_gen": 128}, 1e9, GB10) == ""
    assert roofline.implausible("time_us", {"type_a": "q4_0"}, 1e-9, GB10, weights=Weights(1e9, 4, "int8")) == ""
