"""A model of jobs on a host, for a stateful test: Hypothesis chooses the order of commands and faults.

The model knows only the states that a job may be in: `absent`, `staged`, `running`, `done` or `lost`. At the end the
client does what it always would, and the record must have what was executed, once.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dgxlab.audit import check
from dgxlab.errors import DgxlabError, JobLost, RemoteError
from dgxlab.lab import Lab, raw
from dgxlab.lab.clean import clean, survey
from dgxlab.lab.jobs import follow, settle
from dgxlab.lab.rebuild import rebuild
from dgxlab.model import Plan
from dgxlab.store import Store
from dgxlab.transport.host import JobStatus
from faults.aftermath import sound
from faults.desk import RUNS, Desk
from faults.fault import Broken
from faults.ledger import once, read
from tests.journals import dump

MOST_JOBS = 3
MS = st.sampled_from([0, 100, 400])
HOW = st.sampled_from(["intend", "stage", "submit", "submit"])

STARTED = {"running", "done"}
TRIED = {"absent", "staged", *STARTED}
"""States of a job whose submission may have failed."""


@dataclass
class Modelled:
    """A job of the model.

    Attributes:
        may: The states that it may be in.
        rc: Its final status, {} before that was seen.
        cleaned: Whether its folder was removed.
    """

    plan: Plan
    may: set[str]
    rc: Mapping[str, Any]
    cleaned: bool = False

    def see(self, state: str, rc: Mapping[str, Any] | None) -> None:
        """Take note of the job's state and final status.

        Raises:
            Broken: if the state is not possible, or the final status has changed.
        """
        if state not in self.may:
            raise Broken(f"job {self.plan.job_id} is {state}, and may be {sorted(self.may)}")
        if state in ("done", "lost"):
            self.may = {state}
        elif state == "running":
            self.may -= {"absent", "staged"}
        if rc and self.rc not in ({}, rc):
            raise Broken(f"the last word of job {self.plan.job_id} was {self.rc} and is {rc}")
        self.rc = rc or self.rc


class Machine(RuleBasedStateMachine):
    """One history of commands and faults; a subclass sets `desk`."""

    desk: ClassVar[Desk]
    met: ClassVar[Counter[str]] = Counter()
    """How often each event happened in all histories."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = ExitStack()
        self.lab: Lab = self.ends.enter_context(self.desk.lab())
        self.jobs: list[Modelled] = []
        self.armed = self.full = False

    # -- what a client does -------------------------------------------------------------------------------------------

    @initialize(ms=MS, how=HOW)
    def first(self, ms: int, how: str) -> None:
        """Begin the history with a job."""
        self.submit(ms, how)

    @precondition(lambda self: len(self.jobs) < MOST_JOBS)
    @rule(ms=MS, how=HOW)
    def submit(self, ms: int, how: str) -> None:
        """Record a job as intended, and perhaps stage or start it."""
        job = self.desk.plan(f"m{uuid4().hex[:12]}", ms)
        self.desk.intend(self.lab, job)
        self.jobs.append(Modelled(job, {"absent"}, {}))
        if how == "stage" and not self.full:
            self.desk.stage(job)
            self.jobs[-1].may = {"staged"}
        elif how == "submit":
            self.start(len(self.jobs) - 1)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, MOST_JOBS - 1))
    def start(self, which: int) -> None:
        """Submit a job again, as a client does whose record lacks its end."""
        job = self._pick(which)
        if self.lab.store.job(job.plan.job_id).state not in ("intended", "running"):
            return
        before, job.may = job.may, job.may | (TRIED if job.may & {"absent", "staged"} else set())
        with self._faults("start"):
            status = self.desk.host.submit(job.plan)
            if before & {"absent", "staged"} and not self.full:
                job.may -= {"absent", "staged"}
            self._saw(job, status)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, MOST_JOBS - 1))
    def poll(self, which: int) -> None:
        """Ask the host for a job's state."""
        job = self._pick(which)
        with self._faults("poll"):
            self._saw(job, self.desk.host.status(job.plan.job_id))

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, MOST_JOBS - 1))
    def cancel(self, which: int) -> None:
        """Cancel a job; one that has not started then never starts."""
        job = self._pick(which)
        job.may |= STARTED if "staged" in job.may else set()
        with self._faults("cancel"):
            status = self.desk.host.cancel(job.plan.job_id)
            if status.state == "running":
                raise Broken(f"job {job.plan.job_id} was cancelled and runs")
            self._saw(job, status)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, MOST_JOBS - 1))
    def resume(self, which: int) -> None:
        """Settle unfinished jobs and wait for one of them, as `run` does before it measures."""
        job = self._pick(which)
        if self.lab.store.job(job.plan.job_id).state in ("intended", "running"):
            job.may |= TRIED if job.may & {"absent", "staged"} else set()
        with self._faults("resume"):
            settle(self.lab, self.desk.host, job.plan.subject, lambda event: None)
            if self.lab.store.job(job.plan.job_id).state in ("intended", "running"):
                raise Broken(f"job {job.plan.job_id} was settled and has no end")

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, MOST_JOBS - 1))
    def collect(self, which: int) -> None:
        """Follow a job, as `attach` does."""
        job = self._pick(which)
        with self._faults("collect", JobLost):
            try:
                follow(self.lab, self.desk.host, job.plan.job_id, lambda event: None)
            except RemoteError as error:
                if "has not started" not in error.message or not job.may & {"absent", "staged"}:
                    raise

    @precondition(lambda self: any(job.may & {"done", "lost"} for job in self.jobs))
    @rule()
    def clean(self) -> None:
        """Remove jobs from the host, as `host clean` does."""
        with self._faults("clean"):
            candidates = survey(self.lab, self.desk.host, ("jobs",), 0)
            done = clean(self.lab, self.desk.host, candidates, lambda event: None)
            for item in done.removed:
                (job,) = [job for job in self.jobs if job.plan.job_id == item.name]
                if not job.may & {"done", "lost"} or not raw.path_of(self.lab.raw, item.name).exists():
                    raise Broken(f"job {item.name} was removed, which may be {sorted(job.may)}")
                job.may, job.cleaned = {"absent"}, True

    # -- what comes in between ----------------------------------------------------------------------------------------

    @rule(down=st.booleans(), size=st.integers(1, 6000))
    def cut(self, down: bool, size: int) -> None:
        """Let the proxy cut the next connection after some bytes."""
        setattr(self.desk.box.proxy, "cut_after" if down else "cut_after_up", size)
        self.armed = True

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, MOST_JOBS - 1), listing=st.booleans(), after_s=st.floats(0.3, 1.2))
    def kill_client(self, which: int, listing: bool, after_s: float) -> None:
        """Kill a `dgxlab` command while it settles unfinished jobs."""
        args = ("jobs", "--host", "box") if listing else ("attach", self._pick(which).plan.job_id)
        self.desk.kill_client(args, after_s)
        self._disarm("kill client")

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, MOST_JOBS - 1))
    def kill_agent(self, which: int) -> None:
        """Kill a job's agent."""
        job = self._pick(which)
        if self._started(job):
            self.desk.kill_agent(job.plan)
            self._died(job)
            self.met["kill agent"] += 1

    @precondition(lambda self: self.jobs)
    @rule()
    def reboot(self) -> None:
        """Let the host lose its power; the connection never answers again."""
        self.desk.reboot()
        self.armed = True
        for job in self.jobs:
            self._died(job)
        self.met["reboot"] += 1

    @precondition(lambda self: self.jobs and not self.full)
    @rule()
    def fill_disk(self) -> None:
        """Fill the host's disk."""
        self.desk.box.disk.fill()
        self.full = True
        self.met["fill disk"] += 1

    @precondition(lambda self: self.full)
    @rule()
    def make_room(self) -> None:
        """Free the host's disk."""
        self.desk.box.disk.clear()
        self.full = False

    # -- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def nothing_goes_back(self) -> None:
        """Check that each job is in a possible state."""
        for job in self.jobs:
            status = self.desk.job(job.plan).status()
            job.see(status.state, status.rc)

    def teardown(self) -> None:
        """Remove all faults, let the client finish, and check that the record has what was executed, once."""
        with self.ends:
            self.desk.heal()
            self.full = False
            for job in self.jobs:
                self.resume(self.jobs.index(job))
            self.nothing_goes_back()
            for job in self.jobs:
                self._agrees(job)
            if flaws := check(self.lab.store):
                raise Broken("; ".join(flaws))
            self._rebuilt()

    def _agrees(self, job: Modelled) -> None:
        recorded = self.lab.store.job(job.plan.job_id)
        status = self.desk.job(job.plan).status()
        there = status.rc["status"] if status.rc else status.state
        if not job.cleaned and recorded.state != there:
            raise Broken(f"job {job.plan.job_id} is {there} and recorded as {recorded.state}")
        self.met[recorded.state] += 1
        sound(self.desk.box, self.lab.store, job.plan.name)
        once([launch for launch in read(self.desk.box.ledger) if launch.job_id == job.plan.job_id])
        # on a busy machine a run is repeated
        (runs,) = self.lab.store.rows("SELECT count(DISTINCT argv) AS n FROM runs WHERE job_id = ?", (job.plan.job_id,))
        if recorded.state == "done" and runs["n"] != RUNS:
            raise Broken(f"job {job.plan.job_id} is done and has {runs['n']} runs of {RUNS}")

    def _rebuilt(self) -> None:
        """Check that the jobs' raw files can be fetched, and that a rebuild from them gives the same record."""
        for job in self.jobs:
            raw.archive(self.lab, self.lab.store.job(job.plan.job_id), None, lambda event: None)
        path = self.desk.box.there.here.folder / "again.db"
        path.unlink(missing_ok=True)
        with Store.open(path) as store:
            done = rebuild(Lab(store, self.lab.cache, self.lab.connect, self.lab.raw), [], lambda event: None)
            ours, again = (dump(each, intent_times=False) for each in (self.lab.store, store))
        for table in ours:
            if ours[table] != again[table]:
                raise Broken(f"a rebuild ({done}) has other {table}: {again[table]}, and the record {ours[table]}")

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _pick(self, which: int) -> Modelled:
        return self.jobs[which % len(self.jobs)]

    def _started(self, job: Modelled) -> bool:
        return (self.desk.job(job.plan).folder / "started").exists()

    def _died(self, job: Modelled) -> None:
        if "running" in job.may:
            job.may = (job.may - {"running"}) | {"lost"}

    def _saw(self, job: Modelled, status: JobStatus) -> None:
        job.see(status.state, status.rc)

    @contextlib.contextmanager
    def _faults(self, doing: str, *also: type[DgxlabError]) -> Iterator[None]:
        """Allow a step to fail with a DgxlabError if a fault was injected."""
        excused: tuple[type[DgxlabError], ...] = (DgxlabError,) if self.armed or self.full else also
        try:
            yield
            self.met[doing] += 1
        except excused:
            self.met[f"{doing} fails"] += 1
        finally:
            self._disarm("")

    def _disarm(self, word: str) -> None:
        self.desk.disarm()
        self.armed = False
        self.met.update([word] if word else [])
