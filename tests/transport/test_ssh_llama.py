"""The real llama.cpp over a real sshd: what the README says, and the quickstart killed and cut."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
