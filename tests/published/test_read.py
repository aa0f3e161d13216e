"""The record's files are read exactly, or refused with line and reason."""

import pytest

from dgxlab.errors import SpecError
from dgxlab.published import read_figures, read_gates

HEADER = "source_doc,host,engine,pin,model,quant,tool,test,metric,value,unit,stddev,notes\n"
ROW = "plan.md,box GB10,llama.cpp,7a6ddc5,Qwen3-32B,Q4_K_M,llama-bench,pp512,prefill,718,t/s,1.5,P0\n"
OTHER = ROW.replace("718", "117.5")
GATE = "plan.md,box GB10,llama.cpp,7a6ddc5,op-level,,gate,MUL_MAT,tests_passed,1103/1103,,,\n"


def test_a_figure_is_read_as_it_stands() -> None:
    """Numbers become numbers, everything else stays text, and the line is where it begins."""
    first, second = read_figures((HEADER + ROW + OTHER).encode(), "x.csv")
    assert (first.value, first.unit, first.stddev, first.notes, first.line) == (718.0, "t/s", 1.5, "P0", 2)
    assert (second.value, second.line) == (117.5, 3)
    assert first.figure != second.figure
    assert len(first.figure) == 16


def test_line_ends_of_windows_change_nothing() -> None:
    """A figure is the same figure whatever ends its line."""
    unix = read_figures((HEADER + ROW).encode(), "x.csv")
    assert read_figures((HEADER + ROW).replace("\n", "\r\n").encode(), "x.csv") == unix


def test_its_place_is_no_part_of_a_figure() -> None:
    """The same row further down has the same identity."""
    assert (
        read_figures((HEADER + OTHER + ROW).encode(), "x.csv")[1].figure
        == read_figures((HEADER + ROW).encode(), "x.csv")[0].figure
    )


def test_a_quoted_cell_may_hold_commas_and_quotes() -> None:
    """What the CSV quotes is text."""
    text = HEADER + ROW.replace("P0", '"a, ""b"""')
    assert read_figures(text.encode(), "x.csv")[0].notes == 'a, "b"'


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", None, "is empty"),
        (ROW, 1, "the columns must be source_doc,host"),
        (HEADER.replace("host,", ""), 1, "the columns must be source_doc,host"),
        ("\ufeff" + HEADER + ROW, 1, "the columns must be"),
        ("model\tn_prompt\n" + ROW, 1, "the columns must be"),
        (HEADER + ROW + ROW, 3, "it says what line 2 says"),
        (HEADER + ROW + "\n" + OTHER, 3, "it has 0 columns instead of 13"),
        (HEADER + ROW.replace(",1.5", ""), 2, "it has 12 columns instead of 13"),
        (HEADER + ROW.replace("718", "7,18"), 2, "it has 14 columns instead of 13"),
        (HEADER + ROW + OTHER[:-1], 3, "the file ends before the line does"),
        (HEADER + ROW + OTHER[:40], 3, "the file ends before the line does"),
        (HEADER + ROW.replace("718", "nan"), 2, "the value 'nan' is not a number"),
        (HEADER + ROW.replace("718", "1e999"), 2, "the value '1e999' is not a number"),
        (HEADER + ROW.replace("718", "7_18"), 2, "the value '7_18' is not a number"),
        (HEADER + ROW.replace("718", "\u0667"), 2, "is not a number"),
        (HEADER + ROW.replace("718", " 718"), 2, "the value ' 718' is not a number"),
        (HEADER + ROW.replace("718", ""), 2, "it has no value"),
        (HEADER + ROW.replace("t/s", ""), 2, "it has no unit"),
        (HEADER + ROW.replace("plan.md", ""), 2, "it has no source_doc"),
        (HEADER + ROW.replace("1.5", "-1.5"), 2, "the stddev -1.5 is negative"),
        (HEADER + ROW.replace("1.5", "~1"), 2, "the stddev '~1' is not a number"),
        (HEADER + ROW.replace("P0", "\x1b[1;34mP0\x1b[0m"), 2, "a control character in notes"),
        (HEADER + ROW.replace("P0", '"P0\nP1"') + OTHER, 2, "a line break or a control character in notes"),
        (HEADER + ROW.replace("P0", '"P0') + OTHER, 2, "unexpected end of data"),
        (HEADER + ROW.replace("P0", '"P0"x'), 2, "expected after"),
        (HEADER + ROW + OTHER.replace("\n", "\r"), 3, "a carriage return stands alone"),
    ],
)
def test_a_wrong_file_is_refused_with_line_and_reason(text: str, line: int | None, reason: str) -> None:
    """No number is read out of a file that is cut, coloured, of another shape or says a thing twice."""
    with pytest.raises(SpecError) as caught:
        read_figures(text.encode(), "x.csv")
    assert reason in caught.value.message
    assert caught.value.message.startswith("x.csv" if line is None else f"x.csv, line {line}: ")


def test_another_encoding_is_refused_with_its_line() -> None:
    """Bytes that are no UTF-8 are not guessed at."""
    with pytest.raises(SpecError, match=r"x\.csv, line 3: it is not UTF-8"):
        read_figures((HEADER + ROW).encode() + OTHER.replace("P0", "±").encode("latin-1"), "x.csv")


def test_a_gate_is_read_with_its_counts() -> None:
    """A gate has no unit, and its value is text."""
    (gate,) = read_gates((HEADER + GATE).encode(), "x.csv")
    assert (gate.test, gate.value, gate.unit, gate.stddev) == ("MUL_MAT", "1103/1103", "", None)


@pytest.mark.parametrize(
    ("value", "metric", "reason"),
    [
        ("1103", "tests_passed", "no passed/total"),
        ("1104/1103", "tests_passed", "no passed/total"),
        ("07DB", "greedy_md5", "no md5"),
        ("718", "prefill", "no metric of a gate"),
    ],
)
def test_a_gate_that_is_none_is_refused(value: str, metric: str, reason: str) -> None:
    """Counts must be counts, an md5 an md5."""
    text = HEADER + GATE.replace("1103/1103", value).replace("tests_passed", metric)
    with pytest.raises(SpecError, match=f"x.csv, line 2: .*{reason}"):
        read_gates(text.encode(), "x.csv")
