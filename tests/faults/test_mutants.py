"""Mutated journals and replies are refused, or read and shown."""

from __future__ import annotations

from typing import Any

import pytest

from dgxlab.model import events
from faults.campaign import trials
from faults.kinds.mutants import MUTANTS


def test_refused_or_shown() -> None:
    """Whatever the value is that changed."""
    tally = trials(MUTANTS, 1, range(60))
    assert tally.failures == []
    assert min(tally.met[word] for word in ("refused", "read")) > 2


def _unread(value: Any) -> Any:
    """Take an event as it is."""
    event = events.EVENTS.get(str(value["event"]), events.Event).__new__(events.EVENTS[str(value["event"])])
    for name, field in value.items():
        if name != "event":
            object.__setattr__(event, name, field)
    return event


def test_it_finds_what_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that looks at no field ends in a traceback."""
    monkeypatch.setattr(events, "read", _unread)
    found: Any = [failure.reason for failure in trials(MUTANTS, 1, range(60)).failures]
    assert any("Traceback" in why for why in found)
