"""What several tests of the agent need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dgxlab.agent import child


@pytest.fixture
def adopts() -> Iterator[None]:
    """Make this process the parent of what its programs leave running, as the agent is."""
    child.adopt()
    yield
    child._libc.prctl(child.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
