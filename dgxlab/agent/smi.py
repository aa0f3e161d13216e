"""How nvidia-smi is asked and what it answers: drivers differ in the fields that they know, and in 'not known'."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence

NULLS = frozenset({"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]", "[Not Found]"})
"""nvidia-smi's spellings of 'not known': null, never 0."""

HELP = ("nvidia-smi", "--help-query-gpu")
"""Prints the fields that this driver knows; it needs no GPU and takes 18 ms on an H200."""

BASIC = {
    name: name
    for name in ("uuid", "temperature.gpu", "clocks.sm", "clocks.mem", "power.draw", "utilization.gpu", "pstate")
}
"""Fields that every driver knows."""

FIELDS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*BASIC, "driver_version")},
    "clocks_event_reasons.active": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    **{
        name: (name,)
        for name in (
            "clocks_event_reasons_counters.sw_power_cap",
            "clocks_event_reasons_counters.sw_thermal_slowdown",
            "clocks_event_reasons_counters.hw_thermal_slowdown",
            "clocks_event_reasons_counters.hw_power_brake_slowdown",
        )
    },
}
"""What we want to know, under the newest driver's name for it, and all that drivers have called it, newest first."""


def choose(said: str) -> dict[str, str]:
    """Return by our name how this driver calls each field that it knows, from what `HELP` printed.

    One field that it does not know would fail a whole query.
    """
    known = set(re.findall(r'"([\w.]+)"', said))
    found = {name: next((word for word in words if word in known), "") for name, words in FIELDS.items()}
    return {name: word for name, word in found.items() if word} if found["uuid"] else dict(BASIC)


def query(fields: Sequence[str]) -> list[str]:
    """Return the command that prints these fields once, a line a GPU."""
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def sampling(uuids: Sequence[str], fields: Sequence[str], period_s: float) -> list[str]:
    """Return the command that prints the time and these fields of these GPUs again and again, after a header."""
    asked = f"--query-gpu={','.join(('timestamp', *fields))}"
    return ["nvidia-smi", "-i", ",".join(uuids), asked, "--format=csv,nounits", "-lms", f"{period_s * 1000:.0f}"]


def parse_gpus(fields: Sequence[str], text: str) -> list[dict[str, str | None]]:
    """Read nvidia-smi's csv without header and units; a value it does not know is None, a broken line is left out."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [
        {field: None if cell in NULLS else cell for field, cell in zip(fields, row, strict=True)}
        for row in rows
        if len(row) == len(fields)
    ]
