"""No shell reads what a spec or hosts.yaml says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from faults import hostile
from faults.campaign import trials
from faults.kinds.canary import CANARY


def test_no_canary() -> None:
    """On the line, in specs, in sources, and by the real program."""
    tally = trials(CANARY, 1, range(20))
    assert tally.failures == []
    assert {"quoted", "refused", "planned", "ran"} <= set(tally.met)


def test_it_finds_a_line_that_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that are put together as they are let the canary out."""

    def careless(argv: Sequence[str]) -> bytes:
        return " ".join(word if "/canary" in word else shlex.quote(word) for word in argv).encode()

    monkeypatch.setattr(hostile, "quote", careless)
    assert any("a program was run" in failure.reason for failure in trials(CANARY, 1, range(12)).failures)
