"""How values are compared and numbers are taken."""

import pytest

from dgxlab.agent.parse.parsed import Parsed, Row, RowError, agree, belongs, equal, finite, match_rows, positive, speed
from dgxlab.model import Cell, CellResult


@pytest.mark.parametrize(
    ("wanted", "printed"),
    [
        (4096, "4096"),
        (0.1, "0.100000"),
        (1e-5, "0.00001"),
        (True, 1),
        (True, "true"),
        (False, 0),
        ("1", True),
        ("q4_K", "q4_K"),
        ("[1,1]", "[1,1]"),
        (2**60 + 1, str(2**60 + 1)),
    ],
)
def test_equal_values(wanted: object, printed: object) -> None:
    """Numbers compare as numbers however they are written, true is 1, the rest is text; either way round."""
    assert equal("x", wanted, printed)
    assert equal("x", printed, wanted)


@pytest.mark.parametrize(
    ("wanted", "printed"),
    [
        (1, 2),
        (2**60, 2**60 + 1),
        ("q4_K", "q4_k"),
        (10, "1_0"),
        (10, "\u0661\u0660"),
        (1, "1.000001"),
        ("on", 1),
        (0, ""),
        (0, None),
        ("nan", float("inf")),
    ],
)
def test_unequal_values(wanted: object, printed: object) -> None:
    """Nothing is equal by rounding, by letter case, or because Python knows more spellings of a number than C."""
    assert not equal("x", wanted, printed)


@pytest.mark.parametrize(("word", "value"), [("auto", -1), ("off", 0), ("on", 1), (True, 1), ("0", 0)])
def test_flash_attn_is_a_word_or_a_number(word: object, value: int) -> None:
    """What -fa takes is what the row prints as a number."""
    assert equal("flash_attn", word, value)
    assert not equal("flash_attn", word, value + 5)


def test_a_row_without_the_column_does_not_belong() -> None:
    """A parameter that the row does not have is no match, whatever its value."""
    cell = Cell("llama-bench", "pp512", {"n_prompt": 512, "n_ubatch": 0})
    assert not belongs(cell, Row({}, {"n_prompt": 512}))
    assert belongs(cell, Row({}, {"n_prompt": 512, "n_ubatch": 0, "other": 1}))


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "", " 1", "1 ", "0x10", "1,5", None, True, [1], "1e999", "9" * 41]
)
def test_finite_takes_only_plain_numbers(value: object) -> None:
    """Everything that is not a plain finite number is refused by name."""
    with pytest.raises(RowError, match=r"t is .*, not a number"):
        finite(value, "t")


@pytest.mark.parametrize(("value", "why"), [("0.000000", "above 0"), (-3, "above 0"), ("nan", "not a number")])
def test_positive_refuses_the_rest(value: object, why: str) -> None:
    """Zero and less is refused like no number at all."""
    with pytest.raises(RowError, match=why):
        positive(Row({"t": value}, {}), "t")


def test_positive_refuses_a_missing_column() -> None:
    """Missing is not 0."""
    with pytest.raises(RowError, match="its row has no t"):
        positive(Row({}, {}), "t")


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 0), (0, 1), (1, -1), (1e300, 1e-300), (1e-300, 1e300)])
def test_speed_is_finite_and_positive(tokens: float, seconds: float) -> None:
    """A speed that is 0, infinite or negative is none."""
    with pytest.raises(RowError, match="is no speed"):
        speed(tokens, seconds)


def test_agree_allows_rounding_only() -> None:
    """Six digits agree, a thousandth off does not."""
    assert agree("s", 32152.6539, 32152.7) == 32152.6539
    with pytest.raises(RowError, match=r"s is 32200, but its tokens and time give 32152\.7"):
        agree("s", 32152.6539, 32200)


def test_match_rows_gives_each_cell_its_own_row() -> None:
    """One row: a result; none or two: a sentence that names the cell; a foreign row: nothing."""
    cells = [Cell("t", f"n={n}", {"n": n}) for n in (1, 2, 3)]
    rows = [Row({"n": n}, {"n": n}) for n in (2, 3, 2, 9)]
    parsed = match_rows(cells, rows, lambda cell, row: CellResult(cell.key, (), row.printed), ["line 1 is broken"])
    assert parsed == Parsed(
        (CellResult(cells[2].key, (), {"n": 3}),),
        ("line 1 is broken", "n=1: it has no row", "n=2: 2 rows belong to it, not one"),
    )
