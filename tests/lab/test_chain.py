"""Chains held by a real agent on the toy, as the job's own folder tells of them."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab import plan
from dgxlab.agent.journal import read
from dgxlab.agent.lock import FOLDERS
from dgxlab.lab import Side, ask, resolve
from dgxlab.lab.provision import send
from dgxlab.model import EngagedGate, Experiment, FileModel, ParityGate, Plan, Session
from dgxlab.transport.host import JobStatus
from tests import machines, toy
from tests.lab.conftest import ToyLab
from tests.lab.test_detached import quiet, wait_for

Event = dict[str, Any]
BURN_IN = ["u1", "u2", "u3", "u4"]


def arm(lab: ToyLab, name: str, env: Mapping[str, str] | None = None, **changes: Any) -> Experiment:
    """Return an arm with one entry of one cell, in a session of six cycles."""
    entry = toy.llama_bench(n_prompt=(16,), n_gen=(0,), env=env or {})
    return lab.experiment(**{"name": name, "bench": (entry,), "session": Session(cycles=6), **changes})


def begin(lab: ToyLab, baseline: Experiment, candidate: Experiment, kind: str = "ab") -> Plan:
    """Start a session and be gone before reading a line of it."""
    sides = [Side(each, resolve(lab.lab, each, None, quiet)) for each in (baseline, candidate)]
    probe = ask(lab.host, *sides)
    one, two = (side.source for side in sides)
    job = plan.make_ab(baseline, candidate, (one, two), job_id=plan.new_job_id("toy"), kind=kind)
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
    return list(read(lab.root / "jobs" / job.job_id / "journal.jsonl"))


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


def test_a_session_against_itself(toy_lab: ToyLab) -> None:
    """One build; gates before and after; a chain for each entry, every run a process with output of its own."""
    both = arm(toy_lab, "same", bench=(toy.backend_ops(), toy.batched_bench()), session=Session(cycles=6))
    events, end = hold(toy_lab, both)
    assert (end["exit_code"], end["status"]) == (0, "done")
    assert len(of(events, "build")) == 1
    assert [gate["id"] for gate in of(events, "gate")] == ["gate:0", "gate:0:after"]
    assert places(events) == chain(6) * 2
    runs = of(events, "run")
    assert [run["chain"] for run in runs] == ["chain:0"] * 17 + ["chain:1"] * 17
    assert {(run["status"], run["tool"]) for run in runs} == {("valid", "backend-ops"), ("valid", "batched-bench")}
    assert len({run["raw"]["stdout"]["path"] for run in runs}) == 34
    assert runs[22]["raw"]["stdout"]["path"] == "raw/chain-1-candidate-1.out"
    assert [run["position"] for run in runs] == list(range(34))
    last = of(events, "chain")[-1]
    assert (last["id"], last["state"], last["valid"], last["drift"]) == ("chain:1", "done", 6, 0.0)
    steps = [event["id"] for event in of(events, "step") if event["state"] == "done"]
    assert steps[-3:] == ["chain:0", "chain:1", "gate:0:after"]


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
    assert "candidate 5 failed: llama-bench was killed by SIGSEGV" in end["message"]
    assert end["next"].endswith("raw/chain-0-candidate-5.err")
    assert places(events) == chain(5) + chain(6)
    assert {run["status"] for run in of(events, "run") if run["chain"] == "chain:1"} == {"valid"}
    assert [gate["id"] for gate in of(events, "gate")] == ["gate:0", "gate:1", "gate:0:after", "gate:1:after"]
    (error,) = of(events, "error")
    assert len(error["details"].splitlines()) == 5


def test_a_candidate_that_crashes_in_half_its_runs(toy_lab: ToyLab, tmp_path: Path) -> None:
    """Each crash costs a cycle and brings another; here just enough are left."""
    env = {"TOY": "every second crashes", "TOY_COUNT": str(tmp_path / "calls")}
    eight = Session(cycles=8)
    events, end = hold(toy_lab, *(arm(toy_lab, *of, session=eight) for of in (("stock",), ("shaky", env))))
    assert end["exit_code"] == 0
    ran = [(run["cycle"], run["status"]) for run in of(events, "run") if run["role"] == "candidate"]
    assert ran == [(i, "valid" if i % 2 else "failed") for i in range(1, 11)]
    last = of(events, "chain")[-1]
    assert (last["state"], last["cycles"], last["valid"], last["done"]) == ("done", 10, 5, 25)


def test_a_baseline_that_crashes_is_told_at_once(toy_lab: ToyLab) -> None:
    """Its own error, after two runs; the candidate is not run."""
    events, end = hold(toy_lab, arm(toy_lab, "broken", {"TOY": "status"}), arm(toy_lab, "stock"))
    assert end["exit_code"] == 4
    assert end["message"].startswith("llama-bench ended with exit status 7: error: out of toys")
    assert places(events) == ["u1", "u2"]


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


def test_a_path_under_test_that_ran_in_the_baseline(toy_lab: ToyLab) -> None:
    """The candidate's marker is on the baseline's stderr too: both arms are the same path."""
    engaged = (EngagedGate("toy-marker: here"),)
    events, end = hold(toy_lab, arm(toy_lab, "stock", gates=()), arm(toy_lab, "w4a16", gates=engaged))
    assert end["exit_code"] == 5
    assert end["message"].startswith(
        "the path under test ran in the baseline too: 'toy-marker: here' is on llama-bench's"
    )
    assert places(events) == ["u1", "u2"]


def test_a_screen_is_one_bracket_without_gates_after(toy_lab: ToyLab) -> None:
    """The least that can be held."""
    events, end = hold(toy_lab, arm(toy_lab, "stock"), arm(toy_lab, "other"), kind="screen")
    assert end["exit_code"] == 0
    assert places(events) == chain(1)
    assert [gate["id"] for gate in of(events, "gate")] == ["gate:0", "gate:1"]


def test_a_session_cancelled_in_the_middle_of_its_chain(toy_lab: ToyLab) -> None:
    """What ran is in the journal, whole; nothing is glued to it later, and no program is left."""
    job = begin(toy_lab, arm(toy_lab, "stock"), arm(toy_lab, "slow", {"TOY": "slow"}))
    wait_for(toy_lab, job.job_id, '"role":"baseline","cycle":1')
    end = rc(toy_lab.host.cancel(job.job_id))
    assert (end["exit_code"], end["status"]) == (130, "cancelled")
    events = told(toy_lab, job)
    assert places(events) == chain(1)
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "cancelled")
    assert of(events, "chain")[-1]["state"] == "running"


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU that no other test has; `machines.sampled` says of which kind."""
    uuid = f"GPU-{secrets.token_hex(8)}"
    monkeypatch.setenv("PATH", f"{tmp_path / 'smi'}:{os.environ['PATH']}")
    yield uuid
    for where in FOLDERS:
        (where / f"dgxlab-{uuid}").unlink(missing_ok=True)


def test_a_gb10_with_a_stuck_clock_measures_nothing_more(toy_lab: ToyLab, gpu: str, tmp_path: Path) -> None:
    """The first run of burn-in shows it, and the job ends with what to do."""
    stuck = "47, 611, [N/A], 14.20, 96, P0, 580.95.05, 0x0000000000000000, [N/A], [N/A], [N/A], [N/A]"
    machines.sampled(tmp_path / "smi", {gpu: "NVIDIA GB10"}, stuck)
    one = arm(toy_lab, "gb10", {"TOY": "slow"}, cmake={"GGML_CUDA": "ON"}, gates=())
    events, end = hold(toy_lab, one)
    assert end["exit_code"] == 8
    assert end["message"].startswith("the GPU was busy at 611 MHz: a GB10 below 1500 MHz under load is in its stuck")
    assert places(events) == ["u1"]


def test_a_cold_session_needs_a_temperature(toy_lab: ToyLab, gpu: str, tmp_path: Path) -> None:
    """A GPU whose temperature is not known is refused before anything is measured."""
    unknown = "[N/A], 1980, 3201, 472.33, 99, P0, 580.159.04, 0x0000000000000000, 0, 0, 0, 0"
    machines.sampled(tmp_path / "smi", {gpu: "NVIDIA H200"}, unknown)
    cold = Session(cycles=5, thermal="cold")
    events, end = hold(toy_lab, arm(toy_lab, "cold", cmake={"GGML_CUDA": "ON"}, gates=(), session=cold))
    assert end["exit_code"] == 8
    assert end["message"].startswith("thermal: cold needs the device's temperature")
    assert places(events) == []


def test_a_pinned_session_names_its_processors(toy_lab: ToyLab) -> None:
    """Each run says where it ran, the same in both arms; gates are left alone."""
    events, end = hold(toy_lab, arm(toy_lab, "pinned", session=Session(cycles=5, pin=True)))
    assert end["exit_code"] == 0
    (places,) = {tuple(run["before"]["pinned"]) for run in of(events, "run")}
    assert set(places) <= os.sched_getaffinity(0)
    assert not any("pinned" in run["after"] for run in of(events, "run"))
