"""A job's folder on the host: how it appears, whether it runs, how it ended.

Liveness is a lock, never a stored word or a pid: run.lock is held by the agent and by everything it started.

    jobs/<id>/  plan.json  agent.pyz  MANIFEST    written whole, then renamed into place
                run.lock   started   journal.jsonl   raw/   rc
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgxlab.agent.facts import boot_id

RESERVE = 4096
"""Bytes set aside for the final status, so that a full disk cannot keep a job from saying that the disk is full."""
START_S = 20.0
"""How long a start may take to show itself."""


@dataclass(frozen=True)
class Status:
    """What the host knows of a job.

    Attributes:
        state: absent, staged, running, done or lost.
        journal_bytes: Length of its journal.
        rc: The final status it wrote, {} before.
    """

    job_id: str
    state: str
    journal_bytes: int = 0
    rc: dict[str, Any] | None = None


class Job:
    """One job's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job_id = folder.name
        self.plan = folder / "plan.json"
        self.journal = folder / "journal.jsonl"
        self.raw = folder / "raw"
        self._lock = folder / "run.lock"
        self._started = folder / "started"
        self.rc = folder / "rc"
        self._reserve = folder / "rc.reserved"

    @classmethod
    def stage(cls, jobs: Path, job_id: str, plan: bytes, agent: Path) -> Job:
        """Make the folder visible, whole or not at all; staging a job that is there already changes nothing."""
        job = cls(jobs / job_id)
        if job.folder.exists():
            return job
        incoming = jobs / f".in-{job_id}-{os.getpid()}"
        incoming.mkdir(parents=True)
        (incoming / "plan.json").write_bytes(plan)
        shutil.copyfile(agent, incoming / "agent.pyz")
        (incoming / "rc.reserved").write_bytes(b" " * RESERVE)
        (incoming / "raw").mkdir()
        names = ("plan.json", "agent.pyz")
        sums = {name: hashlib.sha256((incoming / name).read_bytes()).hexdigest() for name in names}
        (incoming / "MANIFEST").write_text(json.dumps(sums))
        try:
            incoming.rename(job.folder)
        except OSError:  # another client staged the same job first
            shutil.rmtree(incoming)
        _sync_folder(jobs)
        return job

    def start(self) -> Status:
        """Start the agent detached, unless it was started before; return once it shows a sign of life."""
        if self.status().state == "staged":
            with (self.folder / "agent.err").open("ab") as errors:
                # setsid -f: the agent is nobody's child, so nobody has to collect it
                subprocess.run(
                    ["setsid", "-f", sys.executable, "-ES", str(self.folder / "agent.pyz"), "work", str(self.folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    cwd="/",
                    check=True,
                )
            deadline = time.monotonic() + START_S
            while not self._started.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
        return self.status()

    def begin(self) -> int | None:
        """Take run.lock for life, as the agent; None when the job was started before, so it runs at most once."""
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while not self._started.exists():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # somebody asks for the status this instant, or another agent is about to start
                time.sleep(0.002)
        if self._started.exists():
            os.close(fd)
            return None
        self._put(self._started, {"sid": os.getsid(0), "pid": os.getpid(), "boot_id": boot_id(), "t": time.time()})
        return fd

    def finish(self, **fields: Any) -> None:
        """Write the final status, last of all, into the space that was set aside for it."""
        size = self.journal.stat().st_size if self.journal.exists() else 0
        rc = {**fields, "t": time.time(), "journal_bytes": size, "journal_sha256": sha256(self.journal)}
        blob = json.dumps(rc).encode().ljust(RESERVE)
        fd = os.open(self._reserve, os.O_WRONLY)
        os.pwrite(fd, blob, 0)
        os.fsync(fd)
        os.close(fd)
        self._reserve.rename(self.rc)
        _sync_folder(self.folder)

    def status(self) -> Status:
        """Tell the job's state. The lock is tried before rc is looked at: in that order there is no race."""
        if not self.plan.exists():
            return Status(self.job_id, "absent")
        running = self._held()
        size = self.journal.stat().st_size if self.journal.exists() else 0
        if running:
            return Status(self.job_id, "running", size)
        if self.rc.exists():
            return Status(self.job_id, "done", size, json.loads(self.rc.read_text()))
        return Status(self.job_id, "lost" if self._started.exists() else "staged", size)

    def cancel(self, patience_s: float = 15.0) -> Status:
        """End the job's own session of processes and nothing else, and see that its lock comes free."""
        if self.status().state == "running":
            sid = json.loads(self._started.read_text())["sid"]
            deadline = time.monotonic() + patience_s
            _signal_session(sid, signal.SIGTERM, leader_only=True)
            while self._held() and time.monotonic() < deadline:
                time.sleep(0.02)
            if self._held():
                _signal_session(sid, signal.SIGKILL, leader_only=False)
            while self._held() and time.monotonic() < deadline + patience_s:
                time.sleep(0.02)
        return self.status()

    def _held(self) -> bool:
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who ask do not take each other for the agent
            return False
        except OSError:
            return True
        finally:
            os.close(fd)

    def _put(self, path: Path, value: dict[str, Any]) -> None:
        part = path.with_name(path.name + ".part")
        with part.open("w") as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        _sync_folder(self.folder)


def sha256(path: Path) -> str:
    """Return a file's sha256 in hex, "" when it is not there."""
    if not path.exists():
        return ""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(fd)
    os.close(fd)


def _signal_session(sid: int, number: int, *, leader_only: bool) -> None:
    """Signal the processes whose session is `sid`, read from /proc: session ids are not reused while one lives."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or (leader_only and int(entry.name) != sid):
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == sid:
                os.kill(int(entry.name), number)
        except (OSError, ValueError, IndexError):
            continue
