"""A killed writer leaves nothing in part."""

from __future__ import annotations

import pytest

from faults.campaign import trials
from faults.kinds import commit
from faults.kinds.commit import COMMIT
from tests.store.writer import killed


def test_nothing_in_part() -> None:
    """Of runs, of new databases, of migrations and of backups."""
    tally = trials(COMMIT, 1, range(6))
    assert tally.failures == []
    assert {"commit", "migration"} <= set(tally.met)


def test_it_finds_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that was acknowledged and is not there, as of a writer that does not wait for the disk."""
    monkeypatch.setattr(commit, "killed", lambda *args: killed(*args) + 1000)
    assert any("was acknowledged" in failure.reason for failure in trials(COMMIT, 1, range(4)).failures)
