"""A child process that ingests journals until it is done or killed: python -m tests.store.writer DB JOB RUNS SEED.

Prints, after each commit, the sequence number that the journal must be read from after whatever happens.
"""

import random
import sys
from pathlib import Path

from dgxlab.ingest import ingest
from dgxlab.store import Store
from tests.journals import Journal, intend, whole

SAMPLES = 40


def journal(job_id: str, runs: int) -> Journal:
    """Return the journal that the writer of a job ingests."""
    return whole(job_id, runs, SAMPLES)


def main(path: Path, job_id: str, runs: int, seed: int) -> None:
    """Ingest a job's journal in pieces of random length."""
    chance = random.Random(seed)  # noqa: S311
    written = journal(job_id, runs)
    lines = written.lines()
    with Store.open(path) as store:
        intend(store, written)
        position = 0
        while position < len(lines):
            end = position + chance.randint(1, 4)
            ingest(store, job_id, lines[position:end])
            position = min(end, len(lines))
            print(position, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
