"""A client at its desk and a host that can be hurt in every way, for whoever decides what comes next."""

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
from dgxlab.lab.session import resolve
from dgxlab.model import Experiment, Plan, Source, canonical
from dgxlab.source import PinCache
from dgxlab.spec import load
from dgxlab.spec.hosts import find_host
from dgxlab.store import Store
from dgxlab.transport.host import Host
from dgxlab.transport.ssh import SshTransport
from faults.aftermath import FREE_S, members, sid, unlocked
from faults.fault import Broken, wait_while
from faults.host import Box, box
from faults.spaces import Disk, disk
from tests.sshd import end_sessions

SIZE = 40 << 20
"""Of the host's disk: more than twice what one has that is nearly full."""

BENCH = tuple({"llama-bench": {"model": "m", "n_prompt": n}} for n in (16, 32))
RUNS = len(BENCH)


@dataclass(frozen=True)
class OnDisk(Box):
    """A box whose agent's folder is seen through another process: it is on a disk that this one does not see."""

    seen: Path | None = None

    @property
    def root(self) -> Path:
        """The agent's folder on the host."""
        return self.seen or super().root


@dataclass
class Desk:
    """One client, with the library on a connection through the proxy, and its host.

    Attributes:
        box: The host, and the project for commands.
        disk: Where the agent's folder lies.
        boot_id: The file that the host's kernel seems to have.
        base: The experiment that others are made from.
    """

    box: Box
    disk: Disk
    boot_id: Path
    host: Host
    base: Experiment
    source: Source
    raw: Path

    @contextmanager
    def lab(self) -> Iterator[Lab]:
        """Open a new record for one history; the host forgets older jobs."""
        for path in (*self.box.root.glob("jobs/*"), *self.box.root.glob("trash/*")):
            shutil.rmtree(path)
        shutil.rmtree(self.raw, ignore_errors=True)
        self.box.database.unlink(missing_ok=True)
        with Store.open(self.box.database) as store:
            yield Lab(store, PinCache(self.box.there.here.pins), lambda name: self.host, self.raw)

    def plan(self, name: str, ms: int) -> Plan:
        """Return a plan of an unmeasured experiment whose launches take at least so long."""
        env = {**self.base.env, "TOY_NAME": name, "TOY_MS": str(ms)}
        experiment = replace(self.base, name=name, env=env)
        return plan.make(experiment, self.source, job_id=plan.new_job_id(name))

    def intend(self, lab: Lab, job: Plan) -> None:
        """Record a job, as a client does before it says a word to the host."""
        lab.store.intend(job, "box", __version__)

    def stage(self, job: Plan) -> None:
        """Leave what an agent leaves that was killed between staging a job and starting it."""
        agents = list(self.box.root.glob("agent/*.pyz"))
        Job.stage(self.box.root / "jobs", job.job_id, canonical(job).encode(), agents[0])

    def job(self, job: Plan) -> Job:
        """Return a job's folder on the host, as the agent itself sees it."""
        return Job(self.box.root / "jobs" / job.job_id)

    # -- what hurts ---------------------------------------------------------------------------------------------------

    def kill_agent(self, job: Plan) -> None:
        """Kill the agent of a job that has started, and see that nothing of it lives on."""
        session = sid(self.job(job))
        with contextlib.suppress(ProcessLookupError):
            os.kill(session, signal.SIGKILL)
        _see_gone(lambda: members(session))

    def reboot(self) -> None:
        """End everything that runs on the host at once, and give its kernel another boot's id."""
        root = str(self.box.there.root)
        for pid in _running(root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        end_sessions(self.box.server)
        _see_gone(lambda: _running(root))
        unlocked(self.box)
        self.boot_id.write_text(f"{UUID(int=time.time_ns())}\n")

    def kill_client(self, args: Sequence[str], after_s: float) -> None:
        """Kill the program itself while it carries out a command."""
        child = self.box.start(*args, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(after_s)
        child.kill()
        child.wait()

    def heal(self) -> None:
        """Take every fault away that lasts."""
        self.disarm()
        self.disk.clear()

    def disarm(self) -> None:
        """Let everything through again."""
        self.box.proxy.cut_after = self.box.proxy.cut_after_up = None


@contextmanager
def desk() -> Iterator[Desk]:
    """Give a desk, and this process the home of its client, until the block ends."""
    with TemporaryDirectory(prefix="dgxlab-desk-") as name, disk(Path(name) / "disk") as partition:
        boot_id, kept = Path(name) / "boot_id", dict(os.environ)
        boot_id.write_text("the first boot\n")
        bound = [*partition.within(Path("/")), "mount", "--bind", str(boot_id), "/proc/sys/kernel/random/boot_id"]
        subprocess.run(bound, check=True)
        with box(partition.within(Path("/"))) as whole:
            partition.mount(SIZE, whole.root)
            os.environ |= whole.there.here.env
            try:
                yield _begin(OnDisk(whole.there, whole.proxy, seen=partition.seen(whole.root)), partition, boot_id)
            finally:
                os.environ.clear()
                os.environ |= kept


def _begin(place: OnDisk, partition: Disk, boot_id: Path) -> Desk:
    here = place.there.here
    base = load(place.spec("base", bench=BENCH, gates=[]), host="box")
    entry = find_host("box", [here.hosts])
    way = SshTransport("box", entry.ssh, entry.root, entry.python)
    source = resolve(PinCache(here.pins), base, None, lambda event: None)
    return Desk(place, partition, boot_id, Host(way, entry), base, source, here.folder / "raw")


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
