"""An empty record for each test; modules whose tests only read have one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.db") as opened:
        yield opened
