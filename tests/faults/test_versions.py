"""Two versions of the program: a small part of the campaign."""

from __future__ import annotations

from faults.campaign import trials
from faults.kinds.versions import VERSIONS


def test_versions_by_turns() -> None:
    """What one has left, or still does, the other reads or refuses; everything is measured once."""
    tally = trials(VERSIONS, 17, [0])
    assert tally.failures == []
