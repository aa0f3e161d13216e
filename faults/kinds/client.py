"""The client is killed at random moments: the next one must find the job, finish it and record it once."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from faults import moments
from faults.fault import Broken, Fault
from faults.host import CELLS, Box, box, ended

NOT_YET = 4
"""Exit code of `attach` for a job that has not started."""
SETTLED_SHARE = 0.25
"""Share of trials that also compare the output of commands, which takes as long as everything else."""


def trial(place: Box, random: Random) -> str:
    """Kill a run one or more times, at random moments, and then continue as a user would."""
    name, spec = place.new(random, "kill", (0, 100, 300))
    place.keep_or_empty(random)
    met = _kill(place, name, spec, random)
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        _kill(place, name, spec, random)
    _look(place, name, random)
    place.run("run", spec, "--host", "box").good("the run after it")
    place.check(name, jobs=1, cells=CELLS)
    if random.random() < SETTLED_SHARE:
        _settled(place, name)
    return met


def _kill(place: Box, name: str, spec: Path, random: Random) -> str:
    """Start a run, kill it, and return what it was at."""
    child = place.start("run", spec, "--host", "box")
    moments.wait(place, name, child, random)
    if child.poll() is not None:
        if ended(child).rc != 0:
            raise Broken(f"a run that was not killed ended with {child.returncode}")
        return "after"
    child.kill()
    child.communicate()
    return moments.phase(place, name)


def _look(place: Box, name: str, random: Random) -> None:
    """Look at what is left with another command before running again, or not."""
    recorded = place.jobs(name)
    command = random.choice(("", "jobs", "attach"))
    if command == "jobs":
        place.run("jobs", "--host", "box").good("jobs")
    elif command == "attach" and recorded:
        ran = place.run("attach", recorded[-1]["job_id"])
        if ran.rc != NOT_YET or "has not started on box yet" not in ran.err:
            ran.good("attach")


def _settled(place: Box, name: str) -> None:
    """See that the program itself says that the job is done and that its raw files can be had."""
    (job,) = place.jobs(name)
    listed = json.loads(place.run("jobs", "--host", "box", "--format", "json").good("jobs").out)
    (status,) = [row for row in listed if row["job"] == job["job_id"]]
    if (status["on_host"], status["recorded"]) != ("done", "done"):
        raise Broken(f"jobs says of a finished job that it is {status['on_host']} and recorded as {status['recorded']}")
    place.run("logs", job["job_id"]).good("logs")


CLIENT_KILLED = Fault(
    name="client-killed",
    what="client SIGKILL at random moments of submit, start, follow, ingest, report",
    times=200,
    holds="0 lost, 0 wrong, 0 run twice; `jobs` and `run` finish all",
    place=box,
    trial=trial,
)
