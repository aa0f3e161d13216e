"""Chains held by a real agent on the toy, as the job's own folder tells of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab import plan
from dgxlab.agent.journal import read
from dgxlab.lab import Side
from dgxlab.lab.provision import ask, send
from dgxlab.lab.session import resolve
from dgxlab.model import Experiment, FileModel, ParityGate, Plan, Session
from dgxlab.transport.host import JobStatus
from tests import journals, toy
from tests.lab.conftest import ToyLab
from tests.lab.test_detached import quiet

Event = dict[str, Any]
BURN_IN = ["u1", "u2", "u3", "u4"]


def arm(lab: ToyLab, name: str, env: Mapping[str, str] | None = None, **changes: Any) -> Experiment:
    """Return an arm with one entry of one cell, in a session of six cycles."""
    entry = toy.llama_bench(n_prompt=(16,), n_gen=(0,), env=env or {})
    return lab.experiment(**{"name": name, "bench": (entry,), "session": Session(cycles=6), **changes})


def begin(lab: ToyLab, baseline: Experiment, candidate: Experiment, kind: str = "ab") -> Plan:
    """Start a session and be gone before reading a line of it."""
    sides = [Side(each, resolve(lab.lab.cache, each, None, quiet)) for each in (baseline, candidate)]
    probe = ask(lab.host, *sides)
    first, second = (side.source for side in sides)
    job = plan.make_ab(baseline, candidate, (first, second), job_id=plan.new_job_id("toy"), kind=kind)
    send(lab.lab.cache, lab.host, job, probe, quiet)
    lab.host.submit(job)
    return job


def hold(lab: ToyLab, *arms: Experiment, kind: str = "ab") -> tuple[list[Event], dict[str, Any]]:
    """Hold a session; returns its journal and its last word."""
    job = begin(lab, arms[0], arms[-1], kind)
    deadline = time.monotonic() + 120
    while (status := lab.host.status(job.job_id)).state == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return told(lab, job), rc(status)


def told(lab: ToyLab, job: Plan) -> list[Event]:
    """Return a job's journal."""
    return [journals.told(event) for event in read(lab.root / "jobs" / job.job_id / "journal.jsonl")]


def rc(status: JobStatus) -> dict[str, Any]:
    """Return the last word of a job that has ended."""
    assert (status.state, status.rc is None) == ("done", False)
    return dict(status.rc or {})


def of(events: list[Event], kind: str) -> list[Event]:
    """Return the events of a kind."""
    return [event for event in events if event["event"] == kind]


def places(events: list[Event]) -> list[str]:
    """Return what ran, in short: u1 u2 a0 b1 a1."""
    letters = {"burn-in": "u", "baseline": "a", "candidate": "b"}
    return [f"{letters[run['role']]}{run['cycle']}" for run in of(events, "run")]


def chain(cycles: int) -> list[str]:
    """Return the places of a whole chain."""
    return [*BURN_IN, "a0", *(f"{arm}{i}" for i in range(1, cycles + 1) for arm in "ba")]


def test_a_model_of_one_name_that_is_another_in_each_arm(toy_lab: ToyLab) -> None:
    """Each arm reads its own, and its runs say which."""
    files = {name: toy_lab.folder / f"{name}.gguf" for name in ("stock", "other")}
    for number, path in enumerate(files.values()):
        path.write_bytes(b"GGUF" + bytes(60 + number))
    events, end = hold(toy_lab, *(arm(toy_lab, name, models={"m": FileModel(str(files[name]))}) for name in files))
    assert end["exit_code"] == 0
    known = {event["path"]: event["model_id"] for event in of(events, "model")}
    for run in of(events, "run"):
        path = str(files[run["arm"]])
        assert (run["argv"][run["argv"].index("-m") + 1], run["model_id"]) == (path, known[path])
    assert len(set(known.values())) == 2


def test_a_candidate_that_always_crashes(toy_lab: ToyLab) -> None:
    """The chain is given up, the next one is held, and the gates after them run."""
    entries = (toy.llama_bench(n_prompt=(16,), n_gen=(0,)), toy.backend_ops())
    baseline = arm(toy_lab, "stock", bench=entries)
    crash = (toy.llama_bench(n_prompt=(16,), n_gen=(0,), env={"TOY": "crash"}), toy.backend_ops())
    events, end = hold(toy_lab, baseline, arm(toy_lab, "broken", bench=crash))
    assert (end["exit_code"], end["status"]) == (8, "failed")
    assert "chain:0 (llama-bench) gives no verdict: 0 of 5 cycles count and " in end["message"]
    assert "candidate 5 failed: " in end["message"]
    assert end["next"].endswith("raw/chain-0-candidate-5.err")
    assert places(events) == chain(5) + chain(6)
    assert {run["status"] for run in of(events, "run") if run["chain"] == "chain:1"} == {"valid"}
    assert [gate["id"] for gate in of(events, "gate")] == ["gate:0", "gate:1", "gate:0:after", "gate:1:after"]
    (error,) = of(events, "error")
    assert len(error["details"].splitlines()) == 5


def test_an_arm_whose_gate_fails_is_not_compared(toy_lab: ToyLab) -> None:
    """Neither arm is measured; the other one's gate is still asked, and none again after nothing."""
    wrong = (toy.parity(env={"TOY": "wrong"}),)
    events, end = hold(toy_lab, arm(toy_lab, "stock"), arm(toy_lab, "wrong", gates=wrong))
    assert end["exit_code"] == 5
    assert places(events) == []
    states = {event["id"]: event["state"] for event in of(events, "step")}
    assert [states[step] for step in ("gate:0", "chain:0", "gate:0:after")] == ["done", "skipped", "skipped"]


@pytest.mark.parametrize(
    ("how", "gate", "reasons"),
    [
        (
            "fewer",
            ParityGate("MUL_MAT", "CPU"),
            [
                "the candidate ran 3 cases, the baseline 4",
                "not the baseline's cases: missing: 1, as MUL_MAT(type_a=f32,n=3)",
            ],
        ),
        (
            "one case",
            toy.parity(),
            [
                "not the baseline's cases: missing: 2, as MUL_MAT(type_a=f32,n=2); "
                "repeated more often: 2, as MUL_MAT(type_a=f32,n=1)"
            ],
        ),
        ("fewer", toy.parity(total=3), []),
        ("flaky", toy.parity(), ["flaky here and not in the baseline: MUL_MAT(type_a=q4_0,n=9)"]),
    ],
    ids=["fewer cases", "repeated cases", "declared", "flaky"],
)
def test_a_candidates_gate_is_held_against_the_baselines(
    toy_lab: ToyLab, tmp_path: Path, how: str, gate: ParityGate, reasons: list[str]
) -> None:
    """It has the same cases, unless both specs say how many, and none is flaky in it alone."""
    env = {"TOY": how, "TOY_COUNT": str(tmp_path / "calls")}
    candidate = arm(toy_lab, "candidate", gates=(replace(gate, env=env),), session=Session(cycles=2))
    events, end = hold(toy_lab, arm(toy_lab, "stock"), candidate, kind="screen")
    assert [event["reasons"] for event in of(events, "gate")] == [[], reasons]
    assert end["exit_code"] == (5 if reasons else 0)
    lists = [event["case_list"] for event in of(events, "gate") if "case_list" in event]
    assert len(lists) == len({event["cases"] for event in of(events, "gate")})
