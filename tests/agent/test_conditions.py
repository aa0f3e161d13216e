"""What samples and two states say of a run: numbers, and flags."""

import gzip
from collections.abc import Mapping
from typing import Any

import pytest

from dgxlab.agent.conditions import Conditions, DeviceSample, number
from dgxlab.agent.processors import Contention
from dgxlab.agent.telemetry import parse_gpu
from dgxlab.model.events import HOST, Summary
from tests.conftest import GOLDEN

GPU = "GPU-68b256c7-040d-b58e-160d-b23ae653d8e1"
OTHER = "GPU-b63c0fcc-7aab-eb90-c123-35f1cbacbe2d"
COUNTER = "clocks_event_reasons_counters"
DRIVER = {"driver_version": "580.159.04"}
ALONE = Contention(2)
"""On two processors, of which nothing else is known."""


def state(gpu: Mapping[str, str | None] | None = None, uuid: str = GPU, **host: Any) -> dict[str, Any]:
    rows = [] if gpu is None else [{"uuid": uuid, **DRIVER, **gpu}]
    return {"boot_id": "b", "swap_in_mib": 12.5, "oom_kills": 0, "gpus": rows, **host}


def around(
    *values: Mapping[str, float],
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    gpus: Mapping[str, str] | None = None,
    seconds: float = 1.0,
    contention: Contention = ALONE,
    threads: int = 2,
) -> Conditions:
    samples = [DeviceSample(float(at), GPU, seen) for at, seen in enumerate(values)]
    gpus = {GPU: "NVIDIA H200"} if gpus is None else gpus
    return Conditions(samples, before or state({}), after or state({}), gpus, seconds, contention, threads)


def told(conditions: Conditions) -> list[tuple[str, str, bool, str]]:
    return [(flag.device, flag.kind, flag.hard, flag.reason) for flag in conditions.flags()]


def kinds(conditions: Conditions) -> dict[str, bool]:
    return {flag.kind: flag.hard for flag in conditions.flags()}


def test_a_captured_series() -> None:
    text = gzip.decompress((GOLDEN / "h200" / "telemetry-long.csv.gz").read_bytes()).decode()
    header, *lines = text.splitlines()
    short = {"index": "uuid", "clocks.current.sm": "clocks.sm", "clocks.current.memory": "clocks.mem"}
    names = [name.split(" [")[0].strip() for name in header.split(",")][1:]
    parsed = [parse_gpu([short.get(name, name) for name in names], line) for line in (header, *lines)]
    assert parsed[0] is None
    samples = [sample for sample in parsed[1:] if sample]
    assert len(samples) == len(lines) == 582
    assert samples[0].at == 1795170737.531
    seen = Conditions(samples, state({}, "0"), state({}, "0"), {"0": "NVIDIA H200"}, 291.1, ALONE, 2)
    assert {s.name: (s.unit, s.n, s.min, s.max) for s in seen.telemetry() if s.device == "0"} == {
        "clocks.sm": ("MHz", 582, 345.0, 1980.0),
        "clocks.mem": ("MHz", 582, 3201.0, 3201.0),
        "temperature.gpu": ("C", 582, 41.0, 61.0),
        "power.draw": ("W", 582, 79.17, 663.11),
        "utilization.gpu": ("%", 582, 0.0, 100.0),
    }
    assert kinds(seen) == {"no_telemetry": False}  # the host's own are missing


def test_not_known_is_no_number() -> None:
    """A GB10 says N/A of its memory clock: there is no row, least of all one of 0."""
    seen = around({"clocks.sm": 2400.0}, {"clocks.sm": 2500.0, "temperature.gpu": 60.0}, {"clocks.sm": 2410.0})
    rows = [summary for summary in seen.telemetry() if summary.device == GPU]
    assert rows == [
        Summary(GPU, "clocks.sm", "MHz", 3, 2410.0, 2400.0, 2500.0),
        Summary(GPU, "temperature.gpu", "C", 1, 60.0, 60.0, 60.0),
    ]


@pytest.mark.parametrize("text", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "", None, "nan", "inf", "0xg"])
def test_words_are_no_numbers(text: str | None) -> None:
    assert number(text) is None
    assert (number("0x0000000000000044"), number("79.38"), number("0")) == (68.0, 79.38, 0.0)


@pytest.mark.parametrize(
    ("counter", "bit", "kind", "hard", "words"),
    [
        ("hw_thermal_slowdown", 0x40, "hw_thermal", True, "HW thermal slowdown"),
        ("hw_power_brake_slowdown", 0x80, "power_brake", True, "HW power brake"),
        ("sw_thermal_slowdown", 0x20, "sw_thermal", False, "SW thermal slowdown"),
        ("sw_power_cap", 0x4, "sw_power_cap", False, "SW power cap"),
    ],
)
def test_throttling(counter: str, bit: int, kind: str, hard: bool, words: str) -> None:
    name = f"{COUNTER}.{counter}"
    moved = around(before=state({name: "1000"}), after=state({name: "413000"}))
    assert told(moved) == [(GPU, kind, hard, f"{words} for 412 ms")]
    assert Summary(GPU, name, "us", 1, 412e3, 412e3, 412e3) in moved.telemetry()
    active = "clocks_event_reasons.active"
    seen = around({active: 0.0}, {active: float(bit | 0x1)}, {active: 0.0})
    assert told(seen) == [(GPU, kind, hard, f"{words} in 1 of 3 samples")]
    assert around(before=state({name: "413000"}), after=state({name: "413000"})).flags() == ()


def test_hw_slowdown_without_its_cause() -> None:
    active = "clocks_event_reasons.active"
    assert kinds(around({active: float(0x8)})) == {"hw_slowdown": True}
    assert kinds(around({active: float(0x8 | 0x40)})) == {"hw_thermal": True}


def test_a_counter_that_is_not_known_did_not_move() -> None:
    name = f"{COUNTER}.hw_thermal_slowdown"
    for before, after in (("5", None), (None, "5"), ("5", "3"), ("[N/A]", "7")):
        seen = around(before=state({name: before}), after=state({name: after}))
        assert (seen.flags(), [s for s in seen.telemetry() if s.device == GPU]) == ((), [])
    assert around(before=state({name: "5"}, OTHER), after=state({name: "9"}, OTHER)).flags() == ()


def test_several_gpus_are_told_apart() -> None:
    both = {GPU: "NVIDIA H200", OTHER: "NVIDIA H200"}
    name = f"{COUNTER}.hw_thermal_slowdown"
    states = [{**state(), "gpus": [{"uuid": uuid, **DRIVER, name: us} for uuid in both]} for us in ("0", "2000")]
    flags = around(before=states[0], after=states[1], gpus=both).flags()
    assert [(flag.device, flag.reason) for flag in flags] == [
        (uuid, f"HW thermal slowdown for 2 ms on {uuid[:12]}") for uuid in both
    ]


def test_what_happened_to_the_host() -> None:
    after = state({"driver_version": "590.1"}, boot_id="c", swap_in_mib=20.5, oom_kills=2)
    assert {flag.kind: flag.params for flag in around(after=after).flags() if flag.hard} == {
        "boot": {},
        "driver": {"before": "580.159.04", "after": "590.1"},
        "swap_in": {"mib": 8.0},
        "oom_kill": {"n": 2},
    }
    assert around(after=state({}, swap_in_mib=12.75)).flags() == ()
    assert around(before=state(swap_in_mib=None), after=state(oom_kills=None)).flags() == ()
    assert around(after=state()).flags() == ()  # nvidia-smi did not answer: not known is not changed


@pytest.mark.parametrize(("samples", "count"), [(0, "no"), (9, "9"), (10, "")])
def test_missing_samples(samples: int, count: str) -> None:
    gpu = (GPU, "no_telemetry", False, f"{count} samples from nvidia-smi where 20 were due")
    host = (HOST, "no_telemetry", False, "no samples of the host where 20 were due")
    assert told(around(*[{"clocks.sm": 1.0}] * samples, seconds=10.0)) == [*([gpu] * bool(count)), host]
    assert around(seconds=1.9).flags() == ()


@pytest.mark.parametrize(
    ("name", "clock", "busy", "n", "stuck"),
    [
        ("NVIDIA GB10", 850.0, 96.0, 4, True),
        ("NVIDIA GB10", 1499.0, 91.0, 20, True),
        ("NVIDIA GB10", 1500.0, 96.0, 20, False),
        ("NVIDIA GB10", 2400.0, 96.0, 20, False),
        ("NVIDIA GB10", 850.0, 90.0, 20, False),
        ("NVIDIA GB10", 850.0, 96.0, 3, False),
        ("NVIDIA H200", 850.0, 96.0, 20, False),
    ],
)
def test_the_stuck_clock_of_a_gb10(name: str, clock: float, busy: float, n: int, stuck: bool) -> None:
    idle = {"clocks.sm": 208.0, "utilization.gpu": 0.0}
    samples = [idle, *[{"clocks.sm": clock, "utilization.gpu": busy}] * n, {"clocks.sm": 208.0}]
    flags = around(*samples, gpus={GPU: name}).flags()
    assert [(flag.kind, flag.hard, flag.params["mhz"]) for flag in flags] == [("stuck_clock", True, clock)] * stuck


@pytest.mark.parametrize(
    ("contention", "threads", "kind", "hard"),
    [
        (Contention(2, 0.20, 0.97), 2, "run_queue", True),
        (Contention(2, 0.199, 0.97), 2, "run_queue", False),
        (Contention(2, 0.10), 2, "run_queue", False),
        (Contention(2, 0.97, 0.20), 2, "run_queue", True),
        (Contention(2, 0.97, 0.199), 2, "run_queue", False),
        (Contention(2, 0.099, 0.97), 2, "others_cpu", False),
        (Contention(20, 0.0, 3.0), 20, "others_cpu", False),
        (Contention(20, 0.0, 2.99), 20, "", False),
        (Contention(16, 1.6), 16, "run_queue", True),
        (Contention(16, 0.44), 16, "", False),
        (Contention(16, 0.10), 1, "run_queue", True),
        (Contention(20, 0.12, 18.0, busy=1.2), 20, "run_queue", True),
        (Contention(20, 0.10, 18.0, busy=0.3), 20, "run_queue", True),
        (Contention(2, 0.25, 0.97, busy=2.5), 2, "run_queue", True),
        (Contention(2, None, 0.25), 2, "others_cpu", True),
        (Contention(2, None, 0.249), 2, "", False),
        (Contention(16, None, 4.25), 12, "others_cpu", True),
        (Contention(16, None, 4.24), 12, "others_cpu", False),
        (Contention(2, None, 0.25), 8, "others_cpu", True),
        (Contention(2, 0.0, 0.1, 0.05), 2, "steal", True),
        (Contention(2, 0.0, 0.1, 0.0499), 2, "steal", False),
        (Contention(2, 0.0, 0.1, 0.0099), 2, "", False),
        (Contention(2, 0.0, 0.1, 0.0, 0.101), 2, "psi", False),
        (Contention(2, 0.0, 0.1, 0.0, 0.10), 2, "", False),
        (Contention(2, 0.1, 0.1, 0.0, 0.9), 2, "run_queue", False),
        (Contention(2, 0.0, 0.1, burst=0.15), 2, "burst", True),
        (Contention(2, 0.0, 0.1, burst=0.149), 2, "burst", False),
        (Contention(2, 0.0, 0.1, burst=0.099), 2, "", False),
        (Contention(2, 0.20, 0.97, burst=0.5), 2, "run_queue", True),
        (Contention(2), 2, "", False),
    ],
)
def test_others_on_the_processors(contention: Contention, threads: int, kind: str, hard: bool) -> None:
    """At each threshold and right below it; by the run's threads, and what is not known is no flag."""
    seen = around(contention=contention, threads=threads)
    assert kinds(seen) == ({kind: hard} if kind else {})
    assert seen.contended == hard


def test_what_is_told_of_the_processors() -> None:
    seen = around(contention=Contention(2, 0.5, 0.875, 0.0625, 0.25, burst=0.625))
    assert [s for s in seen.telemetry() if s.name not in ("swap_in_mib", "oom_kills")] == [
        Summary(HOST, "run_queue_s_per_s", "s/s", 1, 0.5, 0.5, 0.5),
        Summary(HOST, "run_queue_burst", "s/s", 1, 0.625, 0.625, 0.625),
        Summary(HOST, "others_cpu", "processors", 1, 0.875, 0.875, 0.875),
        Summary(HOST, "steal_percent", "%", 1, 6.25, 6.25, 6.25),
        Summary(HOST, "psi_cpu_some", "s/s", 1, 0.25, 0.25, 0.25),
    ]
    assert [(flag.kind, flag.hard) for flag in seen.flags()] == [("run_queue", True), ("steal", True)]
    assert seen.flags()[0].params == {"threads": 2, "processors": 2, "waited": 0.5, "others": 0.875}
    assert {s.name for s in around().telemetry()} == {"swap_in_mib", "oom_kills"}
