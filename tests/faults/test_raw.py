"""What a job left cannot be changed unnoticed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dgxlab.lab import raw
from faults.campaign import trials
from faults.kinds.raw import RAW


def test_nothing_changed_is_accepted() -> None:
    """At each of the three moments."""
    tally = trials(RAW, 1, range(8))
    assert tally.failures == []
    assert set(tally.met) == {"ingest", "fetch", "kept"}


def test_it_finds_a_reader_that_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that compares nothing lets changed files in."""

    def trusting(job: object, files: object, known: Mapping[str, str], next: str) -> None:
        assert known

    monkeypatch.setattr(raw, "_compare", trusting)
    reasons = [failure.reason for failure in trials(RAW, 1, range(4)).failures]
    assert any("raw files are taken for what they were" in reason for reason in reasons)
