"""Lines and JSON rows."""

import pytest

from dgxlab.agent.parse.lines import json_rows, plain


def test_plain_removes_colours() -> None:
    """Colours of test-backend-ops and of gcc go, the words stay."""
    assert plain("\x1b[1;32mOK\x1b[0m \x1b[01;31m\x1b[Kerror: \x1b[m\x1b[Kx") == "OK error: x"


def test_other_lines_are_ignored() -> None:
    """Only lines that start with a brace are rows; blank lines and logs are not."""
    rows, problems = json_rows('0.00.001 W load {}\n{"a": 1}\n\n  {"b": 2}\n', "tool")
    assert rows == [{"a": 1}]
    assert problems == []


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"a": 1', "Expecting ',' delimiter"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "-Infinity is not a number"),
        ('{"a": -nan}', "Expecting value"),
        ('{"a": 1, "a": 2}', "a is there twice"),
        ('{"a": 1}{"a": 2}', "Extra data"),
        ('{"a": #0 0x00007f in wait4 ()', "Expecting value"),
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
    ],
)
def test_broken_rows_are_told(line: str, why: str) -> None:
    """A row that was cut, overwritten or holds no number is a sentence with its line, and keeps its place."""
    rows, problems = json_rows('{"a": 0}\n' + line + "\n", "tool")
    assert rows == [{"a": 0}, None]
    assert len(problems) == 1
    assert problems[0].startswith("line 2 of tool's output is a broken row: ")
    assert why in problems[0]


def test_only_newline_ends_a_line() -> None:
    """A file name may hold characters that str.splitlines would cut at."""
    rows, problems = json_rows('{"model": "a\u2028b\x85c"}\r\n', "tool")
    assert rows == [{"model": "a\u2028b\x85c"}]
    assert problems == []
