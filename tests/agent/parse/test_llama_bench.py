"""llama-bench -o jsonl, from real output."""

import json

import pytest

from dgxlab.agent.parse.llama_bench import parse
from dgxlab.model import Cell
from tests.agent.parse.captures import capture, llama_cell

H200 = "h200/llama-bench-q4_k.jsonl"
CPU = "cpu/llama-bench-q4_0.jsonl"


def test_samples_come_from_nanoseconds_and_the_cold_one_is_apart() -> None:
    """pp512 on the H200: five repetitions, the first 15 % slower; the rest count, unrounded."""
    (result,) = parse(capture(H200), [llama_cell(512, 0)]).results
    (avg_ts,) = result.measurements
    assert (avg_ts.metric, avg_ts.unit) == ("avg_ts", "t/s")
    assert avg_ts.discarded == (512 / (15998377 / 1e9),)
    assert avg_ts.samples == tuple(512 / (ns / 1e9) for ns in (13890882, 13483629, 13516451, 13542891))
    assert avg_ts.samples[0] == pytest.approx(36858.7, rel=1e-5)


def test_all_three_tests_of_a_run_are_read() -> None:
    """Prompt, long prompt and generation find their own rows, in the order of the cells."""
    cells = [llama_cell(0, 32), llama_cell(2048, 0), llama_cell(512, 0, type_k="f16", no_kv_offload=False)]
    parsed = parse(capture(H200), cells)
    assert parsed.problems == ()
    assert [r.cell for r in parsed.results] == [c.key for c in cells]
    assert [round(r.measurements[0].samples[-1]) for r in parsed.results] == [917, 34427, 37806]
    assert parsed.results[0].raw["gpu_info"] == "NVIDIA H200"


@pytest.mark.parametrize("flash_attn", ["on", 1, True])
def test_flash_attn_and_cache_type_tell_rows_apart(flash_attn: str | int) -> None:
    """Eight rows of a real matrix: -fa 0,1 and -ctk f16,q8_0; only the one asked for is read."""
    cell = llama_cell(32, 0, repetitions=3, flash_attn=flash_attn, type_k="q8_0")
    (result,) = parse(capture(CPU), [cell]).results
    assert (result.raw["flash_attn"], result.raw["type_k"], result.raw["n_prompt"]) == (1, "q8_0", 32)


def test_a_cell_that_leaves_an_axis_open_is_refused() -> None:
    """Four rows are pp32: which one is meant is not guessed."""
    parsed = parse(capture(CPU), [llama_cell(32, 0, repetitions=3)])
    assert (parsed.results, parsed.problems) == ((), ("pp32: 4 rows belong to it, not one",))


def test_a_cell_without_a_row_is_a_problem() -> None:
    """A test that the program did not run is named."""
    parsed = parse(capture(H200), [llama_cell(4096, 0), llama_cell(512, 0)])
    assert parsed.problems == ("pp4096: it has no row",)
    assert len(parsed.results) == 1


@pytest.mark.parametrize("repetitions", [1, 3, 5])
def test_the_number_of_samples_must_be_right(repetitions: int) -> None:
    """One more sample than counted repetitions, no other number."""
    parsed = parse(capture(H200), [llama_cell(512, 0, repetitions=repetitions)])
    why = f"it has 5 samples, not {repetitions} and a first one to throw away"
    assert (parsed.results, parsed.problems) == ((), (f"pp512: {why}",))


def test_a_cell_must_say_how_many_repetitions() -> None:
    """Without it the cold one cannot be told from the rest."""
    cell = Cell("llama-bench", "pp512", {"n_prompt": 512})
    assert parse(capture(H200), [cell]).problems == ("pp512: the number of repetitions is None, not a number",)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("13890882", "0", "no speed"),
        ("13890882", "-13890882", "no speed"),
        ("13890882", '"x"', "not a number"),
        ("13890882", "null", "not a number"),
        ("13890882", "true", "not a number"),
        ("13890882", "1e999", "not a number"),
        ("13890882", "23890882", "its tokens and time give"),
        ("36858.7", "33985.7", "its tokens and time give"),
        ('"samples_ns": [', '"samples": [', "its row has no samples_ns"),
    ],
)
def test_bad_samples_cost_the_cell_its_result(old: str, new: str, why: str) -> None:
    """A value that is no time, or that the row itself contradicts, is named and the other cells are kept."""
    text = capture(H200).replace(old, new, 1)
    parsed = parse(text, [llama_cell(512, 0), llama_cell(0, 32)])
    assert len(parsed.results) == 1
    assert len(parsed.problems) == 1
    assert parsed.problems[0].startswith("pp512: ")
    assert why in parsed.problems[0]


@pytest.mark.parametrize("token", ["NaN", "-nan", "Infinity", "inf"])
def test_tokens_that_are_not_json_break_the_row(token: str) -> None:
    """C prints nan and inf, Python would read NaN and Infinity: none of them passes."""
    parsed = parse(capture(H200).replace("13890882", token, 1), [llama_cell(512, 0)])
    assert parsed.results == ()
    assert parsed.problems[0].startswith("line 1 of llama-bench's output is a broken row: ")
    assert parsed.problems[1] == "pp512: it has no row"


def test_a_pin_without_samples_ts_is_read() -> None:
    """samples_ts only confirms; a row by another pin without it is as good."""
    rows = [json.loads(line) for line in capture(H200).splitlines()]
    text = "\n".join(json.dumps({k: v for k, v in row.items() if k != "samples_ts"}) for row in rows)
    assert parse(text, [llama_cell(512, 0)]).results[0].measurements == (
        parse(capture(H200), [llama_cell(512, 0)]).results[0].measurements
    )


def test_nothing_printed_is_a_problem_for_every_cell() -> None:
    """A program that failed before its first row leaves a sentence a cell, no exception."""
    parsed = parse("error: failed to load model 'x.gguf'\n", [llama_cell(512, 0), llama_cell(0, 32)])
    assert parsed.problems == ("pp512: it has no row", "tg32: it has no row")
