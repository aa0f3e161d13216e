"""A piece of the shipped record: real jobs of every kind, small enough to be checked hundreds of times."""

# ruff: noqa: S608 - names of tables and columns are the record's own

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dgxlab.store import Store
from dgxlab.store.seals import seal_all
from tests.conftest import PROJECT

JOBS = ("20261120-131141", "20261121-192549", "20261122-023654", "20261122-110457")
"""On a processor; gates on models and batched-bench; an A/B session whose host was lost; one that failed."""

IMPORT = "cdb2fd7a8f38c5ee"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = Path(shutil.copy(PROJECT / "results.db", tmp_path_factory.mktemp("shipped")))
    with Store.open(path) as store:
        yield store


def cut(path: Path, jobs: Sequence[str] = JOBS) -> Path:
    """Leave some jobs and an import in a copy of the shipped record, sealed."""
    with Store.open(path) as store:
        connection, guards = store.connection, disarm(store)
        connection.execute("PRAGMA foreign_keys = OFF")
        kept = f"IN ({','.join(map(repr, jobs))})"
        for row in store.rows("SELECT name FROM sqlite_schema WHERE type = 'table'"):
            columns = {each["name"] for each in store.rows("SELECT name FROM pragma_table_info(?)", (row["name"],))}
            if key := next((name for name in ("job_id", "run_id") if name in columns), None):
                connection.execute(f"DELETE FROM {row['name']} WHERE substr({key}, 1, 15) NOT {kept}")
            elif "try_id" in columns:
                connection.execute(f"DELETE FROM {row['name']}")
            elif "import_id" in columns:
                connection.execute(f"DELETE FROM {row['name']} WHERE import_id <> '{IMPORT}'")
        connection.execute("DELETE FROM cells WHERE cell NOT IN (SELECT cell FROM rows)")
        connection.execute("DELETE FROM readings WHERE number NOT IN (SELECT number FROM run_numbers)")
        connection.execute("DELETE FROM sensors WHERE sensor NOT IN (SELECT sensor FROM readings)")
        seal_all(connection)
        for guard in guards:
            connection.execute(guard)
        connection.execute("VACUUM")
    return path


OF_ROW = """number = (SELECT number FROM run_numbers WHERE run_id = OLD.run_id)
    AND sensor = (SELECT sensor FROM sensors WHERE (device, name) = (OLD.device, OLD.name))"""
EDITABLE = (
    f"CREATE TRIGGER x INSTEAD OF DELETE ON telemetry BEGIN DELETE FROM readings WHERE {OF_ROW}; END",
    f"""CREATE TRIGGER y INSTEAD OF UPDATE ON telemetry BEGIN UPDATE readings SET median = NEW.median WHERE {OF_ROW};
        UPDATE OR IGNORE sensors SET device = NEW.device WHERE (device, name) = (OLD.device, OLD.name); END""",
)
"""Let the view be edited as a table is."""


def disarm(store: Store) -> list[str]:
    """Drop the triggers that refuse an edit, and return their SQL."""
    guards = store.rows("SELECT name, sql FROM sqlite_schema WHERE type = 'trigger'")
    for guard in guards:
        store.connection.execute(f"DROP TRIGGER {guard['name']}")
    return [guard["sql"] for guard in guards]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    path = cut(Path(shutil.copy(PROJECT / "results.db", tmp_path_factory.mktemp("piece"))))
    with Store.open(path) as store:
        disarm(store)
        for trigger in EDITABLE:
            store.connection.execute(trigger)
        store.connection.execute("PRAGMA foreign_keys = OFF")
        store.connection.execute("PRAGMA ignore_check_constraints = ON")
        yield store


@pytest.fixture
def piece(opened: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The piece, whatever a test does to it; that it has no triggers is not told."""
    monkeypatch.setattr(sys.modules["dgxlab.store.check"], "schema_problems", lambda connection: [])
    opened.connection.execute("BEGIN")
    yield opened
    opened.connection.execute("ROLLBACK")
