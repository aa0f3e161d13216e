"""A child process that ingests journals until it is done or killed: python -m tests.store.writer DB JOB RUNS SEED.

Prints, after each commit, the sequence number that the journal must be read from after whatever happens.
"""

import random
import subprocess
import sys
import threading
from pathlib import Path

from dgxlab.ingest import ingest
from dgxlab.store import Store
from tests.journals import Journal, intend, whole

PROJECT = Path(__file__).resolve().parents[2]
SAMPLES = 40
ENDLESS = 400  # runs in a journal that a writer has not finished when it is killed


def journal(job_id: str, runs: int) -> Journal:
    return whole(job_id, runs, SAMPLES)


def start(path: Path, job_id: str, runs: int, seed: int) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "tests.store.writer", str(path), job_id, str(runs), str(seed)]
    return subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def killed(path: Path, job_id: str, seed: int, after_s: float, least: int = 0) -> int:
    """Start a writer, kill it so long after it committed line `least`, return the last line that it acknowledged."""
    child = start(path, job_id, ENDLESS, seed)
    assert child.stdout is not None
    while int(first := child.stdout.readline()) < least:
        pass
    timer = threading.Timer(after_s, child.kill)
    timer.start()
    rest, errors = child.communicate(timeout=30)
    timer.cancel()
    assert (child.returncode, errors) == (-9, "")
    whole_lines = (first + rest).rpartition("\n")[0]
    return int(whole_lines.splitlines()[-1])


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
