"""Traces: what becomes of one, and every trace that is refused. The captured one is of a small CUDA program."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgxlab.model import Cell
from dgxlab.tools.profile import ProfileBench, parse, passes
from dgxlab.tools.profile_files import group_of, short
from tests.tools.traces import Kernels, output, tokens, trace

CAPTURED = Path(__file__).resolve().parent.parent / "golden" / "h200" / "trace-toy.txt"
KERNELS: Kernels = {
    "void mul_mat_q<(ggml_type)40, 64, false>(char const*)": [1000, 1010],
    "rms_norm_f32(float*)": [300],
}
BENCH = ProfileBench("m", (128,), (4,), (1, 32))


def cells(bench: ProfileBench = BENCH) -> tuple[Cell, ...]:
    (launch,) = bench.launches({}, lambda model, cell: True)
    return launch.cells


def problem(text: str) -> str:
    parsed = parse(text, cells())
    assert parsed.results == ()
    (told,) = parsed.problems
    return told


def test_a_captured_trace_has_every_node_of_its_graphs() -> None:
    """37 passes: a first one, then four times a prompt of six launches and eight graphs of twelve nodes."""
    phases = passes(CAPTURED.read_text())
    assert [each.tokens for each in phases] == [16, *[32, *[1] * 8] * 4]
    counts = [{kernel: len(ns) for kernel, ns in each.kernels.items()} for each in phases]
    eager = {"mul_mat_q<40>": 1, "rms_norm_f32": 1, "mul_mat_q<8>": 2, "[memcpy device to device]": 1, "[memset]": 1}
    assert [each == eager for each in counts] == [each.tokens > 1 for each in phases]
    assert all(each == {kernel: 2 * n for kernel, n in eager.items()} for each in counts[2:10])
    assert [each.nodes for each in phases] == [0, *[0, *[12] * 8] * 4]
    assert not any("host to device" in kernel for each in counts for kernel in each)  # loading is in no pass


def test_the_sums_of_a_captured_trace_fit_its_clock() -> None:
    """A kernel runs for most of a pass, for no longer than the pass; two streams overlap, so the sum is more."""
    for each in passes(CAPTURED.read_text()):
        total = sum(sum(ns) for ns in each.kernels.values())
        assert 0.5 * each.wall < each.busy < each.wall
        assert each.busy + 9_000 < total  # ns: one of two kernels of 11 us at the same time


def test_every_kernel_is_a_cell_of_its_own() -> None:
    parsed = parse(output(128, 4, [1, 32], KERNELS), cells())
    assert parsed.problems == ()
    assert [cell.params["kernel"] for cell in parsed.parts] == ["mul_mat_q<40, 64, false>", "rms_norm_f32"] * 4
    values = {
        (cell.label, m.metric): (m.samples, m.discarded)
        for cell, result in zip((*cells(), *parsed.parts), parsed.results, strict=True)
        for m in result.measurements
    }
    of_product = "decode pp128 tg4 B32: mul_mat_q<40, 64, false>"
    assert values[of_product, "step_us"] == ((2.01, 2.01, 2.01), (2.01,))
    assert values[of_product, "launch_us"] == ((1.005,), ())
    assert values[of_product, "launches"] == ((2.0,), ())
    # a prompt of 32 x 128 tokens is two passes
    assert values["prompt pp128 tg4 B32", "launches"] == ((6.0,), ())
    assert values["prompt pp128 tg4 B32", "wall_us"][0] == pytest.approx((4.62, 4.62, 4.62))


def test_launches_in_graphs_are_counted() -> None:
    eager = output(128, 4, [1, 32], KERNELS)
    counts = [
        {m.samples for m in result.measurements if m.metric == "graph_nodes"}
        for text in (eager, eager.replace("launch\t1\t7\t0\t", "launch\t1\t7\t99\t"))
        for result, cell in zip(parse(text, cells()).results, cells(), strict=False)
        if cell.label == "prompt pp128 tg4 B32"
    ]
    assert counts == [set(), {(4.0, 4.0, 4.0)}]  # a prompt of two passes, with two products in each


def test_a_row_gives_its_numbers_again() -> None:
    parsed = parse(output(128, 4, [1, 32], KERNELS), cells())
    for cell, result in zip((*cells(), *parsed.parts), parsed.results, strict=True):
        (again,) = parse(json.dumps(result.raw), [cell]).results
        assert again == result


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text[:-200], "no beginning or no end"),
        (lambda text: text.partition("trace\t")[0], "no beginning or no end"),
        (lambda text: text.replace("trace\t1\t", "trace\t2\t"), "no beginning or no end"),
        (lambda text: text.replace("launch\t1\t7\t0\t", "launch\t1\t7\t", 1), "not whole"),
        (lambda text: text.replace("launch\t1\t7\t0\t", "launch\t99\t7\t0\t", 1), "broken"),
        (lambda text: text.replace("launch\t1\t7\t0\t", "launch\t1\t7\t0\tx", 1), "broken"),
        (lambda text: text.replace('"n_batch": 2048', '"n_batch": 0'), "broken"),
        (lambda text: text[:-2] + "5\n", "5 were dropped"),
        (lambda text: text.replace("llama-batched-bench\t", "llama-server\t"), "another process"),
        (lambda text: text.replace("kernel\t1\t0\t", "kernel\t1\t1\t"), "2 devices"),
        (lambda text: text.replace("pass\t32\t", "pass\t33\t", 1), "are not the"),
        (lambda text: "\n".join(line for line in text.split("\n") if "n_batch" not in line), "no n_batch"),
    ],
)
def test_a_trace_that_cannot_be_trusted_is_refused(change: Callable[[str], str], told: str) -> None:
    assert told in problem(change(output(128, 4, [1, 32], KERNELS)))


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(at=st.integers(0, 10**6), junk=st.text(max_size=3), cut=st.integers(0, 3))
def test_damage_gives_no_other_number(at: int, junk: str, cut: int) -> None:
    """A changed time is one that could be; anything else is refused, and nothing is raised."""
    whole = output(128, 4, [1, 32], KERNELS)
    at %= len(whole)
    parsed = parse(whole[:at] + junk + whole[at + cut :], cells())
    assert bool(parsed.problems) != bool(parsed.results)
    assert len(parsed.results) in (0, len(cells()) + len(parsed.parts))


def test_prompts_and_generation_of_other_sizes_are_refused() -> None:
    assert "passes are not" in problem(output(128, 3, [1, 32], KERNELS))
    assert "passes are not" in problem(output(128, 4, [1], KERNELS))


def test_repetitions_that_differ_are_refused() -> None:
    counts = list(tokens(128, 4, [1, 32]))
    more = {**KERNELS, "rms_norm_f32(float*)": [300, 300]}
    last = len(counts) - 7  # in the last repetition, before the spare row
    mixed = [(count, more if place == last else KERNELS) for place, count in enumerate(counts)]
    rows = output(128, 4, [1, 32], KERNELS).partition("trace\t")[0]
    assert "rms_norm_f32 was launched 4 times in one, 5 in another" in problem(rows + trace(mixed))


def test_time_0_is_refused() -> None:
    assert "of broken is 0" in problem(output(128, 4, [1, 32], {"broken(float*)": [0], **KERNELS}))
    assert "kernel time is 0" in problem(output(128, 4, [1, 32], {}))


def test_a_phase_alone_asks_for_its_own_cells() -> None:
    decode = replace(BENCH, phase=("decode",))
    assert [cell.params["phase"] for cell in cells(decode)] == ["decode", "decode"]
    (launch,) = decode.launches({}, lambda model, cell: cell.params["pl"] == 32)
    assert launch.argv[launch.argv.index("-npl") + 1] == "32,32,32,32,32"
    assert launch.argv[:3] == ("sh", "{files}/trace/run.sh", "{bin}/llama-batched-bench")


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void mul_mat_q<(ggml_type)40, 128, false>(char const*)", "products NVFP4"),
        ("void mul_mat_q<(ggml_type)39, (int)64, (bool)0>(const char *)", "products MXFP4"),
        ("void mul_mat_q_stream_k_fixup<(ggml_type)8, 64, true>(int const*)", "products Q8_0"),
        ("void mul_mat_vec_q<(ggml_type)12, 1, false, false>(void const*)", "products Q4_K"),
        ("void mul_mat_vec_q_moe<(ggml_type)40, 2>(void const*)", "products NVFP4"),
        ("void mul_mat_vec_f<__half, float, 1, 128>(__half const*)", "products float"),
        ("nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "products float"),
        ("quantize_mmq_nvfp4(float const*, int const*)", "activation quantise"),
        ("void quantize_mmq_q8_1<(mmq_q8_1_ds_layout)0>(float const*)", "activation quantise"),
        ("void flash_attn_ext_vec<128, 1, (ggml_type)1, (ggml_type)1, false>(char const*)", "attention"),
        ("void soft_max_f32<true, 0, 0, float>(float const*)", "attention"),
        ("void l2_norm_f32<32>(float const*)", "norms"),
        ("void rope_multi<true, false, float>(float const*)", "rope"),
        (
            "void nvfp4_grouped<nvfp4_grouped_config<128, 192, 2, 4, 64, 5, 1, true> >(nvfp4_grouped_problem)",
            "products NVFP4",
        ),
        ("nvfp4_grouped_to_f16(nvfp4_grouped_problem, float const*, int, int, long, long)", "activation quantise"),
        ("void nvfp4_grouped_route<192>(nvfp4_grouped_problem, int const*, long, int, int)", "routing"),
        ("void gated_delta_net_cuda<128, false, false>(float const*)", "state"),
        ("void ssm_conv_f32<true, 128, 4>(float const*)", "state"),
        ("void conv_state_step<4, 2>(conv_state_args)", "state"),
        ("void k_get_rows_float<float, float>(float const*)", "copies"),
        ("[memcpy device to host]", "copies"),
        ("void topk_moe_cuda<128, true>(float const*)", "routing"),
        ("void unary_gated_op_kernel<&(op_silu(float)), float>(float const*)", "elementwise"),
        ("void k_bin_bcast<&(op_mul(float, float)), float, float, float>(float const*)", "elementwise"),
        ("conv2d_kernel(float const*)", "other"),
    ],
)
def test_a_kernels_group(kernel: str, group: str) -> None:
    """The whole name and the short one, which the record keeps, are of one group."""
    assert group_of(kernel) == group_of(short(kernel)) == group


def test_a_kernel_has_one_name_in_all_builds() -> None:
    internal = "_INTERNAL_eb7fca1c_11_binbcast_cu_6840010b::"
    pointers = ", float const*" * 3
    name = f"void k_bin_bcast<&{internal}op_add, float, float, float{pointers}>(float const*, int)"
    assert short(name) == short(short(name)) == "k_bin_bcast<&op_add, float x3, float const* x3>"
    function = "_INTERNAL_93809095_6_cpy_cu_bfba63e2::cpy_1_scalar<float, float>(char const*, char*)"
    assert short(f"void cpy_scalar<&(void {function})>(char const*, int)") == "cpy_scalar<&cpy_1_scalar>"
    assert short("mul_mat_q<40, 128, false>") == "mul_mat_q<40, 128, false>"


def test_profilers_agree_on_a_short_name() -> None:
    names = ("void mul_mat_q<(ggml_type)40, (int)64>(const char *)", "void mul_mat_q<(ggml_type)40, 64>(char const*)")
    assert {short(name) for name in names} == {"mul_mat_q<40, 64>"}
