"""What came from elsewhere on the command line: published figures beside a form, imported files alone."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from dgxlab import imported, published
from dgxlab.store import Store
from tests.cli.conftest import Project
from tests.report.worlds import GOLDEN, whole


@pytest.fixture
def record(project: Project) -> Project:
    """Give a project whose record has a session, the published figures and an imported file."""
    with Store.open(project.folder / "results.db") as store:
        whole(store)
        published.load(store)
        imported.record(store, imported.open_file(GOLDEN / "llama-bench-q4_k.jsonl", "", ""))
    return project


def test_a_form_with_published_figures(record: Project) -> None:
    """A row of their own, here and in the JSON twin."""
    words = ("report", "--form", "single-stream", "h200", "--published", "seed004 Q4_K_M")
    assert "| published, GB10 (seed004) | 2164 | 2953 | " in record.run(*words).out
    rows = json.loads(record.run(*words, "--format", "json").out)["tables"][0]["rows"]
    assert [row.get("published") for row in rows] == [None, True]
    assert rows[1]["pp512"]["value"] == 2164


def test_published_figures_alone(record: Project) -> None:
    """Any of them by words, beside a table that is named or instead of all four."""
    alone = record.run("report", "--form", "published", "--published", "seed001 H100").out
    assert alone.count("**published**, not measured here") == 1
    both = record.run("report", "--form", "published", "gates", "--published", "seed001 H100").out
    assert both.count("**published**, not measured here") == 2
    ran = record.run("report", "--form", "published", "--published", "seed9")
    assert (ran.rc, ran.error.partition(";")[0]) == (2, "no published figure has all of 'seed9'")


def test_imported_files(record: Project) -> None:
    """All of them in a list, one with its rows; a name that is none is refused with those that are."""
    assert (
        "| llama-bench-q4_k.jsonl | d48c8e6786cf5847 | llama-bench (jsonl) | 3 |"
        in record.run("report", "--form", "imported").out
    )
    one = record.run("report", "--form", "imported", "d48c8e67", "--cells", "tg32").out
    assert one.startswith("| measured | t/s |\n| --- | ---: |\n| tg32 | ")
    assert "**imported**, not measured by dgxlab · file llama-bench-q4_k.jsonl · sha256 d48c8e6786cf5847" in one
    ran = record.run("report", "--form", "imported", "nosuch")
    assert (ran.rc, ran.next) == (2, "dgxlab report --form imported")


def test_an_imported_file_is_exported_alone(record: Project, tmp_path: Path) -> None:
    """Its rows and nothing that was measured here; with other selections it is refused."""
    ran = record.run("export", "one.sqlite", "--imported", "llama-bench-q4_k.jsonl")
    assert ran.out == "3 rows of llama-bench in one.sqlite\n  unknown  llama-bench-q4_k.jsonl\n"
    connection = sqlite3.connect(record.folder / "one.sqlite")
    assert connection.execute("SELECT count(*), min(imported) FROM llama_bench").fetchone() == (
        3,
        "llama-bench-q4_k.jsonl",
    )
    connection.close()
    ran = record.run("export", "two.sqlite", "--imported", "d48c8e67", "--tool", "llama-bench")
    assert (ran.rc, ran.error) == (2, "--imported hands on one file and nothing else")
