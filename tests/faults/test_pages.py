"""A damaged record is told and made again: a small part of the campaign, and that its checks see what they are for."""

from __future__ import annotations

import pytest

from dgxlab import audit
from dgxlab.store import Damaged
from faults.fault import Broken, seeded
from faults.kinds import pages
from faults.kinds.pages import shelf, trial


def test_damaged_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to damage one; and a check that says nothing is found."""
    with shelf() as place:
        met = {trial(place, seeded(5, "pages", number)) for number in range(30)}
        assert len(met) > 8
        monkeypatch.setattr(audit, "check", lambda store: [])
        monkeypatch.setattr(pages, "WAYS", {"a sector": pages.WAYS["a sector"]})
        with pytest.raises((Broken, Damaged)):
            [trial(place, seeded(5, "pages", number)) for number in range(100)]
