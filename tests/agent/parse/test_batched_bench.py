"""llama-batched-bench --output-format jsonl, from real output."""

import json

import pytest

from dgxlab.agent.parse.batched_bench import parse
from tests.agent.parse.captures import batched_cell, capture

TWICE = "cpu/batched-bench-twice.jsonl"
CELLS = [batched_cell(16, 4, pl) for pl in (1, 2, 4)]


def rows() -> list[dict[str, float]]:
    """Return the capture's rows: three sizes, and the same three again."""
    return [json.loads(line) for line in capture(TWICE).splitlines()]


def test_speeds_are_recomputed_from_the_times() -> None:
    """Three speeds each, one sample each, of the second call; what the first one reached is kept as discarded."""
    parsed = parse(capture(TWICE), CELLS)
    assert parsed.problems == ()
    assert [r.cell for r in parsed.results] == [c.key for c in CELLS]
    cold, warm = rows()[1], rows()[4]
    found = {m.metric: (m.samples, m.discarded) for m in parsed.results[1].measurements}
    assert found == {
        "speed_pp": ((2 * 16 / warm["t_pp"],), (2 * 16 / cold["t_pp"],)),
        "speed_tg": ((2 * 4 / warm["t_tg"],), (2 * 4 / cold["t_tg"],)),
        "speed": ((2 * (16 + 4) / warm["t"],), (2 * (16 + 4) / cold["t"],)),
    }
    assert found["speed_pp"][0][0] == pytest.approx(warm["speed_pp"], rel=1e-7)
    assert {m.unit for r in parsed.results for m in r.measurements} == {"t/s"}
    assert parsed.results[1].raw == warm


def test_the_first_call_of_a_size_is_the_slow_one() -> None:
    """Why all rows are asked for twice: in the capture every prompt took longer the first time."""
    prompts = [result.measurements[0] for result in parse(capture(TWICE), CELLS).results]
    assert [speed.samples[0] > 1.3 * speed.discarded[0] for speed in prompts] == [True] * 3


def test_a_shared_prompt_is_counted_once() -> None:
    """With -pps the prompt is computed once for all sequences, and its speed says so."""
    text = capture("cpu/batched-bench-shared.jsonl").partition("\n")[2]
    parsed = parse(2 * text, [batched_cell(16, 4, 2), batched_cell(16, 4, 4)])
    assert parsed.problems == ()
    second = parsed.results[1]
    assert second.raw["is_pp_shared"] == 1
    assert second.measurements[0].samples == (16 / second.raw["t_pp"],)
    assert second.measurements[2].samples == ((16 + 4 * 4) / second.raw["t"],)


@pytest.mark.parametrize(
    ("name", "cells", "printed"),
    [
        ("cpu/batched-bench-lost-row.jsonl", [batched_cell(16, 4, pl) for pl in (1, 2)], 3),
        ("cpu/batched-bench-skipped.jsonl", [batched_cell(pp, 4, pl) for pp in (16, 4096) for pl in (1, 2)], 3),
        ("cpu/batched-bench-abort.jsonl", [batched_cell(32, 4, 1), batched_cell(32, 4, 64)], 2),
        ("h200/batched-bench-q4_k.jsonl", [batched_cell(128, 64, pl) for pl in (1, 8, 32, 64)], 4),
        (TWICE, CELLS[:2], 6),
    ],
)
def test_a_wrong_number_of_rows_gives_nothing(name: str, cells: list, printed: int) -> None:
    """Lost at exit, left out (both with status 0), aborted half way, asked for once, too many: all refused."""
    parsed = parse(capture(name), cells)
    wanted = f"{2 * len(cells)}: {len(cells)} twice, to throw the first half away"
    assert parsed.results == ()
    assert parsed.problems == (f"llama-batched-bench printed {printed} rows, not {wanted}",)


@pytest.mark.parametrize("spare", ["", '{"n_kv_max": 32768, "n_ba', None], ids=["lost", "half", "there"])
def test_the_spare_row_is_never_counted(spare: str | None) -> None:
    """The last size is asked for twice: whatever the exit left of the second, the first one is the cell's."""
    lines = capture(TWICE).strip().split("\n")
    last = lines[2] if spare is None else spare
    assert last != lines[-1]
    parsed = parse("\n".join([*lines, last]), CELLS)
    assert parsed == parse(capture(TWICE), CELLS)
    assert len(parsed.results) == 3


def test_a_row_more_that_is_no_spare_is_refused() -> None:
    """A further row of another size means that something else ran."""
    lines = capture(TWICE).strip().split("\n")
    parsed = parse("\n".join([*lines, lines[1]]), CELLS)
    assert parsed.results == ()
    assert "printed 7 rows, not 6" in parsed.problems[0]


def test_nothing_to_generate_is_refused() -> None:
    """With -ntg 0 the tool prints speed_tg as -nan, which is no JSON."""
    parsed = parse(capture("cpu/batched-bench-no-tg.jsonl"), [batched_cell(16, 0, 2)])
    assert parsed.results == ()
    assert [p.partition(":")[0] for p in parsed.problems] == [
        "line 1 of llama-batched-bench's output is a broken row",
        "line 2 of llama-batched-bench's output is a broken row",
        "pp16 tg0 B2",
        "pp16 tg0 B2",
    ]


@pytest.mark.parametrize("half", [0, 1])
def test_a_broken_row_is_told_and_the_rest_kept(half: int) -> None:
    """It keeps its place, so that no row moves from one half into the other; its cell has no number."""
    lines = capture(TWICE).strip().split("\n")
    lines[3 * half] = lines[3 * half].replace('"t_pp": ', '"t_pp": , ')
    parsed = parse("\n".join(lines), CELLS)
    assert [r.cell for r in parsed.results] == [CELLS[1].key, CELLS[2].key]
    assert len(parsed.problems) == 2
    assert parsed.problems[0].startswith(f"line {1 + 3 * half} of llama-batched-bench's output is a broken row")
    assert parsed.problems[1] == "pp16 tg4 B1: it has no row"


def test_a_cell_printed_twice_is_refused() -> None:
    """The right number of rows, but two for one cell and none for another."""
    lines = capture(TWICE).strip().split("\n")
    parsed = parse("\n".join([*lines[:5], lines[4]]), CELLS)
    assert [r.cell for r in parsed.results] == [CELLS[0].key]
    assert parsed.problems == ("pp16 tg4 B2: 2 rows belong to it, not one", "pp16 tg4 B4: it has no row")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"t_pp": 0.000384', '"t_pp": 0.0', "t_pp is 0.0, not above 0"),
        ('"t_pp": 0.000384', '"t_pp": -0.000384', "t_pp is -0.000384, not above 0"),
        ('"t_pp": 0.000384', '"t_pp": 0.000394', "speed_pp is 83333.3, but its tokens and time give 81218.3"),
        ('"speed_tg": 16528.925781', '"speed_tg": 6528.925781', "speed_tg is 6528.93, but its tokens"),
        ('"speed": 46082.949219', '"speed": "fast"', "speed is 'fast', not a number"),
        ('"t": 0.000868, ', "", "its row has no t"),
        ('"t_pp": 0.000535', '"t_pp": 0.0', "t_pp is 0.0, not above 0"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(old: str, new: str, why: str) -> None:
    """A time and a speed that do not belong together are no measurement, nor are a first call's; others are kept."""
    text = capture(TWICE)
    assert old in text
    parsed = parse(text.replace(old, new, 1), CELLS)
    assert [r.cell for r in parsed.results] == [CELLS[0].key, CELLS[2].key]
    assert len(parsed.problems) == 1
    assert parsed.problems[0].startswith(f"pp16 tg4 B2: {why}")
