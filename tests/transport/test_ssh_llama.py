"""The real llama.cpp over a real sshd: what the README says, the quickstart killed and cut, and A/B sessions."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dgxlab.audit import check
from dgxlab.store import Store
from tests.conftest import CACHE, PROJECT, Quickstart
from tests.proxy import Proxy
from tests.sshd import Sshd, sshd
from tests.transport.conftest import Client, Keys

pytestmark = [pytest.mark.llama, pytest.mark.usefixtures("quickstart")]


def screen() -> list[str]:
    """Return the lines that the README tells a reader to type."""
    block = re.search(r"(?s)\n## On a remote machine\n.*?```sh\n(.*?)```", (PROJECT / "README.md").read_text())
    assert block
    return block[1].splitlines()


@pytest.fixture
def dgx(tmp_path: Path, client: Client, keys: Keys) -> Iterator[Sshd]:
    """A machine that `ssh dgx` reaches, as a reader has it; llama.cpp is built there already."""
    with sshd(tmp_path / "dgx", keys.authorized) as server:
        (server.home / ".dgxlab").symlink_to(CACHE / "host")
        client.host("dgx", server.port)
        yield server


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone as `make demo` leaves it, with the pin in the cache."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for part in ("experiments", "patches", "schema"):
        shutil.copytree(PROJECT / part, folder / part)
    (folder / ".venv").symlink_to(sys.prefix)
    pins = Path(os.environ["HOME"]) / ".cache" / "dgxlab"
    pins.mkdir(parents=True)
    (pins / "llama.cpp.git").symlink_to(CACHE / "llama.cpp.git")
    return folder


def test_the_screen_works_word_for_word(quickstart: Quickstart, clone: Path, dgx: Sshd) -> None:
    """Typed in one shell, with a yes to the one question; each line ends well and does what is written beside it."""
    lines = screen()
    typed = "\n".join(f"{line}\necho == $?" for line in lines)
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    ran = subprocess.run(
        ["bash", "-c", typed], cwd=clone, env=env, input="y\n", capture_output=True, text=True, timeout=900, check=False
    )
    outputs = re.split(r"(?m)^== (\d+)\n", ran.stdout)
    assert outputs[1::2] == ["0"] * len(lines), ran.stdout + ran.stderr
    _, added, doctor, report, jobs, _ = outputs[0::2]
    assert "lets us in" in added
    assert "missing" not in doctor
    assert "MUL_MAT | CPU | 1103/1103 | 306 | 1103 | passed" in report
    assert "SHA256:" in ran.stderr
    assert "12 cells, 12 measured now, 0 up to date" in ran.stderr
    assert re.search(r"quickstart-\w+ +dgx +run .* done +done", jobs)


# -- the quickstart

LIMIT_S = 300.0

QUICK_GATE = "gates: [{backend-ops: {op: SOFT_MAX, backend: CPU, expect: 212/212, unsupported: 0}}]\n\nbench:"
"""Long enough to be cut in, and no half minute: the README's screen has the shipped one."""

ROWS = """SELECT label, cells.tool, params, fixed, metric, ordinal, unit, samples.discarded, build_id, model_id
          FROM samples JOIN runs USING (run_id) JOIN cells USING (cell) WHERE job_id = ? AND status = 'valid'"""


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "dgxlab", *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=folder, env=os.environ, stdout=pipe, stderr=pipe, text=True)


def jobs() -> set[Path]:
    return set((CACHE / "host" / "jobs").glob("2*"))


def the_job(before: set[Path], client: subprocess.Popen[str]) -> Path:
    """Wait for the one job that is new on the host."""
    while not (new := jobs() - before):
        assert client.poll() is None, client.communicate()
        time.sleep(0.1)
    (job,) = new
    return job


def wait_for(job: Path, event: str, count: int = 1, **fields: str) -> None:
    """Wait until a job's journal holds so many events of a kind."""
    deadline = time.monotonic() + LIMIT_S
    while len([e for e in events(job) if e["event"] == event and fields.items() <= e.items()]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def events(job: Path) -> list[dict[str, Any]]:
    """Return what a job's journal says so far."""
    journal = job / "journal.jsonl"
    text = journal.read_text() if journal.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def rows(store: Store, job_id: str) -> list[tuple[Any, ...]]:
    """Return a job's samples with all that is known of them, but for the values."""
    return sorted((tuple(row.values()) for row in store.rows(ROWS, (job_id,))), key=repr)


def test_killed_and_cut_it_records_the_same_rows(quickstart: Quickstart, project: tuple[Path, Proxy]) -> None:
    """The line is cut in the gate, the client killed, the line silent and cut again: one job, each row once."""
    folder, proxy = project
    shortened, count = re.subn(r"(?s)gates:.*?bench:", QUICK_GATE, (folder / "quickstart.yaml").read_text())
    assert count == 1
    (folder / "quickstart.yaml").write_text(shortened)
    command, before = ("run", "quickstart.yaml", "--host", "far"), jobs()
    first = start(folder, *command)
    job = the_job(before, first)
    wait_for(job, "step", kind="gate", state="started")
    proxy.cut()
    wait_for(job, "gate")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = start(folder, *command)
    wait_for(job, "run")
    proxy.cut()
    wait_for(job, "run", 2)
    proxy.blackhole()
    wait_for(job, "run", 3)
    proxy.heal()
    page, err = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, err
    assert "was cut" in err
    assert "; trying again in 1 s (1 of" in err
    assert "SOFT_MAX | CPU | 212/212 | 0 | 212 | passed" in page
    assert jobs() - before == {job}
    with Store.open(folder / "results.db", create=False) as store:
        assert check(store) == []
        assert rows(store, job.name) == rows(quickstart.bench.lab.store, quickstart.outcome.job_id)
        recorded = {(row["cell"], row["metric"], row["value"]) for row in store.rows("SELECT * FROM samples")}
    told = {
        (result["cell"], measured["metric"], float(value))
        for event in events(job)
        if event["event"] == "run" and event["status"] == "valid"
        for result in event["results"]
        for measured in result["measurements"]
        for value in (*measured["discarded"], *measured["samples"])
    }
    assert recorded == told


# -- A/B sessions

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
        report: dict[str, Any] = json.loads(self.out)
        return report


@dataclass(frozen=True)
class Far:
    """A project with two arms, and a host behind a line that can be cut."""

    folder: Path
    proxy: Proxy

    def run(self, *args: str) -> Ended:
        return ended(start(self.folder, *args))

    def ab(self, *options: str) -> subprocess.Popen[str]:
        return start(self.folder, "ab", "batched", "single", "--host", "far", *options)

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
    out, err = process.communicate(timeout=LIMIT_S)
    return Ended(process.returncode, out, err)


def judged(hold: Callable[[], Ended]) -> Ended:
    """Hold a session, and again while it gave no verdict or settled nothing: other programs use this machine too."""
    for _ in range(ATTEMPTS):
        held = hold()
        if held.rc != INVALID and "**inconclusive: " not in held.out:
            break
    return held


def begin(far: Far, *options: str) -> tuple[subprocess.Popen[str], Path]:
    """Begin a session; returns its client and the job's folder once the chain alternates."""
    before = jobs()
    client = far.ab(*options)
    job = the_job(before, client)
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
