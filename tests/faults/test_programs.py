"""Programs that were replaced, and programs that leave others running: a small part of the campaign."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from faults.fault import Broken, seeded
from faults.kinds import leftover, replaced
from faults.kinds.replaced import Built


@pytest.fixture(scope="module")
def place() -> Iterator[Built]:
    """A host with one build."""
    with replaced._built() as made:
        yield made


def test_replaced_programs(place: Built) -> None:
    """A wrapper in the place of a program."""
    assert replaced._trial(place, seeded(5, "replaced", 90)) == "wrapped program"


def test_leftover_processes(place: Built) -> None:
    """In a session of their own, with closed descriptors, deaf to signals, forking on."""
    assert leftover._trial(place.there, seeded(5, "leftover", 8)).startswith("ends, own session, closed, deaf, forks")


def test_a_process_that_lives_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what its experiment is called."""
    monkeypatch.setattr(leftover, "FREE_S", 0.1)
    leftover._gone("name")
    with subprocess.Popen(["sleep", "60"], env={"TOY_NAME": "name"}) as living:
        with pytest.raises(Broken, match=f"there are processes that name left: \\[{living.pid}\\]"):
            leftover._gone("name")
        living.kill()
