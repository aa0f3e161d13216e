"""test-backend-ops perf --output sql, from real output."""

import pytest

from dgxlab.agent.parse.backend_ops import INSERT, case_params, parse
from dgxlab.model import Cell
from tests.agent.parse.captures import capture, kernel_cell

H200 = "h200/tbo-perf-mul_mat.sql"


def values(text: str, *cells: Cell) -> dict[tuple[str, str], float]:
    """Return {(label, metric): value} of a text without problems."""
    parsed = parse(text, cells)
    assert parsed.problems == ()
    labels = {cell.key: cell.label for cell in cells}
    return {(labels[m.cell], m.metric): m.samples[0] for r in parsed.results for m in r.measurements}


def test_h200_values_are_exactly_the_printed_ones() -> None:
    """time_us and flops come as printed; bandwidth, printed as 0, is no measurement of this op."""
    assert values(capture(H200), kernel_cell("q4_0", 1), kernel_cell("nvfp4", 2)) == {
        ("MUL_MAT q4_0 n=1", "time_us"): 14.388455,
        ("MUL_MAT q4_0 n=1", "flops"): 8162135152842.867188,
        ("MUL_MAT nvfp4 n=2", "time_us"): 16.444007,
        ("MUL_MAT nvfp4 n=2", "flops"): 14283685741584.609375,
    }


def test_units_and_raw_row() -> None:
    """Each metric has its unit and one sample, and the row is kept as it was printed."""
    (result,) = parse(capture(H200), [kernel_cell("q4_K", 512)]).results
    assert [(m.metric, m.unit, len(m.samples), m.discarded) for m in result.measurements] == [
        ("time_us", "us", 1, ()),
        ("flops", "FLOPS", 1, ()),
    ]
    assert result.raw["op_params"].startswith("type_a=q4_K,type_b=f32,m=4096,n=512,k=14336,")
    assert result.raw["n_runs"].isdigit()
    assert len(result.raw) == 16


def test_every_case_of_the_capture_is_read() -> None:
    """21 cells, 21 results, in the order of the cells."""
    cells = [kernel_cell(t, n) for n in (1, 2, 3, 4, 5, 8, 512) for t in ("q4_0", "nvfp4", "q4_K")]
    parsed = parse(capture(H200), cells)
    assert parsed.problems == ()
    assert [r.cell for r in parsed.results] == [c.key for c in cells]


def test_bandwidth_of_an_op_without_flops() -> None:
    """SOFT_MAX has no flops: it gets time and bandwidth."""
    cell = Cell("backend-ops", "SOFT_MAX", {"op_name": "SOFT_MAX", "backend_name": "CPU", "ne": "[4096,4096,5,1]"})
    found = values(capture("cpu/tbo-perf-soft_max.sql"), cell)
    assert set(found) == {("SOFT_MAX", "time_us"), ("SOFT_MAX", "bandwidth_gb_s")}
    assert found["SOFT_MAX", "bandwidth_gb_s"] > 1


def test_a_backend_that_is_not_there_measures_nothing() -> None:
    """The program prints the table, no rows, and exits 0; every cell says so."""
    text = capture("cpu/tbo-perf-wrong-backend.sql")
    assert "CREATE TABLE" in text
    parsed = parse(text, [kernel_cell("q4_0", 1)])
    assert parsed.results == ()
    assert parsed.problems == ("MUL_MAT q4_0 n=1: it has no row",)


def test_the_other_backends_rows_do_not_count() -> None:
    """A CPU row is not a CUDA0 cell's."""
    text = capture("cpu/tbo-perf-mul_mat.sql")
    assert parse(text, [kernel_cell("q4_0", 1)]).problems == ("MUL_MAT q4_0 n=1: it has no row",)
    assert parse(text, [kernel_cell("q4_0", 1, backend="CPU")]).problems == ()


def test_two_rows_for_a_cell_are_no_result() -> None:
    """A case that is in the suite twice, or a cell that leaves a parameter open, is refused and not averaged."""
    text = capture(H200)
    twice = parse(text + text, [kernel_cell("q4_0", 1)])
    assert (twice.results, twice.problems) == ((), ("MUL_MAT q4_0 n=1: 2 rows belong to it, not one",))
    vague = Cell("backend-ops", "any n", {"op_name": "MUL_MAT", "type_a": "q4_0"})
    assert parse(text, [vague]).problems == ("any n: 7 rows belong to it, not one",)


@pytest.mark.parametrize(
    ("n", "why"),
    [
        (1, "it did not pass (test failed)"),
        (2, "time_us is '0.000000', not above 0"),
    ],
)
def test_failed_and_untimed_rows_are_problems(n: int, why: str) -> None:
    """Rows of a real failing test run: a diagnostic stands before the INSERT; neither kind of row gives a number."""
    text = capture("cpu/tbo-test-failing.sql")
    assert "] ERR = " in text.split(INSERT)[0]
    lines = text.split("\n")
    only = next(line for line in lines if f",m=16,n={n},k=256," in line and "type_b=f32" in line)
    parsed = parse(only, [kernel_cell("q4_0", n, backend="CPU", m=16, k=256)])
    assert (parsed.results, parsed.problems) == ((), (f"MUL_MAT q4_0 n={n}: {why}",))


def test_an_unsupported_row_is_a_problem() -> None:
    """The row of a case that the backend does not support is in the output, with zeros; it is not a measurement."""
    cell = kernel_cell("q4_0", 1, backend="CPU", type_b="f16", m=16, k=256)
    parsed = parse(capture("cpu/tbo-test-failing.sql"), [cell])
    assert (parsed.results, parsed.problems) == ((), ("MUL_MAT q4_0 n=1: CPU does not support it",))


@pytest.mark.parametrize("value", ["nan", "inf", "-nan", "-14.388455", "0.000000", "", "14,388455", "14.38\x1b[0m8455"])
@pytest.mark.parametrize("old", ["14.388455", "8162135152842.867188"])
def test_values_that_are_no_numbers_are_refused(old: str, value: str) -> None:
    """A bad value in either column costs the cell its result, except a flops of 0, which means that there is none."""
    text = capture(H200).replace(f"'{old}'", f"'{value}'")
    parsed = parse(text, [kernel_cell("q4_0", 1)])
    if old.startswith("8") and value == "0.000000":
        assert [m.metric for m in parsed.results[0].measurements] == ["time_us"]
    else:
        assert parsed.results == ()
        assert len(parsed.problems) == 1
        assert parsed.problems[0].startswith("MUL_MAT q4_0 n=1: ")


def test_a_quote_in_a_value_is_only_a_character() -> None:
    """Values are not escaped: a device called Bob's GPU, or an attempt at SQL, changes nothing."""
    text = capture(H200).replace("'', '');", "'Bob's GPU'); DROP TABLE x; --', '');", 1)
    assert values(text, kernel_cell("q4_0", 1))["MUL_MAT q4_0 n=1", "time_us"] == 14.388455


def test_a_value_that_looks_like_two_is_refused() -> None:
    """`', '` inside a value makes one value too many: the row is told by its line and gives nothing."""
    text = capture(H200).replace("'', '');", "'a', 'b', '');", 1)
    parsed = parse(text, [kernel_cell("q4_0", 1), kernel_cell("q4_0", 2)])
    assert parsed.problems == (
        "line 20 of test-backend-ops's output is a broken row",
        "MUL_MAT q4_0 n=1: it has no row",
    )
    assert len(parsed.results) == 1


@pytest.mark.parametrize(("at", "before"), [("14.388455", 3), ("');\n", 3), ("MUL_MAT", 0)])
def test_a_diagnostic_inside_a_row_breaks_it(at: str, before: int) -> None:
    """A row cut by another stream's line, or with anything behind its end, is not put together again."""
    text = capture(H200)
    place = text.index(at) + before
    for noise in ("CUDA graph warmup complete\n", "CUDA graph warmup complete"):
        parsed = parse(text[:place] + noise + text[place:], [kernel_cell("q4_0", 1), kernel_cell("q4_0", 2)])
        assert len(parsed.results) == 1
        assert parsed.problems[-1].startswith("MUL_MAT q4_0 n=1: ")


def test_a_torn_row_does_not_swallow_the_next() -> None:
    """A row without its end, glued to the following one, costs only itself."""
    first, second = (line for line in capture(H200).split("\n") if "n=1," in line and "q4_" in line)
    parsed = parse(first[:300] + second, [kernel_cell("q4_0", 1), kernel_cell("q4_K", 1)])
    assert parsed.results[0].measurements[0].samples == (16.176153,)
    assert parsed.problems[-1] == "MUL_MAT q4_0 n=1: it has no row"


def test_columns_are_read_by_name() -> None:
    """Another pin's order of columns, or one more of them, changes nothing."""
    line = f"{INSERT}flops, new, op_params, op_name, time_us) VALUES ('5.0', '', 'm=1', 'ADD', '2.5');"
    cell = Cell("backend-ops", "ADD", {"op_name": "ADD", "m": 1})
    assert values(line, cell) == {("ADD", "time_us"): 2.5, ("ADD", "flops"): 5.0}
    without = line.replace("time_us", "seconds")
    assert parse(without, [cell]).problems == ("ADD: its row has no time_us",)


def test_case_params_are_split_outside_brackets() -> None:
    """Lists stay whole, a bare word is nobody's value."""
    assert case_params("split,type_a=q4_0,bs=[1,1],per=[0,1,2,3],mode=bilinear|antialias,v=") == {
        "type_a": "q4_0",
        "bs": "[1,1]",
        "per": "[0,1,2,3]",
        "mode": "bilinear|antialias",
        "v": "",
    }


def test_every_case_of_the_suite_is_split() -> None:
    """All 1,409 MUL_MAT cases of the real suite have their ten parameters."""
    rows = capture("h200/tbo-test-mul_mat.sql.gz").split(INSERT)[1:]
    assert len(rows) == 1103 + 306
    for row in rows:
        params = case_params(row.split("', '")[4])
        assert list(params) == ["type_a", "type_b", "m", "n", "k", "bs", "nr", "per", "k_v", "o"]
