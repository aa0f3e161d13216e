"""Under which conditions a run took place: what was sampled meanwhile in a few numbers, and what speaks against it.

A run's `status` says whether it has values that count at all: one that failed, or had a stranger beside it, has none.
A flag leaves the status as it is. A hard one (a throttle of the hardware, swapping, others on the processors) says that
the machine was not what it was before: every report shows it beside the numbers, and a verdict leaves the run out. A
soft one (a throttle of the software, samples that are missing) is only told: the runs around it cancel it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgxlab.agent.contention import Contention
from dgxlab.agent.sensors import PERIOD_S
from dgxlab.stats import median
from dgxlab.units import duration

HOST = "host"
"""The device of what is no GPU's."""

GAUGES = {
    "clocks.sm": "MHz",
    "clocks.mem": "MHz",
    "temperature.gpu": "C",
    "power.draw": "W",
    "utilization.gpu": "%",
    "cpu_mhz": "MHz",
    "cpu_temp_c": "C",
    "load_1min": "processes",
    "mem_available_mib": "MiB",
}
"""What is sampled, with its unit: nvidia-smi's names for a GPU, our own for the host."""

ACTIVE = "clocks_event_reasons.active"
"""Bits: why the clock is lowered at this instant."""

COUNTERS = {
    "clocks_event_reasons_counters.sw_power_cap": "us",
    "clocks_event_reasons_counters.sw_thermal_slowdown": "us",
    "clocks_event_reasons_counters.hw_thermal_slowdown": "us",
    "clocks_event_reasons_counters.hw_power_brake_slowdown": "us",
    "swap_in_mib": "MiB",
    "oom_kills": "processes",
}
"""What only grows, read before and after a run: a sample can miss a throttle, a counter cannot."""

CONTENTION = {
    "run_queue_s_per_s": ("run_queue", "s/s", 1),
    "others_cpu": ("others", "processors", 1),
    "steal_percent": ("steal", "%", 100),
    "psi_cpu_some": ("psi", "s/s", 1),
}
"""What is told of Contention, one number a run: its field, the unit, and how many of that make 1."""

RUN_QUEUE = (0.05, 0.10)
"""Of a run's threads, soft and hard, how many waited for a processor: of two, one that ran beside nothing else had up
to 0.064 waiting, and one beside a busy loop 0.44 and more."""
OTHERS = 0.25
"""Processors that others may not use where how long the run waited is not known: so many more than its threads left."""
STEAL = (0.01, 0.05)
PSI = 0.10

SWAP_MIB = 1.0
"""Pages of somebody's daemon that come back are less, a model's are more."""

WATCHED_S = 2.0
"""A run as long as this has samples, unless something is wrong with who takes them."""

STUCK_MHZ, BUSY_PERCENT, BUSY_SAMPLES = 1500.0, 90.0, 4
"""See `stuck_clock`; fewer busy samples than that may be the clock's way up."""


@dataclass(frozen=True)
class Sample:
    """One look at one device.

    Attributes:
        at: Unix seconds.
        values: By name, without what is not known.
    """

    at: float
    device: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Summary:
    """One quantity of one device during a run.

    Attributes:
        n: Of samples; a counter's growth is one number.
    """

    device: str
    name: str
    unit: str
    n: int
    median: float
    min: float
    max: float


@dataclass(frozen=True)
class Flag:
    """Something that speaks against a run.

    Attributes:
        kind: One word for programs, at most once a device.
        hard: No verdict may use the run.
        reason: In words.
    """

    device: str
    kind: str
    hard: bool
    reason: str


@dataclass(frozen=True)
class Throttle:
    """A reason for which a GPU lowers its clock, as NVML numbers them, and the counter of its microseconds."""

    kind: str
    words: str
    bit: int
    counter: str
    hard: bool


_COUNTER = "clocks_event_reasons_counters"
THROTTLES = (
    Throttle("hw_thermal", "HW thermal slowdown", 0x40, f"{_COUNTER}.hw_thermal_slowdown", True),
    Throttle("power_brake", "HW power brake", 0x80, f"{_COUNTER}.hw_power_brake_slowdown", True),
    Throttle("hw_slowdown", "HW slowdown", 0x8, "", True),
    Throttle("sw_thermal", "SW thermal slowdown", 0x20, f"{_COUNTER}.sw_thermal_slowdown", False),
    Throttle("sw_power_cap", "SW power cap", 0x4, f"{_COUNTER}.sw_power_cap", False),
)


@dataclass(frozen=True)
class Conditions:
    """All that was seen around one run.

    Attributes:
        samples: Taken while it went on.
        before: The host's state right before it.
        after: And right after it.
        gpus: Name of each GPU that the job measures on, by uuid.
        seconds: How long the run was.
        contention: What others took of the processors meanwhile.
        threads: With how many threads the tool computed.
    """

    samples: Sequence[Sample]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    gpus: Mapping[str, str]
    seconds: float
    contention: Contention
    threads: int

    def telemetry(self) -> list[Summary]:
        """Return every quantity of every device that is known."""
        gauges = [
            Summary(device, name, unit, len(values), median(values), min(values), max(values))
            for device in self._devices
            for name, unit in GAUGES.items()
            if (values := [s.values[name] for s in self._of(device) if name in s.values])
        ]
        grown = [(device, name, COUNTERS[name], by) for (device, name), by in self._grown().items()]
        shared = [
            (HOST, name, unit, scale * share)
            for name, (field, unit, scale) in CONTENTION.items()
            if (share := getattr(self.contention, field)) is not None
        ]
        single = (Summary(device, name, unit, 1, value, value, value) for device, name, unit, value in grown + shared)
        return [*gauges, *single]

    def flags(self, left_running: str = "") -> list[Flag]:
        """Return the flags of the run, the hard ones first.

        Args:
            left_running: Says which processes outlived the program, "" for none. They were ended before the next run.
        """
        found = [*self._throttled(), *self._stuck(), *self._changed(), *self._short_of_memory()]
        found += [Flag(HOST, "left_running", False, left_running)] if left_running else []
        return sorted([*found, *self._shared(), *self._unwatched()], key=lambda flag: not flag.hard)

    @property
    def contended(self) -> bool:
        """Whether others took so much of the processors that the run should be repeated."""
        return any(flag.hard for flag in self._shared())

    @property
    def _devices(self) -> tuple[str, ...]:
        return (*self.gpus, HOST)

    def _of(self, device: str) -> list[Sample]:
        return [sample for sample in self.samples if sample.device == device]

    def _grown(self) -> dict[tuple[str, str], float]:
        """Return how far each counter moved; one that was set back by a driver that started anew is not known."""
        before, after = _readings(self.before), _readings(self.after)
        both = [(device, name) for device in self._devices for name in COUNTERS]
        moved = {key: after[key] - before[key] for key in both if key in before and key in after}
        return {key: by for key, by in moved.items() if by >= 0}

    def _throttled(self) -> Iterator[Flag]:
        grown = self._grown()
        for device in self.gpus:
            active = [int(s.values[ACTIVE]) for s in self._of(device) if ACTIVE in s.values]
            seen: set[str] = set()
            for throttle in THROTTLES:
                hits = sum(bool(bits & throttle.bit) for bits in active)
                by = grown.get((device, throttle.counter), 0.0)
                if throttle.kind == "hw_slowdown" and seen:  # its cause was named
                    continue
                if by or hits:
                    seen.add(throttle.kind)
                    how = f"for {duration(by / 1e6)}" if by else f"in {hits} of {len(active)} samples"
                    yield Flag(device, throttle.kind, throttle.hard, f"{throttle.words} {how}{self._on(device)}")

    def _stuck(self) -> Iterator[Flag]:
        for device, name in self.gpus.items():
            if reason := stuck_clock(name, self._of(device)):
                yield Flag(device, "stuck_clock", True, reason + self._on(device))

    def _changed(self) -> Iterator[Flag]:
        if self.before["boot_id"] != self.after["boot_id"]:
            yield Flag(HOST, "boot", True, "the machine was started again")
        before, after = _driver(self.before), _driver(self.after)
        if before and after and before != after:
            yield Flag(HOST, "driver", True, f"the NVIDIA driver changed from {before} to {after}")

    def _short_of_memory(self) -> Iterator[Flag]:
        grown = self._grown()
        if (swapped := grown.get((HOST, "swap_in_mib"), 0.0)) >= SWAP_MIB:
            yield Flag(HOST, "swap_in", True, f"{swapped:.0f} MiB came back from swap")
        if killed := grown.get((HOST, "oom_kills"), 0.0):
            yield Flag(HOST, "oom_kill", True, f"the kernel killed programs for lack of memory ({killed:.0f})")

    def _shared(self) -> Iterator[Flag]:
        """Say what others took of the processors; pressure on the host only where nothing says on whom."""
        seen, threads = self.contention, self.threads
        waited, others, steal = seen.run_queue, seen.others, seen.steal
        ran = f"{_counted(threads, 'thread')} on {_counted(seen.processors, 'processor')}"
        used = "" if others is None else f"others used {others:.2f} processors"
        found = []
        if waited is not None and waited >= RUN_QUEUE[0] * threads:
            words = f"its {ran} waited {waited:.2f} s a second for their turn"
            hard = waited >= RUN_QUEUE[1] * threads
            found.append(Flag(HOST, "run_queue", hard, "; ".join(filter(None, (words, used)))))
        if waited is None and others is not None and others >= max(OTHERS, seen.processors - threads + OTHERS):
            found.append(Flag(HOST, "others_cpu", True, f"{used} beside its {ran}"))
        if steal is not None and steal >= STEAL[0]:
            reason = f"the hypervisor gave {100 * steal:.1f} % of the processors' time to other machines"
            found.append(Flag(HOST, "steal", steal >= STEAL[1], reason))
        if not found and seen.psi is not None and seen.psi > PSI:
            reason = f"a program on the host waited for a processor {100 * seen.psi:.0f} % of the time"
            found.append(Flag(HOST, "psi", False, reason))
        yield from found

    def _unwatched(self) -> Iterator[Flag]:
        """Say which device was sampled less than half as often as it should have been."""
        due = self.seconds / PERIOD_S
        for device in self._devices:
            n = len(self._of(device))
            if self.seconds >= WATCHED_S and n < due / 2:
                whose = "of the host" if device == HOST else f"from nvidia-smi{self._on(device)}"
                yield Flag(device, "no_telemetry", False, f"{n or 'no'} samples {whose} where {due:.0f} were due")

    def _on(self, device: str) -> str:
        """Name the GPU where there are several."""
        return f" on {device[:12]}" if len(self.gpus) > 1 else ""


def stuck_clock(gpu: str, samples: Iterable[Sample]) -> str:
    """Return why a GPU is in the state that some GB10 do not leave by themselves, "" when it is not.

    Units in it run at 500 to 850 MHz under full load, in P0, and through a reboot (reference/rigor.md, A3).

    Args:
        gpu: Its name.
        samples: Of it, during a run.
    """
    known = [s.values for s in samples if s.values.keys() >= {"clocks.sm", "utilization.gpu"}]
    busy = [values["clocks.sm"] for values in known if values["utilization.gpu"] > BUSY_PERCENT]
    if "GB10" not in gpu or len(busy) < BUSY_SAMPLES:
        return ""
    clock = median(busy)
    if clock >= STUCK_MHZ:
        return ""
    return (
        f"the GPU was busy at {clock:.0f} MHz: a GB10 below {STUCK_MHZ:.0f} MHz under load is in its stuck low-power"
        " state, which a reboot does not end; shut it down and take it off its power supply for a minute"
    )


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def number(text: str | None) -> float | None:
    """Return what nvidia-smi printed as a number, bits among it; None for every other word."""
    try:
        value = float(int(text, 16)) if text and text.startswith("0x") else float(text or "")
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _driver(state: Mapping[str, Any]) -> str:
    """Return the driver's version, "" where it did not answer."""
    return next((row["driver_version"] for row in state["gpus"] if row.get("driver_version")), "")


def _readings(state: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return the counters of a state by device and name, those that are known."""
    found = {(row["uuid"], name): number(row.get(name)) for row in state["gpus"] for name in COUNTERS}
    found |= {(HOST, name): state.get(name) for name in COUNTERS}
    return {key: value for key, value in found.items() if value is not None}
