"""Samplers beside a job: real programs, good and bad, and this machine's own sensors."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dgxlab.agent import facts, telemetry
from dgxlab.agent.child import Exit
from dgxlab.agent.conditions import DeviceSample
from dgxlab.agent.gpus import FIELDS
from dgxlab.agent.processors import Contention
from dgxlab.agent.telemetry import Sampler, Telemetry, parse_gpu, parse_host
from dgxlab.model.events import HOST
from dgxlab.transport.bundle import bundle
from tests import machines
from tests.agent.test_child import wait_gone, wait_until
from tests.conftest import GOLDEN

CAPTURE = (GOLDEN / "h200" / "telemetry-gpu.csv").read_text().splitlines()
LINE = '{"t": %s, "load_1min": 0.5}'
NOTHING = {"boot_id": "b", "gpus": []}


def started(folder: Path, script: str) -> Sampler:
    running = Sampler(["sh", "-c", script], folder / "samples", parse_host)
    wait_until(lambda: running.settled)
    return running


def stop(running: Sampler) -> None:
    running.stop(time.monotonic() + telemetry.STOP_S)


def agent(folder: Path) -> Path:
    path = folder / "agent.pyz"
    path.write_bytes(bundle().packed())
    return path


def test_a_line_of_nvidia_smi() -> None:
    samples = [parse_gpu(tuple(FIELDS), line) for line in CAPTURE]
    assert samples[0] is None
    assert samples[1] is not None
    assert (samples[1].at, samples[1].device) == (1795267361.277, "GPU-1825e1b0-a531-d0cb-696b-226a29a96fb4")
    assert samples[1].values["power.draw"] == 310.99
    assert samples[1].values["clocks_event_reasons.active"] == 0.0
    assert {"uuid", "pstate", "driver_version"}.isdisjoint(samples[1].values)


@pytest.mark.parametrize(
    "line",
    [
        CAPTURE[1][:60],
        CAPTURE[1].replace("13:22:41.277", "25:22:41.277"),
        CAPTURE[1] + ", 1",
        'Field "nonsense" is not a valid field to query.',
        "Unable to determine the device handle for GPU0: 0000:0F:00.0: GPU is lost.",
        "\0" * 200_000,
        "",
    ],
)
def test_other_lines_are_no_samples(line: str) -> None:
    assert parse_gpu(tuple(FIELDS), line) is None


@pytest.mark.parametrize(
    "line",
    ["", "{", "[1]", '{"load_1min": 1}', '{"t": "x"}', '{"t": 1, "a": "b"}', '{"t": 1, "a": NaN}', "[" * 100_000, "7"],
)
def test_nonsense_of_the_host_is_no_sample(line: str) -> None:
    assert parse_host(line) is None
    assert parse_host('{"t": 2.5, "cpu_mhz": 2600.0, "cpu_temp_c": null}') == DeviceSample(
        2.5, HOST, {"cpu_mhz": 2600.0}
    )


def test_this_machine_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    watching = Telemetry(tmp_path / "raw", agent(tmp_path), {}, ())
    watching.start()
    watching.start()
    file = tmp_path / "raw" / "telemetry-host.jsonl"
    wait_until(lambda: file.read_text().count("\n") >= 3)
    watching.stop()
    size = file.stat().st_size
    first, second, *_ = [json.loads(line) for line in file.read_text().splitlines()]
    assert second["t"] - first["t"] > 0.9 * facts.PERIOD_S  # a clock that is set slowly runs slower
    assert first.keys() == {"t", *facts.condition()}
    assert 0 < first["mem_available_mib"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    assert all(value is None or (math.isfinite(value) and value >= 0) for value in first.values())
    state = watching.state()
    assert (state["gpus"], state.keys() - first.keys()) == ([], {"boot_id", "gpus", "gpu_processes"})
    assert state["cpu_temp_c"] is None or state["cpu_temp_c"] > 0  # an unknown value is no zero
    time.sleep(facts.PERIOD_S * 2)
    assert file.stat().st_size == size


def test_a_span_of_time(tmp_path: Path) -> None:
    lines = "".join((LINE % at) + "\n" for at in (1, 2, 3, 4))
    running = started(tmp_path, f"printf '{lines}{{\"t\": 5,'; sleep 600")
    assert [sample.at for sample in running.read(1.5, 3.0)] == [2.0, 3.0]
    assert running.read(0.0, 9.0) == []
    with (tmp_path / "samples").open("a") as file:
        file.write(' "load_1min": 0.25}\n')
    assert [sample.values for sample in running.read(0.0, 9.0)] == [{"load_1min": 0.25}]
    stop(running)


@pytest.mark.parametrize(
    "script",
    ["exit 3", "echo nonsense; echo; echo '{'", "kill -9 $$", "printf '\\377\\376\\n\\000'", "echo oops >&2; exit 1"],
)
def test_a_bad_program_gives_no_samples(tmp_path: Path, script: str) -> None:
    running = started(tmp_path, script)
    assert running.read(0.0, 1e12) == []
    stop(running)


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    running = started(tmp_path, "trap '' TERM; sleep 600 & echo $$ $!; wait")
    pids = [int(pid) for pid in (tmp_path / "samples").read_text().split()]
    stop(running)
    for pid in pids:
        wait_gone(pid)


def test_a_silent_one_does_not_hold_up_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "READY_S", 0.1)
    machines.sampled(tmp_path / "smi", {"GPU-1": "NVIDIA H200"}, "1", loop="exec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path / 'smi'}:{os.environ['PATH']}")
    watching = Telemetry(tmp_path, agent(tmp_path), {"GPU-1": "NVIDIA H200"}, ())
    watching.start()
    assert (tmp_path / "telemetry-gpu.csv").read_text() == ""
    watching.stop()


def test_how_warm_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "smi"
    machines.sampled(folder, {"GPU-1": "NVIDIA H200", "GPU-2": "NVIDIA H200"}, "61, 1980")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    rest = "3201, 472.33, 99, P0, 580.159.04, 0x0000000000000000, 0, 0, 0, 0"
    (folder / "state").write_text(f"GPU-1, 61, 1980, {rest}\nGPU-2, 64, 1980, {rest}\n")
    watching = Telemetry(tmp_path, agent(tmp_path), {"GPU-1": "NVIDIA H200", "GPU-2": "NVIDIA H200"}, ())
    watching.start()
    wait_until(lambda: watching.temperature() == 64.0)
    (folder / "new").write_text(f"GPU-1, 58, 1980, {rest}\nGPU-2, [N/A], 1980, {rest}\n")
    (folder / "new").rename(folder / "state")
    wait_until(lambda: watching.temperature() == 58.0)
    assert watching.now()["GPU-2"]["clocks.sm"] == 1980.0
    began, file = time.time(), tmp_path / "telemetry-gpu.csv"
    before = file.read_text().count("\n")
    wait_until(lambda: file.read_text().count("\n") >= before + 10)
    run = Exit(0, None, began, time.time() - began)
    seen = {(s.device, s.name): s.n for s in watching.around(run, (NOTHING, NOTHING), Contention(2), 2).telemetry()}
    assert seen["GPU-1", "temperature.gpu"] >= 3
    assert ("GPU-2", "temperature.gpu") not in seen
    watching.stop()
    monkeypatch.setattr(telemetry, "FRESH_S", 0.2)
    time.sleep(0.5)
    assert (watching.now(), watching.temperature()) == ({}, None)


def test_it_floods_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgxlab.agent.child.OUTPUT_LIMIT", 100_000)
    running = started(tmp_path, "exec yes")
    assert running._child is not None
    assert running._child.wait(30) != 0
    assert (tmp_path / "samples").stat().st_size == 100_000
    assert running.read(0.0, 1e12) == []


def test_it_dies_with_the_agent_and_holds_nothing_of_its(tmp_path: Path) -> None:
    held = tmp_path / "lock"
    held.touch()
    code = f"""
import os, signal, time
from pathlib import Path
from dgxlab.agent.telemetry import Sampler, parse_host
fd = os.open({str(held)!r}, os.O_RDWR)
os.set_inheritable(fd, True)
samples = Path({str(tmp_path / "samples")!r})
running = Sampler(["sh", "-c", "echo $$; ls -l /proc/$$/fd; echo listed; exec sleep 600"], samples, parse_host)
while "listed" not in samples.read_text():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    pid, listing = (tmp_path / "samples").read_text().split("\n", 1)
    wait_gone(int(pid))
    assert str(tmp_path / "samples") in listing
    assert str(held) not in listing
