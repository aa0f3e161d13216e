"""What is handed on: llama.cpp's columns with our counts, in three encodings, of runs that count and no others."""

from __future__ import annotations

import csv
import json
import sqlite3
import statistics
from pathlib import Path

import pytest

from dgxlab.errors import UsageError
from dgxlab.exported import TABLES, collect, write
from dgxlab.model import to_json
from dgxlab.store import Store
from tests.journals import PIN, source
from tests.report.worlds import CYCLES, Session, capture, fails, h200, places, session_of_two


def test_rows_of_llama_bench_are_computed_from_what_counts(store: Store) -> None:
    """Mean and spread leave out the cold repetition, which the tool's own numbers do not."""
    found = collect(store, "llama-bench", name="h200")
    row = found.rows[0]
    assert (row["n_prompt"], row["model_type"], row["flash_attn"], row["use_mmap"]) == (
        *(512, "llama ?B Q4_K - Medium", -1),
        1,
    )
    counted = [512 / ns * 1e9 for ns in (13890882, 13483629, 13516451, 13542891)]
    assert row["samples_ts"] == counted
    assert row["samples_ns"] == [13890882, 13483629, 13516451, 13542891]
    assert (row["avg_ts"], row["stddev_ts"]) == (statistics.fmean(counted), statistics.stdev(counted))
    assert row["avg_ts"] > 37600  # the tool says 36503.9


def test_every_row_says_where_it_comes_from(store: Store) -> None:
    """Job, run, arm, build, pin, tree, host; and a commit that tells the builds apart."""
    rows = [row for tool in TABLES for row in collect(store, tool).rows]
    assert len(rows) == 2 * (6 + 3 + 3)
    assert {(row["arm"], row["build_commit"]) for row in rows} == {
        ("h200", PIN[:8]),
        ("w4a16", source(["w4a16"]).commit[:8]),
    }
    assert {row["pin"] for row in rows} == {PIN}
    assert all(row["run_id"].startswith(row["job_id"]) for row in rows)


def test_builds_of_one_commit_get_names_of_their_own(tmp_path: Path) -> None:
    """What only cmake or the environment tells apart has another name, of the same length."""
    with Store.open(tmp_path / "results.db") as store:
        for number, changes in enumerate(
            ({}, {"cmake": {"GGML_CUDA": "OFF"}}, {"env": {"GGML_CUDA_DISABLE_GRAPHS": "1"}})
        ):
            made = h200(name=f"arm{number}", **changes)
            Session(store, made, f"20261120-10000{number}-arm{number}-a").build().gates().runs().end()
        found = collect(store, "llama-bench")
    assert len(found.builds) == 3
    assert {len(commit) for commit in found.builds} == {8}
    assert sorted(found.builds.values()) == [("arm0",), ("arm1",), ("arm2",)]


def test_only_what_counts_is_handed_on(tmp_path: Path) -> None:
    """No failed run, no burn-in, and of a chain that goes on nothing at all."""
    with Store.open(tmp_path / "results.db") as store:
        failed = Session(store, h200(), "20261120-100000-h200-a").build().gates()
        failed.runs(ends=fails("killed")).end()
        assert collect(store, "llama-bench").rows == ()
        session = session_of_two(store, "20261120-110000-h200-vs-w4a16-b").build().gates()
        for step in session.plan.chains:
            for role, cycle in places(step.cycles):
                run = step.candidate if role == "candidate" else step.baseline
                session.place(step, role, cycle, 1.0, results=to_json(capture(run)))
        session.save()
        assert [collect(store, tool).rows for tool in TABLES] == [(), (), ()]
        session.gates(after=True).end()
        rows = collect(store, "llama-bench").rows
        assert sorted(row["arm"] for row in rows if row["n_gen"]) == ["h200"] * (CYCLES + 1) + ["w4a16"] * CYCLES


def written(store: Store, path: Path, *tools: str) -> Path:
    """Write these tools' rows."""
    write(path, [collect(store, tool) for tool in tools])
    return path


def test_three_encodings_of_the_same_rows(store: Store, tmp_path: Path) -> None:
    """JSON lines with each sample; csv and SQLite without the lists; numbers are numbers."""
    rows = collect(store, "test-backend-ops").rows
    lines = written(store, tmp_path / "ops.jsonl", "test-backend-ops").read_text().splitlines()
    assert [json.loads(line) for line in lines] == list(rows)
    with written(store, tmp_path / "ops.csv", "test-backend-ops").open() as file:
        assert [row["op_params"] for row in csv.DictReader(file)] == [row["op_params"] for row in rows]
    connection = sqlite3.connect(written(store, tmp_path / "all.sqlite", *TABLES))
    connection.row_factory = sqlite3.Row
    found = [dict(row) for row in connection.execute("SELECT * FROM test_backend_ops")]
    types = connection.execute(
        "SELECT DISTINCT typeof(time_us), typeof(passed), typeof(build_commit) FROM test_backend_ops"
    )
    assert [tuple(row) for row in types] == [("real", "integer", "text")]
    assert connection.execute("SELECT count(*) FROM llama_bench").fetchone()[0] == 6
    connection.close()
    assert found == list(rows)


def test_what_the_file_cannot_be(store: Store, tmp_path: Path) -> None:
    """No format, there already, two tools in one table, no folder: a sentence, and nothing beside it."""
    folder = tmp_path / "out"
    folder.mkdir()
    there = folder / "results.sqlite"
    there.write_text("mine")
    for path, tools, sentence in (
        (folder / "rows.xls", ["llama-bench"], "says no format: name it"),
        (there, ["llama-bench"], "is there already"),
        (folder / "rows.csv", ["llama-bench", "test-backend-ops"], "name one with --tool"),
        (folder / "no" / "rows.csv", ["llama-bench"], "cannot write"),
    ):
        with pytest.raises(UsageError, match=sentence) as error:
            written(store, path, *tools)
        assert error.value.next
    assert there.read_text() == "mine"
    assert list(folder.iterdir()) == [there]
