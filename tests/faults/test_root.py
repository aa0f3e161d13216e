"""Roots open to others: a small part of the campaign, and what its check sees."""

from __future__ import annotations

import pytest

from dgxlab.transport import host
from faults.campaign import trials
from faults.kinds.root import ROOT


def test_open_roots() -> None:
    """Refused, and mended by what is printed."""
    tally = trials(ROOT, 1, range(3))
    assert tally.failures == []
    assert any("refused" in met for met in tally.met)


def test_a_program_that_looks_at_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: whoever may write there is let in."""
    blind = host.BOOT.replace("if other := stranger", "if other := None and stranger")
    assert blind != host.BOOT
    monkeypatch.setattr(host, "BOOT", blind)
    tally = trials(ROOT, 1, range(2))
    assert any("was asked although" in failure.reason for failure in tally.failures)
