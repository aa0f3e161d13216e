"""A host whose sshd starts again, and one that loses its power and comes back as another boot."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from dgxlab.agent.job import Job
from faults.aftermath import appeared, freed, last_noted, recovered, sid, unlocked
from faults.fault import Broken, Fault, wait_while
from faults.host import Box, box, ended, two_cells
from faults.spaces import power
from tests.sshd import Sshd, descendants, serving

BENCH, CELLS = two_cells(3), 6
DOWN_S = 10.0
"""How long processes may take to be gone."""


@dataclass(frozen=True, kw_only=True)
class Machine(Box):
    """A box on a machine of its own.

    Attributes:
        boot_id: The file with what its kernel calls this boot.
        boots: Every sshd that it ever had, the last one running.
        running: Ends the last one, unless it is the first.
        around: The beginning of the command line that it is started with: namespaces that outlive it.
    """

    boot_id: Path
    boots: list[Sshd]
    around: Sequence[str] = ()
    running: ExitStack = field(default_factory=ExitStack)

    @property
    def server(self) -> Sshd:
        """The sshd of this boot."""
        return self.boots[-1]

    def restart_sshd(self) -> None:
        """End sshd and all that serves connections; jobs go on, and the machine starts it again."""
        (init,) = _children(self.server.pid)
        for pid in _children(init):
            if Path(f"/proc/{pid}/exe").readlink().name == "sshd":
                _kill(pid, *descendants(pid))

    def lose_power(self) -> None:
        """End everything at once, and boot again."""
        self.stop()
        self.boot()

    def stop(self) -> None:
        """End everything at once."""
        there = descendants(self.server.pid)
        _kill(self.server.pid)
        if wait_while(lambda: any(Path(f"/proc/{pid}").exists() for pid in there), DOWN_S):
            raise RuntimeError("the machine does not go down")
        self.running.close()
        unlocked(self)

    def boot(self) -> None:
        """Start sshd, as another boot."""
        self.boot_id.write_text(f"{uuid.uuid4()}\n")
        within = [*self.around, *power(self.boot_id)]
        self.boots.append(self.running.enter_context(serving(self.server.folder, self.server.port, within)))


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def _machine() -> Iterator[Machine]:
    with TemporaryDirectory(prefix="dgxlab-boot-") as name:
        boot_id = Path(name) / "boot_id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        with box(power(boot_id)) as whole:
            machine = Machine(whole.there, whole.proxy, boot_id=boot_id, boots=[whole.server])
            with machine.running:
                yield machine


def _trial(place: Machine, random: Random) -> str:
    """Let it happen at any moment of a job, and see what the record, the host and the next command make of it."""
    name, spec = place.new(random, "boot", (50, 200), bench=BENCH)
    restart = random.random() < 0.3
    child = place.start("run", spec, "--host", "box")
    if random.random() < 0.3:
        time.sleep(1.5 * random.random())
    else:
        appeared(place, name)
        time.sleep(random.random())
    if restart:
        place.restart_sshd()
        ran, lost = ended(child), []
    else:
        lost = _rebooted(place, name)
        ran = ended(child)
    rc, states = ran.rc, {job["job_id"]: (job["state"], job["boot_id"]) for job in place.jobs(name)}
    if rc not in ((12,) if lost else (0, 3)):
        raise Broken(f"the command ended with {rc}: {ran.err}")
    if wrong := [job.job_id for job in lost if states[job.job_id][0] != "lost"]:
        raise Broken(f"{wrong} did not survive the power, and are not lost: {states}")
    met = last_noted(lost[0]) or "start" if lost else "whole" if rc == 0 else "out of reach"
    recovered(place, name, place.run("run", spec, "--host", "box"), CELLS)
    return f"{'sshd' if restart else 'power'}, {met}"


def _rebooted(place: Machine, name: str) -> list[Job]:
    """Reboot, and return the jobs that this ended.

    Raises:
        Broken: if one of them is said to run, or to have ended by itself.
    """
    before = place.boot_id.read_text().strip()
    place.lose_power()
    cut = [job for job in place.folders(name) if (job.folder / "started").exists() and not job.rc.exists()]
    for job in cut:
        freed(place, job, sid(job))
        started = job.folder / "started"
        if before not in started.read_text() or before == place.boot_id.read_text().strip():
            raise Broken(f"job {job.job_id} does not know its boot: {started.read_text()}")
        if (state := job.status().state) != "lost":
            raise Broken(f"job {job.job_id} is {state} after a reboot")
    return cut


REBOOT = Fault("reboot", "sshd restart, boot id changed", 30, "lost, never running", _machine, _trial)
