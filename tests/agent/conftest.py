"""What several tests of the agent need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.agent import child
from dgxlab.agent.environment import Root


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """An empty root."""
    empty = Root(tmp_path / "root")
    empty.create()
    return empty


@pytest.fixture
def adopts() -> Iterator[None]:
    """Make this process the parent of what its programs leave running, as the agent is."""
    child.adopt()
    yield
    child._libc.prctl(child.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
