"""Many clients at once: a small part of the campaign, and what its check sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.campaign import trials
from faults.fault import Broken
from faults.kinds.crowd import CROWD, alone
from faults.ledger import Launch


def launch(begin: float, end: float | None) -> Launch:
    """Return a launch from one moment to another."""
    return Launch(begin, 1, Path("/jobs/one/raw/run.out"), "llama-bench", [], end)


def test_eight_clients() -> None:
    """They wait for each other, in the record and on the host."""
    tally = trials(CROWD, 1, [1])
    assert tally.failures == []
    assert sum(tally.met.values()) == 1


def test_two_that_measure_at_once_are_seen() -> None:
    """One that begins before another has ended, or whose end is unknown."""
    alone([launch(3.0, 4.0), launch(1.0, 3.0)])
    with pytest.raises(Broken, match="began while"):
        alone([launch(1.0, 3.0), launch(2.9, 4.0)])
    with pytest.raises(Broken, match="began while"):
        alone([launch(1.0, None), launch(2.0, 3.0)])
