"""test-backend-ops perf --output sql, from real output."""

import pytest

from dgxlab.model import Cell
from dgxlab.tools.backend_ops import INSERT, parse
from dgxlab.tools.rows import case_params
from tests.tools.captures import capture, kernel_cell

H200 = "h200/tbo-perf-mul_mat.sql"
ONE = kernel_cell("q4_0", 1)
FAILING = capture("cpu/tbo-test-failing.sql")
FAILED = next(line for line in FAILING.split("\n") if ",m=16,n=1,k=256," in line and "type_b=f32" in line)
ROWS = [line for line in capture(H200).split("\n") if "n=1," in line and "q4_" in line]


def values(text: str, *cells: Cell) -> dict[tuple[str, str], tuple[str, float]]:
    parsed = parse(text, cells)
    assert parsed.problems == ()
    assert [result.cell for result in parsed.results] == [cell.key for cell in cells]
    labels = {cell.key: cell.label for cell in cells}
    return {(labels[m.cell], m.metric): (m.unit, *m.samples) for r in parsed.results for m in r.measurements}


def test_h200_values_are_exactly_the_printed_ones() -> None:
    assert values(capture(H200), ONE, kernel_cell("nvfp4", 2)) == {
        ("MUL_MAT q4_0 n=1", "time_us"): ("us", 14.388455),
        ("MUL_MAT q4_0 n=1", "flops"): ("FLOPS", 8162135152842.867188),
        ("MUL_MAT nvfp4 n=2", "time_us"): ("us", 16.444007),
        ("MUL_MAT nvfp4 n=2", "flops"): ("FLOPS", 14283685741584.609375),
    }
    cells = [kernel_cell(t, n) for n in (1, 2, 3, 4, 5, 8, 512) for t in ("q4_0", "nvfp4", "q4_K")]
    assert len(values(capture(H200), *cells)) == 2 * 21
    assert len(parse(capture(H200), [ONE]).results[0].raw) == 16


@pytest.mark.parametrize("column", ["time_us", "flops"])
def test_a_value_that_is_no_number_is_refused(column: str) -> None:
    printed = {"time_us": "14.388455", "flops": "8162135152842.867188"}[column]
    parsed = parse(capture(H200).replace(f"'{printed}'", "'-nan'"), [ONE])
    assert (len(parsed.results), len(parsed.problems)) == (0, 1)
    cell = Cell("backend-ops", "SOFT_MAX", {"op_name": "SOFT_MAX", "backend_name": "CPU", "ne": "[4096,4096,5,1]"})
    metrics = [metric for _, metric in values(capture("cpu/tbo-perf-soft_max.sql"), cell)]
    assert metrics == ["time_us", "bandwidth_gb_s"]


VAGUE = "7 rows belong to it, not one: they differ in n, so name these too"


@pytest.mark.parametrize(
    ("text", "cell", "why"),
    [
        (capture("cpu/tbo-perf-wrong-backend.sql"), ONE, "it has no row"),
        (capture("cpu/tbo-perf-mul_mat.sql"), ONE, "it has no row"),
        (2 * capture(H200), ONE, "2 rows belong to it"),
        (capture(H200), Cell("backend-ops", "x", {"op_name": "MUL_MAT", "type_a": "q4_0"}), VAGUE),
        (FAILING, kernel_cell("q4_0", 1, backend="CPU", type_b="f16", m=16, k=256), "CPU does not support it"),
        # rows of a real failing test run
        (FAILED, kernel_cell("q4_0", 1, backend="CPU", type_b="f32", m=16, k=256), "it did not pass (test failed)"),
        (FAILING, kernel_cell("q4_0", 2, backend="CPU", type_b="f32", m=16, k=256), "time_us is '0.000000', not above"),
        # glued to the following one
        (ROWS[0][:300] + ROWS[1], ONE, "it has no row"),
    ],
    ids=["no backend", "another backend", "twice", "vague", "unsupported", "failed", "untimed", "torn"],
)
def test_no_result_without_the_one_row(text: str, cell: Cell, why: str) -> None:
    parsed = parse(text, [cell])
    assert parsed.results == ()
    assert parsed.problems[-1].startswith(f"{cell.label}: {why}")


def test_quotes_in_values() -> None:
    text = capture(H200)
    attack = text.replace("'', '');", "'Bob's GPU'); DROP TABLE x; --', '');", 1)
    assert values(attack, ONE)["MUL_MAT q4_0 n=1", "time_us"] == ("us", 14.388455)
    parsed = parse(text.replace("'', '');", "'a', 'b', '');", 1), [ONE, kernel_cell("q4_0", 2)])
    assert len(parsed.results) == 1
    assert parsed.problems[0].startswith("line 20 ")


@pytest.mark.parametrize(("at", "before"), [("14.388455", 3), ("');\n", 3), ("MUL_MAT", 0)])
@pytest.mark.parametrize("noise", ["CUDA graph warmup complete\n", "CUDA graph warmup complete"])
def test_a_diagnostic_inside_a_row_breaks_it(at: str, before: int, noise: str) -> None:
    assert len(parse(ROWS[0][:300] + ROWS[1], [kernel_cell("q4_K", 1)]).results) == 1
    text = capture(H200)
    place = text.index(at) + before
    parsed = parse(text[:place] + noise + text[place:], [ONE, kernel_cell("q4_0", 2)])
    assert len(parsed.results) == 1
    assert parsed.problems[-1].startswith("MUL_MAT q4_0 n=1: ")


def test_columns_are_read_by_name() -> None:
    line = f"{INSERT}flops, new, op_params, op_name, time_us) VALUES ('5.0', '', 'm=1', 'ADD', '2.5');"
    cell = Cell("backend-ops", "ADD", {"op_name": "ADD", "m": 1})
    assert values(line, cell) == {("ADD", "time_us"): ("us", 2.5), ("ADD", "flops"): ("FLOPS", 5.0)}
    assert parse(line.replace("time_us", "seconds"), [cell]).results == ()


def test_case_params_are_split_outside_brackets() -> None:
    assert case_params("split,type_a=q4_0,bs=[1,1],mode=bilinear|antialias,v=") == {
        "type_a": "q4_0",
        "bs": "[1,1]",
        "mode": "bilinear|antialias",
        "v": "",
    }
    rows = capture("h200/tbo-test-mul_mat.sql.gz").split(INSERT)[1:]
    names = [tuple(case_params(row.split("', '")[4])) for row in rows]
    assert names == [("type_a", "type_b", "m", "n", "k", "bs", "nr", "per", "k_v", "o")] * (1103 + 306)
