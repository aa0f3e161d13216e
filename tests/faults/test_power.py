"""A host that loses its power: a small part of the campaign, and that its disk forgets."""

from __future__ import annotations

import time

import pytest

from dgxlab.agent.boot import settle
from faults.campaign import trials
from faults.kinds.power import POWER, _drive

pytestmark = pytest.mark.skipif(bool(POWER.lacks()), reason=POWER.lacks())


def test_power_losses() -> None:
    """The next run needs no help."""
    tally = trials(POWER, 2, range(1))
    assert tally.failures == []


def test_a_disk_that_forgets() -> None:
    """What was renamed into place and never synced has its name and nothing else; that is what jobs must survive."""
    with _drive() as place:
        place.insert("empty")
        for name in ("synced", "not"):
            with (place.root / "part").open("wb") as file:
                file.write(bytes(5000))
            if name == "synced":
                settle(place.root / "part", place.root / name)
            else:
                (place.root / "part").rename(place.root / name)
        time.sleep(1.5)
        place.lose_power()
        assert [(place.root / name).stat().st_size for name in ("synced", "not")] == [5000, 0]
