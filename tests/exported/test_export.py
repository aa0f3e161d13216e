"""Rows for other programs: llama.cpp's columns with our counts in three encodings, and imported rows as printed."""

import csv
import json
import sqlite3
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab import imported
from dgxlab.errors import UsageError
from dgxlab.exported import LeftOut, collect, collect_imported, fitting, left_out, write
from dgxlab.model import to_json
from dgxlab.store import Store
from dgxlab.tools import EXPORTED
from dgxlab.tools.llama_bench import MEASURED
from tests.journals import PIN, THROTTLED, source
from tests.report.test_serving import record
from tests.report.worlds import CYCLES, GOLDEN, Session, capture, fails, h200, places, session_of_two

FILES = ("json", "jsonl", "sql", "csv")


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "empty.db") as opened:
        yield opened


@pytest.fixture
def imports(store: Store) -> Store:
    for name in (*(f"llama-bench-q4_k.{suffix}" for suffix in (*FILES, "md")), "tbo-perf-mul_mat.sql"):
        imported.record(store, imported.open_file(GOLDEN / name, "", ""))
    return store


def rows_of(path: Path, query: str) -> list[dict[str, Any]]:
    connection = sqlite3.connect(path)
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute(query)]
    connection.close()
    return rows


# -- measured rows ----------------------------------------------------------------------------------------------------


def test_rows_of_llama_bench_are_computed_from_what_counts(store: Store) -> None:
    row = collect(store, "llama-bench", name="h200").rows[0]
    settings = ("n_prompt", "model_type", "flash_attn", "use_mmap")
    assert [row[name] for name in settings] == [512, "llama ?B Q4_K - Medium", -1, 1]
    counted = [512 / ns * 1e9 for ns in (13890882, 13483629, 13516451, 13542891)]
    assert row["samples_ts"] == counted
    assert row["samples_ns"] == [13890882, 13483629, 13516451, 13542891]
    assert (row["avg_ts"], row["stddev_ts"]) == (statistics.fmean(counted), statistics.stdev(counted))


def test_every_row_says_where_it_comes_from(store: Store) -> None:
    rows = [row for tool in EXPORTED for row in collect(store, tool).rows]
    assert len(rows) == 2 * (6 + 3 + 3)
    assert {(row["arm"], row["build_commit"]) for row in rows} == {
        ("h200", PIN[:8]),
        ("w4a16", source(["w4a16"]).commit[:8]),
    }
    assert {row["pin"] for row in rows} == {PIN}
    assert all(row["run_id"].startswith(row["job_id"]) for row in rows)


def test_exported_rows_of_batched_bench_are_warm_when_they_come_back(store: Store, tmp_path: Path) -> None:
    """The tool's own files get a note about their first row, which dgxlab measured again and left out."""
    exported = collect(store, "llama-batched-bench", name="h200")
    write(tmp_path / "rows.jsonl", [exported])
    reading = imported.open_file(tmp_path / "rows.jsonl").reading
    assert (len(reading.rows), reading.notes) == (len(exported.rows), ())


def test_builds_of_one_commit_get_names_of_their_own(empty: Store) -> None:
    changes = ({}, {"cmake": {"GGML_CUDA": "OFF"}}, {"env": {"GGML_CUDA_DISABLE_GRAPHS": "1"}})
    for number, change in enumerate(changes):
        experiment = h200(name=f"arm{number}", **change)
        Session(empty, experiment, f"20261120-10000{number}-arm{number}-a").build().gates().runs().end()
    exported = collect(empty, "llama-bench")
    assert {len(commit) for commit in exported.builds} == {8}
    assert sorted(exported.builds.values()) == [("arm0",), ("arm1",), ("arm2",)]


def unended(store: Store) -> Session:
    """Return a session of two arms whose gates after the chain are still to come."""
    session = session_of_two(store, "20261120-110000-h200-vs-w4a16-b").build().gates()
    for step in session.plan.chains:
        for role, cycle in places(step.cycles):
            run = step.candidate if role == "candidate" else step.baseline
            session.place(step, role, cycle, 1.0, results=to_json(capture(run)))
    session.save()
    return session


def test_only_what_counts_is_handed_on(empty: Store) -> None:
    Session(empty, h200(), "20261120-100000-h200-a").build().gates().runs(ends=fails("killed")).end()
    assert collect(empty, "llama-bench").rows == ()
    session = unended(empty)
    assert [collect(empty, tool).rows for tool in EXPORTED] == [()] * 4
    session.gates(after=True).end()
    rows = collect(empty, "llama-bench").rows
    assert sorted(row["arm"] for row in rows if row["n_gen"]) == ["h200"] * (CYCLES + 1) + ["w4a16"] * CYCLES
    assert collect(empty, "llama-bench", name="w4a16").rows == tuple(row for row in rows if row["arm"] == "w4a16")
    assert collect(empty, "llama-bench", name="h200-vs-w4a16").rows == rows
    empty.put("flags", {"run_id": rows[0]["run_id"], **THROTTLED})
    assert {row["run_id"] for row in rows} - {row["run_id"] for row in collect(empty, "llama-bench").rows} == {
        rows[0]["run_id"]
    }


def test_what_does_not_count_is_counted_by_its_reason(store: Store, empty: Store) -> None:
    assert left_out(store, ["llama-bench"]) == []
    session = unended(empty)
    hidden = left_out(empty, ["llama-bench"])
    assert [(each.which, each.next) for each in hidden] == [
        ("whose run is of a session that has not ended", "dgxlab report 4a16-b --wide")
    ]
    session.gates(after=True).end()
    (warm,) = left_out(empty, ["llama-bench"])
    rows = collect(empty, "llama-bench").rows
    assert warm == LeftOut(hidden[0].rows - len(rows), "whose run was a warm-up", "")
    empty.put("flags", {"run_id": rows[0]["run_id"], **THROTTLED})
    flawed = [row for row in rows if row["run_id"] == rows[0]["run_id"]]
    hard = LeftOut(len(flawed), "whose run had a hard event", "dgxlab report 4a16-b --wide")
    assert left_out(empty, ["llama-bench"]) == [hard, warm]
    assert left_out(empty, ["llama-bench"], name="nosuch") == []
    empty.put("rejections", {"job_id": "20261120-110000-h200-vs-w4a16-b", "reason": "a trial", "at": 0.0})
    assert left_out(empty, ["llama-bench"]) == [
        LeftOut(hidden[0].rows, "whose run was rejected with its session", "dgxlab report 4a16-b --wide")
    ]


# -- imported rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", FILES)
def test_imported_rows_are_what_the_tool_printed(imports: Store, suffix: str) -> None:
    name = f"llama-bench-q4_k.{suffix}"
    exported = collect_imported(imports, name)
    assert (exported.tool, exported.builds) == ("llama-bench", {"unknown": (name,)})
    printed = [json.loads(line) for line in (GOLDEN / "llama-bench-q4_k.jsonl").read_text().splitlines()]
    for row, line in zip(exported.rows, printed, strict=True):
        names = line if suffix == "jsonl" else set(line) - set(MEASURED)
        assert {column: row[column] for column in names} == {column: line[column] for column in names}
        assert isinstance(row["avg_ts"], float)
        assert isinstance(row["avg_ns"], int)
        assert list(row)[-2:] == ["imported", "sha256"]
        assert not any(isinstance(value, bool) for value in row.values())


def test_operations_keep_their_counts(imports: Store, tmp_path: Path) -> None:
    exported = collect_imported(imports, "12901dc2")
    write(tmp_path / "ops.sqlite", [exported])
    rows = rows_of(tmp_path / "ops.sqlite", "SELECT op_params, time_us, n_runs, imported FROM test_backend_ops")
    assert len(rows) == len(exported.rows) == 21
    assert list(rows[0].values()) == [exported.rows[0]["op_params"], 14.388455, 69864, "tbo-perf-mul_mat.sql"]
    assert all("imported" not in row for row in collect(imports, "test-backend-ops").rows)


@pytest.mark.parametrize("name", ["llama-bench-q4_k.md", "nosuch"])
def test_a_table_for_people_is_not_handed_on(imports: Store, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        collect_imported(imports, name)


# -- files ------------------------------------------------------------------------------------------------------------


def test_three_encodings_of_the_same_rows(store: Store, tmp_path: Path) -> None:
    ops = collect(store, "test-backend-ops")
    for suffix in ("jsonl", "csv"):
        write(tmp_path / f"ops.{suffix}", [ops])
    assert [json.loads(line) for line in (tmp_path / "ops.jsonl").read_text().splitlines()] == list(ops.rows)
    with (tmp_path / "ops.csv").open() as file:
        assert [row["op_params"] for row in csv.DictReader(file)] == [row["op_params"] for row in ops.rows]
    path = tmp_path / "all.sqlite"
    write(path, [each for tool in EXPORTED if (each := collect(store, tool)).rows])
    assert rows_of(path, "SELECT * FROM test_backend_ops") == list(ops.rows)
    typeof = "SELECT DISTINCT typeof(time_us) a, typeof(passed) b, typeof(build_commit) c FROM test_backend_ops"
    assert rows_of(path, typeof) == [{"a": "real", "b": "integer", "c": "text"}]
    assert rows_of(path, "SELECT count(*) n FROM llama_bench") == [{"n": 6}]


@pytest.mark.parametrize(
    ("name", "tools", "reason"),
    [
        ("rows.xls", ["llama-bench"], "the suffix of rows.xls is unknown"),
        ("results.sqlite", ["llama-bench"], "is there already"),
        ("rows.csv", ["llama-bench", "test-backend-ops"], "--tool"),
        ("no/rows.csv", ["llama-bench"], "cannot be written"),
    ],
)
def test_what_the_file_cannot_be(store: Store, tmp_path: Path, name: str, tools: list[str], reason: str) -> None:
    there = tmp_path / "out" / "results.sqlite"
    there.parent.mkdir()
    there.write_text("mine")
    with pytest.raises(UsageError, match=reason) as error:
        write(there.parent / name, [collect(store, tool) for tool in tools])
    assert error.value.next
    assert there.read_text() == "mine"
    assert list(there.parent.iterdir()) == [there]


# -- a report of llama-benchy -----------------------------------------------------------------------------------------


def test_a_server_as_llama_benchy_has_the_same_figures_when_it_is_imported(store: Store, tmp_path: Path) -> None:
    """Other tools of the same record are left out; what a wave began at once is the whole of it."""
    record(store, "plain", 2000)
    tables, rest = fitting([table for tool in EXPORTED if (table := collect(store, tool)).rows], "json")
    assert [(each.rows, each.which, each.next) for each in rest] == [
        (6, "of llama-bench, which json cannot hold", "dgxlab export rows.jsonl --tool llama-bench"),
        (12, "of test-backend-ops, which json cannot hold", "dgxlab export rows.jsonl --tool test-backend-ops"),
        (9, "of llama-batched-bench, which json cannot hold", "dgxlab export rows.jsonl --tool llama-batched-bench"),
    ]
    write(path := tmp_path / "served.json", tables)
    read = imported.open_file(path)
    assert (read.tool, read.reading.provenance["model"]) == ("llama-benchy", "m.gguf")
    assert [row.params for row in read.reading.rows] == [{"pp": 16, "tg": 100, "pl": pl} for pl in (1, 4)]
    for row, samples in zip(read.reading.rows, ((3200,), (64 / 0.011,)), strict=True):
        values = {each.metric: each.values for each in row.values}
        assert values["speed_pp"] == pytest.approx(samples * 3)
        # 99 tokens of each, from the first token of the first stream to the last of the last, which begins 6 ms later
        assert values["tg_throughput"] == pytest.approx([{1: 99 / 0.198, 4: 396 / 0.204}[row.params["pl"]]] * 3)
        assert values["e2e_ttft"] == pytest.approx([5.0 + 2 * i for i in range(row.params["pl"])] * 3)
        (ttft,) = store.rows(
            """SELECT avg(value) AS ms FROM measurements JOIN cells USING (cell)
               WHERE metric = 'ttft_p50_ms' AND json_extract(inflated(params), '$.pl') = ?""",
            (row.params["pl"],),
        )
        assert statistics.median(values["e2e_ttft"]) == pytest.approx(ttft["ms"])


def test_only_one_server_makes_a_report(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="json is llama-benchy's format"):
        write(tmp_path / "none.json", fitting([collect(store, "llama-bench")], "json")[0])
    record(store, "plain", 2000)
    served = collect(store, "llama-server")
    for of in ("model", "arm", "device_id"):
        other = replace(served, rows=(*served.rows, {**served.rows[0], of: "other"}))
        with pytest.raises(UsageError, match="json is llama-benchy's format") as refused:
            write(tmp_path / "two.json", [other])
        assert refused.value.next == "dgxlab sessions"


def test_a_server_as_a_table(store: Store, tmp_path: Path) -> None:
    record(store, "plain", 2000)
    write(tmp_path / "rows.sqlite", [collect(store, "llama-server")])
    one, four = rows_of(tmp_path / "rows.sqlite", "SELECT * FROM llama_server ORDER BY pl")
    assert (one["speed_tg"], four["speed_tg"], four["model"]) == (500.0, 2000.0, "m.gguf")
