"""Whole jobs that are watched: real samplers, and an nvidia-smi whose GPUs are a capture."""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dgxlab.agent.lock import FOLDERS
from dgxlab.audit import check
from dgxlab.cli._display import Lines
from dgxlab.lab.raw import listing, path_of
from dgxlab.model import Experiment
from dgxlab.model.events import read
from dgxlab.report import collect, render, sessions
from tests import machines, toy
from tests.agent.test_child import wait_gone, wait_until
from tests.lab.conftest import ToyLab, is_measured, kinds

BUSY = "71, 1980, 3201, 472.33, 99, P0, 580.159.04, 0x0000000000000000, 0, 0, 0, 0"
CAPPED = "71, 1755, 3201, 699.50, 99, P0, 580.159.04, 0x0000000000000004, CALLS000, 0, 0, 0"
TOO_HOT = "92, 1200, 3201, 472.33, 99, P0, 580.159.04, 0x0000000000000000, 0, 0, CALLS000, 0"


@pytest.fixture
def uuids() -> Iterator[list[str]]:
    gpus = sorted(f"GPU-{secrets.token_hex(8)}" for _ in range(2))
    yield gpus
    for path in (where / f"dgxlab-{uuid}" for where in FOLDERS for uuid in gpus):
        path.unlink(missing_ok=True)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def make(*args: Any, **options: Any) -> Path:
        folder = tmp_path / "smi"
        machines.sampled(folder, *args, **options)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return folder

    return make


def slow(lab: ToyLab, **changes: Any) -> Experiment:
    bench = toy.llama_bench(n_prompt=(16,), n_gen=(0,), env={"TOY": "slow", **changes.pop("env", {})})
    return lab.experiment(**{"cmake": {"GGML_CUDA": "ON"}, "bench": (bench,), **changes})


def telemetry(lab: ToyLab) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["device"], row["name"]): row for row in lab.lab.store.rows("SELECT * FROM telemetry")}


def flags(lab: ToyLab) -> dict[tuple[str, str], tuple[bool, str]]:
    """Return the flags by device and kind, but for those of a busy machine, which also delays the samplers."""
    busy = "'run_queue', 'burst', 'others_cpu', 'steal', 'psi', 'no_telemetry', 'too_short'"
    rows = lab.lab.store.rows(f"SELECT * FROM flags WHERE kind NOT IN ({busy})")  # noqa: S608 - from above
    return {(row["device"], row["kind"]): (bool(row["hard"]), row["reason"]) for row in rows}


def release_when_sampled(lab: ToyLab) -> Callable[[dict[str, Any]], None]:
    """Let a held run end when all its samplers have printed eight lines."""

    def react(event: dict[str, Any]) -> None:
        if is_measured(event):
            files = max((lab.root / "jobs").iterdir()).glob("raw/telemetry-*")
            enough = {file: file.read_text().count("\n") + 8 for file in files}
            wait_until(lambda: all(file.read_text().count("\n") >= lines for file, lines in enough.items()))
            lab.release()

    return react


def run_event(events: list[dict[str, Any]]) -> dict[str, Any]:
    (event,) = kinds(events, "run")
    return event


def test_a_run_and_its_gpu(toy_lab: ToyLab, watch: Callable[..., Path], uuids: list[str]) -> None:
    mine = uuids[1]
    watch(dict.fromkeys(uuids, "NVIDIA H200"), BUSY, watched=[mine])
    toy_lab.hold.touch()
    env = {"CUDA_VISIBLE_DEVICES": "1", "TOY": "held", "TOY_HOLD": str(toy_lab.hold)}
    held = slow(toy_lab, gates=(), env=env)
    outcome, events = toy_lab.run_well(held, react=release_when_sampled(toy_lab))
    seen = telemetry(toy_lab)
    assert {device for device, _ in seen} == {mine, "host"}
    clock = seen[mine, "clocks.sm"]
    assert (clock["unit"], clock["median"], clock["min"], clock["max"]) == ("MHz", 1980.0, 1980.0, 1980.0)
    assert clock["n"] >= 5
    assert seen[mine, "power.draw"]["median"] == 472.33
    assert seen[mine, "clocks_event_reasons_counters.hw_thermal_slowdown"]["max"] == 0.0
    assert seen["host", "mem_available_mib"]["n"] >= 3
    assert (flags(toy_lab), check(toy_lab.lab.store)) == ({}, [])
    assert Lines().of(read(run_event(events)))[0].endswith("s, SM 1980 MHz, 71 °C, 472 W)")
    page = render(collect(toy_lab.lab.store, "toy"))
    assert "  - median of a run: SM 1980 MHz, 71 °C, 472 W\n" in page
    kept = listing(path_of(toy_lab.lab.raw, outcome.job_id))
    assert {"raw/telemetry-gpu.csv", "raw/telemetry-host.jsonl"} <= kept.keys()


@pytest.mark.parametrize(
    ("row", "kind", "hard", "words"),
    [(TOO_HOT, "hw_thermal", True, "HW thermal slowdown for "), (CAPPED, "sw_power_cap", False, "SW power cap for ")],
)
def test_a_flag_is_told_beside_the_numbers(
    toy_lab: ToyLab, watch: Callable[..., Path], uuids: list[str], row: str, kind: str, hard: bool, words: str
) -> None:
    watch({uuids[0]: "NVIDIA H200"}, row)
    outcome, events = toy_lab.run(slow(toy_lab))
    assert (outcome.error, outcome.measured) == (None, 1)
    ((key, (is_hard, reason)),) = flags(toy_lab).items()
    assert (key, is_hard) == ((uuids[0], kind), hard)
    assert reason.startswith(words)
    word = "hard event, so no verdict uses this run" if hard else "flag"
    assert Lines().of(read(run_event(events)))[1] == f"  {word}: {reason}"
    shown = "**hard event**" if hard else "flag"
    page = render(collect(toy_lab.lab.store, "toy"), wide=True)
    assert f"- {shown} in every row: {reason}\n" in page
    assert ("a run with a hard event was disturbed: no verdict uses it" in " ".join(page.split())) == hard
    assert toy_lab.run(slow(toy_lab))[0].reused == 1


@pytest.mark.parametrize("ms", ["0", "300"])
def test_a_run_too_short_to_see_other_programs_says_so(toy_lab: ToyLab, ms: str) -> None:
    """One that fails says only why it failed."""
    entry = toy.llama_bench(n_prompt=(16,), n_gen=(0,), env={"TOY_MS": ms})
    crash = toy.llama_bench(n_prompt=(32,), n_gen=(0,), env={"TOY_MS": ms, "TOY": "crash"})
    _, events = toy_lab.run(toy_lab.experiment(gates=(), bench=(entry, crash)))
    runs = kinds(events, "run")
    assert {run["status"] for run in runs} == {"valid", "failed"}
    for run in runs:
        told = [flag["hard"] for flag in run["flags"] if flag["kind"] == "too_short"]
        assert told == [False] * (run["seconds"] < 0.2 and run["status"] == "valid")


def test_a_sampler_that_fails_costs_its_samples_alone(
    toy_lab: ToyLab, watch: Callable[..., Path], uuids: list[str]
) -> None:
    folder = watch({uuids[0]: "NVIDIA H200"}, TOO_HOT, loop="trap '' TERM; echo $$ >sampler; sleep 600")
    outcome, _ = toy_lab.run(slow(toy_lab))
    assert (outcome.error, outcome.measured) == (None, 1)
    assert flags(toy_lab).keys() == {(uuids[0], "hw_thermal")}
    lost = toy_lab.lab.store.rows("SELECT * FROM flags WHERE kind = 'no_telemetry' AND device <> 'host'")
    # more than one where a busy machine disturbed the run, which was then repeated
    assert {(row["device"], row["hard"], row["reason"][:10]) for row in lost} == {(uuids[0], 0, "no samples")}
    assert (uuids[0], "clocks.sm") not in telemetry(toy_lab)
    wait_gone(int((folder / "sampler").read_text()))


def test_a_run_beside_a_busy_program_is_repeated_and_kept(toy_lab: ToyLab) -> None:
    entry = toy.llama_bench(n_prompt=(16,), n_gen=(0,), env={"TOY": "busy"})
    with machines.busy_processor():
        outcome, events = toy_lab.run(toy_lab.experiment(bench=(entry,)))
        again, _ = toy_lab.run(toy_lab.experiment(bench=(entry,)))
    assert (outcome.error, outcome.measured) == (None, 1)
    runs = [event for event in events if event["event"] == "run"]
    assert [(run["status"], run["reason"]) for run in runs] == [("valid", "")] * 3
    waited = [flag for run in runs for flag in run["flags"] if flag["kind"] == "run_queue"]
    assert [flag["hard"] for flag in waited] == [True] * 3
    assert waited[-1]["reason"].startswith("its processes (1 thread on 1 processor) waited ")
    seen = {row["name"]: row["median"] for row in runs[-1]["telemetry"]}
    assert seen["run_queue_s_per_s"] >= 0.1
    assert seen["others_cpu"] > 0.2
    told = {f"  hard event, so no verdict uses this run: {flag['reason']}" for flag in waited[-1:]}
    assert told <= set(Lines().of(read(runs[-1])))
    repeated = [f"run:0 is run again, try {n} of 3" for n in (2, 3)]
    assert [event["note"] for event in events if "is run again" in event.get("note", "")] == repeated
    assert [row["runs"] for row in sessions(toy_lab.lab.store)] == ["0 of 3"]
    page = render(collect(toy_lab.lab.store, "toy"))
    assert f"- **hard event** in every row: {waited[-1]['reason']} " in " ".join(page.split())
    assert check(toy_lab.lab.store) == []
    assert again.reused == 1
