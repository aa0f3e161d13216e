"""Fixtures for tests of the published record."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab import published
from dgxlab.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store that holds the published record and nothing else."""
    with Store.open(tmp_path / "results.db") as opened:
        published.load(opened)
        yield opened
