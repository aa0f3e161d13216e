"""A gate and a run of programs that go too far."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgxlab.agent import child
from dgxlab.agent.measure import Bench
from dgxlab.agent.telemetry import Telemetry
from dgxlab.model import Expectation, GateStep, ParityGate, RunStep

GATE = GateStep("gate:0", "one", ParityGate("MUL_MAT", "CPU", Expectation(1, 1), 0), ("-o", "MUL_MAT"), {})
RUN = RunStep("run:0", "one", "llama-bench", ("{bin}/llama-bench",), {}, ())


def bench(folder: Path, notes: list[str]) -> Bench:
    """Return a bench whose notes are kept."""
    return Bench(folder, (), Telemetry(folder, folder / "agent.pyz", {}), notes.append)


def test_output_without_end_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gate and a run that failed; none of it is parsed, and its last line is told."""
    monkeypatch.setattr(child, "OUTPUT_LIMIT", 1 << 20)
    monkeypatch.setattr(child, "OUTPUT_LOOK_S", 0.05)
    here = bench(tmp_path, [])
    gate = here.gate(GATE, ["yes"]).fields
    assert (gate["status"], gate["reasons"][0]) == ("failed", "test-backend-ops printed more than 1 MiB")
    run = here.run(RUN, ["yes"], "run:0", lambda looks: "").fields
    assert (run["status"], run["reason"]) == ("failed", "llama-bench printed more than 1 MiB: y")
    assert run["raw"]["stdout"]["size"] == 1 << 20
    assert here.launch("again", ["yes"], {}, 20.0).text() == ""


def test_what_is_left_running_is_told(tmp_path: Path, adopts: None) -> None:
    """With the run, and by a note whatever left it."""
    notes: list[str] = []
    run = bench(tmp_path, notes).run(RUN, ["setsid", "-f", "sleep", "60"], "run:0", lambda looks: "").fields
    (flag,) = [flag for flag in run["flags"] if flag["kind"] == "left_running"]
    assert notes == [flag["reason"]]
    assert flag["reason"].startswith("run:0 left processes running, which were ended: pid ")
    assert (flag["hard"], flag["reason"].endswith(" (sleep)")) == (False, True)
