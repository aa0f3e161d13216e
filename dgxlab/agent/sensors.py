"""What Linux says of the host's condition: memory, swapping, load, the processor's clock and temperature."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

PERIOD_S = 0.5
"""Between two samples: often enough for a run of seconds, seldom enough to cost nothing."""


def host() -> dict[str, float | None]:
    """Return the host's condition at this instant; what it does not tell is None, never 0."""
    memory, counted = meminfo(), _pairs("/proc/vmstat")
    return {
        "load_1min": os.getloadavg()[0],
        "mem_available_mib": _mib(memory.get("MemAvailable")),
        "swap_used_mib": _mib(memory["SwapTotal"] - memory["SwapFree"]) if "SwapFree" in memory else None,
        "swap_in_mib": counted["pswpin"] * os.sysconf("SC_PAGE_SIZE") / (1 << 20) if "pswpin" in counted else None,
        "oom_kills": counted.get("oom_kill"),
        "cpu_mhz": _cpu_mhz(),
        "cpu_temp_c": _cpu_temp(),
    }


def sense() -> None:
    """Write the host's condition to stdout twice a second, a line of JSON each, until this process is ended."""
    while True:
        os.write(1, json.dumps({"t": time.time(), **host()}).encode() + b"\n")
        time.sleep(PERIOD_S)


def meminfo() -> dict[str, int]:
    """Return /proc/meminfo in kB."""
    return _pairs("/proc/meminfo")


def read(path: str) -> str:
    """Return a small file's text, "" where there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _pairs(path: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+):?\s+(\d+)", read(path), re.MULTILINE)}


def _mib(kib: int | None) -> int | None:
    return None if kib is None else kib // 1024


def _cpu_mhz() -> float | None:
    """Return the mean over all processors: of the kernel's clock control, else (in a virtual machine) of cpuinfo."""
    policies = Path("/sys/devices/system/cpu/cpufreq").glob("policy*/scaling_cur_freq")
    speeds = [int(khz) / 1000 for path in policies if (khz := read(str(path)).strip()).isdigit()]
    if not speeds:
        found = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", read("/proc/cpuinfo"), re.MULTILINE)
        speeds = [float(mhz) for mhz in found]
    return round(sum(speeds) / len(speeds), 1) if speeds else None


def _cpu_temp() -> float | None:
    zones = [read(str(zone)).strip() for zone in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    readings = [int(zone) / 1000 for zone in zones if zone.lstrip("-").isdigit()]
    return max(readings) if readings else None
