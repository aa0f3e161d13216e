"""How rows are decoded, values compared and numbers taken."""

import pytest

from dgxlab.model import Cell, CellResult
from dgxlab.tools.rows import PrintedRow, Refused, agree, equal, finite, json_rows, match_rows, plain, positive, speed


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
    ("name", "values", "others"),
    [
        # however they are written
        ("x", (4096, "4096"), ("4096.001", "4_096", "\u0664\u0660\u0669\u0666")),
        ("x", (0.1, "0.100000"), ()),
        ("x", (1e-5, "0.00001"), (0,)),
        ("x", (1, True, "true", "1"), ("on", "1.000001")),
        ("x", ("q4_K",), ("q4_k",)),
        ("x", (2**60 + 1, str(2**60 + 1)), (2**60,)),
        ("x", (0, "0"), ("", None)),
        ("x", ("nan",), (float("inf"),)),
        # what -fa takes is what the row prints as a number
        *(("flash_attn", pair, (4,)) for pair in (("auto", -1), ("off", 0, "0"), ("on", 1, True))),
    ],
)
def test_values_are_compared_as_numbers_or_texts(
    name: str, values: tuple[object, ...], others: tuple[object, ...]
) -> None:
    assert all(equal(name, a, b) for a in values for b in values)
    assert not any(equal(name, *pair) for a in values for b in others for pair in ((a, b), (b, a)))


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
    rows = [*(PrintedRow({"n": n}, {"n": n, "k": 0, "other": 1}) for n in (2, 3, 2, 9)), PrintedRow({}, {"n": 1})]
    parsed = match_rows(cells, rows, lambda cell, row: CellResult(cell.key, (), row.printed), ["line 1 is broken"])
    assert parsed.results == (CellResult(cells[2].key, (), {"n": 3}),)
    assert [problem[:6] for problem in parsed.problems] == ["line 1", "n=1: i", "n=2: 2"]
