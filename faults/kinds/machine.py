"""Any order of commands and faults: a trial is one history that Hypothesis chooses."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from faults.desk import Desk, desk
from faults.fault import Fault
from faults.machine import Machine

STEPS = 20
ENDS = ("lost", "failed", "cancelled", "done")


def trial(place: Desk, random: Random) -> str:
    """Run one history; return the worst final state of its jobs."""

    class Here(Machine):
        desk: ClassVar[Desk] = place
        met: ClassVar[Counter[str]] = Counter()

    once = settings(
        max_examples=2,  # the first is always the simplest, in which nothing happens
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(random.getrandbits(64))(Here), settings=once)
    return next((end for end in ENDS if Here.met[end]), "nothing")


MACHINE = Fault(
    name="machine",
    what="any order of submit, start, poll, cut, kill client, kill agent, reboot, disk full, cancel, resume, collect",
    times=100,
    holds="a job runs at most once, is recorded once, never goes back; a rebuild equals the record",
    place=desk,
    trial=trial,
)
