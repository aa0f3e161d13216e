"""Jobs outlive whoever started them, and are ingested exactly once."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dgxlab import plan
from dgxlab.errors import Interrupted, JobLost, RemoteError
from dgxlab.lab import ask, follow, left_to_do, make_plan, resolve, run, settle, start
from dgxlab.model import Experiment, Plan
from tests import toy
from tests.lab.conftest import ToyLab


def quiet(event: Mapping[str, Any]) -> None:
    """Watch nothing."""


def slow(lab: ToyLab) -> Experiment:
    """Return an experiment with a quick entry and one that takes 3 s a size."""
    return lab.experiment(bench=(toy.backend_ops(), toy.llama_bench(n_gen=(0,), env={"TOY": "slow"})))


def submit(lab: ToyLab, experiment: Experiment) -> Plan:
    """Start a job as `run` does, and be gone before reading a line of it."""
    source = resolve(lab.lab, experiment, None, quiet)
    probe = ask(lab.host, experiment, source)
    todo = left_to_do(lab.lab.store, experiment, source, probe)
    job = make_plan(lab.lab.store, experiment, source, todo)
    start(lab.lab, lab.host, experiment, job, probe, quiet)
    return job


def wait_for(lab: ToyLab, job_id: str, text: str) -> None:
    """Wait until a job's journal says something."""
    journal = lab.root / "jobs" / job_id / "journal.jsonl"
    deadline = time.monotonic() + 30
    while text not in (journal.read_text() if journal.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_run_takes_up_what_a_dead_client_left(toy_lab: ToyLab) -> None:
    """The second client follows the first one's job and measures nothing of its own."""
    job = submit(toy_lab, slow(toy_lab))
    outcome, events = toy_lab.run(slow(toy_lab))
    assert (outcome.error, outcome.job_id, outcome.reused) == (None, job.job_id, 4)
    assert len([event for event in events if event["event"] == "run"]) == 2
    assert [status.job_id for status in toy_lab.host.jobs() if status.state == "running"] == []
    assert set(toy_lab.values()) == {"pp16", "pp32", *(f"MUL_MAT type_a=q4_0 m=4096 k=14336 n={n}" for n in (8, 512))}


def test_intent_without_a_job_is_carried_out(toy_lab: ToyLab) -> None:
    """A client that died between its note and the first network call: the same job is started, once."""
    experiment = toy_lab.experiment()
    toy_lab.run(toy_lab.experiment(bench=(), models={}))
    source = resolve(toy_lab.lab, experiment, None, quiet)
    job = plan.make(experiment, source, job_id=plan.new_job_id("toy"))
    toy_lab.lab.store.intend(job, experiment, toy_lab.host.name, "0")
    outcome, _ = toy_lab.run(experiment)
    assert (outcome.job_id, outcome.reused) == (job.job_id, 8)


def test_killed_agent_loses_nothing_that_was_measured(toy_lab: ToyLab) -> None:
    """Lost is said; the run after it measures only what is missing."""
    experiment = slow(toy_lab)
    job = submit(toy_lab, experiment)
    wait_for(toy_lab, job.job_id, '"event":"run"')
    started = json.loads((toy_lab.root / "jobs" / job.job_id / "started").read_text())
    os.kill(started["pid"], 9)
    with pytest.raises(JobLost, match="was lost"):
        follow(toy_lab.lab, toy_lab.host, job.job_id, quiet)
    assert len(toy_lab.values()) == 2
    outcome, events = toy_lab.run(experiment)
    assert outcome.error is None
    assert [event["tool"] for event in events if event["event"] == "run"] == ["llama-bench"]
    assert toy_lab.lab.store.job(job.job_id).state == "lost"


def test_ctrl_c_leaves_the_job_running(toy_lab: ToyLab) -> None:
    """The message names both ways on, and attach finds the rest."""

    def impatient(event: Mapping[str, Any]) -> None:
        if event["event"] == "run":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        run(toy_lab.lab, slow(toy_lab), watch=impatient)
    (job,) = toy_lab.lab.store.unfinished("local")
    assert f"dgxlab attach {job.job_id}" in caught.value.next
    assert f"dgxlab cancel {job.job_id}" in caught.value.next
    assert toy_lab.host.status(job.job_id).state == "running"
    assert follow(toy_lab.lab, toy_lab.host, job.job_id, quiet) is None
    assert len(toy_lab.values()) == 4


def test_cancel_ends_the_job_and_keeps_what_it_measured(toy_lab: ToyLab) -> None:
    """The journal has its end, the programs are gone, the record says cancelled."""
    job = submit(toy_lab, slow(toy_lab))
    wait_for(toy_lab, job.job_id, '"event":"run"')
    status = toy_lab.host.cancel(job.job_id)
    assert status.rc is not None
    assert (status.state, status.rc["status"]) == ("done", "cancelled")
    settle(toy_lab.lab, toy_lab.host, None, quiet)
    assert toy_lab.lab.store.job(job.job_id).state == "cancelled"
    assert len(toy_lab.values()) == 2
    assert _programs_under(toy_lab.root / "builds") == []


def _programs_under(folder: Path) -> list[str]:
    found = []
    for link in Path("/proc").glob("[0-9]*/exe"):
        with contextlib.suppress(OSError):
            found.append(str(link.readlink()))
    return [program for program in found if program.startswith(str(folder))]


def test_two_readers_ingest_once(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> None:
    """Reading a journal again, whole or from where one stands, adds nothing."""
    lab = make_toy_lab()
    outcome, _ = lab.run()
    tables = ("runs", "samples", "gates", "rows")
    before = [lab.lab.store.rows(f"SELECT * FROM {table}") for table in tables]  # noqa: S608 - names from above
    assert follow(lab.lab, lab.host, outcome.job_id, quiet) is None
    assert [lab.lab.store.rows(f"SELECT * FROM {table}") for table in tables] == before  # noqa: S608


def test_half_a_plan_is_never_staged(toy_lab: ToyLab) -> None:
    """A cut upload looks like its end: the checksum tells, and nothing becomes visible."""
    toy_lab.host.probe()
    with pytest.raises(RemoteError, match="did not arrive whole"):
        toy_lab.host._ask("submit", "20260101-000000-half-abc123", "0" * 64, stdin=lambda: [b'{"job_id": "20260101'])
    assert toy_lab.host.status("20260101-000000-half-abc123").state == "absent"


def test_agent_is_sent_when_the_host_lacks_it(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> None:
    """A fresh host gets this version's agent, whole, under its own digest."""
    lab = make_toy_lab(root=tmp_path / "fresh")
    lab.host.probe()
    (agent,) = (tmp_path / "fresh" / "agent").iterdir()
    assert agent.stat().st_mode & 0o077 == 0
    calls = lab.host.calls
    lab.host.probe()
    assert lab.host.calls == calls + 1
