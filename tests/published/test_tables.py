"""The tables of the documents: golden files, and the numbers as the documents print them.

`python -m tests.published.test_tables` writes the golden files anew.
"""

from pathlib import Path

import pytest

from dgxlab.published import Figure
from dgxlab.report import render_table
from dgxlab.report.published import TABLES, PublishedTable, concurrency, kernel_bytes, steps

GOLDEN = Path(__file__).resolve().parent / "golden"
MADE = {make.__name__: make for make in TABLES}


def _numbers(table: PublishedTable) -> list[list[float | None]]:
    values = [[row.get(column.key) for column in table.columns if column.numeric] for row in table.rows]
    return [[value.value if isinstance(value, Figure) else value for value in row] for row in values]  # type: ignore[misc]


@pytest.mark.parametrize("name", MADE)
def test_each_table_is_its_golden_file(name: str) -> None:
    """Whole, with its sources beneath."""
    assert render_table(MADE[name]()) == (GOLDEN / f"{name}.md").read_text(encoding="utf-8")


def test_the_steps_have_the_numbers_of_the_plan() -> None:
    """Row by row: q4_K and q4_0 n=512, pp512, pp2048, ratio to MMQ."""
    assert _numbers(steps()) == [
        [2, None, 31.75, None, 0.04],
        [6.63, 7.53, 119, 123, 0.14],
        [8.50, 10.56, 148.5, 153.9, 0.18],
        [9.92, 11.68, 177.6, 185.0, 0.21],
    ]
    notes = [str(row["notes"]) for row in steps().rows]
    assert "+28 % q4_K, +40 % q4_0 over Step 1" in notes[2]
    assert "+17 % q4_K, +20 % pp512 over P3b-1; +49 % pp512 over Step 1" in notes[3]


def test_the_sweep_has_the_numbers_of_the_plan() -> None:
    """Row by row: B, then prefill and decode of Q8, MXFP4 and vLLM."""
    table = concurrency()
    assert _numbers(table) == [
        [1, 1080, 60.1, 1625, 83.4, 9644, 48.0],
        [8, 2189, 160.8, 3634, 267.4, 33373, 312.4],
        [32, 2198, 357.1, 3651, 551.2, 99398, 1171],
        [64, 2194, 519.2, 3648, 770.2, 151990, 2064],
    ]
    assert [flag.labels for flag in table.flags] == [
        ("vLLM 0.23.0 FP8 S_PP at B 32",),
        ("vLLM 0.23.0 FP8 S_PP at B 64",),
    ]


def test_the_bytes_have_the_numbers_of_the_gate() -> None:
    """Row by row: state, with projections, time, min, max, floor, rate, share of the peak, cap."""
    assert _numbers(kernel_bytes()) == [
        [805.3, 816, 3.98, 3.90, 4.33, 2.99, 202, 74, 1.33],
        [402.6, None, 3.62, None, None, None, 111, 41, None],
        [413, None, None, None, None, None, None, None, None],
    ]


if __name__ == "__main__":
    for name, make in MADE.items():
        (GOLDEN / f"{name}.md").write_text(render_table(make()), encoding="utf-8")
