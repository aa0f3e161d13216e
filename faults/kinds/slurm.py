"""Slurm ends a job, forgets an answer, or is away: nothing is lost, and no step runs twice."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from faults import moments
from faults.aftermath import freed, recovered, sid
from faults.fault import Broken, Fault
from faults.host import CELLS, COMMAND_S, Box, Ran, box, ended
from tests.slurm import NODES, PROGRAMS, Slurm, found, slurm

FORGETFUL = """#!/bin/sh
# answers with an error once after LOSE was made, although the job was submitted
{sbatch} "$@" >"{folder}/answer" 2>&1; status=$?
rm "{folder}/lose" 2>/dev/null && exit 1
cat "{folder}/answer"; exit $status
"""
AWAY_S = (0.2, 3.0)
OTHER = ("sbatch", "--job-name=other", "--gres=gpu:4", "--output=/dev/null", "--wrap=sleep 1", "--partition=urgent")
GOOD, NOT_YET = 0, (4, 12)
"""Exit codes of a run, and of one that Slurm ended or could not be asked for."""
TRIES = 5
"""Runs after the first until one must be good: Slurm may be back only then."""
QUEUE_S = 60.0
"""Longest time until Slurm has forgotten all jobs."""
HURRY_S = 2.0
"""Pause between two calls of `_hurry`."""


@dataclass(frozen=True, kw_only=True)
class Cluster(Box):
    """A box whose jobs go through Slurm; `bin` has an sbatch whose answers can be lost."""

    slurm: Slurm
    bin: Path

    def numbers(self) -> list[str]:
        """Return Slurm's numbers of the jobs that have not ended."""
        return [line.split()[0] for line in self.queue()]

    def queue(self) -> list[str]:
        """Return a line for each job that has not ended: number, name, state, reason."""
        with suppress(subprocess.CalledProcessError):
            return self.slurm.tell("squeue", "--noheader", "--format=%i %j %T %r").splitlines()
        return []


@contextmanager
def _cluster() -> Iterator[Cluster]:
    with box() as host, slurm(host.there.here.folder / "slurm") as running:
        programs = host.there.here.folder / "bin"
        programs.mkdir()
        text = FORGETFUL.format(sbatch=shutil.which("sbatch"), folder=programs)
        (programs / "sbatch").write_text(text)
        (programs / "sbatch").chmod(0o755)
        hosts = json.loads(host.there.here.hosts.read_text())
        entry = {**hosts["near"], "slurm": {"partition": "gpu", "gres": "gpu:4", "time": "60"}}
        host.there.here.hosts.write_text(json.dumps({**hosts, "box": {**entry, "path_prepend": _beside()}}))
        before = {name: os.environ.get(name) for name in ("PATH", *running.env)}
        os.environ.update({**running.env, "PATH": f"{programs}:{os.environ['PATH']}"})
        try:
            yield Cluster(host.there, host.proxy, slurm=running, bin=programs)
        finally:
            os.environ.update({name: value for name, value in before.items() if value is not None})


def _beside() -> list[str]:
    return [str(Path(sys.executable).parent)]


def _away(place: Cluster, random: Random, name: str) -> None:
    place.slurm.kill(name)
    time.sleep(random.uniform(*AWAY_S))
    place.slurm.start(name)


def _hurry(place: Cluster) -> None:
    """Let Slurm do now what it does in minutes, and resume nodes as an administrator does.

    A killed slurmd may have accepted a job and forgotten it: Slurm calls that job running until the node registers
    again, which it does every half hour. A job whose start failed waits for two minutes. A slurmctld that forgot the
    end of a job drains its node.
    """
    tell = place.slurm.tell
    with suppress(subprocess.CalledProcessError):
        tell("scontrol", "reconfigure")
        for number in tell("squeue", "--noheader", "--states=PENDING", "--format=%i %r").splitlines():
            if number.endswith(" BeginTime"):
                tell("scontrol", "update", f"jobid={number.split()[0]}", "starttime=now")
        if "drain" in tell("sinfo", "--noheader", "--Node", "--format=%T"):
            tell("scontrol", "update", f"nodename={','.join(NODES)}", "state=resume")


def _ended(place: Cluster, child: subprocess.Popen[str]) -> Ran:
    """Wait for the end of a run, and hurry Slurm meanwhile."""
    deadline = time.monotonic() + COMMAND_S
    while child.poll() is None and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=HURRY_S)  # what it printed is kept for the next call
            break
        _hurry(place)
    return ended(child)


def _each(place: Cluster, *argv: str) -> None:
    for number in place.numbers():
        with suppress(subprocess.CalledProcessError):  # it has ended, or may not be requeued
            place.slurm.tell(*argv, number)


def _limit(place: Cluster, _: Random) -> None:
    """Send what Slurm sends a minute before the limit, which is moved to now."""
    for number in place.numbers():
        with suppress(subprocess.CalledProcessError):
            place.slurm.tell("scontrol", "update", f"jobid={number}", "timelimit=1")
            place.slurm.tell("scancel", "--batch", "--signal=TERM", number)


WAYS: Mapping[str, Callable[[Cluster, Random], object]] = {
    "slurmctld restarted": lambda place, random: _away(place, random, "slurmctld"),
    "slurmd killed": lambda place, random: _away(place, random, random.choice(("node1", "node2"))),
    "scancel": lambda place, _: _each(place, "scancel"),
    "killed": lambda place, _: _each(place, "scancel", "--signal=KILL", "--full"),
    "requeue": lambda place, _: _each(place, "scontrol", "requeue"),
    "preempted": lambda place, _: [place.slurm.tell(*OTHER, f"--nodelist=node{n}") for n in (1, 2)],
    "limit": _limit,
}


def _trial(place: Cluster, random: Random) -> str:
    """Run, let one of these happen at a random moment, and continue as a user would."""
    name, spec = place.new(random, "slurm", (0, 200))
    way = random.choice((*WAYS, "answer lost"))
    if way == "answer lost":
        (place.bin / "lose").touch()
    child = place.start("run", spec, "--host", "box")
    try:
        if way != "answer lost":
            moments.wait(place, name, child, random)
            WAYS[way](place, random)
        ran, left = _ended(place, child), TRIES
        while ran.rc != GOOD:
            if not left or ran.rc not in NOT_YET or "next: " not in ran.err:
                raise Broken(f"{way}: run {TRIES - left + 1} ended with {ran.rc}: {ran.err}")
            child, left = place.start("run", spec, "--host", "box"), left - 1
            ran = _ended(place, child)
        deadline = time.monotonic() + QUEUE_S
        while (queue := place.queue()) and time.monotonic() < deadline:
            _hurry(place)
            time.sleep(HURRY_S)
        if queue:
            raise Broken(f"{way}: orphans in the queue: {queue}")
    except BaseException:  # the next trial begins without what this one left
        child.kill()
        _each(place, "scancel")
        raise
    for job in place.folders(name):
        if (job.folder / "started").exists():
            freed(place, job, sid(job))
    recovered(place, name, ran, CELLS)
    return way


def _lacks() -> str:
    missing = [name for name in PROGRAMS if not Path(found(name)).exists()]
    return " and ".join([*(["root"] if os.getuid() else []), *missing])


SLURM = Fault(
    "slurm",
    "slurmctld restarted, slurmd killed, scancel, requeue, preemption, time limit, answer of sbatch lost",
    200,
    "0 lost, 0 wrong, 0 run twice, 0 orphans",
    _cluster,
    _trial,
    limit_s=600.0,
    lacks=_lacks,
)
