"""An empty record."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.db") as opened:
        yield opened
