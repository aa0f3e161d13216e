"""A clock that is set an hour back or forward while a job runs: the client's, the host's, or both."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from dgxlab.agent.job import Job
from faults.aftermath import appeared, recovered
from faults.clock import Clock
from faults.fault import Broken, Fault
from faults.host import Box, Ran, box, ended, two_cells
from faults.ledger import read

BENCH, CELLS = two_cells(3), 6
HOUR_S = 3600
SLACK_S = 20.0
"""How much longer than the program itself its run may be said to have taken, on a machine that has much else to do."""

DURATIONS = """SELECT 'run' AS what, run_id AS key, raw, seconds FROM runs JOIN jobs USING (job_id) WHERE name = :name
    UNION ALL SELECT 'gate', gate_id, gates.raw, gates.seconds FROM gates JOIN jobs USING (job_id) WHERE name = :name
    UNION ALL SELECT 'build', arm, '', arms.seconds FROM arms JOIN jobs USING (job_id) WHERE name = :name
    UNION ALL SELECT 'model', inputs.name, '', inputs.seconds FROM inputs JOIN jobs USING (job_id)
        WHERE jobs.name = :name"""


@dataclass(frozen=True, kw_only=True)
class Clocks(Box):
    """A box whose two sides have clocks that can be set."""

    client: Clock
    host: Clock

    def timed(self, *args: str | Path) -> Ran:
        """Run `dgxlab ARGS` by the client's clock."""
        return self.run(*args, env={**self.there.here.env, **self.client.env})


@contextmanager
def _clocks() -> Iterator[Clocks]:
    with TemporaryDirectory(prefix="dgxlab-clock-") as name, box() as whole:
        client, host = (Clock.make(Path(name) / side) for side in ("client", "host"))
        hosts = whole.there.here.hosts
        told = json.loads(hosts.read_text())
        told["box"]["python"] = str(host.python)
        hosts.write_text(json.dumps(told))
        yield Clocks(whole.there, whole.proxy, client=client, host=host)


def _trial(place: Clocks, random: Random) -> str:
    """Set clocks during a run; then everything is done once, took as long as it did, and is known to be done."""
    name, spec = place.new(random, "clock", (100, 300), bench=BENCH)
    hour = random.choice((-HOUR_S, HOUR_S))
    which = random.choice(("client", "host", "both"))
    child = place.start("run", spec, "--host", "box", env={**place.there.here.env, **place.client.env})
    try:
        job = appeared(place, name)
        _wait(place, job, random)
        for clock in (place.client, place.host) if which == "both" else (getattr(place, which),):
            clock.set(hour)
        ended(child).good("the command")
        place.check(name, jobs=1, cells=CELLS)
        _durations(place, name)
        recovered(place, name, place.timed("run", spec, "--host", "box"), CELLS)
        _ages(place, job.job_id)
    finally:
        place.client.set(0)
        place.host.set(0)
    return f"{which} {'back' if hour < 0 else 'forward'}{_jumped(job)}"


def _wait(place: Clocks, job: Job, random: Random) -> None:
    """Wait for some moment of a job, more often than not one at which a program runs."""
    if random.random() < 0.3:
        time.sleep(random.random())
        return
    number = random.randrange(1 + len(BENCH))  # of its launches, the gate among them
    while len([launch for launch in read(place.ledger) if launch.job_id == job.job_id]) <= number:
        time.sleep(0.01)


def _jumped(job: Job) -> str:
    """Return that the agent saw its clock being set, "" where it did not."""
    times = [json.loads(line)["t"] for line in job.journal.read_text().splitlines()]
    return " in the journal" if max(times) - min(times) > HOUR_S / 2 else ""


def _durations(place: Clocks, name: str) -> None:
    """See that what is said to have taken so long did: by the clock of the programs themselves.

    Raises:
        Broken: if something did not.
    """
    took = {launch.raw: (launch.end or 0) - launch.begin for launch in place.check(name)}
    with place.store() as store:
        for row in store.rows(DURATIONS, {"name": name}):
            own = took[json.loads(row["raw"])["stdout"]["path"]] if row["raw"] else 0.0
            if not own <= row["seconds"] <= own + SLACK_S:
                raise Broken(f"{row['what']} {row['key']} took {own} s, and is said to have taken {row['seconds']}")


def _ages(place: Clocks, job_id: str) -> None:
    """See that a job is never younger than nothing, nor older than the clock was set.

    Raises:
        Broken: if it is.
    """
    ran = place.timed("jobs", "--host", "box", "--format", "json")
    (age_s,) = (job["age_s"] for job in json.loads(ran.out) if job["job"] == job_id)
    if not 0 <= age_s <= HOUR_S + 100:
        raise Broken(f"job {job_id} is said to be {age_s} s old")


SET = Fault(
    "clock",
    "clock set back or forward an hour",
    20,
    "durations from the monotonic clock",
    _clocks,
    _trial,
)
