"""How often a job repeats a run of its own, on runs whose outcome is given."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from dgxlab.agent.measure import Attempt
from dgxlab.agent.work import Worker
from dgxlab.errors import DgxlabError, HostBusy
from dgxlab.model import RunStep

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
        return Attempt({"status": status}, again)

    def record(step: RunStep, fields: dict[str, Any]) -> None:
        recorded.append(fields["status"])

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
