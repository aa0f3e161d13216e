"""What the schema refuses; that it is what migrations make is in test_open."""

# ruff: noqa: S608 - the names are those of our tables

import json
import sqlite3
import zlib
from pathlib import Path

import pytest

from dgxlab.store import Store
from dgxlab.store.migrations import MIGRATIONS
from dgxlab.store.schema import VERSION, deflated, inflated
from tests.elsewhere import from_elsewhere
from tests.journals import FROM_ELSEWHERE, TABLES, compared, whole
from tests.store.conftest import measured

APPEND_ONLY = (
    *("arms", "inputs", "gates", "checks", "runs", "rows", "samples", "telemetry", "flags"),
    *("readings", "run_numbers", "sensors", "chain_runs", "imports"),
)


def test_every_table_is_strict_and_every_reference_restricts(store: Store) -> None:
    tables = "SELECT name FROM pragma_table_list WHERE type = 'table' AND name NOT LIKE '%sqlite_%'"
    assert store.rows(f"{tables} AND NOT strict") == []
    for table in (*TABLES, *FROM_ELSEWHERE):
        actions = {row["on_delete"] for row in store.rows(f"PRAGMA foreign_key_list({table})")}
        assert actions <= {"RESTRICT"}, table


def test_version_counts_the_migrations() -> None:
    names = [migration.name for migration in MIGRATIONS._migrations]
    assert len(names) == VERSION
    assert [name.split("_")[0] for name in names] == [f"m{number:03}" for number in range(1, VERSION + 1)]


def test_evidence_is_append_only(store: Store) -> None:
    journal = compared("job-1")
    journal.events[-1:] = whole("job-1").events[4:5]  # a run with a flag, outside of the chain
    journal.events[-1]["seq"] = len(journal.events) - 1
    journal.check(arm=journal.plan.arms[0].name)
    measured(store, journal)
    from_elsewhere(store)
    for table in APPEND_ONLY:
        before = store.rows(f"SELECT * FROM {table}")
        column = next(iter(before[0]))
        for sql in (
            f"UPDATE {table} SET {column} = {column}",
            f"DELETE FROM {table}",
            f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}",
        ):
            name = "telemetry" if table == "readings" else table
            with pytest.raises(sqlite3.IntegrityError, match=f"{name} is append-only"):
                store.connection.execute(sql)
        assert before == store.rows(f"SELECT * FROM {table}") != []


REFUSED = {
    "jobs": """state = 'sleeping'; experiment = 'unknown'; facts = '{'; exit_code = 'four'; journal_lines = 10000""",
    "verdicts": """
        verdict = 'better'; verdict = 'invalid'; effect = NULL; ci_low = NULL; promoted = 2; model_id = 'unknown';
        promoted = 1, verdict = 'same'; promoted = 1, screen = 1; valid_cycles = cycles + 1; reasons = 'because';
        flaws = '[]'""",
}


def test_constraints(store: Store) -> None:
    measured(store, compared("job-1"))
    assert len(store.verdicts("job-1")) == 1
    for table, changes in REFUSED.items():
        for change in changes.split(";"):
            with pytest.raises(sqlite3.IntegrityError):
                store.connection.execute(f"UPDATE {table} SET {change}")


def test_a_sample_is_a_finite_number(store: Store) -> None:
    measured(store, whole("job-1"))
    row = store.rows("SELECT * FROM samples LIMIT 1")[0] | {"metric": "new"}
    for value in (float("inf"), float("-inf"), float("nan"), "fast"):
        with pytest.raises(sqlite3.IntegrityError):
            store.put("samples", {**row, "value": value})


def test_views_show_the_earliest_sighting(folder: Path) -> None:
    seen = []
    for order in (("job-1", "job-2"), ("job-2", "job-1")):
        with Store.open(folder / f"{order[0]}.db") as store:
            measured(store, *map(whole, order))
            seen.append((store.rows("SELECT * FROM builds"), store.rows("SELECT * FROM models")))
    assert seen[0] == seen[1]
    builds, models = seen[0]
    assert [row["job_id"] for row in builds] == [row["job_id"] for row in models] == ["job-1"]


def test_what_was_deflated_stays_readable(store: Store) -> None:
    text = '{"avg_ns":1,"avg_ts":2.5,"backends":"CUDA"}'
    released = bytes.fromhex("78f934d0f19e43cae488dc6d040c138c4c5d0b002aed0d2f")
    assert {inflated(each) for each in (released, zlib.compress(text.encode()), text, deflated(text))} == {text}
    lines = json.dumps([text] * 40)
    store.put("case_lists", {"cases": "x", "lines": lines})
    assert store.rows("SELECT lines, inflated(lines) AS same FROM case_lists") == [{"lines": lines, "same": lines}]
    assert store.rows("SELECT length(lines) < 100 AS small FROM case_lists") == [{"small": 1}]
