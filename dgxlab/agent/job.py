"""A job's folder on the host: staging, state, final status, and raw files.

To stage a job is to make its folder with the plan; the agent is then started in it. The job runs as long as the agent
holds run.lock: no stored state or pid is trusted. Processes that outlive a killed agent keep the locks of devices and
of shared items; they are known by the job's id in their environment.

    jobs/<id>/  plan.json  agent.pyz  MANIFEST        the staged files
                run.lock   started   journal.jsonl   raw/   rc (the final status)
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dgxlab.agent import slurm
from dgxlab.agent.boot import me, settle
from dgxlab.agent.environment import JOB, settings
from dgxlab.agent.facts import boot_id
from dgxlab.agent.files import sha256, waits_for
from dgxlab.agent.lock import TRIES, in_place, lock, measuring
from dgxlab.errors import AGAIN, JobLost, RemoteError, UsageError, one_line
from dgxlab.replies import LIVE, SLURMS_WORD, Status, final_status, sealed

if TYPE_CHECKING:
    from dgxlab.model.parts import FinalStatus

_STAGED = ("plan.json", "agent.pyz")  # files of a staged job; MANIFEST has their digests
_RESERVE = 4096  # bytes reserved for each of `started` and `rc`, so that they can be written on a full disk
SEAL = 128  # bytes of _RESERVE for the digest of a final status
CANCELLED = "cancelled"
"""File of a job that Slurm started and that the user has cancelled: TERM is not by Slurm itself then."""
BY_USER: FinalStatus = {"exit_code": 130, "status": "cancelled", "message": "", "next": ""}
"""The final status of a cancelled job."""
_KILL_WAIT_S = 35.0  # how long Slurm waits, by default, between TERM and KILL, and a little more
_START_S = 20.0  # max time until a started agent shows a sign of life
_LEVEL = 6  # gzip level: text shrinks to a tenth, at 100 MB/s


class Job:
    """One job on this host, by its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job_id = folder.name
        self.plan = folder / "plan.json"
        self.journal = folder / "journal.jsonl"
        self.raw = folder / "raw"
        self._lock = folder / "run.lock"
        self._started = folder / "started"
        self.rc = folder / "rc"
        self._slurm = slurm.Watched(self.job_id) if (folder / slurm.FILE).exists() else None

    @classmethod
    def stage(cls, jobs: Path, job_id: str, plan: bytes, agent: Path) -> Job:
        """Make a job's folder below `jobs`, completely or not at all, with a copy of the zipapp `agent`.

        An existing folder is kept, unless it was damaged before the job began.
        """
        job = cls(jobs / job_id)
        if job.folder.exists() and not job.set_aside():
            return job
        incoming = jobs / f".in-{job_id}-{me()}"
        try:
            (incoming / "raw").mkdir(parents=True)
            (incoming / "plan.json").write_bytes(plan)
            shutil.copyfile(agent, incoming / "agent.pyz")
            for word in ("started", "rc"):
                (incoming / f"{word}.reserved").write_bytes(b" " * _RESERVE)
            (incoming / "run.lock").touch(mode=0o600)  # shows the first status call whether there are locks
            (incoming / "MANIFEST").write_text(json.dumps({name: sha256(incoming / name) for name in _STAGED}))
            settle(incoming, job.folder)
        except OSError:
            # the disk is full, or another client staged the same job first
            shutil.rmtree(incoming, ignore_errors=True)
            if not job.plan.exists():
                raise
        return job

    def start(self) -> Status:
        """Start the agent as a detached process, unless it was started before; return the state once it has begun.

        Raises RemoteError if the staged files are damaged.
        """
        if self.status().state == "staged":
            if not self._whole():
                raise RemoteError(f"job {self.job_id} is damaged on {settings().name}", next=AGAIN)
            if settings().slurm is not None:
                slurm.submit(self.folder)
                return Job(self.folder).status()
            with (self.folder / "agent.err").open("ab") as errors:
                # setsid -f: the agent is not our child, so we need not reap it
                subprocess.run(
                    ["setsid", "-f", sys.executable, "-ES", str(self.folder / "agent.pyz"), "work", str(self.folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={**os.environ, JOB: self.job_id},
                    cwd="/",
                    check=True,
                )
            deadline = time.monotonic() + _START_S
            while not self._started.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
        return self.status()

    def begin(self) -> int | None:
        """Take run.lock for this process, which is the agent, and write `started`; return the lock's descriptor.

        None if the job was started before: a job runs at most once.
        """
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        # a status call holds the lock briefly, another starting agent until it exits
        while not self._started.exists() and not _lock(fd):
            time.sleep(0.002)
        if self._started.exists():
            os.close(fd)
            return None
        try:
            _put(self._started, {"sid": os.getsid(0), "pid": os.getpid(), "boot_id": boot_id(), "t": time.time()})
        except FileNotFoundError:  # two nodes whose locks do not reach each other: the rename decides
            os.close(fd)
            return None
        return fd

    def finish(self, **fields: Any) -> None:
        """Write the final status, with these fields, into the space reserved for it; the last write of a job."""
        rc = {**fields, "t": time.time(), "journal_bytes": self._size(), "journal_sha256": sha256(self.journal)}
        while len(json.dumps(rc)) > _RESERVE - SEAL and rc.get("message"):  # the journal has all of it
            rc["message"] = rc["message"][: len(rc["message"]) // 2]
        _put(self.rc, {**rc, "sha256": sealed(rc)})

    def status(self) -> Status:
        """Return the job's state: absent, staged, queued, running, done or lost."""
        # first `started`, then the lock, then rc: this order avoids races
        if not self.plan.exists():
            return Status(self.job_id, "absent")
        begun = self._started.exists()  # read before the lock: a job that began in between would look lost
        running, size = self._held(), self._size()
        if running:
            return Status(self.job_id, "running", size, waits_for=waits_for(self.journal))
        if not self.rc.exists() and self._slurm and (status := self._by_slurm(self._slurm, begun, size)):
            return status
        if not self.rc.exists():
            return Status(self.job_id, "lost" if begun else "staged", size)
        rc = final_status(self.rc.read_bytes())
        if rc is None:
            return Status(self.job_id, "lost", size, cause="its final status was damaged")
        if rc["journal_sha256"] != sha256(self.journal):
            return Status(self.job_id, "lost", size, cause="its journal is not what its agent wrote")
        return Status(self.job_id, "done", size, rc)

    def _by_slurm(self, watched: slurm.Watched, begun: bool, size: int) -> Status | None:
        """Return the state of a job without a final status as Slurm knows it; None if the job has ended with one."""
        word = self.folder / SLURMS_WORD  # Slurm forgets, and need not be asked again
        if word.exists():
            return Status(self.job_id, "lost", size, slurm=word.read_text())
        try:
            slurm_job = watched.look()
        except slurm.Silent as silent:  # nothing is known: the job may run
            return Status(self.job_id, "running" if begun else "queued", size, slurm=silent.message)
        if slurm_job and not slurm_job.ended:
            return Status(self.job_id, "queued" if slurm_job.waiting else "running", size, slurm=str(slurm_job))
        text, part = str(slurm_job or "Slurm does not know the job any more"), word.with_name(f".{word.name}-{me()}")
        try:
            part.write_text(text)
        except OSError:  # the disk is full: Slurm is asked again
            part.unlink(missing_ok=True)
        # once the folder was changed from here, a network disk shows what a node wrote in it
        over = self.rc.exists() or not (begun or slurm_job or self._started.exists())
        if part.exists():
            part.unlink() if over else part.rename(word)
        return None if over else Status(self.job_id, "lost", self._size(), slurm=text)

    def _size(self) -> int:
        return self.journal.stat().st_size if self.journal.exists() else 0

    def cancel(self, patience_s: float = 15.0) -> Status:
        """End all processes of the job and return its state; a job that has not begun will never start.

        TERM lets the agent write the final status, KILL ends what is left after `patience_s` seconds. Raises
        RemoteError if a process survives.
        """
        if self._slurm:
            return self._cancel_by_slurm(patience_s)
        staged = self.status().state == "staged"
        if staged and not self.set_aside() and (fd := self.begin()) is not None:
            self.finish(**BY_USER)
            os.close(fd)
        deadline = time.monotonic() + patience_s
        if self._held() and (sid := self._sid()) in [pid for pid, _, _ in self._processes()]:
            os.kill(sid, signal.SIGTERM)
        while self._held() and time.monotonic() < deadline:
            time.sleep(0.02)
        deadline = time.monotonic() + patience_s
        while living := self._processes():
            if time.monotonic() > deadline:
                names = " and ".join(f"pid {pid} ({name})" for pid, _, name in living)
                raise RemoteError(
                    f"{names} of job {self.job_id} cannot be ended: the kernel keeps a process until its call returns",
                    next=f"dgxlab cancel {self.job_id}",
                )
            for _, group, _ in living:  # the group: a process that keeps forking has a new pid by then
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            time.sleep(0.02)
        return self.status()

    def _cancel_by_slurm(self, patience_s: float) -> Status:
        (self.folder / CANCELLED).touch()
        if not self._started.exists() and (fd := self.begin()) is not None:
            self.finish(**BY_USER)
            os.close(fd)
        deadline = time.monotonic() + _KILL_WAIT_S + patience_s
        slurm.cancel(self.job_id)
        while (there := slurm.look(self.job_id)) and not there.ended:
            if time.monotonic() > deadline:
                raise RemoteError(f"Slurm has not ended the job: {there}", next=f"dgxlab cancel {self.job_id}")
            time.sleep(0.2)
        return Job(self.folder).status()

    def _sid(self) -> int:
        """Return the session of the agent, which it leads; 0 before it has started."""
        return int(json.loads(self._started.read_text())["sid"]) if self._started.exists() else 0

    def _processes(self) -> list[tuple[int, int, str]]:
        """Return pid, group and name of all processes in the agent's session or with the job's id as environment."""
        sid = self._sid() if self._held() else 0  # the number may have been reused by another session
        ours, seen = f"{JOB}={self.job_id}".encode(), set[Path]()
        living: list[tuple[int, int, str]] = []
        # a process that keeps forking may end before it is read; its child is found in the next pass
        while not living and (new := set(Path("/proc").glob("[0-9]*")) - seen):
            seen |= new
            for entry in new:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    before, _, after = (entry / "stat").read_text().rpartition(")")
                    state, _, group, session = after.split()[:4]
                    of_agent = sid > 0 and int(session) == sid  # the kernel's own processes have 0
                    if state not in "ZX" and (of_agent or ours in (entry / "environ").read_bytes().split(b"\0")):
                        living.append((int(entry.name), int(group), one_line(before.partition("(")[2])))
        return living

    def _held(self) -> bool:
        try:
            with self._lock.open("rb") as file:  # shared: one status call must not mistake another for the agent
                return not _lock(file.fileno(), fcntl.LOCK_SH)
        except FileNotFoundError:
            return False

    def set_aside(self) -> bool:
        """Rename the folder if it was damaged before the job began; return whether no folder is left at this path."""
        # requires run.lock of the folder that is now at this path, not of one that was replaced
        with contextlib.suppress(FileNotFoundError), self._lock.open("ab") as file:
            fd = file.fileno()
            taken = not self._started.exists() and _lock(fd, tries=TRIES) and in_place(fd, self._lock)
            if not taken or not self.torn:
                return False
            self.folder.rename(self.folder.with_name(f".broken-{self.job_id}-{me()}"))
        return True

    def about(self) -> dict[str, Any]:
        """Return the plan's name, shown_kind and experiment, and age_s; {} if it is missing or being deleted."""
        from dgxlab.model import shown_kind  # only here: most verbs need no vocabulary

        try:
            staged = json.loads(self.plan.read_text())
            age_s = max(0.0, time.time() - self.plan.stat().st_mtime)
            name, experiment = str(staged["name"]), str(staged["experiment"])
            kind = shown_kind(str(staged["kind"]), len(staged["arms"]))
            return {"name": name, "shown_kind": kind, "experiment": experiment, "age_s": age_s}
        except (OSError, ValueError, LookupError, TypeError):
            return {}

    def digests(self) -> dict[str, str]:
        """Return the sha256 of every file of evidence that no longer grows, by its path in the job's folder."""
        grow = (self.rc, self.journal, self.folder / "agent.err")
        return {str(path.relative_to(self.folder)): sha256(path) for path in self._files() if path not in grow}

    def send(self, limit: int, out: BinaryIO) -> None:
        """Write {"size": bytes, "files": count} of the raw files to `out`, then their gzipped tar if size <= `limit`.

        Raises JobLost if there is no such job, and UsageError if the job has not ended.
        """
        state = self.status().state
        if state == "absent":
            raise job_lost(self.job_id)
        if state not in ("done", "lost"):
            raise UsageError(f"job {self.job_id} has not ended", next=f"dgxlab attach {self.job_id}")
        sizes = {path: path.lstat().st_size for path in self._files()}
        size = sum(sizes.values())
        out.write(json.dumps({"size": size, "files": len(sizes)}).encode() + b"\n")
        if size <= limit:
            with (
                gzip.GzipFile(filename="", fileobj=out, mode="wb", compresslevel=_LEVEL, mtime=0) as packed,
                tarfile.open(fileobj=packed, mode="w|", format=tarfile.GNU_FORMAT) as archive,
            ):
                for path, bytes_ in sizes.items():
                    entry = tarfile.TarInfo(str(path.relative_to(self.folder)))
                    entry.size, entry.mode, entry.mtime = bytes_, 0o600, int(path.stat().st_mtime)
                    with path.open("rb") as file:
                        archive.addfile(entry, file)
        out.flush()

    def _files(self) -> list[Path]:
        """Return the files that are evidence of results; rc is first, because the journal is checked against it."""
        paths = [self.rc, self.plan, self.journal, self.folder / "agent.err", self.folder / SLURMS_WORD]
        paths += [*sorted(self.folder.glob("*.log")), *sorted(self.raw.glob("*"))]
        return [path for path in paths if path.exists() and stat.S_ISREG(path.lstat().st_mode)]

    @property
    def torn(self) -> bool:
        """Whether the job has not begun and its staged files are damaged: a power loss may leave empty files."""
        return not self._started.exists() and not self._whole()

    def _whole(self) -> bool:
        """Whether all staged files are present and match MANIFEST."""
        try:
            sums = json.loads((self.folder / "MANIFEST").read_text())
            return all(sums[name] == sha256(self.folder / name) for name in _STAGED)
        except (OSError, ValueError, LookupError, TypeError):
            return False


def _lock(fd: int, kind: int = fcntl.LOCK_EX, tries: int = 1) -> bool:
    """Lock run.lock as `lock` does; on a cluster without locks Slurm says which jobs run, and a rename which begin."""
    try:
        return lock(fd, kind, tries)
    except RemoteError:
        if settings().slurm is None:
            raise
        return True


def _put(path: Path, value: dict[str, Any]) -> None:
    """Write a value into its reserved space, completely or not at all."""
    reserved = path.with_name(f"{path.name}.reserved")
    with reserved.open("r+b") as file:
        file.write(json.dumps(value).encode().ljust(_RESERVE))
    settle(reserved, path)


# -- all jobs of a host -----------------------------------------------------------------------------------------------


def listed(folder: Path) -> list[dict[str, Any]]:
    """Return status and `Job.about` of every job in the folder, the oldest first; then who else measures here."""
    own = {job.job_id: {**vars(job.status()), **job.about()} for job in _jobs(folder)}
    for job_id, signed in measuring(but="").items():
        status = Status(job_id, "elsewhere", cause=f"measures, below another root: {signed}")
        own.setdefault(job_id, {**vars(status), "age_s": max(0.0, time.time() - signed.since)})
    return [*own.values()]


def running(folder: Path) -> dict[str, str]:
    """Return the plan's subject of each running job, by job id."""
    from dgxlab.model import subject  # only here: most verbs need no vocabulary

    # part of every probe, so ended jobs are skipped cheaply
    live = (job for job in _jobs(folder) if not job.rc.exists() and job.status().state in LIVE)
    plans = {job.job_id: plan(job) for job in live if job.about()}
    return {job_id: subject(p["kind"], p["experiment"], p.get("baseline", "")) for job_id, p in plans.items()}


def plan(job: Job) -> Any:
    """Return a job's plan as JSON; raises JobLost if there is no such job."""
    try:
        return json.loads(job.plan.read_text())
    except FileNotFoundError:
        raise job_lost(job.job_id) from None


def job_lost(job_id: str) -> JobLost:
    """Return the error for a job whose folder is missing."""
    cause = "its folder was deleted, or was never there"
    return JobLost(f"the host has no job {job_id}: {cause}", next=f"dgxlab report {job_id}")


def _jobs(folder: Path) -> Iterator[Job]:
    return (Job(path) for path in sorted(folder.iterdir()) if not path.name.startswith("."))
