"""What an A/B session will see, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dgxlab.cli._out import table
from dgxlab.lab.outlook import command
from dgxlab.stats import cycle_range
from dgxlab.units import duration, metric, percent

if TYPE_CHECKING:
    from dgxlab.lab import Outlook
    from dgxlab.lab.outlook import Expected
    from dgxlab.model import Experiment

NEVER = "over 100"
"""Cycles that are needed where no session of a length that is proposed would do."""


def describe(found: Outlook, experiment: Experiment) -> str:
    """Return the outlook as text: a line a claim, then the session as it is planned and as it would have to be."""
    return "\n".join(_lines(found, experiment))


def planned(found: Outlook) -> str:
    """Return how many cycles a session will have, and how long they take, as far as the record knows."""
    if found.cycles is None:
        fewest, most = cycle_range(found.family)
        return f"planned: {fewest} to {most} cycles, as the burn-in of each chain decides"
    decides = "" if found.fixed else "; the burn-in of each chain decides"
    return f"planned: {_session(found.cycles, found.seconds)}{decides}"


def _lines(found: Outlook, experiment: Experiment) -> Iterator[str]:
    effect = percent(found.effect)
    yield f"experiment {experiment.name} on host {experiment.host}, to see an effect of {effect}"
    if found.claims:
        yield ""
        yield table([_row(one) for one in found.claims], right=("noise floor", "MDE", "cycles"))
        yield ""
        yield planned(found)
        if found.needed is None:
            yield f"needed for {effect}: {NEVER} cycles, which no session has"
        else:
            yield f"needed for {effect}: {_session(found.needed, found.seconds_needed)}"
    if found.unknown:
        yield ""
        yield f"no noise floor: {', '.join(found.unknown)}"
        yield f"measured by: {command('noise', experiment)}"


def _row(one: Expected) -> Mapping[str, str]:
    return {
        "cell": " ".join(filter(None, (one.model, one.label, metric(one.metric).label))),
        "noise floor": percent(one.sigma),
        "MDE": percent(one.mde),
        "cycles": str(one.needed or NEVER),
        "measured by": one.session,
    }


def _session(cycles: int, seconds: float | None) -> str:
    took = "how long is not known, as it never ran here" if seconds is None else f"about {duration(seconds)}"
    return f"{cycles} cycles, {took}"
