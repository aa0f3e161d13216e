"""The quickstart on the real llama.cpp over a real sshd: killed and cut, it records what it would have."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dgxlab.audit import check
from dgxlab.store import Store
from tests.conftest import CACHE, Quickstart
from tests.proxy import Proxy

pytestmark = pytest.mark.llama

LIMIT_S = 300.0

QUICK_GATE = "gates: [{backend-ops: {op: SOFT_MAX, backend: CPU, expect: 212/212, unsupported: 0}}]\n\nbench:"
"""Long enough to be cut in, and no half minute: the README's screen has the shipped one."""

ROWS = """SELECT label, cells.tool, params, fixed, metric, ordinal, unit, samples.discarded, build_id, model_id
          FROM samples JOIN runs USING (run_id) JOIN cells USING (cell) WHERE job_id = ? AND status = 'valid'"""


def shorten(spec: Path) -> None:
    """Replace the gate of a spec."""
    shortened, count = re.subn(r"(?s)gates:.*?bench:", QUICK_GATE, spec.read_text())
    assert count == 1
    spec.write_text(shortened)


def start(project: Path) -> subprocess.Popen[str]:
    """Type the command."""
    argv = [sys.executable, "-m", "dgxlab", "run", "quickstart.yaml", "--host", "far"]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, cwd=project, env=os.environ, stdout=pipe, stderr=pipe, text=True)


def the_job(before: set[Path]) -> Path:
    """Wait for the one job that is new on the host."""
    deadline = time.monotonic() + LIMIT_S
    while not (new := {path for path in (CACHE / "host" / "jobs").glob("2*") if path not in before}):
        assert time.monotonic() < deadline
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
    shorten(folder / "quickstart.yaml")
    before = set((CACHE / "host" / "jobs").glob("2*"))
    first = start(folder)
    job = the_job(before)
    wait_for(job, "step", kind="gate", state="started")
    proxy.cut()
    wait_for(job, "gate")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    second = start(folder)
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
    assert {path for path in (CACHE / "host" / "jobs").glob("2*") if path not in before} == {job}
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
