"""Damaged output is read exactly or refused."""

from __future__ import annotations

import math

import pytest

from dgxlab.agent.parse import parsed
from dgxlab.imported import reading
from faults.campaign import trials
from faults.kinds.fuzz import FUZZ


def test_exact_or_refused() -> None:
    """Every reader, on every capture."""
    tally = trials(FUZZ, 1, range(2000))
    assert tally.failures == []
    assert min(tally.met[word] for word in ("exact", "in part", "refused")) > 100


def test_it_finds_a_reader_that_takes_what_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the digits it finds reads wrong numbers."""

    def lenient(value: object, name: str) -> float:
        digits = "".join(c for c in str(value) if c in "0123456789.")
        return float(digits) if digits.count(".") < 2 and digits.strip(".") else math.pi

    monkeypatch.setattr(parsed, "finite", lenient)
    monkeypatch.setattr(reading, "finite", lenient)
    assert trials(FUZZ, 1, range(2000)).failures
