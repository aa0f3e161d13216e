"""Fixtures for tests of the store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.store import Store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with nothing in it: a test may look at all that appears beside a database."""
    made = tmp_path / "record"
    made.mkdir()
    return made


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """An empty store in a folder of its own."""
    with Store.open(folder / "results.db") as opened:
        yield opened
