"""How rows are decoded, values compared and numbers taken."""

from collections.abc import Sequence

import pytest

from dgxlab.model import Cell, CellResult
from dgxlab.tools import batched_bench
from dgxlab.tools.rows import Refused, agree, equal, finite, json_rows, match_rows, plain, positive, speed
from faults.damage import Parse
from faults.fault import seeded
from faults.kinds.fuzz import PARSED
from tests.tools.captures import capture


def test_plain_removes_colours() -> None:
    assert plain("\x1b[1;32mOK\x1b[0m \x1b[01;31m\x1b[Kerror: \x1b[m\x1b[Kx") == "OK error: x"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"a": 1', "Expecting ',' delimiter"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ('{"a": -nan}', "Expecting value"),
        ('{"a": 1, "a": 2}', "a is there twice"),
        ('{"a": 1}{"a": 2}', "Extra data"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_broken_rows_keep_their_place(line: str, why: str) -> None:
    rows, (problem,) = json_rows(f'0.00.001 W load {{}}\n{{"a": "b\u2028c\x85"}}\r\n\n{line}\n  {{"b": 2}}\n', "tool")
    assert rows == [{"a": "b\u2028c\x85"}, None]
    assert problem.startswith("line 4 of tool's output")
    assert why in problem


@pytest.mark.parametrize(
    ("values", "others"),
    [
        # however they are written
        ((4096, "4096"), ("4096.001", "4_096", "\u0664\u0660\u0669\u0666")),
        ((0.1, "0.100000"), ()),
        ((1e-5, "0.00001"), (0,)),
        ((1, True, "true", "1"), ("on", "1.000001")),
        (("q4_K",), ("q4_k",)),
        ((2**60 + 1, str(2**60 + 1)), (2**60,)),
        ((0, "0"), ("", None)),
        (("nan",), (float("inf"),)),
    ],
)
def test_values_are_compared_as_numbers_or_texts(values: tuple[object, ...], others: tuple[object, ...]) -> None:
    assert all(equal(a, b) for a in values for b in values)
    assert not any(equal(*pair) for a in values for b in others for pair in ((a, b), (b, a)))


@pytest.mark.parametrize(
    "value", ["nan", "inf", "", " 1", "1 ", "0x10", "1,5", None, True, [1], "1e999", "9" * 41, "0.0", -3]
)
def test_only_plain_numbers_above_0_are_positive(value: object) -> None:
    with pytest.raises(Refused, match=r"^t is "):
        positive({"t": value}, "t")
    with pytest.raises(Refused, match=r"no t$"):
        positive({}, "t")


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 0), (0, 1), (1, -1), (1e300, 1e-300), (1e-300, 1e300)])
def test_speed_is_finite_and_positive(tokens: float, seconds: float) -> None:
    with pytest.raises(Refused):
        speed(tokens, seconds)


def test_agree_allows_rounding_only() -> None:
    assert agree("s", 32152.6539, finite("32152.7", "s")) == 32152.6539
    with pytest.raises(Refused):
        agree("s", 32152.6539, 32200)


def test_match_rows_gives_each_cell_its_own_row() -> None:
    cells = [Cell("t", f"n={n}", {"n": n, "k": 0}) for n in (1, 2, 3)]
    rows = [*({"n": n, "other": 1} for n in (2, 3, 2, 9)), {"k": 1, "n": 1}]
    parsed = match_rows(
        cells, rows, lambda cell, row: CellResult(cell.key, (), row), ["line 1 is broken"], lambda row: {"k": 0, **row}
    )
    assert parsed.results == (CellResult(cells[2].key, (), {"n": 3, "other": 1}),)
    assert [problem[:6] for problem in parsed.problems] == ["line 1", "n=1: i", "n=2: 2"]


@pytest.mark.parametrize(("parse", "name", "cells"), PARSED, ids=["backend-ops", "llama-bench", "batched-bench"])
def test_the_order_of_rows_and_cells_does_not_matter(parse: Parse, name: str, cells: Sequence[Cell]) -> None:
    lines, expected = capture(name).split("\n"), parse(capture(name), cells)
    cold = len(cells) if parse is batched_bench.parse else 0
    for number in range(20):
        random = seeded(1, name, number)
        tail = random.sample(lines[cold:], len(lines) - cold)
        assert parse("\n".join([*lines[:cold], *tail]), cells) == expected
        again = parse(capture(name), random.sample(cells, len(cells)))
        assert {r.cell: r for r in again.results} == {r.cell: r for r in expected.results}
