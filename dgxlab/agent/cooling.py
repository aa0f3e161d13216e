"""What `thermal: cold` means: a run begins when the device is nearly as cool as it gets by itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from dgxlab.agent.environment import settings
from dgxlab.errors import AGAIN, ConditionsError
from dgxlab.units import duration

ABOVE_C = 3.0
"""So much warmer than the coolest that was seen may the device be when a run begins."""
STILL_S = 30.0
"""When no temperature has been a new lowest for so long, it falls no further."""
LIMIT_S = 900.0
"""How long one wait may last."""
LOOK_S = 1.0
"""Between two looks."""
KNOWN_S = 5.0
"""How long a temperature may not be known before it counts as not there."""


class NotCool(ConditionsError):
    """The device does not cool, or nobody says how warm it is: this chain ends, others may do better."""


class Cooling:
    """The temperature gate of one chain.

    Args:
        temperature: Returns that of the device in degrees Celsius, None where it is not known.
        tell: Called with a sentence whenever a wait begins.
    """

    def __init__(self, temperature: Callable[[], float | None], tell: Callable[[str], None]) -> None:
        self._temperature = temperature
        self._tell = tell
        self._gate: float | None = None

    def find_gate(self) -> None:
        """Leave the device alone after a first run, until its temperature stops falling.

        Raises:
            NotCool: if no temperature is known.
        """
        begin = since = time.monotonic()
        lowest = self._look()
        self._tell(f"cooling from {lowest:.1f} °C until it gets no cooler")
        while (now := time.monotonic()) - since < STILL_S and now - begin < LIMIT_S:
            time.sleep(LOOK_S)
            seen = self._look()
            if seen < lowest:
                lowest, since = seen, time.monotonic()
        self._gate = lowest + ABOVE_C

    def wait(self) -> bool:
        """Wait until a run may begin, which the first always may; return whether that took any time.

        Raises:
            NotCool: if it does not become cool enough, or no temperature is known.
        """
        seen = self._look()
        if self._gate is None or seen <= self._gate:
            return False
        self._tell(f"cooling from {seen:.1f} °C to {self._gate:.1f} °C")
        deadline = time.monotonic() + LIMIT_S
        while seen > self._gate:
            if time.monotonic() >= deadline:
                least = f"{self._gate:.1f} °C within {duration(LIMIT_S)}"
                raise NotCool(f"the device did not cool to {least}: it is at {seen:.1f} °C", next=AGAIN)
            time.sleep(LOOK_S)
            seen = self._look()
        return True

    def _look(self) -> float:
        deadline = time.monotonic() + KNOWN_S
        while (seen := self._temperature()) is None:
            if time.monotonic() >= deadline:
                raise NotCool(
                    "thermal: cold needs the device's temperature, and this host tells none; thermal: hot needs none",
                    next=f"dgxlab doctor {settings().name}",
                )
            time.sleep(min(LOOK_S, KNOWN_S / 10))
        return seen
