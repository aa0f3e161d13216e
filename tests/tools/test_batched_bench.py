"""llama-batched-bench --output-format jsonl, from real output."""

import json

import pytest

from dgxlab.model import Cell
from dgxlab.tools.batched_bench import parse
from tests.tools.captures import batched_cell, capture

TWICE = "cpu/batched-bench-twice.jsonl"
CELLS = [batched_cell(16, 4, pl) for pl in (1, 2, 4)]
LINES = capture(TWICE).strip().split("\n")
"""Three sizes, and the same three again."""


def test_speeds_are_recomputed_from_the_times() -> None:
    parsed = parse(capture(TWICE), CELLS)
    assert parsed.problems == ()
    assert [r.cell for r in parsed.results] == [c.key for c in CELLS]
    cold, warm = json.loads(LINES[1]), json.loads(LINES[4])
    assert {m.metric: (m.unit, m.samples, m.discarded) for m in parsed.results[1].measurements} == {
        "speed_pp": ("t/s", (2 * 16 / warm["t_pp"],), (2 * 16 / cold["t_pp"],)),
        "speed_tg": ("t/s", (2 * 4 / warm["t_tg"],), (2 * 4 / cold["t_tg"],)),
        "speed": ("t/s", (2 * (16 + 4) / warm["t"],), (2 * (16 + 4) / cold["t"],)),
    }
    assert parsed.results[1].raw == warm
    prompts = [result.measurements[0] for result in parsed.results]
    assert all(prompt.samples[0] > 1.3 * prompt.discarded[0] for prompt in prompts)


def test_a_shared_prompt_is_counted_once() -> None:
    text = capture("cpu/batched-bench-shared.jsonl").partition("\n")[2]
    parsed = parse(2 * text, [batched_cell(16, 4, 2), batched_cell(16, 4, 4)])
    assert parsed.problems == ()
    second = parsed.results[1]
    assert second.measurements[0].samples == (16 / second.raw["t_pp"],)
    assert second.measurements[2].samples == ((16 + 4 * 4) / second.raw["t"],)


@pytest.mark.parametrize(
    ("text", "cells", "printed"),
    [
        (capture("cpu/batched-bench-lost-row.jsonl"), [batched_cell(16, 4, pl) for pl in (1, 2)], 3),
        (
            capture("cpu/batched-bench-skipped.jsonl"),
            [batched_cell(pp, 4, pl) for pp in (16, 4096) for pl in (1, 2)],
            3,
        ),
        (capture("cpu/batched-bench-abort.jsonl"), [batched_cell(32, 4, 1), batched_cell(32, 4, 64)], 2),
        (capture("h200/batched-bench-q4_k.jsonl"), [batched_cell(128, 64, pl) for pl in (1, 8, 32, 64)], 4),
        (capture(TWICE), CELLS[:2], 6),
        ("\n".join([*LINES, LINES[1]]), CELLS, 7),
    ],
    ids=["lost at exit", "left out", "aborted", "once", "too many", "no spare"],
)
def test_a_wrong_number_of_rows_gives_nothing(text: str, cells: list[Cell], printed: int) -> None:
    parsed = parse(text, cells)
    assert parsed.results == ()
    assert [problem.split(",")[0] for problem in parsed.problems] == [f"llama-batched-bench printed {printed} rows"]


@pytest.mark.parametrize("spare", ["", '{"n_kv_max": 32768, "n_ba', LINES[2]], ids=["lost", "half", "there"])
def test_the_spare_row_is_never_counted(spare: str) -> None:
    parsed = parse("\n".join([*LINES, spare]), CELLS)
    assert parsed == parse(capture(TWICE), CELLS)
    assert len(parsed.results) == 3


@pytest.mark.parametrize("half", [0, 1])
def test_a_broken_row_costs_its_cell(half: int) -> None:
    lines = list(LINES)
    lines[3 * half] = lines[3 * half].replace('"t_pp": ', '"t_pp": , ')
    parsed = parse("\n".join(lines), CELLS)
    assert [r.cell for r in parsed.results] == [CELLS[1].key, CELLS[2].key]
    assert [problem.partition(" of ")[0][:6] for problem in parsed.problems] == [f"line {1 + 3 * half}", "pp16 t"]
    twice = parse("\n".join([*LINES[:5], LINES[4]]), CELLS)
    assert [r.cell for r in twice.results] == [CELLS[0].key]
    assert len(twice.problems) == 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"t_pp": 0.000384', '"t_pp": 0.0', "t_pp is 0.0"),
        ('"t_pp": 0.000384', '"t_pp": 0.000394', "speed_pp is 83333.3"),
        ('"speed_tg": 16528.925781', '"speed_tg": 6528.925781', "speed_tg is 6528.93"),
        ('"t": 0.000868, ', "", "its row has no t"),
        ('"t_pp": 0.000535', '"t_pp": 0.0', "t_pp is 0.0"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(old: str, new: str, why: str) -> None:
    assert old in capture(TWICE)
    parsed = parse(capture(TWICE).replace(old, new, 1), CELLS)
    assert [r.cell for r in parsed.results] == [CELLS[0].key, CELLS[2].key]
    assert [problem.startswith(f"pp16 tg4 B2: {why}") for problem in parsed.problems] == [True]
