"""Checks after a job was ended by force, and after the next `run`."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dgxlab.agent.job import Job
from dgxlab.store import Store
from faults.fault import Broken, wait_while
from faults.host import VALID_CELLS, Box, Ran
from faults.ledger import compare, intact

FREE_S = 10.0
"""Longest time in which locks must be free and processes gone after an agent's end."""
START_S = 60.0
"""Longest time until a job must have started on its host."""


def appeared(box: Box, experiment: str) -> Job:
    """Wait for an experiment's job to have started on the host, and return it.

    Raises:
        Broken: if it does not.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        for job in box.folders(experiment):
            if (job.folder / "started").exists():
                return job
        time.sleep(0.01)
    raise Broken(f"no job of {experiment} started within {START_S:.0f} s")


def last_noted(job: Job) -> str:
    """Return the kind of the last event in a job's journal, "" without events."""
    return next(reversed(_noted_kinds(job)), "")


def _noted_kinds(job: Job) -> list[str]:
    """Return the kind of every event in a job's journal, without decoding the rest."""
    lines = job.journal.read_bytes().splitlines(keepends=True) if job.journal.exists() else []
    return [str(json.loads(line)["event"]) for line in lines if line.endswith(b"\n")]


def sid(job: Job) -> int:
    """Return the session id of a job's processes, which its agent wrote down."""
    return int(json.loads((job.folder / "started").read_text())["sid"])


def members(session: int) -> list[int]:
    """Return the process ids of a session, without zombies; its leader, the agent, comes first."""
    return sorted(_members(session), key=lambda pid: (pid != session, pid))


def _members(session: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z" and int(rest[2]) == session:
            yield int(stat.parent.name)


def freed(box: Box, job: Job, session: int) -> None:
    """Check that a job whose agent is gone has no process left, and that its locks are free.

    Raises:
        Broken: if a process lives, or a lock is held, after FREE_S.
    """

    def held() -> str:
        if pids := members(session):
            return f"there are orphans: {[Path(f'/proc/{pid}/cmdline').read_bytes() for pid in pids]}"
        return _locked(job.folder / "run.lock", *box.server.locks.glob("dgxlab-*"))

    if what := wait_while(held, FREE_S):
        raise Broken(f"{FREE_S:.0f} s after the agent of {job.job_id} was gone {what}")


def unlocked(box: Box) -> None:
    """Wait until all locks on a host are free: a killed process releases them a moment after its end.

    Raises:
        Broken: if one stays held.
    """

    def held() -> str:
        return _locked(*box.root.glob("jobs/*/run.lock"), *box.server.locks.glob("dgxlab-*"))

    if what := wait_while(held, FREE_S):
        raise Broken(f"{FREE_S:.0f} s after the host went down {what}")


def _locked(*paths: Path) -> str:
    for path in paths:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return f"{path.name} is held"
        finally:
            os.close(fd)
    return ""


def recovered(box: Box, experiment: str, ran: Ran, cells: int) -> None:
    """Check that a last `run` succeeded, and that every cell then has one value: nothing was measured twice.

    Raises:
        Broken: if not, or if anything is lost or wrong.
    """
    ran.good("the run after it")
    measured(box, experiment, cells)


def measured(box: Box, experiment: str, cells: int, at_most: int = 1) -> None:
    """Check that every cell of an experiment has a value, and that the record has what was executed.

    Args:
        at_most: Most jobs that may have measured a cell.

    Raises:
        Broken: if a cell has no value or too many, or anything is lost or wrong.
    """
    with box.store() as store:
        sound(box, store, experiment)
        times = Counter(row["cell"] for row in store.rows(VALID_CELLS, (experiment,)))
    if len(times) != cells or max(times.values()) > at_most:
        raise Broken(f"{cells} cells should have a value each, {at_most} at most: {times}")


def sound(box: Box, store: Store, experiment: str) -> None:
    """Check that the record has all events of the journals, and what was executed.

    Raises:
        Broken: if not.
    """
    states = {job["job_id"]: job["state"] for job in box.jobs(experiment)}
    compare(store, box.ledger, experiment, cut=[job_id for job_id, state in states.items() if state != "done"])
    for job in box.folders(experiment):
        _noted(store, job, states)
    intact(store)


def _noted(store: Store, job: Job, states: dict[str, Any]) -> None:
    events = Counter(_noted_kinds(job))
    for kind in ("run", "gate"):
        (row,) = store.rows(f"SELECT count(*) AS n FROM {kind}s WHERE job_id = ?", (job.job_id,))  # noqa: S608 - from above
        if row["n"] != events.get(kind, 0):
            raise Broken(
                f"lost: job {job.job_id} ({states.get(job.job_id)}) noted {events[kind]} {kind}s, {row['n']} are stored"
            )
