"""A job's folder on the host: how it appears, whether it runs, how it ended.

Liveness is a lock, never a stored word or a pid: run.lock is held by the agent alone. What an agent leaves running when
it is killed keeps the locks of devices and of the root's folders, and is found by the job's id in its environment.

    jobs/<id>/  plan.json  agent.pyz  MANIFEST    written whole, then renamed into place
                run.lock   started   journal.jsonl   raw/   rc
"""

from __future__ import annotations

import contextlib
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

from dgxlab.agent.boot import settle
from dgxlab.agent.environment import JOB, settings
from dgxlab.agent.facts import boot_id
from dgxlab.agent.lock import in_place, lock, locked, plain
from dgxlab.errors import AGAIN, RemoteError

STAGED = ("plan.json", "agent.pyz")
"""What a job is, with its digests in MANIFEST."""

RESERVE = 4096
"""Bytes set aside for each word that a job must be able to say on a full disk: that it started, and how it ended."""
SEAL = 128
"""Bytes of that which the digest of a final status takes."""
UNSEALED = {"exit_code", "status", "message", "next", "t", "journal_bytes", "journal_sha256"}
"""What the final status of an older agent says, without a digest of its own."""
START_S = 20.0
"""How long a start may take to show itself."""


@dataclass(frozen=True)
class Status:
    """What the host knows of a job.

    Attributes:
        state: absent, staged, running, done or lost.
        journal_bytes: Length of its journal.
        rc: The final status it wrote, None before.
        cause: Why a job that wrote one is lost nevertheless: what lies there is not what it wrote.
    """

    job_id: str
    state: str
    journal_bytes: int = 0
    rc: dict[str, Any] | None = None
    cause: str = ""


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

    @classmethod
    def stage(cls, jobs: Path, job_id: str, plan: bytes, agent: Path) -> Job:
        """Make the folder visible, whole or not at all; staging a job that is there already changes nothing.

        One that was damaged before it began is replaced.
        """
        job = cls(jobs / job_id)
        if job.folder.exists() and not job.set_aside():
            return job
        incoming = jobs / f".in-{job_id}-{os.getpid()}"
        try:
            _fill(incoming, plan, agent)
            settle(incoming, job.folder)
        except OSError:
            # a full disk, of which nothing more shall be taken, or another client staged the same job first
            shutil.rmtree(incoming, ignore_errors=True)
            if not job.plan.exists():
                raise
        return job

    def start(self) -> Status:
        """Start the agent detached, unless it was started before; return once it shows a sign of life.

        Raises:
            RemoteError: if the job is damaged, and another client is about to replace it.
        """
        if self.status().state == "staged":
            if not self._whole():
                raise RemoteError(f"job {self.job_id} is damaged on {settings().name}", next=AGAIN)
            with (self.folder / "agent.err").open("ab") as errors:
                # setsid -f: the agent is nobody's child, so nobody has to collect it
                subprocess.run(
                    ["setsid", "-f", sys.executable, "-ES", str(self.folder / "agent.pyz"), "work", str(self.folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={**os.environ, JOB: self.job_id},
                    cwd="/",
                    check=True,
                )
            deadline = time.monotonic() + START_S
            while not self._started.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
        return self.status()

    def begin(self) -> int | None:
        """Take run.lock for life, as the agent; None when the job was started before, so it runs at most once.

        Raises:
            RemoteError: if there are no locks where it lies.
        """
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # who asks for the status has it for an instant; another agent that is about to start has it for good
        while not self._started.exists() and not lock(fd):
            time.sleep(0.002)
        if self._started.exists():
            os.close(fd)
            return None
        _put(self._started, {"sid": os.getsid(0), "pid": os.getpid(), "boot_id": boot_id(), "t": time.time()})
        return fd

    def finish(self, **fields: Any) -> None:
        """Write the final status, last of all, into the space that was set aside for it."""
        size = self.journal.stat().st_size if self.journal.exists() else 0
        rc = {**fields, "t": time.time(), "journal_bytes": size, "journal_sha256": sha256(self.journal)}
        while len(json.dumps(rc)) > RESERVE - SEAL and rc.get("message"):  # the journal has all of it
            rc["message"] = rc["message"][: len(rc["message"]) // 2]
        _put(self.rc, {**rc, "sha256": _sealed(rc)})

    def status(self) -> Status:
        """Tell the job's state: started is looked for, the lock tried, then rc read; in that order there is no race."""
        if not self.plan.exists():
            return Status(self.job_id, "absent")
        begun = self._started.exists()  # one that began between the two looks would be taken for lost
        running = self._held()
        size = self.journal.stat().st_size if self.journal.exists() else 0
        if running:
            return Status(self.job_id, "running", size)
        if self.rc.exists():
            return self._final(size)
        return Status(self.job_id, "lost" if begun else "staged", size)

    def _final(self, size: int) -> Status:
        """Return the status of a job that left a final one; nothing is believed of one that contradicts its journal."""
        rc = final_status(self.rc.read_bytes())
        if rc is None:
            return Status(self.job_id, "lost", size, cause="its final status was damaged")
        if rc["journal_sha256"] != sha256(self.journal):
            return Status(self.job_id, "lost", size, cause="its journal is not what its agent wrote")
        return Status(self.job_id, "done", size, rc)

    def cancel(self, patience_s: float = 15.0) -> Status:
        """End all that a job started and nothing else: its agent by TERM, after which it writes its end, and by KILL.

        One that has not begun never will.

        Raises:
            RemoteError: if something of it goes on.
        """
        staged = self.status().state == "staged"
        if staged and not self.set_aside() and (fd := self.begin()) is not None:
            self.finish(exit_code=130, status="cancelled", message="", next="")
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
            for _, group, _ in living:  # the group: one that forks on and on would be another process by then
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
            time.sleep(0.02)
        return self.status()

    def _sid(self) -> int:
        """Return the session of the agent, which it leads; 0 before it has started."""
        return int(json.loads(self._started.read_text())["sid"]) if self._started.exists() else 0

    def _processes(self) -> list[tuple[int, int, str]]:
        """Return the pid, the process group and the name of what lives of a job.

        That is its agent's session, and whatever has the job's id in its environment.
        """
        sid = self._sid() if self._held() else 0  # a free number may be anybody's session
        ours, seen = f"{JOB}={self.job_id}".encode(), set[Path]()
        found: list[tuple[int, int, str]] = []
        # one that forks on and on may end before it is looked at, and then it goes on in one that began meanwhile
        while not found and (new := set(Path("/proc").glob("[0-9]*")) - seen):
            seen |= new
            for entry in new:
                with contextlib.suppress(OSError, ValueError, IndexError):
                    before, _, after = (entry / "stat").read_text().rpartition(")")
                    state, _, group, session = after.split()[:4]
                    of_agent = sid > 0 and int(session) == sid  # the kernel's own processes have 0
                    if state not in "ZX" and (of_agent or ours in (entry / "environ").read_bytes().split(b"\0")):
                        found.append((int(entry.name), int(group), plain(before.partition("(")[2])))
        return found

    def _held(self) -> bool:
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not lock(fd, fcntl.LOCK_SH)  # shared: two who ask do not take each other for the agent
        finally:
            os.close(fd)

    def set_aside(self) -> bool:
        """Move the folder out of the way if it was damaged before the job began; return whether it is gone.

        Whoever holds run.lock decides about its folder: neither an agent that begins nor another client's `set_aside`
        comes in between. It must be the lock of the folder that is there now.
        """
        try:
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return True
        try:
            if self._started.exists() or not locked(fd) or not in_place(fd, self._lock):
                return False
            if self._started.exists() or self._whole():
                return False
            self.folder.rename(self.folder.with_name(f".broken-{self.job_id}-{os.getpid()}"))
        finally:
            os.close(fd)
        return True

    @property
    def torn(self) -> bool:
        """Whether it was damaged before it began: where files are not synced, a power loss leaves their names alone."""
        return not self._started.exists() and not self._whole()

    def _whole(self) -> bool:
        """Whether all is there that was staged."""
        try:
            sums = json.loads((self.folder / "MANIFEST").read_text())
            return all(sums[name] == sha256(self.folder / name) for name in STAGED)
        except (OSError, ValueError, LookupError, TypeError):
            return False


def sha256(path: Path) -> str:
    """Return a file's sha256 in hex, "" when it is not there."""
    if not path.exists():
        return ""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            total.update(chunk)
    return total.hexdigest()


def final_status(content: bytes) -> dict[str, Any] | None:
    """Return what an rc says, None where that is not what an agent wrote."""
    try:
        rc = json.loads(content)
        seal = rc.pop("sha256", None)
        whole = seal == _sealed(rc) if seal else rc.keys() <= UNSEALED
        return rc if whole and isinstance(rc["journal_sha256"], str) else None
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def _sealed(rc: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(rc, sort_keys=True).encode()).hexdigest()


def _fill(folder: Path, plan: bytes, agent: Path) -> None:
    """Make a job's folder as it is before its start."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_bytes(plan)
    shutil.copyfile(agent, folder / "agent.pyz")
    for word in ("started", "rc"):
        (folder / f"{word}.reserved").write_bytes(b" " * RESERVE)
    (folder / "raw").mkdir()
    (folder / "run.lock").touch(mode=0o600)  # so that the first who asks sees whether there are locks at all
    sums = {name: sha256(folder / name) for name in STAGED}
    (folder / "MANIFEST").write_text(json.dumps(sums))


def _put(path: Path, value: dict[str, Any]) -> None:
    """Write a word into the space that was set aside for it, whole or not at all."""
    reserved = path.with_name(f"{path.name}.reserved")
    fd = os.open(reserved, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, json.dumps(value).encode().ljust(RESERVE), 0)
    finally:
        os.close(fd)
    settle(reserved, path)
