"""Roots open to others: a small part of the campaign, and what its check sees."""

from __future__ import annotations

from faults.campaign import trials
from faults.kinds.root import ROOT


def test_open_roots() -> None:
    """Refused, and mended by what is printed."""
    tally = trials(ROOT, 1, range(4))
    assert tally.failures == []
    assert {word[1:] for word in tally.met} == {" refused", "hared"}
