"""Programs that leave processes running, hidden in any way: these must be ended and reported."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from faults.aftermath import FREE_S, appeared, freed, recovered, sid
from faults.fault import Broken, Fault, wait_while
from faults.host import Box, box, ended, two_cells

BENCH, CELLS = two_cells(2), 4
HOW = {"s": "own session", "c": "closed", "t": "deaf", "f": "forks on"}
"""What the remaining process does; see TOY_LEAVES in tests/toy.py."""


def _trial(place: Box, random: Random) -> str:
    """Let every launch leave something, and the job end by itself, by `cancel`, or by the death of its agent."""
    how = "".join(letter for letter in HOW if random.random() < 0.5)
    end = random.choice(("ends", "ends", "cancelled", "killed"))
    name, spec = place.new(random, "left", (0, 200), bench=BENCH, env={"TOY_LEAVES": how or "-"})
    child = place.start("run", spec, "--host", "box")
    job = appeared(place, name)
    session = sid(job)
    if end != "ends":
        time.sleep(random.random())
    if end == "killed":
        with suppress(ProcessLookupError):
            os.kill(session, signal.SIGKILL)
    if end != "ends":
        place.run("cancel", job.job_id).good("cancel")
    ran = ended(child)
    if ran.rc not in {"ends": (0,), "cancelled": (0, 130), "killed": (0, 12)}[end]:
        raise Broken(f"the command ended with {ran.rc}: {ran.err}")
    if end == "killed":
        place.run("cancel", job.job_id).good("cancel of a lost job")
    _gone(name)
    freed(place, job, session)
    recovered(place, name, place.run("run", spec, "--host", "box"), CELLS)
    _gone(name)
    _told(place, name)
    return f"{end}, {', '.join(HOW[letter] for letter in how) or 'in its group'}"


def _gone(name: str) -> None:
    """See that nothing lives that an experiment's programs started.

    Raises:
        Broken: if something does.
    """
    if living := wait_while(lambda: _living(f"TOY_NAME={name}"), FREE_S):
        raise Broken(f"{FREE_S:.0f} s later there are processes that {name} left: {living}")


def _living(word: str) -> list[int]:
    pids: list[int] = []
    seen = set[Path]()
    while not pids and (new := set(Path("/proc").glob("[0-9]*")) - seen):  # what forks on began meanwhile
        seen |= new
        for process in new:
            with suppress(OSError):
                if word.encode() in (process / "environ").read_bytes().split(b"\0"):
                    pids.append(int(process.name))
    return pids


def _told(place: Box, name: str) -> None:
    """See that every run says what it left.

    Raises:
        Broken: if one does not.
    """
    sql = """SELECT run_id FROM runs JOIN jobs USING (job_id) WHERE jobs.name = ? AND status = 'valid'
        AND run_id NOT IN (SELECT run_id FROM flags WHERE kind = 'left_running')"""
    with place.store() as store:
        if silent := store.rows(sql, (name,)):
            raise Broken(f"runs do not say what they left: {silent}")


LEFTOVER = Fault(
    "leftover",
    "programs that leave processes running: in their own session, without descriptors, deaf, forking on",
    100,
    "0 alive after a run, a cancel, or the agent's death and a cancel; every run is flagged; locks free",
    box,
    _trial,
)
