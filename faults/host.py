"""A host to inject faults in: the real program, a real sshd behind a faulty network, and the toy with its ledger."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.place import Far, far
from dgxlab.agent.job import Job
from dgxlab.store import Store
from faults.fault import Broken
from faults.ledger import Launch, compare, intact, once
from faults.spaces import Disk
from tests.proxy import Proxy
from tests.sshd import Sshd

COMMAND_S = 100.0
"""A command that takes longer counts as hung."""

BENCH: Sequence[Mapping[str, Any]] = ({"llama-bench": {"model": "m", "n_prompt": [16, 32], "n_gen": 4}},)
"""One entry of three cells."""
CELLS = 3


def two_cells(launches: int) -> Sequence[Mapping[str, Any]]:
    """Return this many bench entries of two cells each."""
    return tuple({"llama-bench": {"model": "m", "n_prompt": [n, 2 * n]}} for n in range(16, 16 + launches))


VALID_CELLS = """SELECT DISTINCT job_id, cell FROM rows JOIN runs USING (run_id) JOIN jobs USING (job_id)
    WHERE jobs.name = ? AND runs.status = 'valid'"""
"""Selects the valid cells of an experiment; a job may have measured a cell twice, if a run was disturbed."""
EMPTY_SHARE = 0.1
"""Share of trials that begin with an empty host, so that everything is sent and built again."""


@dataclass(frozen=True)
class Ran:
    """The result of a command."""

    rc: int
    out: str
    err: str

    def good(self, what: str) -> Ran:
        """Return this result.

        Raises:
            Broken: if the exit status is not 0.
        """
        if self.rc != 0:
            raise Broken(f"{what} ended with {self.rc}: {self.err}")
        return self


@dataclass(frozen=True)
class Box:
    """A host named `box` behind a proxy, and a project with a record; the host `near` is the same without network.

    An experiment's name is in the environment of its programs too, so that each experiment has its own cells, and is
    not up to date because another was measured.

    Attributes:
        within: Words to put before each command, for other namespaces.
    """

    there: Far
    proxy: Proxy
    within: Sequence[str] = ()

    @property
    def server(self) -> Sshd:
        """The host's sshd."""
        return self.there.server

    @property
    def root(self) -> Path:
        """The agent's folder on the host."""
        return self.there.root

    @property
    def ledger(self) -> Path:
        """The ledger of the toy's programs."""
        return self.there.here.folder / "ledger"

    @property
    def database(self) -> Path:
        """The record."""
        return self.there.here.project / "results.db"

    def spec(self, name: str, *, ms: int = 0, bench: Sequence[Mapping[str, Any]] = BENCH, **fields: Any) -> Path:
        """Write an experiment's spec, and return its path.

        Args:
            name: A new name.
            ms: Least time of each launch, in milliseconds.
            bench: The bench entries; each is one launch.
            fields: Further keys of the spec.
        """
        env = {"TOY_NAME": name, "TOY_MS": str(ms), **fields.pop("env", {})}
        return self.there.here.spec(name, bench, env=env, **fields)

    def new(self, random: Random, kind: str, ms: Sequence[int], **fields: Any) -> tuple[str, Path]:
        """Write the spec of a new experiment, whose `ms` is one of these; return its name and path."""
        name = f"{kind}-{random.getrandbits(40):010x}"
        return name, self.spec(name, ms=random.choice(ms), **fields)

    def start(self, *args: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start `dgxlab ARGS` in the project; `options` are further ones of Popen."""
        return subprocess.Popen(
            [*self.within, sys.executable, "-m", "dgxlab", *map(str, args)],
            cwd=self.there.here.project,
            text=True,
            **{
                "env": {**self.there.here.env, "DGXLAB_LOCKS": str(self.server.locks)},
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                **options,
            },
        )

    def run(self, *args: str | Path, **options: Any) -> Ran:
        """Run `dgxlab ARGS` in the project to its end.

        Raises:
            Broken: if it does not end, or shows a traceback.
        """
        return ended(self.start(*args, **options))

    @contextmanager
    def store(self) -> Iterator[Store]:
        """Open the record."""
        with Store.open(self.database, create=False) as opened:
            yield opened

    def keep_or_empty(self, random: Random) -> bool:
        """Remove the agent's folder from the host in one of ten trials; return whether it was kept."""
        if random.random() < EMPTY_SHARE:
            shutil.rmtree(self.root)
            return False
        return True

    def jobs(self, experiment: str) -> list[dict[str, Any]]:
        """Return an experiment's jobs in the record."""
        if not self.database.exists():
            return []
        with self.store() as store:
            return store.rows("SELECT * FROM jobs WHERE name = ? ORDER BY job_id", (experiment,))

    def folders(self, experiment: str) -> list[Job]:
        """Return an experiment's jobs on the host as the agent sees them."""
        jobs = [Job(path.parent) for path in sorted(self.root.glob("jobs/[!.]*/plan.json"))]
        return [job for job in jobs if json.loads(job.plan.read_text())["name"] == experiment]

    def check(self, experiment: str, *, jobs: int | None = None, cells: int | None = None) -> list[Launch]:
        """Compare the record of an experiment with its launches, and return the launches.

        Args:
            jobs: Number of jobs that must be done, on the host and in the record; None for any.
            cells: Number of cells that must have a valid value each, with nothing launched twice; None for any.

        Raises:
            Broken: if anything is lost, wrong, or was done twice.
        """
        recorded, there = self.jobs(experiment), {job.job_id: job.status().state for job in self.folders(experiment)}
        if unknown := there.keys() - {job["job_id"] for job in recorded}:
            raise Broken(f"lost: the record does not know {sorted(unknown)}")
        states = {job["job_id"]: job["state"] for job in recorded}
        if jobs is not None and (len(recorded) != jobs or {*states.values(), *there.values()} != {"done"}):
            raise Broken(f"there are not {jobs} good jobs: {states} in the record, {there} on the host")
        with self.store() as store:
            launches = compare(store, self.ledger, experiment)
            if cells is not None:
                once(launches)
                n = len(store.rows(VALID_CELLS, (experiment,)))
                if n != cells:
                    raise Broken(f"{'lost' if n < cells else 'twice'}: {n} values of {cells} cells")
            intact(store)
        return launches


@dataclass(frozen=True, kw_only=True)
class OnDisk(Box):
    """A box with some of its folders on a small disk."""

    disk: Disk


class HostOnDisk(OnDisk):
    """A box whose agent's folder is on the disk."""

    @property
    def root(self) -> Path:
        """The agent's folder, on its disk."""
        return self.disk.seen(super().root)


def ended(child: subprocess.Popen[str]) -> Ran:
    """Wait for the end of a command.

    Raises:
        Broken: if it does not end, or shows a traceback.
    """
    try:
        out, err = child.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        child.kill()
        _, err = child.communicate()
        raise Broken(f"{child.args!r} did not end within {COMMAND_S:.0f} s: {err[-1000:]}") from None
    if "Traceback" in err or child.returncode == 1:
        raise Broken(f"{child.args!r} ended with {child.returncode}: {err[-3000:]}")
    return Ran(child.returncode, out, err)


@contextmanager
def box(within: Sequence[str] = ()) -> Iterator[Box]:
    """Yield a host on which the agent and the toy are installed and built.

    Args:
        within: Words to put before the sshd's command, for other namespaces.
    """
    with far(within=within) as there, Proxy(there.server.port) as proxy:
        host = Box(there, proxy)
        there.reach(proxy.port)
        env = {"TOY_LEDGER": str(host.ledger)}
        hosts = {
            "box": {"ssh": "box", "python": sys.executable, "env": env},
            "near": {"local": True, "root": str(there.root), "env": env},
        }
        there.here.hosts.write_text(json.dumps(hosts))
        host.run("run", host.spec("warm"), "--host", "box").good("a run without a fault")
        host.check("warm", jobs=1, cells=CELLS)
        yield host
