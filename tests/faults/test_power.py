"""A host that loses its power: one trial of the campaign, on a disk that is seen to forget."""

from __future__ import annotations

import time

import pytest

from dgxlab.agent.boot import settle
from faults.fault import seeded
from faults.kinds.power import POWER, Drive

pytestmark = pytest.mark.skipif(bool(POWER.lacks()), reason=POWER.lacks())


def _forgets(place: Drive) -> None:
    """See that what was renamed and never synced has its name and nothing else after a power loss."""
    place.insert("empty")
    part = place.root / "part"
    for name, rename in (("synced", settle), ("not", lambda old, new: old.rename(new))):
        part.write_bytes(bytes(5000))
        rename(part, place.root / name)
    time.sleep(1.5)
    place.lose_power()
    assert [(place.root / name).stat().st_size for name in ("synced", "not")] == [5000, 0]


def test_power_losses() -> None:
    """The next run needs no help."""
    with POWER.place() as place:
        _forgets(place)
        assert POWER.trial(place, seeded(3, "power", 1)).startswith("empty")
