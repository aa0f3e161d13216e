"""Markdown: nothing that is shown can become markup, nothing missing becomes a number."""

from __future__ import annotations

import dataclasses
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from dgxlab.model import SeriesRef
from dgxlab.report import Number, Provenance, Report, Table, markdown, render, render_table
from dgxlab.report.markdown import escape, layout
from dgxlab.report.records import Column, Failure, Missing
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
    """Return a table with these rows."""
    return dataclasses.replace(Table("single-stream", "Single stream", columns, rows, ORIGIN), **changes)


def speed(median: float, spread: float | None = None, n: int = 1) -> Number:
    """Return a speed in t/s."""
    return Number("avg_ts", "t/s", n, spread, median=median, of="samples")


def tokens(text: str) -> list[Token]:
    """Parse markdown as GitHub does: tables and strikethrough on."""
    return MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)


def cells(text: str) -> list[list[str]]:
    """Return the rows of the tables in a text as a reader sees them; any markup in a cell fails."""
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
    """In a cell, whatever the text: one row, two cells, no markup, the same characters but for blanks."""
    page = f"| a | b |\n| --- | --- |\n| {escape(text)} | x |\n"
    rows = cells(page)
    assert len(rows) == 2
    shown = rows[1][0]
    assert rows[1][1] == "x"
    assert "".join(shown.split()) == "".join(escape_free(text).split())


def escape_free(text: str) -> str:
    """Return what a reader should see: the text without control characters."""
    return "".join(" " if markdown.unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def test_escape_covers_every_special_character() -> None:
    """Each of them behind a backslash; line breaks and control characters are gone."""
    assert escape("\\|`*_<>[]~&") == "\\\\\\|\\`\\*\\_\\<\\>\\[\\]\\~\\&"
    assert escape("MUL_MAT _a_ b_") == "MUL_MAT \\_a\\_ b\\_"
    assert escape("a\nb\r\nc\x1b[0m") == "a b  c \\[0m"
    assert escape("https://a.b Www.c.d x:/y ftp://e") == "https\\://a.b Www\\.c.d x:/y ftp\\://e"


def test_no_field_of_a_report_can_forge_anything() -> None:
    """Every text of every record is hostile; the page still has exactly its own tables, headings and items."""
    origin = Provenance(EVIL, (EVIL, EVIL), EVIL, (SeriesRef(EVIL, EVIL),), EVIL, EVIL, EVIL, True, (EVIL,))
    columns = (Column("a", EVIL), Column("avg_ts", "", "avg_ts"))
    made = Table("ops", EVIL, columns, ({"a": EVIL, "avg_ts": speed(1.5, 0.1, 3)},), origin, {EVIL: EVIL})
    page = render(
        Report(
            EVIL,
            EVIL,
            (made, made),
            (Missing(EVIL, EVIL, EVIL, (EVIL, EVIL), EVIL),),
            (Failure(EVIL, EVIL, EVIL, EVIL, True),),
        )
    )
    found = tokens(page)
    count = {kind: sum(token.type == kind for token in found) for kind in {token.type for token in found}}
    assert (count["table_open"], count["tr_open"], count["th_open"], count["td_open"]) == (3, 6, 8, 8)
    assert (count["heading_open"], count["list_item_open"], count["blockquote_open"]) == (5, 1, 1)
    assert "html_block" not in count
    inline = {child.type for token in found for child in token.children or []}
    assert inline <= {"text", "text_special", "strong_open", "strong_close", "softbreak"}
    assert "<script" not in page.replace("\\<script", "")


def test_the_registered_escape_cannot_be_forgotten_in_a_template() -> None:
    """A new template's bare expressions are escaped too, in loops, joins, macros and conditions."""
    template = markdown._environment().from_string(
        "{% macro cell(x) %}[{{ x }}]{% endmacro %}{{ a }} {{ cell(a) }} {{ [a, a] | join('|') }} {{ a if a else a }}"
    )
    assert template.render(a="<_>") == "\\<\\_\\> [\\<\\_\\>] \\<\\_\\>\\|\\<\\_\\> \\<\\_\\>"


def test_an_undefined_name_is_an_error() -> None:
    """A typo in a template does not print nothing."""
    with pytest.raises(jinja2.UndefinedError):
        markdown._environment().from_string("{{ reprot }}").render()


def test_missing_values_are_dashes() -> None:
    """None, an empty text and a key that is not there; 0 and False are values."""
    columns = (*COLUMNS, Column("x", "x"), Column("y", "y"))
    _, _, body = layout(
        table(
            {"model": None, "avg_ts": speed(54.8), "x": 0, "y": False},
            {"model": ""},
            columns=columns,
        )
    )
    assert body == [[DASH, f"54.8 ± {DASH} (1)", "0", "no"], [DASH, DASH, DASH, DASH]]


def test_a_table_without_any_value_still_renders() -> None:
    """A column of dashes, in the metric's unit."""
    headers, _, body = layout(table({"model": "m"}))
    assert (headers, body) == (["model", "t/s"], [["m", DASH]])


def test_provenance_stands_beneath() -> None:
    """Session, pin, series, tree, build, host on one line; dirty and synthetic only when so."""
    page = render_table(table({"model": "m"}))
    assert page.splitlines()[-1] == (
        "experiment toy · session 20261120-103000-toy-a · pin e3a74b299085 · series w4a16@0123456789ab"
        " · tree cdd2bf5ea86c · build 2152cea1b7b715ae · backend CPU · host dgx"
    )
    origin = dataclasses.replace(ORIGIN, series=(), dirty=True, synthetic=("q4k",), build_id=None, sessions=())
    page = render_table(table({"model": "m"}, provenance=origin, settings={"n_ubatch": 512, "mmap": True}))
    assert page.splitlines()[-1] == (
        f"experiment toy · session {DASH} · pin e3a74b299085 · series none · tree cdd2bf5ea86c"
        f" · build {DASH} · backend CPU · host dgx"
        " · **dirty** tree · **synthetic model** q4k · every row: n_ubatch 512, mmap yes"
    )


def test_a_report_of_nothing_says_so() -> None:
    """Never an empty page."""
    assert render(Report("Experiment x", "", (), (), ())).count("\n") == 3
