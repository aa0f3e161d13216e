"""Imported rows handed on: with every column that the tool printed, alone, and only where it printed them all."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab import imported
from dgxlab.errors import UsageError
from dgxlab.exported import collect, collect_imported, write
from dgxlab.store import Store
from tests.report.worlds import GOLDEN, whole

FILES = ("json", "jsonl", "sql", "csv")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A record with one session, and with captures that were imported."""
    with Store.open(tmp_path / "results.db") as opened:
        whole(opened)
        for name in (*(f"llama-bench-q4_k.{suffix}" for suffix in (*FILES, "md")), "tbo-perf-mul_mat.sql"):
            imported.record(opened, imported.open_file(GOLDEN / name, "", ""))
        yield opened


def test_rows_are_what_the_tool_printed(store: Store) -> None:
    """Every column with its value, and the file after them; numbers are numbers, truths are 1 and 0."""
    printed = [json.loads(line) for line in (GOLDEN / "llama-bench-q4_k.jsonl").read_text().splitlines()]
    found = collect_imported(store, "llama-bench-q4_k.jsonl")
    assert (found.tool, found.builds) == ("llama-bench", {"unknown": ("llama-bench-q4_k.jsonl",)})
    for row, line in zip(found.rows, printed, strict=True):
        assert {name: row[name] for name in line} == line
        assert list(row)[-2:] == ["imported", "sha256"]
        assert not any(isinstance(value, bool) for value in row.values())


@pytest.mark.parametrize("suffix", FILES)
def test_the_formats_agree(store: Store, suffix: str) -> None:
    """SQL and csv print numbers as texts; handed on they are what JSON says."""
    found = collect_imported(store, f"llama-bench-q4_k.{suffix}").rows
    of_each = {
        "test_time",
        "avg_ns",
        "stddev_ns",
        "avg_ts",
        "stddev_ts",
        "samples_ns",
        "samples_ts",
        "imported",
        "sha256",
    }
    settings = [{name: said for name, said in row.items() if name not in of_each} for row in found]
    jsonl = collect_imported(store, "llama-bench-q4_k.jsonl").rows
    assert settings == [{name: said for name, said in row.items() if name not in of_each} for row in jsonl]
    assert all(isinstance(row["avg_ts"], float) and isinstance(row["avg_ns"], int) for row in found)


def test_operations_keep_their_counts(store: Store, tmp_path: Path) -> None:
    """In SQLite as in the tool's own table, with nothing that was measured here."""
    found = collect_imported(store, "12901dc2")
    write(tmp_path / "ops.sqlite", [found])
    connection = sqlite3.connect(tmp_path / "ops.sqlite")
    rows = connection.execute("SELECT op_params, time_us, n_runs, imported FROM test_backend_ops").fetchall()
    connection.close()
    assert len(rows) == len(found.rows) == 21
    assert rows[0] == (found.rows[0]["op_params"], 14.388455, 69864, "tbo-perf-mul_mat.sql")
    assert all("imported" not in row for row in collect(store, "test-backend-ops").rows)


def test_a_table_for_people_is_not_handed_on(store: Store) -> None:
    """It lacks columns that the others have."""
    said = "llama-bench-q4_k.md is output of llama-bench (md), whose rows lack columns that llama-bench (json), "
    with pytest.raises(UsageError, match=re.escape(said)):
        collect_imported(store, "llama-bench-q4_k.md")
    with pytest.raises(UsageError, match="has no imported file 'nosuch'"):
        collect_imported(store, "nosuch")
