"""Damaged output is read exactly or refused."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from dgxlab.tools import reading, rows
from faults.campaign import trials
from faults.fault import seeded
from faults.kinds import fuzz
from faults.kinds.fuzz import FUZZ


def test_exact_or_refused() -> None:
    """Every reader, on every capture."""
    tally = trials(FUZZ, 1, range(2000))
    assert tally.failures == []
    assert min(tally.met[word] for word in ("exact", "in part", "refused")) > 100


def test_a_count_may_begin_with_zeros(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A gate that takes 045/45 for the same number is right."""
    count = re.compile("([0-9]+)/([0-9]+) tests")
    monkeypatch.setattr(fuzz, "damaged", lambda text, random: count.sub(r"0\1/00\2 tests", text))
    assert {fuzz.judge(tmp_path, seeded(1, "fuzz", n)) for n in range(20)} == {"exact", "refused"}


def test_it_finds_a_reader_that_takes_what_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the digits it finds reads wrong numbers."""

    def lenient(value: object, name: str) -> float:
        digits = "".join(c for c in str(value) if c in "0123456789.")
        return float(digits) if digits.count(".") < 2 and digits.strip(".") else math.pi

    monkeypatch.setattr(rows, "finite", lenient)
    monkeypatch.setattr(reading, "finite", lenient)
    assert trials(FUZZ, 1, range(2000)).failures
