"""A gate and a run of programs that go too far."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgxlab.agent import child
from dgxlab.agent.gates import run_gate, text
from dgxlab.agent.journal import Journal
from dgxlab.agent.lease import DeviceLease
from dgxlab.agent.measure import Attempt, Bench, Runs
from dgxlab.agent.telemetry import Telemetry
from dgxlab.agent.work import Worker
from dgxlab.errors import DgxlabError, HostBusy
from dgxlab.model import ARM, CheckCommand, Expectation, GateStep, ParityGate, Plan, RunStep
from dgxlab.model.events import RunEvent

GATE = GateStep("gate:0", "one", ParityGate("MUL_MAT", "CPU", Expectation(1, 1), 0), (CheckCommand(ARM, ("yes",), {}),))
RUN = RunStep("run:0", "one", "llama-bench", ("{bin}/llama-bench",), {}, ())


def bench(folder: Path, notes: list[str]) -> Bench:
    return Bench(folder, (), Telemetry(folder, folder / "agent.pyz", {}), notes.append)


def run(bench: Bench, folder: Path, argv: list[str]) -> RunEvent:
    lease = DeviceLease(Plan("J", "n", "e", (), ()), [], (), lambda *told: None)
    journal = Journal(folder / "journal.jsonl")
    runs = Runs("J", journal, bench, lease, lambda step, arm: argv, lambda step: ("B", ""), [])
    return runs.launch(RUN, "run:0").run


def test_output_without_end_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "OUTPUT_LIMIT", 1 << 20)
    monkeypatch.setattr(child, "OUTPUT_LOOK_S", 0.05)
    here = bench(tmp_path, [])
    gate = run_gate(here, GATE, "B", {}, lambda argv, paths: list(argv))
    assert (gate.status, str(gate.reasons[0])) == ("failed", "test-backend-ops printed more than 1 MiB")
    event = run(here, tmp_path, ["yes"])
    assert (event.status, event.reason) == ("failed", "llama-bench printed more than 1 MiB: y")
    assert event.raw["stdout"].size == 1 << 20
    assert here.launch("again", ["yes"], {}, 20.0).text() == ""


def test_what_is_left_running_is_told(tmp_path: Path, adopts: None) -> None:
    notes: list[str] = []
    event = run(bench(tmp_path, notes), tmp_path, ["setsid", "-f", "sleep", "60"])
    (flag,) = [flag for flag in event.flags if flag.kind == "left_running"]
    assert notes == [flag.reason]
    assert flag.reason.startswith("run:0 left processes running, which were ended: pid ")
    assert (flag.hard, flag.reason.endswith(" (sleep)")) == (False, True)


def test_the_words_are_the_seeds_for_ever() -> None:
    """A recorded md5 of greedy text belongs to these very words; a longer text begins with the shorter one."""
    assert text(3, 0) == "food look near"
    wanted = "97bbbf17f647b5d871138d453a8f7fadd3b5af8c54f1374c6a96fe508b65b091"
    assert hashlib.sha256(text(1000, 7).encode()).hexdigest() == wanted

    assert text(50, 1).startswith(text(20, 1) + " ")
    assert text(20, 2).split() != text(20, 1).split()
    assert len(text(50, 1).split()) == 50


STEP = RunStep("run:0", "one", "llama-bench", ("{bin}/llama-bench",), {}, (), attempts=2)
GOOD = ("valid", "")
SHARED = ("valid", "disturbed")
STRANGER = ("discarded", "disturbed")
SHORT = ("failed", "rows")


@pytest.mark.parametrize(
    ("outcomes", "ran", "fails"),
    [
        ([GOOD], 1, False),
        ([SHARED, GOOD], 2, False),
        ([SHARED, SHARED, SHARED], 3, False),
        ([SHARED, STRANGER, SHARED], 3, False),
        ([SHARED, SHARED, STRANGER], 3, True),
        ([SHORT, SHARED, GOOD], 3, False),
        ([SHORT, SHORT], 2, True),
    ],
)
def test_a_run_that_was_not_left_alone_is_repeated(outcomes: Sequence[tuple[str, str]], ran: int, fails: bool) -> None:
    """Twice at most; then a number is kept, all of them are recorded, and only one that is none is a failure."""
    coming = iter(outcomes)
    recorded: list[str] = []
    names: list[str] = []
    failures: list[DgxlabError] = []

    def launch(step: RunStep, name: str) -> Attempt:
        names.append(name)
        status, again = next(coming)
        return Attempt(SimpleNamespace(status=status), again)  # type: ignore[arg-type]

    def record(run: Any) -> None:
        recorded.append(run.status)

    worker: Any = SimpleNamespace(
        plan=SimpleNamespace(steps=[STEP]),
        runs=SimpleNamespace(
            hold=lambda: 0.0,
            launch=launch,
            record=record,
            failure=lambda name, attempt, tries: HostBusy(f"{name}: {tries}"),
        ),
        fail=failures.append,
        _progress=lambda *told: None,
    )
    Worker._run(worker, STEP)
    assert recorded == [status for status, _ in outcomes]
    assert names == [*["run:0"], *(f"run:0-{i}" for i in range(1, ran))]
    assert [error.message for error in failures] == [f"run:0: {ran}"] * fails
