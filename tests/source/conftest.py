"""What the tests of pins share."""

from pathlib import Path

import pytest

from dgxlab.source import PinCache


@pytest.fixture
def cache(tmp_path: Path) -> PinCache:
    return PinCache(tmp_path / "cache" / "llama.cpp.git")
