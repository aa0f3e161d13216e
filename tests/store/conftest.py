"""Fixtures for tests of the store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.ingest import ingest
from dgxlab.store import Store
from tests.journals import Journal, intend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with nothing in it: a test may look at all that appears beside a database."""
    record = tmp_path / "record"
    record.mkdir()
    return record


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with Store.open(folder / "results.db") as opened:
        yield opened


def measured(store: Store, *journals: Journal) -> Journal:
    for journal in journals:
        intend(store, journal)
        ingest(store, journal.plan.job_id, journal.lines())
    return journal
