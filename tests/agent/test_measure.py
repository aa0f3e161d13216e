"""A gate and a run of programs that go too far."""

import hashlib
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgxlab.agent import child, gates, measure
from dgxlab.agent.gates import random_text, run_gate
from dgxlab.agent.measure import Attempt, Workbench
from dgxlab.agent.work import Worker
from dgxlab.errors import DgxlabError, HostBusy
from dgxlab.model import ARM, CheckCommand, Expectation, GateStep, ParityGate, RunStep
from dgxlab.model.events import NoteEvent, ProgressEvent, RunEvent
from dgxlab.model.reasons import Code, reason
from tests.journals import read

GATE = GateStep("gate:0", "one", ParityGate("MUL_MAT", "CPU", Expectation(1, 1), 0), (CheckCommand(ARM, ("yes",), {}),))
RUN = RunStep("run:0", "one", "llama-bench", ("{bin}/llama-bench",), {}, ())


def run(bench: Workbench, *argv: str) -> RunEvent:
    return bench.measure(replace(RUN, argv=argv), "run:0").run


def test_output_without_end_is_the_reason(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "OUTPUT_LIMIT", 1 << 20)
    monkeypatch.setattr(child, "OUTPUT_LOOK_S", 0.05)
    gate = run_gate(bench, GATE)
    assert (gate.status, gate.reasons[0].code) == ("failed", "too_long")
    event = run(bench, "yes")
    assert (event.status, event.reasons) == ("failed", (reason(Code.TOO_LONG, program="yes", mib=1, last="y"),))
    assert event.raw["stdout"].size == 1 << 20
    assert bench.launch("again", ["yes"], {}, 20.0).text() == ""


def test_a_gate_counts_its_cases_as_they_pass(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "_LOOK_S", 0.05)
    monkeypatch.setattr(measure, "_PROGRESS_S", 0.0)
    two = f"until grep -q '\"done\":2,' {bench.job.journal}; do sleep 0.02; done"
    case = r"printf '  MUL_MAT(n=1): \033[1;32mOK\033[0m\n'"
    command = CheckCommand(ARM, ("sh", "-c", f"{case}; {case}; {two}; {case}"), {})
    run_gate(bench, replace(GATE, gate=replace(GATE.gate, expect=Expectation(3, 3)), commands=(command,)))
    told = [(each.done, each.total) for each in read(bench.job.journal) if isinstance(each, ProgressEvent)]
    assert (2, 3) in told
    assert told[-1] == (3, 3)


def test_a_look_at_output_without_a_line_end_reads_little(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_LOOK_BYTES", 1 << 16)
    printed = tmp_path / "printed"
    printed.write_bytes(b"x" * (8 << 20))
    look = gates._counting(bench, GATE, printed)
    tracemalloc.start()
    for _ in range(3):
        look(0)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("recipe", "last"),
    [
        ("@echo 'No module named torch' >&2; exit 1", "No module named torch"),
        ("@$(MAKE) inner", "No module named numpy"),
        ("@echo on stdout; exit 1", "on stdout"),
        ("@exit 1", "make: *** ["),
        ("@no-such-compiler", "make: no-such-compiler: "),
        ("@kill -ABRT $$$$", "make: *** ["),
    ],
)
def test_the_reason_of_a_make_is_its_commands_own(bench: Workbench, tmp_path: Path, recipe: str, last: str) -> None:
    inner = "inner:\n\t@echo 'No module named numpy' >&2; exit 1\n"
    (tmp_path / "Makefile").write_text(f"test:\n\t{recipe}\n{inner}")
    launched = bench.launch("make", ["make", "-C", str(tmp_path), "test"], {}, 20.0)
    assert launched.last_words().startswith(last)


@pytest.mark.usefixtures("adopts")
def test_what_is_left_running_is_told(bench: Workbench) -> None:
    event = run(bench, "sh", "-c", "sleep 60 & until grep -q sleep /proc/$!/comm; do :; done")
    (flag,) = [flag for flag in event.flags if flag.kind == "left_running"]
    assert [event.note for event in read(bench.job.journal) if isinstance(event, NoteEvent)] == [flag.reason]
    assert (flag.hard, flag.params["program"], flag.reason.endswith(" (sleep)")) == (False, "run:0", True)


def test_the_words_are_the_seeds_for_ever() -> None:
    """A recorded md5 of greedy text belongs to these very words; a longer text begins with the shorter one."""
    assert random_text(3, 0) == "food look near"
    wanted = "97bbbf17f647b5d871138d453a8f7fadd3b5af8c54f1374c6a96fe508b65b091"
    assert hashlib.sha256(random_text(1000, 7).encode()).hexdigest() == wanted
    assert random_text(1000, 7).startswith(random_text(20, 7) + " ")


STEP = RunStep("run:0", "one", "llama-bench", ("{bin}/llama-bench",), {}, (), attempts=2)
GOOD = ("valid", "")
SHARED = ("valid", "disturbed")
STRANGER = ("discarded", "disturbed")
SHORT = ("failed", "rows")


@pytest.mark.parametrize(
    ("outcomes", "fails"),
    [
        ([GOOD], False),
        ([SHARED, GOOD], False),
        ([SHARED, SHARED, SHARED], False),
        ([SHARED, STRANGER, SHARED], False),
        ([SHARED, SHARED, STRANGER], True),
        ([SHORT, SHARED, GOOD], False),
        ([SHORT, SHORT], True),
    ],
)
def test_a_run_that_was_not_left_alone_is_repeated(outcomes: Sequence[tuple[str, str]], fails: bool) -> None:
    """Twice at most; then a number is kept, all of them are recorded, and only one that is none is a failure."""
    coming = iter(outcomes)
    recorded: list[str] = []
    names: list[str] = []
    notes: list[str] = []
    failures: list[DgxlabError] = []

    def measure(step: RunStep, name: str) -> Attempt:
        names.append(name)
        status, again = next(coming)
        reasons = () if status == "valid" else ("why",)
        run: Any = SimpleNamespace(status=status, reasons=reasons, reason="why" * len(reasons), hard=())
        return Attempt(run, again)

    worker: Any = SimpleNamespace(
        plan=SimpleNamespace(steps=[STEP]),
        bench=SimpleNamespace(
            hold=lambda: 0.0,
            measure=measure,
            failure=lambda name, attempt, tries: HostBusy(f"{name}: {tries}"),
            progress=lambda *told: None,
            note=notes.append,
        ),
        emit=lambda run: recorded.append(run.status),
        fail=failures.append,
    )
    Worker._run(worker, STEP)
    assert recorded == [status for status, _ in outcomes]
    assert names == ["run:0", "run:0-1", "run:0-2"][: len(outcomes)]
    assert [note.partition(",")[0] for note in notes] == ["run:0 is run again"] * (len(outcomes) - 1)
    assert [error.message for error in failures] == [f"run:0: {len(outcomes)}"] * fails
