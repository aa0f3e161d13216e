"""A client and a host on which every fault can be injected, for tests that choose the order of events."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

from dgxlab import __version__, plan
from dgxlab.agent.job import Job
from dgxlab.lab import Lab
from dgxlab.lab.request import source_of
from dgxlab.model import Experiment, Plan, Source, canonical
from dgxlab.source import PinCache
from dgxlab.spec import load
from dgxlab.spec.hosts import find_host
from dgxlab.store import Store
from dgxlab.transport.host import Host
from dgxlab.transport.ssh import SshTransport
from faults.aftermath import FREE_S, members, sid, unlocked
from faults.fault import Broken, wait_while
from faults.host import HostOnDisk, box
from faults.spaces import disk
from tests.sshd import end_sessions

SIZE = 40 << 20
"""Size of the host's disk in bytes."""

BENCH = tuple({"llama-bench": {"model": "m", "n_prompt": n}} for n in (16, 32))
RUNS = len(BENCH)


@dataclass
class Desk:
    """One client, in this process, and its host behind a proxy.

    Attributes:
        box: The host, and the project for commands.
        boot_id: The file that the host reads as its kernel's boot id.
        base: The experiment that others are made from.
    """

    box: HostOnDisk
    boot_id: Path
    host: Host
    base: Experiment
    source: Source
    raw: Path

    @contextmanager
    def lab(self) -> Iterator[Lab]:
        """Yield a lab with a new record; all jobs are removed from the host."""
        for path in (*self.box.root.glob("jobs/*"), *self.box.root.glob("trash/*")):
            shutil.rmtree(path)
        shutil.rmtree(self.raw, ignore_errors=True)
        self.box.database.unlink(missing_ok=True)
        with Store.open(self.box.database) as store:
            yield Lab(store, PinCache(self.box.there.here.pins), lambda name: self.host, self.raw)

    def plan(self, name: str, ms: int) -> Plan:
        """Return the plan of an experiment of a new name, whose launches take at least `ms` milliseconds."""
        env = {**self.base.env, "TOY_NAME": name, "TOY_MS": str(ms)}
        experiment = replace(self.base, name=name, env=env)
        return plan.make(experiment, self.source, job_id=plan.new_job_id(name))

    def intend(self, lab: Lab, job: Plan) -> None:
        """Record that a job is intended, as a client does before it calls the host."""
        lab.store.intend(job, "box", __version__)

    def stage(self, job: Plan) -> None:
        """Stage a job and do not start it, as an agent that is killed in between."""
        agents = list(self.box.root.glob("agent/*.pyz"))
        Job.stage(self.box.root / "jobs", job.job_id, canonical(job).encode(), agents[0])

    def job(self, job: Plan) -> Job:
        """Return a job on the host as the agent sees it."""
        return Job(self.box.root / "jobs" / job.job_id)

    # -- what hurts ---------------------------------------------------------------------------------------------------

    def kill_agent(self, job: Plan) -> None:
        """Kill the agent of a job that has started, and check that no process of the job remains."""
        session = sid(self.job(job))
        with contextlib.suppress(ProcessLookupError):
            os.kill(session, signal.SIGKILL)
        _see_gone(lambda: members(session))

    def reboot(self) -> None:
        """Kill all processes of the host at once, and give it a new boot id."""
        root = str(self.box.there.root)
        for pid in _running(root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end_sessions(self.box.server)
        _see_gone(lambda: _running(root))
        unlocked(self.box)
        self.boot_id.write_text(f"{UUID(int=time.time_ns())}\n")

    def kill_client(self, args: Sequence[str], after_s: float) -> None:
        """Start `dgxlab ARGS`, and kill it after some seconds."""
        child = self.box.start(*args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(after_s)
        child.kill()
        child.wait()

    def heal(self) -> None:
        """Remove all faults that last."""
        self.disarm()
        self.box.disk.clear()

    def disarm(self) -> None:
        """Let the proxy pass everything again."""
        self.box.proxy.cut_after = self.box.proxy.cut_after_up = None


@contextmanager
def desk() -> Iterator[Desk]:
    """Yield a desk; inside the block, this process has the environment of its client."""
    with TemporaryDirectory(prefix="dgxlab-desk-") as name, disk(Path(name) / "disk") as small:
        boot_id, kept = Path(name) / "boot_id", dict(os.environ)
        boot_id.write_text("the first boot\n")
        bound = [*small.within(Path("/")), "mount", "--bind", str(boot_id), "/proc/sys/kernel/random/boot_id"]
        subprocess.run(bound, check=True)
        with box(small.within(Path("/"))) as whole:
            small.mount(SIZE, whole.root)
            os.environ |= whole.there.here.env
            try:
                yield _desk(HostOnDisk(whole.there, whole.proxy, disk=small), boot_id)
            finally:
                os.environ.clear()
                os.environ |= kept


def _desk(place: HostOnDisk, boot_id: Path) -> Desk:
    here = place.there.here
    base = load(place.spec("base", bench=BENCH, gates=[]), host="box")
    entry = find_host("box", [here.hosts])
    way = SshTransport("box", entry.ssh, entry.root, entry.python)
    source = source_of(PinCache(here.pins), base, None, lambda event: None)
    return Desk(place, boot_id, Host(way, entry), base, source, here.folder / "raw")


def _see_gone(alive: Callable[[], list[int]]) -> None:
    if pids := wait_while(alive, FREE_S):
        raise Broken(f"{FREE_S:.0f} s after they were killed there are processes: {pids}")


def _running(word: str) -> list[int]:
    """Return the processes with a word in their command line, which only those of one host have."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes() and "\nState:\tZ" not in (path.parent / "status").read_text():
                pids.append(int(path.parent.name))
    return pids
