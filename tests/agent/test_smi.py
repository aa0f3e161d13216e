"""What nvidia-smi is asked, by its own list of fields."""

from __future__ import annotations

import pytest

from dgxlab.agent import smi
from tests.conftest import GOLDEN

HELP = (GOLDEN / "h200" / "help-query-gpu.txt").read_text()


def test_a_new_driver_is_asked_for_everything() -> None:
    """Under the newest names."""
    assert smi.choose(HELP) == {name: name for name in smi.FIELDS}


def test_an_old_driver_is_asked_under_its_own_names() -> None:
    """It says throttle where newer ones say event, and has no counters: none is asked for, or the query would fail."""
    lines = [line for line in HELP.splitlines() if "reasons_counters" not in line]
    old = "\n".join(lines).replace('"clocks_event_reasons.active" or ', "")
    fields = smi.choose(old)
    assert fields["clocks_event_reasons.active"] == "clocks_throttle_reasons.active"
    assert not any("counters" in name for name in fields)
    assert smi.choose(old.replace('"pstate"', '"p-state"')).keys() == fields.keys() - {"pstate"}


@pytest.mark.parametrize("said", ["", "NVIDIA-SMI has failed.\n", 'unknown option "help"\n'])
def test_a_driver_that_lists_nothing_is_asked_the_least(said: str) -> None:
    """What every driver knows."""
    assert smi.choose(said) == smi.BASIC
