"""llama-batched-bench --output-format jsonl, from real output."""

import json

import pytest

from dgxlab.agent.parse.batched_bench import parse
from tests.agent.parse.captures import batched_cell, capture

H200 = "h200/batched-bench-q4_k.jsonl"
WARM = [batched_cell(128, 64, pl) for pl in (8, 32, 64)]


def test_speeds_are_recomputed_from_the_times() -> None:
    """The first row is thrown away; the other three give three speeds each, one sample each."""
    parsed = parse(capture(H200), WARM)
    assert parsed.problems == ()
    assert [r.cell for r in parsed.results] == [c.key for c in WARM]
    found = {m.metric: m.samples for m in parsed.results[0].measurements}
    assert found == {
        "speed_pp": (8 * 128 / 0.028893,),
        "speed_tg": (8 * 64 / 0.259328,),
        "speed": (8 * (128 + 64) / 0.288221,),
    }
    assert found["speed_pp"][0] == pytest.approx(35441.109375, rel=1e-7)
    assert {m.unit for r in parsed.results for m in r.measurements} == {"t/s"}
    assert parsed.results[0].raw["pl"] == 8


def test_the_thrown_away_row_may_repeat_a_cell() -> None:
    """`-npl 1,1,2,4`: the cold B=1 is dropped, the second one counts."""
    cells = [batched_cell(16, 4, pl) for pl in (1, 2, 4)]
    text = capture("cpu/batched-bench.jsonl")
    parsed = parse(text, cells)
    assert parsed.problems == ()
    warm = json.loads(text.split("\n")[1])
    assert parsed.results[0].raw == warm
    assert parsed.results[0].measurements[0].samples == (16 / warm["t_pp"],)


def test_a_shared_prompt_is_counted_once() -> None:
    """With -pps the prompt is computed once for all sequences, and its speed says so."""
    parsed = parse(capture("cpu/batched-bench-shared.jsonl"), [batched_cell(16, 4, 2), batched_cell(16, 4, 4)])
    assert parsed.problems == ()
    second = parsed.results[1]
    assert second.raw["is_pp_shared"] == 1
    assert second.measurements[0].samples == (16 / second.raw["t_pp"],)
    assert second.measurements[2].samples == ((16 + 4 * 4) / second.raw["t"],)


@pytest.mark.parametrize(
    ("name", "cells", "printed"),
    [
        ("cpu/batched-bench-lost-row.jsonl", [batched_cell(16, 4, pl) for pl in (1, 2, 4)], 3),
        ("cpu/batched-bench-skipped.jsonl", [batched_cell(pp, 4, pl) for pp in (16, 4096) for pl in (1, 2)], 3),
        ("cpu/batched-bench-abort.jsonl", [batched_cell(32, 4, 1), batched_cell(32, 4, 64)], 2),
        (H200, [batched_cell(128, 64, pl) for pl in (1, 8, 32, 64)], 4),
        (H200, WARM[:2], 4),
    ],
)
def test_a_wrong_number_of_rows_gives_nothing(name: str, cells: list, printed: int) -> None:
    """Lost at exit, left out (both with status 0), aborted half way, no throw-away row, one too many: all refused."""
    parsed = parse(capture(name), cells)
    wanted = f"{len(cells) + 1}: {len(cells)} and a first one to throw away"
    assert parsed.results == ()
    assert parsed.problems == (f"llama-batched-bench printed {printed} rows, not {wanted}",)


@pytest.mark.parametrize("spare", ["", '{"n_kv_max": 32768, "n_ba', None], ids=["lost", "half", "there"])
def test_the_spare_row_is_never_counted(spare: str | None) -> None:
    """The last size is asked for twice: whatever the exit left of the second, the first one is the cell's."""
    lines = capture(H200).strip().split("\n")
    last = lines[-1].replace('"t_tg": 0.874230', '"t_tg": 0.900000') if spare is None else spare
    parsed = parse("\n".join([*lines, last]), WARM)
    assert parsed == parse(capture(H200), WARM)
    assert len(parsed.results) == 3


def test_a_row_more_that_is_no_spare_is_refused() -> None:
    """A further row of another size means that something else ran."""
    lines = capture(H200).strip().split("\n")
    parsed = parse("\n".join([*lines, lines[1]]), WARM)
    assert parsed.results == ()
    assert "printed 5 rows, not 4" in parsed.problems[0]


def test_nothing_to_generate_is_refused() -> None:
    """With -ntg 0 the tool prints speed_tg as -nan, which is no JSON."""
    parsed = parse(capture("cpu/batched-bench-no-tg.jsonl"), [batched_cell(16, 0, 2)])
    assert parsed.results == ()
    assert [p.partition(":")[0] for p in parsed.problems] == [
        "line 1 of llama-batched-bench's output is a broken row",
        "line 2 of llama-batched-bench's output is a broken row",
        "pp16 tg0 B2",
    ]


def test_a_broken_first_row_is_told_and_the_rest_kept() -> None:
    """The throw-away row keeps its place when it is broken: no warm row is dropped in its stead."""
    parsed = parse(capture(H200)[:-1].replace('"t_pp": 0.071266', '"t_pp": ', 1), WARM)
    assert len(parsed.results) == 3
    assert len(parsed.problems) == 1
    assert parsed.problems[0].startswith("line 1 of llama-batched-bench's output is a broken row")


def test_a_cell_printed_twice_is_refused() -> None:
    """The right number of rows, but two for one cell and none for another."""
    lines = capture(H200).strip().split("\n")
    parsed = parse("\n".join([*lines[:3], lines[2]]), WARM)
    assert [r.cell for r in parsed.results] == [WARM[0].key]
    assert parsed.problems == ("pp128 tg64 B32: 2 rows belong to it, not one", "pp128 tg64 B64: it has no row")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"t_pp": 0.028893', '"t_pp": 0.0', "t_pp is 0.0, not above 0"),
        ('"t_pp": 0.028893', '"t_pp": -0.028893', "t_pp is -0.028893, not above 0"),
        ('"t_pp": 0.028893', '"t_pp": 0.028993', "speed_pp is 35441.1, but its tokens and time give 35318.9"),
        ('"speed_tg": 1974.333618', '"speed_tg": 974.333618', "speed_tg is 974.334, but its tokens"),
        ('"speed": 5329.243652', '"speed": "fast"', "speed is 'fast', not a number"),
        ('"t": 0.288221, ', "", "its row has no t"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(old: str, new: str, why: str) -> None:
    """A time and a speed that do not belong together are no measurement; the other cells are kept."""
    text = capture(H200)
    assert old in text
    parsed = parse(text.replace(old, new, 1), WARM)
    assert [r.cell for r in parsed.results] == [WARM[1].key, WARM[2].key]
    assert len(parsed.problems) == 1
    assert parsed.problems[0].startswith(f"pp128 tg64 B8: {why}")
