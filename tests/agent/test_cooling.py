"""Chains whose runs wait for the device to cool, on a temperature that is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.agent import chain
from dgxlab.errors import AGAIN, ConditionsError
from dgxlab.model import ChainStep
from dgxlab.model.events import ChainEvent, RunEvent
from tests.agent.scripted import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """One whose runs all come to the same."""
    return World(tmp_path)


def cold(step: ChainStep) -> ChainStep:
    """Let each run wait for the device to cool."""
    return replace(step, thermal="cold", cycles=2)


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the gate be found in no time."""
    for name, value in {"STILL_S": 0.02, "LIMIT_S": 0.2, "LOOK_S": 0.001, "KNOWN_S": 0.05}.items():
        monkeypatch.setattr(chain, name, value)


def cools(world: World, at: Callable[[int, int], float]) -> None:
    """Let the temperature be a function of the runs so far and the looks since the last."""
    looks: list[int] = []

    def warm() -> float:
        looks.append(len(world.names))
        return at(len(world.names), looks.count(len(world.names)))

    world.warm = warm


@pytest.mark.usefixtures("quickly")
def test_a_cold_chain_waits_for_its_gate(world: World) -> None:
    """A run that heats, then 3 degrees above where it falls no further; and every later run begins there."""
    cools(world, lambda runs, looks: 50.0 if runs == 0 else max(40.0, 60.0 - looks))
    assert world.hold(cold) is None
    assert world.places == ["u1", "u2", "u3", "u4", "a0", "b1", "a1", "b2", "a2"]
    cooling = [event for event in world.of(ChainEvent) if event.state == "cooling"]
    assert cooling[0].note == "cooling from 59.0 °C until it gets no cooler"
    assert [event.note for event in cooling[1:]] == ["cooling from 59.0 °C to 43.0 °C"] * 7
    assert [(event.role, event.cycle) for event in cooling[:4]] == [
        ("burn-in", 1),
        ("burn-in", 3),
        ("burn-in", 4),
        ("baseline", 0),
    ]
    assert cooling[1].conditions == {"temperature.gpu": (56.0, 58.0)}
    assert not any(run.flags for run in world.of(RunEvent))


@pytest.mark.usefixtures("quickly")
def test_a_device_that_stays_warm(world: World) -> None:
    """The error names both temperatures; the chain ends, the job need not."""
    cools(world, lambda runs, looks: 40.0 if runs < 3 else 44.04)
    error = world.hold(cold)
    assert isinstance(error, ConditionsError)
    assert (error.exit_code, error.next) == (8, AGAIN)
    assert error.message == "the device did not cool to 43.0 °C within 200 ms: it is at 44.0 °C"
    assert world.places == ["u1", "u2", "u3"]
    assert world.of(ChainEvent)[-1].state == "done"


@pytest.mark.usefixtures("quickly")
def test_no_temperature_no_cold_chain(world: World) -> None:
    """Refused before anything is measured."""
    error = world.hold(cold)
    assert isinstance(error, ConditionsError)
    assert (
        error.message
        == "thermal: cold needs the device's temperature, and this host tells none; thermal: hot needs none"
    )
    assert error.next == "dgxlab doctor local"
    assert world.of(RunEvent) == []


@pytest.mark.usefixtures("quickly")
def test_a_temperature_that_is_late_or_pauses(world: World) -> None:
    """A sampler that has just begun, or missed a look, is waited for a moment."""
    seen: Iterator[float | None] = iter([None, None, 40.0, None])
    world.warm = lambda: next(seen, 40.0)
    assert world.hold(cold) is None
