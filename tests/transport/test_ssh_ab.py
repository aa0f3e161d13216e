"""A/B sessions of the real llama.cpp over a real sshd: killed, cut, cancelled, and followed from elsewhere."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dgxlab.store import Store
from tests.conftest import CACHE, PROJECT
from tests.proxy import Proxy
from tests.transport.test_quickstart import LIMIT_S, events, wait_for

pytestmark = [pytest.mark.llama, pytest.mark.usefixtures("quickstart")]

ATTEMPTS = 3
"""How often a session is held where other programs make the machine wander too far for any verdict."""

INVALID = 8
"""The exit code of a session without a verdict."""

ARMS = {
    "batched": "{model: small, n_prompt: 64, n_threads: 1}",
    "single": "{model: small, n_prompt: 64, n_threads: 1, n_ubatch: 1}",
}
"""A prompt in one piece, and one token by one: less than half the speed, however many processors are free."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    rc: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, Any]:
        """What it printed, as JSON."""
        report: dict[str, Any] = json.loads(self.out)
        return report


@dataclass(frozen=True)
class Far:
    """A project with two arms, and a host behind a line that can be cut."""

    folder: Path
    proxy: Proxy

    def start(self, *args: str) -> subprocess.Popen[str]:
        """Type a command."""
        argv = [sys.executable, "-m", "dgxlab", *args]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, cwd=self.folder, env=os.environ, stdout=pipe, stderr=pipe, text=True)

    def run(self, *args: str) -> Ended:
        """Type a command and wait for its end."""
        return ended(self.start(*args))

    def ab(self, *options: str) -> subprocess.Popen[str]:
        """Begin a session of both arms."""
        return self.start("ab", "batched", "single", "--host", "far", *options)

    def verdicts(self, db: str = "results.db") -> list[dict[str, Any]]:
        """Return what a record says of every claim."""
        with Store.open(self.folder / db, create=False) as store:
            return store.rows("SELECT * FROM verdicts ORDER BY job_id, chain, cell, metric")


@pytest.fixture
def far(project: tuple[Path, Proxy]) -> Far:
    """Write both arms beside the quickstart, with a gate of a second; they use its build and its model."""
    folder, proxy = project
    base = (PROJECT / "experiments" / "cpu" / "quickstart.yaml").read_text().split("gates:")[0]
    (folder / "experiments").mkdir()
    for name, bench in ARMS.items():
        text = base.replace("name: quickstart", f"name: {name}")
        text += "gates: [{backend-ops: {op: SQR, backend: CPU}}]\n"
        text += f"bench: [{{llama-bench: {bench}}}]\n"
        text += "session: {cycles: 6, drift_limit: 0.5}\n"
        (folder / "experiments" / f"{name}.yaml").write_text(text)
    return Far(folder, proxy)


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for the end of a command."""
    out, err = process.communicate(timeout=LIMIT_S)
    return Ended(process.returncode, out, err)


def judged(hold: Callable[[], Ended]) -> Ended:
    """Hold a session, and again while it gave no verdict or settled nothing: other programs use this machine too."""
    for _ in range(ATTEMPTS):
        held = hold()
        if held.rc != INVALID and "**inconclusive: " not in held.out:
            break
    return held


def jobs() -> set[Path]:
    """Return the folders of the host's jobs."""
    return set((CACHE / "host" / "jobs").glob("2*"))


def begin(far: Far, *options: str) -> tuple[subprocess.Popen[str], Path]:
    """Begin a session; returns its client and the job's folder once the chain alternates."""
    before = jobs()
    client = far.ab(*options)
    while not jobs() - before:
        assert client.poll() is None, client.communicate()
        time.sleep(0.1)
    (job,) = jobs() - before
    wait_for(job, "run", role="candidate")
    return client, job


def test_killed_and_cut_the_session_is_followed(far: Far) -> None:
    """In mid chain the line is cut and the client killed: the next command, and another record, tell the same job."""

    def hold() -> Ended:
        before = jobs()
        first, job = begin(far)
        far.proxy.cut()
        first.send_signal(signal.SIGKILL)
        first.communicate()
        second = far.ab("--fail-on", "slower", "--format", "json")
        wait_for(job, "run", 2, role="candidate")
        far.proxy.cut()
        told = ended(second)
        assert jobs() - before == {job}
        return told

    held = judged(hold)
    assert held.rc == 11, held.err
    assert [line for line in held.err.splitlines() if "t/s" in line] == []  # no value before the end
    assert "error: 1 verdict of 1 is slower, on which to fail" in held.err.splitlines()
    report = held.report
    assert (report["kind"], report["verdict"], report["counts"]) == ("ab", "slower", {"slower": 1})
    job_id = report["session"]
    assert f"session {job_id} of the same arms went on without this command: its result is kept" in held.err
    chain = [event for event in events(CACHE / "host" / "jobs" / job_id) if event["event"] == "run"]
    assert len({(run["role"], run["cycle"]) for run in chain}) == len(chain)
    attached = far.run("attach", job_id, "--host", "far", "--db", "other.db", "--format", "json")
    assert attached.rc == 0, attached.err
    assert attached.report == report
    mine = [row for row in far.verdicts() if row["job_id"] == job_id]
    assert far.verdicts("other.db") == mine
    for db in ("results.db", "other.db"):
        assert far.run("db", "check", "--db", db).out == "ok\n"


def test_a_cancelled_session_is_held_again(far: Far) -> None:
    """Its verdicts are invalid; the next one has the same builds and measures everything itself."""
    first, job = begin(far)
    assert far.run("cancel", job.name, "--host", "far").rc == 0
    cancelled = ended(first)
    assert cancelled.rc == 130, cancelled.err
    assert "**invalid: 1 of 1 invalid**" in cancelled.out
    assert "was cancelled" in cancelled.out
    (verdict,) = far.verdicts()
    assert (verdict["job_id"], verdict["verdict"]) == (job.name, "invalid")
    held = judged(lambda: ended(far.ab("--format", "json")))
    assert held.rc == 0, held.err
    assert held.report["verdict"] == "slower"
    assert held.report["session"] != job.name
    assert re.findall(r"build \w+ of (\w+): (\w+)", held.err) == [("batched", "reused"), ("single", "reused")]
    assert far.run("db", "check").out == "ok\n"
