"""SIGKILL of a job's agent, of one of its programs, or of all its processes, as when memory runs out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from random import Random

from faults.aftermath import appeared, freed, last_noted, members, recovered, sid, sound
from faults.fault import Broken, Fault
from faults.host import Box, Ran, box, ended, two_cells

BENCH, CELLS = two_cells(3), 6


def _trial(place: Box, random: Random) -> str:
    """Kill something of a job at any moment of its life, and let the next command mend it."""
    word = random.choice(tuple(VICTIMS))
    hold = random.choice((_run, _session))
    return f"{word} in {hold(place, random, f'kill-{random.getrandbits(40):010x}', VICTIMS[word])}"


def _run(place: Box, random: Random, name: str, kill: Callable[[int, Random], None]) -> str:
    spec = place.spec(name, ms=random.choice((30, 150)), bench=BENCH)
    ran, phase = _hurt(place, random, ("run", spec, "--host", "box"), name, kill)
    _told(place, name, ran)
    recovered(place, name, place.run("run", spec, "--host", "box"), CELLS)
    return phase


def _session(place: Box, random: Random, name: str, kill: Callable[[int, Random], None]) -> str:
    spec = place.spec(name, ms=random.choice((10, 50)), bench=BENCH[:1])
    session = f"{name}-vs-{name}"
    command = ("noise", spec, "--host", "box")
    ran, phase = _hurt(place, random, command, session, kill)
    _told(place, session, ran)
    with place.store() as store:
        sound(place, store, session)
        sql = "SELECT jobs.job_id, state, verdict FROM verdicts JOIN jobs USING (job_id) WHERE jobs.name = ?"
        if wrong := [
            row for row in store.rows(sql, (session,)) if row["state"] != "done" and row["verdict"] != "invalid"
        ]:
            raise Broken(f"verdicts of a session that was killed: {wrong}")
    if ran.rc:
        place.run(*command).good("a session after one that was killed")
    return phase


def _hurt(
    place: Box, random: Random, command: tuple[object, ...], name: str, kill: Callable[[int, Random], None]
) -> tuple[Ran, str]:
    """Return how the command ended whose job was hurt, and what the job was doing then."""
    child = place.start(*map(str, command))
    job = appeared(place, name)
    session = sid(job)
    time.sleep(random.random() ** 2)
    kill(session, random)
    phase = last_noted(job)
    ran = ended(child)
    freed(place, job, session)
    return ran, phase


def _told(place: Box, name: str, ran: Ran) -> None:
    (job,) = place.jobs(name)
    (folder,) = place.folders(name)
    state = folder.status().state
    wanted = {0: ("done", "done"), 12: ("lost", "lost")}.get(ran.rc, ("failed", "done"))
    if (job["state"], state) != wanted:
        raise Broken(
            f"the command ended with {ran.rc}, the job is {job['state']} in the record and {state} on the host"
        )


def _agent(session: int, random: Random) -> None:
    _kill(session)


def _child(session: int, random: Random) -> None:
    """Kill a program that the agent has started, as soon as there is one."""
    while pids := members(session):
        if others := [pid for pid in pids if pid != session]:
            _kill(random.choice(others))
            return
        time.sleep(0.001)


def _group(session: int, random: Random) -> None:
    """Kill all, also what is started meanwhile."""
    while pids := members(session):
        for pid in pids:
            _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


VICTIMS: Mapping[str, Callable[[int, Random], None]] = {"agent": _agent, "child": _child, "all": _group}

KILLED = Fault(
    "agent",
    "agent SIGKILL, child SIGKILL, whole process group",
    100,
    "lost or failed, 0 verdicts from it, 0 orphans, lock free in 10 s",
    box,
    _trial,
)
