"""A place to break: the real program, a real sshd behind a faulty network, and the toy, which notes what it does."""

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
from tests.proxy import Proxy
from tests.sshd import Sshd

COMMAND_S = 100.0
"""A command of the program that takes longer hangs."""

BENCH: Sequence[Mapping[str, Any]] = ({"llama-bench": {"model": "m", "n_prompt": [16, 32], "n_gen": 4}},)
"""One entry of three cells."""
CELLS = 3


def two_cells(launches: int) -> Sequence[Mapping[str, Any]]:
    """Return so many entries of two cells each."""
    return tuple({"llama-bench": {"model": "m", "n_prompt": [n, 2 * n]}} for n in range(16, 16 + launches))


VALID_CELLS = """SELECT DISTINCT job_id, cell FROM rows JOIN runs USING (run_id) JOIN jobs USING (job_id)
    WHERE jobs.name = ? AND runs.status = 'valid'"""
"""Of an experiment; a job itself repeats a run that had to share the processors."""
EMPTY_SHARE = 0.1
"""How often a trial begins with an empty host: then everything is sent and built again."""


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    rc: int
    out: str
    err: str

    def good(self, what: str) -> Ran:
        """Return this if it ended well.

        Raises:
            Broken: if not.
        """
        if self.rc != 0:
            raise Broken(f"{what} ended with {self.rc}: {self.err}")
        return self


@dataclass(frozen=True)
class Box:
    """A host `box`, by way of a proxy, and a project with a record.

    The same machine is `near` without a network in between. Experiments differ in their names, which are in the
    environment of what they run too, so that each has cells of its own and measures although others did.

    Attributes:
        within: The beginning of the commands' own command lines: namespaces of their own.
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
        """Where the toy's programs write down what they did."""
        return self.there.here.folder / "ledger"

    @property
    def database(self) -> Path:
        """The record."""
        return self.there.here.project / "results.db"

    def spec(self, name: str, *, ms: int = 0, bench: Sequence[Mapping[str, Any]] = BENCH, **fields: Any) -> Path:
        """Write an experiment that was never measured.

        Args:
            name: One that was not used before.
            ms: How long each launch of a program takes at least.
            bench: What is measured; an entry is one launch.
            fields: Further ones of the spec.
        """
        env = {"TOY_NAME": name, "TOY_MS": str(ms), **fields.pop("env", {})}
        return self.there.here.spec(name, bench, env=env, **fields)

    def new(self, random: Random, kind: str, ms: Sequence[int], **fields: Any) -> tuple[str, Path]:
        """Write an experiment for a trial, whose launches take one of these times; return its name and file."""
        name = f"{kind}-{random.getrandbits(40):010x}"
        return name, self.spec(name, ms=random.choice(ms), **fields)

    def start(self, *args: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start `dgxlab ARGS` as a process of its own, in the project."""
        return subprocess.Popen(
            [*self.within, sys.executable, "-m", "dgxlab", *map(str, args)],
            cwd=self.there.here.project,
            text=True,
            **{
                "env": self.there.here.env,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                **options,
            },
        )

    def run(self, *args: str | Path, **options: Any) -> Ran:
        """Run `dgxlab ARGS` to its end.

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
        """Leave the host as it is, or, seldom, make it one that never saw the program; return whether it was left."""
        if random.random() < EMPTY_SHARE:
            shutil.rmtree(self.root)
            return False
        return True

    def jobs(self, experiment: str) -> list[dict[str, Any]]:
        """Return an experiment's rows in the record's table of jobs, () where there is no record yet."""
        if not self.database.exists():
            return []
        with self.store() as store:
            return store.rows("SELECT * FROM jobs WHERE name = ? ORDER BY job_id", (experiment,))

    def folders(self, experiment: str) -> list[Job]:
        """Return the folders of an experiment's jobs on the host, as the agent itself sees them."""
        jobs = [Job(path.parent) for path in sorted(self.root.glob("jobs/[!.]*/plan.json"))]
        return [job for job in jobs if json.loads(job.plan.read_text())["name"] == experiment]

    def check(self, experiment: str, *, jobs: int | None = None, cells: int | None = None) -> list[Launch]:
        """Compare the record of an experiment with what was launched for it, and return that.

        Args:
            jobs: How many jobs there must be, on the host and in the record, all of which ended well.
            cells: How many cells must have a valid value, of one job each; then nothing may have been launched twice.

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


def ended(child: subprocess.Popen[str]) -> Ran:
    """Wait for a command.

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
    """Give a place in which everything that trials share is built: the agent is on the host, and the toy.

    Args:
        within: The beginning of the command line that the host's sshd is started with: namespaces of its own.
    """
    with far(within=within) as there, Proxy(there.server.port) as proxy:
        place = Box(there, proxy)
        there.reach(proxy.port)
        env = {"TOY_LEDGER": str(place.ledger)}
        hosts = {
            "box": {"ssh": "box", "python": sys.executable, "env": env},
            "near": {"local": True, "root": str(there.root), "env": env},
        }
        there.here.hosts.write_text(json.dumps(hosts))
        place.run("run", place.spec("warm"), "--host", "box").good("a run without a fault")
        place.check("warm", jobs=1, cells=CELLS)
        yield place
