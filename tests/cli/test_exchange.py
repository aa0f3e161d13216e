"""`dgxlab import` and `dgxlab export`, and reports of what came from elsewhere."""

import json
import sqlite3
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from dgxlab import imported
from dgxlab.cli.record import _lines, newest
from dgxlab.exported import LeftOut
from dgxlab.store import Store, alias
from tests.cli.conftest import Project
from tests.report.worlds import GOLDEN, whole

LOG = GOLDEN / "tbo-perf-mmid.txt"


def test_import_prints_what_it_read(project: Project) -> None:
    ran = project.ok("import", "--tool", "test-backend-ops", LOG, "--db", "x.db", "--format", "json")
    read = json.loads(ran.out)
    assert (read["tool"], read["format"], read["file"]) == ("test-backend-ops", "console", "tbo-perf-mmid.txt")
    assert read["new"] is True
    assert read["provenance"] == {"device_description": "NVIDIA H200"}
    assert read["rows"][0]["params"]["type_a"] == "q4_0"
    assert read["rows"][0]["values"][0] == {"metric": "time_us", "unit": "us", "values": [6.98], "discarded": ""}
    again = project.run("import", LOG, "--db", "x.db")
    assert again.out.startswith(f"{read['import_id']}  test-backend-ops (console), 20 rows: ")
    assert again.out.endswith(f"  shown by: dgxlab --db x.db report --form imported {read['import_id']}\n")
    assert again.err.startswith("note: ")
    assert project.run("db", "check", "x.db").out == "ok\n"


def test_import_refuses_with_line_reason_and_command(project: Project) -> None:
    broken = project.folder / "cut here.txt"
    broken.write_bytes(LOG.read_bytes()[:1200])
    ran = project.run("import", "cut here.txt", "--db", "x.db")
    assert (ran.rc, ran.out) == (9, "")
    assert ran.error.startswith("cut here.txt, line 17: ")
    assert ran.next == "sed -n 17p 'cut here.txt'"
    assert not (project.folder / "x.db").exists()
    assert project.run("import", LOG, "--tool", "nvidia-smi").rc == 2
    assert "console, sql, jsonl" in project.run("import", LOG, "--tool=test-backend-ops", "--format-of=md").error


def test_export_of_a_measured_project(measured: Project) -> None:
    ran = measured.ok("export", "runs.sqlite")
    assert ran.out.splitlines()[0] == "3 rows of llama-bench in runs.sqlite"
    assert ran.out.splitlines()[1] == f"  {measured.machine.pin[:8]}  toy"
    connection = sqlite3.connect(measured.folder / "runs.sqlite")
    sql = "SELECT (SELECT count(*) FROM llama_bench), (SELECT count(*) FROM test_backend_ops)"
    counts = connection.execute(sql).fetchone()
    connection.close()
    assert counts == (3, 2)
    told = measured.json("export", "ops.csv", "--tool", "test-backend-ops")
    tools = [{"tool": "test-backend-ops", "rows": 2, "builds": {measured.machine.pin[:8]: ["toy"]}}]
    assert told == {"file": "ops.csv", "tools": tools, "left_out": []}
    ran = measured.run("export", "ops.json", "--tool", "test-backend-ops", "--name", "toy")
    mend = "dgxlab export rows.jsonl --tool test-backend-ops --name toy"
    left = f"  left out: 2 rows of test-backend-ops, which json cannot hold: see {mend}"
    assert ran.err.splitlines()[1:] == [left, f"next: {mend}"]
    assert measured.ok(*ran.next.split()[1:]).out.startswith("2 rows of test-backend-ops in rows.jsonl\n")


def test_export_of_an_imported_file_as_json_names_that_file(adopted: Project) -> None:
    ran = adopted.run("export", "rows.json", "--imported", "d48c8e67")
    assert ran.next == "dgxlab export rows.jsonl --imported d48c8e67"
    assert adopted.ok(*ran.next.split()[1:]).out.startswith("3 rows of llama-bench in rows.jsonl\n")


def test_rows_that_no_command_shows_are_counted_alone() -> None:
    assert list(_lines([LeftOut(2, "whose run was a warm-up", "")])) == ["left out: 2 rows whose run was a warm-up"]


def test_export_says_what_it_leaves_out(measured: Project) -> None:
    assert measured.ok("export", "all.sqlite").err == ""
    with Store.open(measured.folder / "results.db") as store:
        (job,) = (job.job_id for job in store.jobs())
        store.put("rejections", {"job_id": job, "reason": "a trial", "at": 0.0})
    ran = measured.run("export", "none.sqlite")
    short = alias(job)
    line = f"left out: 8 rows whose run was rejected with its session: see dgxlab report {short} --wide"
    assert ran.error == f"{measured.folder / 'results.db'} has no such row to export"
    assert ran.err.splitlines()[1:] == [f"  {line}", f"next: dgxlab report {short} --wide"]


def test_export_names_the_newest_builds() -> None:
    assert newest(["a", "b", "c"], 2) == ["a", "b", "c"]
    assert newest(["a", "b", "c", "d"], 2) == ["  2 earlier builds", "c", "d"]


def test_export_of_nothing(measured: Project) -> None:
    assert measured.run("export", "x.sqlite", "--name", "other").next == "dgxlab sessions"
    assert "'zz'" in measured.run("export", "x.sqlite", "--job", "zz").error
    many = measured.run("export", "x.csv")
    assert "name one with --tool" in many.error
    assert many.next.startswith("dgxlab export x.csv --tool llama-bench")
    assert [path.name for path in measured.folder.glob("x.*")] == []


@pytest.fixture
def adopted(project: Project) -> Project:
    with Store.open(project.folder / "results.db") as store:
        whole(store)
        imported.record(store, imported.open_file(GOLDEN / "llama-bench-q4_k.jsonl", "", ""))
    return project


def test_a_form_with_published_figures(adopted: Project) -> None:
    words = ("report", "--form", "single-stream", "h200", "--published", "seed004 Q4_K_M")
    assert "| published, GB10 (seed004) | 2164 | 2953 | " in adopted.run(*words).out
    rows = adopted.json(*words)["tables"][0]["rows"]
    assert [row.get("published") for row in rows] == [None, True]
    assert rows[1]["pp512"]["value"] == 2164


def test_imported_files(adopted: Project) -> None:
    listed = adopted.run("report", "--form", "imported").out
    assert "| llama-bench-q4_k.jsonl | d48c8e6786cf5847 | llama-bench (jsonl) | 3 |" in listed
    page = adopted.run("report", "--form", "imported", "d48c8e67", "--cells", "tg32").out
    assert page.startswith("| measured | t/s |\n| --- | ---: |\n| tg32 | ")
    assert "**imported**" in page
    assert "- [1] imported file llama-bench-q4_k.jsonl\n  - sha256 d48c8e6786cf5847" in page
    ran = adopted.run("report", "--form", "imported", "nosuch")
    assert (ran.rc, ran.next) == (2, "dgxlab report --form imported")


def test_an_imported_file_is_exported_alone(adopted: Project, tmp_path: Path) -> None:
    ran = adopted.run("export", "one.sqlite", "--imported", "llama-bench-q4_k.jsonl")
    assert ran.out == "3 rows of llama-bench in one.sqlite\n  unknown  llama-bench-q4_k.jsonl\n"
    connection = sqlite3.connect(adopted.folder / "one.sqlite")
    counted = connection.execute("SELECT count(*), min(imported) FROM llama_bench").fetchone()
    connection.close()
    assert counted == (3, "llama-bench-q4_k.jsonl")
    ran = adopted.run("export", "two.sqlite", "--imported", "d48c8e67", "--tool", "llama-bench")
    assert (ran.rc, ran.next) == (2, "dgxlab export --help")


# -- to stdout, and in Parquet -----------------------------------------------------------------------------------------


def test_export_to_stdout_is_the_file(measured: Project) -> None:
    """By either spelling; what is said about it goes to stderr, and csv is the default."""
    tool = ("--tool", "llama-bench")
    for suffix in ("csv", "jsonl"):
        measured.ok("export", f"rows.{suffix}", *tool)
        ran = measured.ok("export", "-o", "-", "--as", suffix, *tool)
        assert ran.out == (measured.folder / f"rows.{suffix}").read_text()
        assert ran.err.startswith("3 rows of llama-bench on stdout\n")
    assert measured.ok("export", "-", *tool, "-q").out == (measured.folder / "rows.csv").read_text()
    assert measured.run("export", "-").next == "dgxlab export - --tool llama-bench"
    for words in ((), ("a.csv", "-o", "b.csv")):
        assert measured.run("export", *words).error == "export needs one FILE, - for stdout; --job names a session"


def test_export_in_parquet_keeps_types_and_lists(measured: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    measured.ok("export", "rows.parquet", "--tool", "llama-bench")
    measured.ok("export", "rows.jsonl", "--tool", "llama-bench")
    lines = [json.loads(line) for line in (measured.folder / "rows.jsonl").read_text().splitlines()]
    assert parquet.read_table(measured.folder / "rows.parquet").to_pylist() == lines
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ran = measured.run("export", "more.parquet", "--tool", "llama-bench")
    assert (ran.rc, ran.error) == (2, "Parquet is written with pyarrow, and there is no module pyarrow")
    assert ran.next.endswith("-m pip install 'pyarrow>=17'")
