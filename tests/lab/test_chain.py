"""Chains held by a real agent on the toy, as the job's own folder tells of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab import plan
from dgxlab.lab.provision import probe_for, send
from dgxlab.model import Experiment, FileModel, ParityGate, Session
from dgxlab.tools import BackendOpsBench
from tests import journals, toy
from tests.journals import read, words
from tests.lab.conftest import ToyLab, kinds, notes, quiet

Event = dict[str, Any]
BURN_IN = ["u1", "u2", "u3", "u4"]


def arm(lab: ToyLab, name: str, env: Mapping[str, str] | None = None, **changes: Any) -> Experiment:
    entry = toy.llama_bench(n_prompt=(16,), n_gen=(0,), env=env or {})
    return lab.experiment(**{"name": name, "bench": (entry,), "session": Session(cycles=6), **changes})


def hold(lab: ToyLab, *arms: Experiment, kind: str = "ab") -> tuple[list[Event], dict[str, Any]]:
    """Hold a session without a client; returns its journal and its last word."""
    sides = [lab.side(each) for each in (arms[0], arms[-1])]
    sources = (sides[0].source, sides[1].source)
    job = plan.make_ab(arms[0], arms[-1], sources, job_id=plan.new_job_id("toy"), kind=kind)
    send(lab.lab.cache, lab.host, job, probe_for(lab.host, *sides), quiet)
    lab.host.submit(job)
    status = lab.wait_end(job.job_id)
    assert (status.state, status.rc is None) == ("done", False)
    return [journals.told(event) for event in read(lab.root / "jobs" / job.job_id / "journal.jsonl")], status.rc or {}


def places(events: list[Event]) -> list[str]:
    letters = {"burn-in": "u", "baseline": "a", "candidate": "b"}
    return [f"{letters[run['role']]}{run['cycle']}" for run in kinds(events, "run")]


def chain(cycles: int) -> list[str]:
    return [*BURN_IN, "a0", *(f"{arm}{i}" for i in range(1, cycles + 1) for arm in "ba")]


def test_a_model_of_one_name_that_is_another_in_each_arm(toy_lab: ToyLab) -> None:
    files = {name: toy_lab.folder / f"{name}.gguf" for name in ("stock", "other")}
    for number, path in enumerate(files.values()):
        path.write_bytes(toy.GGUF + bytes(number))
    events, end = hold(toy_lab, *(arm(toy_lab, name, models={"m": FileModel(str(files[name]))}) for name in files))
    assert end["exit_code"] == 0
    known = {event["path"]: event["model_id"] for event in kinds(events, "model")}
    for run in kinds(events, "run"):
        path = str(files[run["arm"]])
        assert (run["argv"][run["argv"].index("-m") + 1], run["model_id"]) == (path, known[path])
    assert len(set(known.values())) == 2


def test_a_candidate_that_always_crashes(toy_lab: ToyLab) -> None:
    entries = (toy.llama_bench(n_prompt=(16,), n_gen=(0,)), toy.backend_ops())
    baseline = arm(toy_lab, "stock", bench=entries)
    crash = (toy.llama_bench(n_prompt=(16,), n_gen=(0,), env={"TOY": "crash"}), toy.backend_ops())
    events, end = hold(toy_lab, baseline, arm(toy_lab, "broken", bench=crash))
    assert (end["exit_code"], end["status"]) == (8, "failed")
    assert "chain:0 (llama-bench) gives no verdict: 0 of 5 cycles count and " in end["message"]
    assert "candidate 5 failed: " in end["message"]
    assert end["next"].endswith("raw/chain-0-candidate-5.err")
    assert places(events) == chain(5) + chain(6)
    assert {run["status"] for run in kinds(events, "run") if run["chain"] == "chain:1"} == {"valid"}
    assert [gate["id"] for gate in kinds(events, "gate")] == ["gate:0", "gate:1", "gate:0:after", "gate:1:after"]


def test_an_arm_whose_gate_fails_is_not_compared(toy_lab: ToyLab) -> None:
    wrong = (toy.parity(env={"TOY": "wrong"}),)
    events, end = hold(toy_lab, arm(toy_lab, "stock"), arm(toy_lab, "wrong", gates=wrong))
    assert end["exit_code"] == 5
    assert places(events) == []
    states = {event["id"]: event["state"] for event in kinds(events, "step")}
    assert [states[step] for step in ("gate:0", "chain:0", "gate:0:after")] == ["done", "skipped", "skipped"]


@pytest.mark.parametrize("others", [(), (toy.backend_ops(),)], ids=["alone", "beside another chain"])
def test_gates_after_the_chains_check_what_ran_in_a_cycle(toy_lab: ToyLab, others: tuple[BackendOpsBench, ...]) -> None:
    crash = toy.llama_bench(n_prompt=(16,), n_gen=(0,), env={"TOY": "crash"})
    baseline = arm(toy_lab, "broken", bench=(crash, *others))
    events, end = hold(toy_lab, baseline, arm(toy_lab, "stock", bench=(replace(crash, env={}), *others)))
    assert end["exit_code"] == 4
    assert places(events) == ["u1", "u2", *(chain(6) if others else [])]
    after = ["gate:0:after", "gate:1:after"] if others else []
    assert [gate["id"] for gate in kinds(events, "gate")] == ["gate:0", "gate:1", *after]
    assert len(notes(events, "the gates after the chains are left out: no chain has a cycle")) == (not others)


MISSING = "not the baseline's cases: missing"
FEWER = ["the candidate ran 3 cases, the baseline 4", f"{MISSING}: 1, as MUL_MAT(type_a=f32,n=3)"]
REPEATED = f"{MISSING}: 2, as MUL_MAT(type_a=f32,n=2); repeated more often: 2, as MUL_MAT(type_a=f32,n=1)"


@pytest.mark.parametrize(
    ("how", "gate", "reasons"),
    [
        ("fewer", ParityGate("MUL_MAT", "CPU"), FEWER),
        ("one case", toy.parity(), [REPEATED]),
        ("fewer", toy.parity(total=3), []),
        ("flaky", toy.parity(), ["flaky here and not in the baseline: MUL_MAT(type_a=q4_0,n=9)"]),
    ],
    ids=["fewer cases", "repeated cases", "declared", "flaky"],
)
def test_a_candidates_gate_is_held_against_the_baselines(
    toy_lab: ToyLab, tmp_path: Path, how: str, gate: ParityGate, reasons: list[str]
) -> None:
    env = {"TOY": how, "TOY_COUNT": str(tmp_path / "calls")}
    candidate = arm(toy_lab, "candidate", gates=(replace(gate, env=env),), session=Session(cycles=2))
    events, end = hold(toy_lab, arm(toy_lab, "stock"), candidate, kind="screen")
    assert [words(event) for event in kinds(events, "gate")] == [[], reasons]
    assert end["exit_code"] == (5 if reasons else 0)
    lists = [event["case_list"] for event in kinds(events, "gate") if "case_list" in event]
    assert len(lists) == len({event["readings"]["arm"]["cases"] for event in kinds(events, "gate")})
