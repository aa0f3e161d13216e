"""The n-th write of the record or of an agent fails with EIO, ENOSPC or EINTR, once or from then on."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from dgxlab.agent.files import remote_error
from dgxlab.agent.job import Job
from dgxlab.agent.work import work
from dgxlab.ingest import ingest
from dgxlab.lab.jobs import record_end
from dgxlab.model import Plan, canonical, from_json
from dgxlab.replies import Status
from dgxlab.store import Store, check, merging
from faults.fault import Broken, Fault
from faults.host import CELLS, Box, box
from faults.kinds.commit import Shelf, as_it_was_or_whole, rows_of, shelf, sound
from faults.ledger import compare, intact
from faults.refusal import Refusing, refusing
from tests.journals import Journal, dump, intend, whole

ERRORS = (errno.EIO, errno.ENOSPC, errno.EINTR)
PIECE = 3
"""Lines of a journal that are ingested at a time."""

NAMED = re.compile(
    r"the disk|[Nn]o space left|Input/output error|cannot be (written|opened|copied|made)|disk I/O error"
)
"""How a message names a disk that refuses a write."""


def journal(job_id: str) -> Journal:
    """Return the journal to ingest."""
    return whole(job_id, runs=6, samples=20)


# -- what is done with writes that fail ---------------------------------------------------------------------------


def _ingest(folder: Path, done: list[Any]) -> None:
    lines = journal("job-1").lines()
    with Store.open(folder / "results.db") as store:
        intend(store, journal("job-1"))
        for at in range(0, len(lines), PIECE):
            ingest(store, "job-1", lines[at : at + PIECE])
            done.append(at + len(lines[at : at + PIECE]))


def _open(folder: Path, done: list[Any]) -> None:
    Store.open(folder / "results.db").close()


def _back_up(folder: Path, done: list[Any]) -> None:
    with Store.open(folder / "results.db") as store:
        store.back_up()


def _merge(folder: Path, done: list[Any]) -> None:
    with Store.open(folder / "results.db") as store, merging(store, folder / "other.db"):
        pass


def _job(folder: Path, done: list[Any], job_id: str, plan: str, agent: str) -> None:
    try:
        job = Job.stage(folder / "jobs", job_id, plan.encode(), Path(agent))
        done.append("staged")
        work(job.folder)
    except OSError as error:  # as the agent's command line does
        raise remote_error("the job", error) from error


ACTS: Mapping[str, Callable[..., None]] = {
    "ingest": _ingest,
    "open": _open,
    "back up": _back_up,
    "merge": _merge,
    "job": _job,
}


# -- the trials -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusals:
    """The process in which writes fail.

    Attributes:
        writes: Number of writes, by action and by the version of the database that it opens.
    """

    program: Refusing
    writes: dict[tuple[str, int], int]

    def do(self, act: str, folder: Path, random: Random | None, version: int = 0, **given: Any) -> dict[str, Any]:
        """Call an action with a random write failing; without random numbers, count its writes.

        Raises:
            Broken: if it ended in a traceback, or its error does not name the disk.
        """
        number = random.choice(ERRORS) if random else 0
        n = random.randint(1, self.writes[act, version]) if random else 0
        lasting = random is not None and number != errno.EINTR and random.random() < 0.5
        done = self.program.do(act, folder, n, number, lasting=lasting, **given)
        self.writes.setdefault((act, version), done["writes"])
        if done["traceback"]:
            raise Broken(f"{act}: {done['traceback']}")
        if done["error"] and (number in (0, errno.EINTR) or not NAMED.search(done["error"])):
            raise Broken(f"{act} ended with {done['error']}")
        return done


@dataclass(frozen=True)
class Records(Refusals):
    """Databases to write to.

    Attributes:
        full: A record with a job.
        truth: Its rows, without the time at which the job was intended.
    """

    shelf: Shelf
    full: Path
    truth: Mapping[str, Any]


@contextmanager
def _records() -> Iterator[Records]:
    """Make databases of every schema, and count the writes of everything."""
    with shelf(work=False) as databases, refusing(databases.folder, os.environ) as program:
        refusals, path, full = Refusals(program, {}), databases.anew(), databases.folder / "full.db"
        refusals.do("ingest", path.parent, None)
        with Store.open(path) as store:
            truth = dump(store, intent_times=False)
        shutil.copy(path, full)
        refusals.do("back up", path.parent, None)
        _other(path)
        refusals.do("merge", path.parent, None)
        for old in databases.olds:
            path = databases.anew()
            if old.path is not None:
                shutil.copy(old.path, path)
            refusals.do("open", path.parent, None, old.version)
        yield Records(program, refusals.writes, databases, full, truth)


def _other(path: Path) -> Path:
    """Make another record beside one, with another job."""
    other = path.with_name("other.db")
    with Store.open(other) as store:
        intend(store, journal("job-2"))
        ingest(store, "job-2", journal("job-2").lines())
    return other


def _record(records: Records, random: Random) -> str:
    """Let one write fail, and see that what was acknowledged is there, and that it can be done after all."""
    return random.choice((_of_ingest, _of_opening, _of_copy, _of_merge))(records, random)


def _of_ingest(records: Records, random: Random) -> str:
    path = records.shelf.anew()
    if random.random() < 0.5:
        Store.open(path).close()
    done = records.do("ingest", path.parent, random)
    with Store.open(path) as store:
        sound(store)
        known = store.find_job("job-1")
        if (known.journal_seq if known else 0) < max(done["done"], default=0):
            raise Broken(f"lost: line {max(done['done'])} was acknowledged")
        intend(store, journal("job-1"))
        ingest(store, "job-1", journal("job-1").lines())
        if dump(store, intent_times=False) != records.truth:
            raise Broken("going on gave another record than one that was never interrupted")
    return _word("ingest", done)


def _of_opening(records: Records, random: Random) -> str:
    old, path = random.choice(records.shelf.olds), records.shelf.anew()
    if old.path is not None:
        shutil.copy(old.path, path)
    done = records.do("open", path.parent, random, old.version)
    as_it_was_or_whole(path, old)
    with Store.open(path) as store:
        sound(store)
        if rows_of(store.connection, old.columns) != old.rows:
            raise Broken(f"migrating again lost rows of schema {old.version}")
    return _word("migration" if old.version else "creation", done)


def _of_copy(records: Records, random: Random) -> str:
    path = records.shelf.anew()
    shutil.copy(records.full, path)
    done = records.do("back up", path.parent, random)
    for copy in path.with_name(f"{path.name}.backups").glob("*.db"):
        if sound_copy := _differs(copy, records):
            raise Broken(f"a copy that has its name is none: {sound_copy}")
    if wrong := _differs(path, records):
        raise Broken(f"copying changed the record: {wrong}")
    return _word("copy", done)


def _differs(path: Path, records: Records) -> str:
    with Store.open(path) as store:
        if problems := check(store):
            return problems[0]
        return "" if dump(store, intent_times=False) == records.truth else "it holds something else"


def _of_merge(records: Records, random: Random) -> str:
    path = records.shelf.anew()
    other = _other(path)
    shutil.copy(records.full, path)
    done = records.do("merge", path.parent, random)
    with Store.open(path) as store:
        sound(store)
        jobs = [job.job_id for job in store.jobs()]
        if jobs == ["job-1"] and dump(store, intent_times=False) != records.truth:
            raise Broken("a merge that failed changed the record")
        with merging(store, other):
            pass
        sound(store)
        if len(store.jobs()) != 2:
            raise Broken("merging again did not add what was missing")
    return _word("merge", done)


def _word(act: str, done: Mapping[str, Any]) -> str:
    return f"{act}, {'refused' if done['error'] else 'whole'}"


@dataclass(frozen=True)
class Agents(Refusals):
    """A host, and a job's plan.

    Attributes:
        folder: For records.
    """

    there: Box
    plan: Plan
    agent: Path
    folder: Path


@contextmanager
def _agents() -> Iterator[Agents]:
    """Measure a job on a host, and count the writes of its agent."""
    with box() as there, TemporaryDirectory(prefix="dgxlab-io-") as name:
        folder, (warm,) = Path(name), there.folders("warm")
        env = {**there.there.here.env, "DGXLAB_ROOT": str(there.root), "DGXLAB_LOCKS": name}
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as the box's sshd has it
        env["DGXLAB_HOST"] = json.dumps({"env": {"TOY_LEDGER": str(there.ledger)}})
        with refusing(folder, env) as program:
            plan = from_json(Plan, json.loads(warm.plan.read_text()))
            agents = Agents(program, {}, there, plan, warm.folder / "agent.pyz", folder)
            _agent(agents, None)
            yield agents


def _agent(agents: Agents, random: Random | None) -> str:
    """Let an agent carry out a job, and see that the record of what it left is what was executed."""
    job_id = agents.plan.job_id.replace("warm", f"io-{random.getrandbits(40):010x}" if random else "io")
    plan = replace(agents.plan, job_id=job_id)
    agents.there.ledger.unlink(missing_ok=True)
    done = agents.do("job", agents.there.root, random, job_id=job_id, plan=canonical(plan), agent=str(agents.agent))
    job = Job(agents.there.root / "jobs" / job_id)
    status = job.status()
    try:
        _see(agents, plan, job, status, done)
    finally:
        shutil.rmtree(job.folder, ignore_errors=True)
    return f"agent, {status.rc['status'] if status.rc else status.state}"


def _see(agents: Agents, plan: Plan, job: Job, status: Status, done: Mapping[str, Any]) -> None:
    rc = status.rc
    if status.state == "running" or (status.state == "absent" and done["done"]):
        raise Broken(f"the agent is gone, and its job is {status.state}")
    if rc is not None and (rc["exit_code"] == 1 or (rc["exit_code"] and not NAMED.search(json.dumps(rc)))):
        raise Broken(f"the job failed, and does not name the disk: {rc['message']}")
    path = agents.folder / "results.db"
    path.unlink(missing_ok=True)
    with Store.open(path) as store:
        store.intend(plan, "box", "0", staged=canonical(plan))
        if job.journal.exists():
            ingest(store, plan.job_id, job.journal.read_bytes().splitlines(keepends=True))
        record_end(store, plan.job_id, rc)
        noted = rc is not None and rc["exit_code"] == 0  # else the journal may have refused the last launch
        compare(store, agents.there.ledger, plan.name, cut=() if noted else [plan.job_id])
        valid = store.rows("SELECT DISTINCT cell FROM rows JOIN runs USING (run_id) WHERE status = 'valid'")
        intact(store)
    if rc is not None and rc["exit_code"] == 0 and len(valid) != CELLS:
        raise Broken(f"the job ended well with {len(valid)} cells")


MUST = "a sentence that names the disk; what was acknowledged is there; database intact"
RECORD = Fault("io", "EIO, ENOSPC or EINTR at the n-th write of the record", 1600, MUST, _records, _record)
AGENT = Fault("io-agent", "EIO, ENOSPC or EINTR at the n-th write of an agent", 400, MUST, _agents, _agent)
