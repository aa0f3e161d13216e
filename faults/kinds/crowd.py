"""Eight clients at once on one record and one host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults.aftermath import measured
from faults.fault import Broken, Fault
from faults.host import Box, box, ended, two_cells
from faults.ledger import Launch, read

CLIENTS = 8
BENCH, CELLS = two_cells(2), 4


@dataclass(frozen=True, kw_only=True)
class Crowd(Box):
    """A box whose clients use one record outside the project."""

    record: Path

    @property
    def database(self) -> Path:
        """The shared record."""
        return self.record


def _trial(place: Box, random: Random) -> str:
    """Start them at once, some for the same experiment; all must end well, and none may disturb another."""
    names = [f"crowd-{random.getrandbits(40):010x}" for _ in range(random.choice((1, 4, CLIENTS)))]
    specs = [place.spec(name, ms=random.choice((10, 60)), bench=BENCH) for name in names]
    new = random.random() < 0.5
    record = place.database.with_name(f"{names[0]}.db") if new else place.database
    crowd = Crowd(place.there, place.proxy, record=record)
    before, running = len(read(place.ledger)), []
    for spec in itertools.islice(itertools.cycle(specs), CLIENTS):
        running.append(crowd.start("run", spec, "--host", "box", "--db", record))
        time.sleep(0.05 * random.random())
    failed = [ran.err for ran in map(ended, running) if ran.rc]
    if failed:
        raise Broken(f"{len(failed)} of {CLIENTS} clients failed: {failed[0]}")
    alone(read(place.ledger)[before:])
    for name in names:  # who starts in the instant in which another does may measure the same once more, after it
        measured(crowd, name, CELLS, at_most=CLIENTS // len(names))
    return f"{len(names)} experiments, {'a new' if new else 'the old'} record"


def alone(launches: Sequence[Launch]) -> None:
    """Check that no two programs measured at the same time.

    Raises:
        Broken: if two did.
    """
    for first, second in itertools.pairwise(sorted(launches, key=lambda launch: launch.begin)):
        if first.end is None or second.begin < first.end:
            raise Broken(f"{second.job_id} {second.raw} began while {first.job_id} {first.raw} measured")


CROWD = Fault(
    "crowd",
    "8 clients at once on one database and one host",
    50,
    "0 'database is locked', 0 overlapping measurements",
    box,
    _trial,
)
