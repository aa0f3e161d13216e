"""The schema, written out: a change of it is seen here, and needs a migration."""

# ruff: noqa: S608 - the names are those of our tables

import sqlite3
from pathlib import Path

import pytest

from dgxlab.ingest import ingest
from dgxlab.store import Store
from dgxlab.store.migrations import MIGRATIONS
from dgxlab.store.schema import APPEND_ONLY, TELEMETRY, VERSION
from tests.elsewhere import from_elsewhere
from tests.journals import FROM_ELSEWHERE, TABLES, compared, intend, whole

EXPECTED = {
    "experiments": "digest name hypothesis spec",
    "jobs": "job_id kind name experiment host host_id plan plan_digest intent_at state exit_code error next details"
    " boot_id agent_version protocol journal_bytes journal_lines journal_seq dgxlab_version facts finished_at",
    "arms": "job_id arm build_id device_id pin tree commit_id series dirty cmake toolchain binaries libraries"
    " cmake_cache log seconds reused",
    "inputs": "job_id model_id name path size digest recipe seconds reused",
    "cells": "cell tool label params fixed",
    "gates": "gate_id job_id build_id overridden cases arm op backend gate_digest rc passed total unsupported expected"
    " expected_cases status reasons flaky failed argv env raw seconds at",
    "runs": "run_id job_id build_id arm tool model_id position argv env env_digest rc signal started seconds"
    " status reason before after raw",
    "rows": "run_id cell raw",
    "samples": "run_id cell metric ordinal value unit discarded",
    "telemetry": "run_id device name unit n median min max",
    "flags": "run_id device kind hard reason",
    "chain_runs": "run_id chain role cycle",
    "verdicts": "job_id chain cell metric position model_id baseline_arm candidate_arm candidate_cell screen"
    " better verdict promoted effect ci_low ci_high confidence mde p spread k_to_settle cycles valid_cycles baseline"
    " candidate noise_sigma noise_cycles noise_session flaws reasons same_low same_high noise",
    "published": "figure source_doc host engine pin model quant tool test metric value unit stddev notes line",
    "published_gates": "figure source_doc host engine pin model quant tool test metric value unit stddev notes line",
    "imports": "import_id sha256 size tool format provenance notes content name at",
    "imported_rows": "import_id position label params",
    "imported": "import_id position metric ordinal value unit discarded",
    "checks": "check_id job_id build_id arm step kind gate gate_digest inputs env commands readings status"
    " reasons raw seconds at",
    "builds": "build_id pin tree commit_id series dirty cmake toolchain binaries libraries cmake_cache seconds job_id",
    "models": "model_id name path size digest recipe job_id",
    "devices": "device_id host_id names uuids driver compute_cap cpus",
    "case_lists": "cases lines",
    "seals": "unit content seal",
    "rejections": "job_id reason at",
    "expectations": "pin tree gate_digest compute_cap op backend total unsupported cases job_id",
}


def test_columns(store: Store) -> None:
    """Every table and view has exactly these columns, in this order."""
    found = store.rows(
        """SELECT s.name AS tab, c.name AS col FROM sqlite_schema AS s, pragma_table_info(s.name) AS c
           WHERE s.type IN ('table', 'view') AND s.name NOT LIKE '!_%' ESCAPE '!' ORDER BY s.rowid, c.cid"""
    )
    columns: dict[str, list[str]] = {}
    for row in found:
        columns.setdefault(row["tab"], []).append(row["col"])
    assert {table: " ".join(names) for table, names in columns.items()} == EXPECTED


def test_every_table_is_strict(store: Store) -> None:
    """No table takes a text where a number belongs."""
    loose = store.rows(
        "SELECT name FROM pragma_table_list WHERE type = 'table' AND NOT strict AND name NOT LIKE '%sqlite_%'"
    )
    assert loose == []


def test_every_reference_restricts(store: Store) -> None:
    """No foreign key deletes or forgets rows that refer to one."""
    for table in (*TABLES, *FROM_ELSEWHERE):
        actions = {row["on_delete"] for row in store.rows(f"PRAGMA foreign_key_list({table})")}
        assert actions <= {"RESTRICT"}, table


def test_version_counts_the_migrations() -> None:
    """A migration that forgets to raise the version would never be applied."""
    names = [migration.name for migration in MIGRATIONS._migrations]
    assert len(names) == VERSION
    assert [name.split("_")[0] for name in names] == [f"m{number:03}" for number in range(1, VERSION + 1)]


@pytest.mark.parametrize("table", [*APPEND_ONLY, *TELEMETRY, "chain_runs", "checks", *FROM_ELSEWHERE])
def test_evidence_is_append_only(folder: Path, table: str) -> None:
    """Evidence can neither be changed, nor deleted, nor replaced."""
    journal = compared("job-1")
    journal.events[-1:] = whole("job-1").events[4:5]  # a run with a flag, outside of the chain
    journal.events[-1]["seq"] = len(journal.events) - 1
    journal.check(arm=journal.plan.arms[0].name)
    with Store.open(folder / "results.db") as store:
        intend(store, journal)
        ingest(store, "job-1", journal.lines())
        from_elsewhere(store)
    (column, *_) = EXPECTED[table].split()
    with Store.open(folder / "results.db") as store:  # one that had nothing to migrate
        before = store.rows(f"SELECT * FROM {table}")
        for sql in (
            f"UPDATE {table} SET {column} = {column}",
            f"DELETE FROM {table}",
            f"INSERT OR REPLACE INTO {table} SELECT * FROM {table}",
        ):
            with pytest.raises(sqlite3.IntegrityError, match=f"{table} is append-only"):
                store.connection.execute(sql)
        assert before == store.rows(f"SELECT * FROM {table}") != []


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("jobs", "state", "sleeping"),
        ("jobs", "experiment", "nobody"),
        ("jobs", "facts", "{"),
        ("jobs", "exit_code", "four"),
        ("jobs", "journal_lines", 10_000),
    ],
)
def test_constraints(store: Store, table: str, column: str, value: object) -> None:
    """Unknown states, missing parents, broken JSON and wrong types do not get in."""
    intend(store, whole("job-1"))
    with pytest.raises(sqlite3.IntegrityError):
        store.connection.execute(f"UPDATE {table} SET {column} = ?", (value,))


@pytest.mark.parametrize(
    "change",
    [
        "verdict = 'better'",
        "verdict = 'invalid'",
        "effect = NULL",
        "ci_low = NULL",
        "promoted = 2",
        "promoted = 1, verdict = 'same'",
        "promoted = 1, screen = 1",
        "valid_cycles = cycles + 1",
        "model_id = 'unknown'",
        "reasons = 'because'",
        "flaws = '[]'",
    ],
)
def test_a_verdict_cannot_contradict_itself(store: Store, change: str) -> None:
    """An invalid one has no number, only what is faster is promoted, a screen never; lists are lists."""
    journal = compared("job-1")
    intend(store, journal)
    ingest(store, "job-1", journal.lines())
    assert len(store.verdicts("job-1")) == 1
    with pytest.raises(sqlite3.IntegrityError):
        store.connection.execute(f"UPDATE verdicts SET {change}")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), "fast"])
def test_a_sample_is_a_finite_number(store: Store, value: object) -> None:
    """Neither infinity nor NaN nor a word is a sample."""
    journal = whole("job-1")
    intend(store, journal)
    ingest(store, "job-1", journal.lines())
    (row,) = store.rows("SELECT run_id, cell FROM rows LIMIT 1")
    with pytest.raises(sqlite3.IntegrityError):
        store.put("samples", {**row, "metric": "new", "ordinal": 0, "value": value, "unit": "t/s", "discarded": None})


def test_views_show_the_earliest_sighting(folder: Path) -> None:
    """A build that two jobs used is one row of `builds`, with what the earlier job saw, whatever came in first."""
    seen = []
    for order in (("job-1", "job-2"), ("job-2", "job-1")):
        with Store.open(folder / f"{order[0]}.db") as store:
            for job_id in order:
                journal = whole(job_id)
                intend(store, journal)
                ingest(store, job_id, journal.lines())
            seen.append((store.rows("SELECT * FROM builds"), store.rows("SELECT * FROM models")))
    assert seen[0] == seen[1]
    builds, models = seen[0]
    assert [row["job_id"] for row in builds] == [row["job_id"] for row in models] == ["job-1"]
