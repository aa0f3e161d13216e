"""Markdown: nothing that is shown can become markup, nothing missing becomes a number."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from dgxlab.errors import UsageError
from dgxlab.model import SeriesRef
from dgxlab.report import Number, Page, Provenance, Report, Table, markdown, render, render_page
from dgxlab.report.cells import layout, legend
from dgxlab.report.markdown import escape
from dgxlab.report.records import Column, Failure, Missing, ShownFlag
from dgxlab.units import MISSING as DASH

EVIL = "a|b\n| evil | 99 |<script>alert(1)</script>\\|`x` *b* _i_ [l](javascript:1) &lt; ~~s~~ \u202e\x1b[31m\u2028# h"

ORIGIN = Provenance(
    experiment="toy",
    sessions=("20261120-103000-toy-a",),
    pin="e3a74b299085cd00013804f7fca2e03441b2da20",
    series=(SeriesRef("w4a16", "0123456789abcdef" * 4),),
    tree="cdd2bf5ea86cf440c7d486560ae51229a2c1f811",
    build_id="2152cea1b7b715ae",
    host="dgx",
    backend="CPU",
)
COLUMNS = (Column("model", "model"), Column("avg_ts", "", "avg_ts"))


def table(*rows: dict[str, Any], columns: tuple[Column, ...] = COLUMNS, **changes: Any) -> Table:
    return replace(Table("single-stream", "Single stream", columns, rows, ORIGIN), **changes)


def speed(median: float, spread: float | None = None, n: int = 1) -> Number:
    return Number("avg_ts", "t/s", n, spread, median=median, of="samples")


def tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def cells(text: str) -> list[list[str]]:
    rows: list[list[str]] = []
    for token in tokens(text):
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline" and rows and token.level > 3:
            children = token.children or []
            assert {child.type for child in children} <= {"text", "text_special"}, children
            rows[-1].append("".join(child.content for child in children))
    return rows


@given(st.text(max_size=60))
def test_an_escaped_text_reads_as_itself(text: str) -> None:
    page = f"| a | b |\n| --- | --- |\n| {escape(text)} | x |\n"
    rows = cells(page)
    assert len(rows) == 2
    shown = rows[1][0]
    assert rows[1][1] == "x"
    assert "".join(shown.split()) == "".join(escape_free(text).split())


def escape_free(text: str) -> str:
    return "".join(" " if markdown.unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def test_escape_covers_every_special_character() -> None:
    assert escape("\\|`*_<>[]~&") == "\\\\\\|\\`\\*\\_\\<\\>\\[\\]\\~\\&"
    assert escape("MUL_MAT _a_ b_") == "MUL_MAT \\_a\\_ b\\_"
    assert escape("a\nb\r\nc\x1b[0m") == "a b  c \\[0m"
    assert escape("https://a.b Www.c.d x:/y ftp://e") == "https\\://a.b Www\\.c.d x:/y ftp\\://e"


@pytest.mark.parametrize(("wide", "tables", "items"), [(True, 3, 10), (False, 2, 11)])
def test_no_field_of_a_report_can_forge_anything(wide: bool, tables: int, items: int) -> None:
    origin = Provenance(EVIL, (EVIL, EVIL), EVIL, (SeriesRef(EVIL, EVIL),), EVIL, EVIL, EVIL, True, (EVIL,))
    columns = (Column("a", EVIL), Column("avg_ts", "", "avg_ts"))
    flags = (ShownFlag((EVIL,), True, EVIL), ShownFlag((), True, EVIL))
    hostile = Table(
        "ops", EVIL, columns, ({"a": EVIL, "avg_ts": speed(1.5, 0.1, 3)},), origin, {EVIL: EVIL}, flags=flags
    )
    missing = Missing(EVIL, EVIL, EVIL, (EVIL, EVIL), EVIL)
    failure = Failure(EVIL, EVIL, EVIL, EVIL, True, "session")
    page = render(Report(EVIL, EVIL, (hostile, hostile), (missing,), (failure,)), wide=wide)
    parsed = tokens(page)
    count = Counter(token.type for token in parsed)
    assert (count["table_open"], count["tr_open"]) == (tables, 2 * tables)
    assert (count["heading_open"], count["blockquote_open"]) == (4 + wide, 1)
    assert count["list_item_open"] == items
    assert [token.content for token in parsed if token.type == "html_block"] == [
        "<details><summary>Sources</summary>\n",
        "</details>\n",
    ]
    inline = {child.type for token in parsed for child in token.children or []}
    assert inline <= {"text", "text_special", "strong_open", "strong_close", "softbreak"}


@given(st.lists(st.sampled_from(["-", "+", "#", "1.", ">", "===", "a" * 50, "b"]), min_size=1, max_size=60))
def test_a_long_line_stays_one_item(words: list[str]) -> None:
    page = markdown._folded(f"- x {escape(' '.join(words))}\n")
    assert page.split() == f"- x {escape(' '.join(words))}".split()
    items = MarkdownIt("commonmark").parse(page)
    assert sum(token.type == "list_item_open" for token in items) == 1
    assert not any(token.type in ("heading_open", "blockquote_open", "hr") for token in items)


def test_the_registered_escape_cannot_be_forgotten_in_a_template() -> None:
    template = markdown._environment().from_string(
        "{% macro cell(x) %}[{{ x }}]{% endmacro %}{{ a }} {{ cell(a) }} {{ [a, a] | join('|') }} {{ a if a else a }}"
    )
    assert template.render(a="<_>") == "\\<\\_\\> [\\<\\_\\>] \\<\\_\\>\\|\\<\\_\\> \\<\\_\\>"


def test_an_undefined_name_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        markdown._environment().from_string("{{ reprot }}").render()


def test_missing_values_are_dashes() -> None:
    columns = (*COLUMNS, Column("x", "x"), Column("y", "y"))
    _, _, body = layout(
        table({"model": None, "avg_ts": speed(54.8), "x": 0, "y": False}, {"model": ""}, columns=columns)
    )
    assert body == [[DASH, "54.8", "0", "no"], [DASH, DASH, DASH, DASH]]


def test_what_is_the_same_in_every_row_is_beneath() -> None:
    rows = [{"model": "m", "test": test, "avg_ts": speed(1.0)} for test in ("pp512", "tg32")]
    columns = (COLUMNS[0], Column("test", "test"), COLUMNS[1])
    result = Page("single-stream", (table(*rows, columns=columns),))
    assert render_page(result).splitlines()[0] == "| test | t/s |"
    assert "\nevery row: model m · [1]\n" in render_page(result)
    assert render_page(result, wide=True).splitlines()[0] == "| model | test | t/s |"
    assert render_page(result, columns=("avg_ts", "model")).splitlines()[0] == "| t/s | model |"
    with pytest.raises(UsageError, match="no column 'mode'"):
        render_page(result, columns=("mode",))


def test_what_does_not_count_is_counted() -> None:
    capped = ShownFlag((), False, "capped", sessions=("20261120-093000-toy-fedcba",))
    flags = (ShownFlag((), True, "hot", sessions=("20261120-083000-toy-012345",)), capped)
    failures = (
        Failure("20261120-103000-toy-abc123", "run a", "failed", "killed", again=True),
        Failure("20261120-103000-toy-abc123", "gate b", "failed", "1 of 2", kind="gate"),
        Failure("20261120-103000-toy-abc123", "session", "lost", "rebooted", kind="session"),
    )
    report = Report("x", "", (table({"model": "m"}, flags=flags),), (), failures)
    page, wide = render(report), render(report, wide=True)
    where = "dgxlab report fedcba --wide, dgxlab report abc123 --wide"
    assert f"\n1 run failed (counted later), 1 gate failed, 1 flag: see {where}\n" in page
    of_one = render(replace(report, tables=()))
    assert "\n1 run failed (counted later), 1 gate failed: see dgxlab report abc123 --wide\n" in of_one
    assert "\n- **hard event** in every row: hot\n" in page
    assert "\n- **session abc123** lost: rebooted\n" in page
    assert "capped" not in page
    assert "\n- flag in every row: capped\n" in wide
    assert "\n| abc123 | run a | failed, counted later | killed |\n" in wide


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (speed(14.45), "14.45"),
        (speed(35570.0, 108.0, 5), "35570 ± 108 (5)"),
        (Number("avg_ts", "t/s", None, 1.0, value=50.0), f"50.0 ± 1.0 ({DASH})"),
        (Number("avg_ts", "t/s", None, None, value=50.0), "50.0"),
    ],
)
def test_a_number_alone_has_no_spread(number: Number, shown: str) -> None:
    assert layout(table({"model": "m", "avg_ts": number}))[2] == [["m", shown]]
    assert ("single value" in legend([number])) == ("±" not in shown)
