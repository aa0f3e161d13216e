"""The conditions of a run: statistics of the samples taken during it, and the flags derived from them.

A run's `status` says whether its values count: those of a run that failed or shared the device do not. A flag does not
change the status. A hard flag (hardware throttle, swapping, other programs on the processors) means that the machine
had changed: every report shows the flag beside the numbers, and a verdict leaves the run out. A soft flag (software
throttle, missing samples) is only reported: the neighbouring runs cancel its effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgxlab.agent.facts import PERIOD_S
from dgxlab.agent.processors import Contention
from dgxlab.model.events import COPY, HOST, Flag, Summary, flag
from dgxlab.model.reasons import Code
from dgxlab.stats import median

_GAUGES = {
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
"""Unit of each sampled quantity; a GPU's have nvidia-smi's names."""

_ACTIVE = "clocks_event_reasons.active"  # bit mask: why the clock is lowered at this instant

_COUNTER = "clocks_event_reasons_counters"
_THROTTLES = (
    (Code.HW_THERMAL, 0x40, f"{_COUNTER}.hw_thermal_slowdown", True),
    (Code.POWER_BRAKE, 0x80, f"{_COUNTER}.hw_power_brake_slowdown", True),
    (Code.HW_SLOWDOWN, 0x8, "", True),
    (Code.SW_THERMAL, 0x20, f"{_COUNTER}.sw_thermal_slowdown", False),
    (Code.SW_POWER_CAP, 0x4, f"{_COUNTER}.sw_power_cap", False),
)
"""Why a GPU lowers its clock: NVML's bit for it, the counter of its microseconds, and whether the flag is hard."""

_COUNTERS = {counter: "us" for _, _, counter, _ in _THROTTLES if counter}
_COUNTERS |= {"swap_in_mib": "MiB", "oom_kills": "processes"}
"""Counters, which only grow: a sample can miss a throttle, a counter cannot."""

_CONTENTION = {
    "run_queue_s_per_s": ("run_queue", "s/s", 1),
    "run_queue_burst": ("burst", "s/s", 1),
    "others_cpu": ("others", "processors", 1),
    "steal_percent": ("steal", "%", 100),
    "psi_cpu_some": ("psi", "s/s", 1),
}
"""By name in the telemetry: a field of Contention, the unit, and the factor to that unit."""

_RUN_QUEUE = (0.05, 0.10)
"""Limits (soft, hard) for the waiting time of a run, in seconds per second and busy thread. Two threads together waited
up to 0.064 s per second alone on a machine, and 0.44 s and more beside a busy loop. A server and its client, which also
wait for each other, waited up to 0.25 s alone on two processors: the flag is hard only if others used as much."""
_BURST = (0.10, 0.15)
"""Limits (soft, hard) for the worst second, in which one cell of several may have been measured. It was up to 0.05 in
runs that were alone, also in those whose own processes waited for each other, and of one thread 0.26 and more beside a
busy loop of half a second. Of 1,433 recorded runs 12 waited 0.10 s or more in all, and 5 waited 0.15 s."""
_OTHERS = 0.25
"""If the waiting time is unknown: other programs may use this many processors beyond those that the run left free."""
_SHARE = 0.15
"""Soft limit for the share of the processors that others use, also if the run does not wait: they use memory bandwidth,
which the GPU of a DGX Spark shares. In 1,309 recorded runs it was below 0.1, or above 0.3 where others worked."""
_STEAL = (0.01, 0.05)  # limits (soft, hard) for the share of time that the hypervisor gave to other machines
_PSI = 0.10  # limit for the share of time in which a task waited for a processor
_SWAP_MIB = 1.0  # pages swapped in for an idle daemon are less than this, those of a model more
_WATCHED_S = 2.0  # a run of at least this length has samples, unless a sampler fails

_STUCK_MHZ, _BUSY_PERCENT, _BUSY_SAMPLES = 1500.0, 90.0, 4
"""A GPU is stuck if this many samples are busier than this and their median clock is below this. With fewer busy
samples the clock may still be rising."""


@dataclass(frozen=True)
class DeviceSample:
    """The known quantities of one device at one time, by name; `at` is in Unix seconds."""

    at: float
    device: str
    values: Mapping[str, float]


@dataclass(frozen=True)
class Conditions:
    """What was observed around one run: samples during it, and the host's states right before and after it."""

    samples: Sequence[DeviceSample]
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    gpus: Mapping[str, str]  # name of each GPU that the job measures on, by uuid
    seconds: float
    contention: Contention
    threads: int
    copies: Mapping[str, float] = field(default_factory=dict)
    """The bandwidth of a copy on each GPU, in GB/s, by uuid; {} if it could not be measured."""

    def telemetry(self) -> tuple[Summary, ...]:
        """Return statistics of each known quantity of each device during the run."""
        gauges = [
            Summary(device, name, unit, len(values), median(values), min(values), max(values))
            for device in (*self.gpus, HOST)
            for name, unit in _GAUGES.items()
            if (values := [s.values[name] for s in self._of(device) if name in s.values])
        ]
        grown = [(device, name, _COUNTERS[name], by) for (device, name), by in self._grown().items()]
        shared = [
            (HOST, name, unit, scale * share)
            for name, (field, unit, scale) in _CONTENTION.items()
            if (share := getattr(self.contention, field)) is not None
        ]
        copies = [(device, COPY, "GB/s", rate) for device, rate in self.copies.items()]
        alone = (*grown, *shared, *copies)
        single = (Summary(device, name, unit, 1, value, value, value) for device, name, unit, value in alone)
        return (*gauges, *single)

    def flags(self, *others: Flag) -> tuple[Flag, ...]:
        """Return the flags of the run, the hard ones first, with `others` among them."""
        flags = [*self._throttled(), *self._stuck(), *self._changed(), *others]
        return tuple(sorted([*flags, *self._shared(), *self._unwatched()], key=lambda each: not each.hard))

    @property
    def contended(self) -> bool:
        """Whether others used the processors so much that a flag for it is hard: the run should be repeated."""
        return any(each.hard for each in self._shared())

    def _of(self, device: str) -> list[DeviceSample]:
        return [sample for sample in self.samples if sample.device == device]

    def _grown(self) -> dict[tuple[str, str], float]:
        """Return the growth of each counter, without those that a driver restart reset."""
        before, after = _readings(self.before), _readings(self.after)
        both = [(device, name) for device in (*self.gpus, HOST) for name in _COUNTERS]
        moved = {key: after[key] - before[key] for key in both if key in before and key in after}
        return {key: by for key, by in moved.items() if by >= 0}

    def _throttled(self) -> Iterator[Flag]:
        grown = self._grown()
        for device in self.gpus:
            active = [int(s.values[_ACTIVE]) for s in self._of(device) if _ACTIVE in s.values]
            seen = False
            for code, bit, counter, hard in _THROTTLES:
                hits = sum(bool(bits & bit) for bits in active)
                by = grown.get((device, counter), 0.0)
                if (by or hits) and not (code is Code.HW_SLOWDOWN and seen):  # unless its cause was named
                    seen = True
                    how: dict[str, Any] = {"seconds": by / 1e6} if by else {"hits": hits, "samples": len(active)}
                    yield flag(code, device, hard=hard, **how, **self._on(device))

    def _stuck(self) -> Iterator[Flag]:
        """Yield the GPUs that were busy at a low clock.

        Some GB10 are stuck at 500 to 850 MHz under full load, in P0, and through a reboot (reference/rigor.md, A3).
        """
        for device, name in self.gpus.items():
            known = [s.values for s in self._of(device) if s.values.keys() >= {"clocks.sm", "utilization.gpu"}]
            busy = [values["clocks.sm"] for values in known if values["utilization.gpu"] > _BUSY_PERCENT]
            if "GB10" in name and len(busy) >= _BUSY_SAMPLES and (clock := median(busy)) < _STUCK_MHZ:
                yield flag(Code.STUCK_CLOCK, device, hard=True, mhz=clock, least=_STUCK_MHZ, **self._on(device))

    def _changed(self) -> Iterator[Flag]:
        if self.before["boot_id"] != self.after["boot_id"]:
            yield flag(Code.BOOT, hard=True)
        before, after = (
            next((row["driver_version"] for row in state["gpus"] if row.get("driver_version")), "")
            for state in (self.before, self.after)
        )
        if before and after and before != after:
            yield flag(Code.DRIVER, hard=True, before=before, after=after)
        grown = self._grown()
        if (swapped := grown.get((HOST, "swap_in_mib"), 0.0)) >= _SWAP_MIB:
            yield flag(Code.SWAP_IN, hard=True, mib=swapped)
        if killed := grown.get((HOST, "oom_kills"), 0.0):
            yield flag(Code.OOM_KILL, hard=True, n=killed)

    def _shared(self) -> list[Flag]:
        """Return flags for other programs' use of the processors; host pressure only where nothing else is known."""
        seen, threads = self.contention, self.threads
        waited, others, steal = seen.run_queue, seen.others, seen.steal
        ran: dict[str, Any] = {"threads": threads, "processors": seen.processors}
        busy = max(1.0, seen.busy or threads)  # a program on a GPU keeps one of its threads busy, a server more
        flags = []
        if waited is not None and waited >= _RUN_QUEUE[0] * busy:
            by_others = waited if others is None else min(waited, others)
            hard = by_others >= _RUN_QUEUE[1] * busy
            flags.append(flag(Code.RUN_QUEUE, hard=hard, **ran, waited=waited, others=others))
        elif others is not None:
            hard = waited is None and others >= max(_OTHERS, seen.processors - threads + _OTHERS)
            if hard or others >= _SHARE * seen.processors:
                flags.append(flag(Code.OTHERS_CPU, hard=hard, **ran, others=others))
        if seen.burst is not None and seen.burst >= _BURST[0] and not any(each.hard for each in flags):
            flags.append(flag(Code.BURST, hard=seen.burst >= _BURST[1], waited=seen.burst))
        if steal is not None and steal >= _STEAL[0]:
            flags.append(flag(Code.STEAL, hard=steal >= _STEAL[1], share=steal))
        if not flags and seen.psi is not None and seen.psi > _PSI:
            flags.append(flag(Code.PSI, hard=False, share=seen.psi))
        return flags

    def _unwatched(self) -> Iterator[Flag]:
        due = self.seconds / PERIOD_S
        for device in (*self.gpus, HOST):
            n = len(self._of(device))
            if self.seconds >= _WATCHED_S and n < due / 2:
                on = {} if device == HOST else self._on(device)
                yield flag(Code.NO_TELEMETRY, device, hard=False, n=n, due=due, nvidia_smi=device != HOST, **on)

    def _on(self, device: str) -> dict[str, str]:
        return {"gpu": device[:12]} if len(self.gpus) > 1 else {}


def number(text: str | None) -> float | None:
    """Return a value that nvidia-smi printed, also a hexadecimal bit mask, as a finite number; None for other text."""
    try:
        value = float(int(text, 16)) if text and text.startswith("0x") else float(text or "")
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _readings(state: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    counters = {(row["uuid"], name): number(row.get(name)) for row in state["gpus"] for name in _COUNTERS}
    counters |= {(HOST, name): state.get(name) for name in _COUNTERS}
    return {key: value for key, value in counters.items() if value is not None}
