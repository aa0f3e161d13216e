"""llama-bench -o jsonl, from real output."""

import json

import pytest

from dgxlab.model import Cell
from dgxlab.tools.llama_bench import parse
from tests.tools.captures import capture, llama_cell

H200 = "h200/llama-bench-q4_k.jsonl"
CPU = "cpu/llama-bench-q4_0.jsonl"


def test_samples_come_from_nanoseconds_and_the_cold_one_is_apart() -> None:
    rows = [json.loads(line) for line in capture(H200).splitlines()]
    without = "\n".join(json.dumps({k: v for k, v in row.items() if k != "samples_ts"}) for row in rows)
    for text in (capture(H200), without):
        (avg_ts,) = parse(text, [llama_cell(512, 0)]).results[0].measurements
        assert (avg_ts.metric, avg_ts.unit) == ("avg_ts", "t/s")
        assert avg_ts.discarded == (512 / (15998377 / 1e9),)
        assert avg_ts.samples == tuple(512 / (ns / 1e9) for ns in (13890882, 13483629, 13516451, 13542891))


def test_all_three_tests_of_a_run_are_read() -> None:
    cells = [llama_cell(0, 32), llama_cell(2048, 0), llama_cell(512, 0, type_k="f16", no_kv_offload=False)]
    parsed = parse(capture(H200), cells)
    assert parsed.problems == ()
    assert [r.cell for r in parsed.results] == [c.key for c in cells]
    assert [round(r.measurements[0].samples[-1]) for r in parsed.results] == [917, 34427, 37806]
    assert parsed.results[0].raw["gpu_info"] == "NVIDIA H200"


@pytest.mark.parametrize("flash_attn", [1, True])
def test_flash_attn_and_cache_type_tell_rows_apart(flash_attn: int) -> None:
    cell = llama_cell(32, 0, repetitions=3, flash_attn=flash_attn, type_k="q8_0")
    (result,) = parse(capture(CPU), [cell]).results
    assert (result.raw["flash_attn"], result.raw["type_k"], result.raw["n_prompt"]) == (1, "q8_0", 32)


@pytest.mark.parametrize(
    ("name", "cell", "why"),
    [
        (CPU, llama_cell(32, 0, repetitions=3), "4 rows belong to it, not one"),
        (H200, llama_cell(4096, 0), "it has no row"),
        (H200, llama_cell(512, 0, repetitions=1), "it has 5 samples, not 1 and a first one to throw away"),
        (H200, llama_cell(512, 0, repetitions=5), "it has 5 samples, not 5 and a first one to throw away"),
        (H200, Cell("llama-bench", "x", {"n_prompt": 512}), "the number of repetitions is None, not a number"),
    ],
)
def test_no_result_without_the_one_row(name: str, cell: Cell, why: str) -> None:
    parsed = parse(capture(name), [cell])
    assert (parsed.results, parsed.problems) == ((), (f"{cell.label}: {why}",))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("13890882", "0", "no speed"),
        ("13890882", "null", "not a number"),
        ("13890882", "23890882", "its tokens and time give"),
        ("36858.7", "33985.7", "its tokens and time give"),
        ('"samples_ns": [', '"samples": [', "its row has no samples_ns"),
    ],
)
def test_bad_samples_cost_the_cell_its_result(old: str, new: str, why: str) -> None:
    parsed = parse(capture(H200).replace(old, new, 1), [llama_cell(512, 0), llama_cell(0, 32)])
    assert len(parsed.results) == 1
    (problem,) = parsed.problems
    assert problem.startswith("pp512: ")
    assert why in problem
