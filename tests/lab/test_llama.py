"""The real llama.cpp at the pin, on this machine's CPU: the whole loop, and a patched arm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dgxlab import audit, report
from dgxlab.model import ParityGate
from dgxlab.spec import load
from tests.conftest import PROJECT, Bench, Quickstart
from tests.lab.test_run import kinds

pytestmark = pytest.mark.llama


def test_quickstart_is_gated_and_measured(quickstart: Quickstart) -> None:
    """1103 of 1103 with 306 unsupported, and a number for every cell."""
    assert quickstart.outcome.error is None
    (gate,) = kinds(quickstart.events, "gate")
    assert (gate["passed"], gate["total"], gate["unsupported"]) == (1103, 1103, 306)
    runs = kinds(quickstart.events, "run")
    measured = {result["cell"] for run in runs if run["status"] == "valid" for result in run["results"]}
    assert len(measured) == quickstart.outcome.planned == 12
    assert audit.check(quickstart.bench.lab.store) == []


def test_quickstart_again_measures_nothing(quickstart: Quickstart) -> None:
    """Everything is up to date: no job, no event from a host."""
    outcome, events = quickstart.bench.run(quickstart.experiment)
    assert (outcome.job_id, outcome.reused) == ("", 12)
    assert [event for event in events if event["event"] != "note"] == []


def test_quickstart_report(quickstart: Quickstart) -> None:
    """Each table has its rows, its pin and its host."""
    collected = report.collect(quickstart.bench.lab.store, "quickstart")
    page = report.render(collected)
    assert "| MUL_MAT | CPU | 1103/1103 | 306 | 1103 | passed |" in page
    assert [len(table.rows) for table in collected.tables] == [1, 6, 3, 3]
    assert page.count("pin e3a74b299085") == 1


@pytest.mark.usefixtures("llama_bin")
def test_a_patched_build(make_bench: Callable[[], Bench]) -> None:
    """The shapes series: one file compiled on top of stock, and the program works."""
    bench = make_bench()
    experiment = replace(load(PROJECT / "experiments" / "cpu" / "shapes-cpu.yaml"), gates=(ParityGate("SQR", "CPU"),))
    outcome, events = bench.run(experiment, kind="gate")
    assert outcome.error is None
    (build,) = kinds(events, "build")
    assert [ref["name"] for ref in build["source"]["series"]] == ["backend-ops-shapes"]
    log = bench.root / "jobs" / outcome.job_id / "build-shapes-cpu.log"
    compiled = [line for line in log.read_text().splitlines() if "Building C" in line] if log.exists() else []
    assert all("test-backend-ops.cpp" in line for line in compiled)


def test_stock_and_patched_are_different_builds(quickstart: Quickstart) -> None:
    """llama.cpp's own build_commit is the same for both; ours tells them apart, by tree and by binary."""
    patched = replace(load(PROJECT / "experiments" / "cpu" / "shapes-cpu.yaml"), gates=(ParityGate("SQR", "CPU"),))
    outcome, _ = quickstart.bench.run(patched, kind="gate")
    assert outcome.error is None
    rows = quickstart.bench.lab.store.rows("SELECT tree, binaries FROM builds")
    assert len({row["tree"] for row in rows}) == len({row["binaries"] for row in rows}) == len(rows) == 2
