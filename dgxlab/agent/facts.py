"""One look at the host: who it is, what compiles on it, what state it is in."""

from __future__ import annotations

import csv
import getpass
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgxlab.agent.environment import base_env, settings
from dgxlab.agent.lock import FOLDERS
from dgxlab.agent.occupancy import QUERY, parse_processes

if TYPE_CHECKING:  # most of the agent's verbs are done before the vocabulary would be loaded
    from dgxlab.model import Facts, Toolchain

NULLS = frozenset({"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]", "[Not Found]"})
"""nvidia-smi's spellings of 'not known': null, never 0."""

GPU_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "memory.total")
STATE_FIELDS = ("uuid", "temperature.gpu", "clocks.sm", "power.draw", "utilization.gpu", "pstate")

TOOLS = ("git", "cmake", "ninja", "ccache", "nvcc", "nvidia-smi")

PATIENCE_S = 20.0
"""How long a program may take to say its version or its state."""


def gather() -> Facts:
    """Return what is true of this host now.

    Every program is asked at the same time: this is a part of each command's first round trip.
    """
    from dgxlab.model import Facts

    env = base_env()
    compilers = (env.get("CC", "cc"), env.get("CXX", "c++"), "cmake", "nvcc")
    # --version and not the table whose header says the same: that takes 100 ms on an H200, this 18 ms
    smi = [_gpu_query(GPU_FIELDS), ["nvidia-smi", "--version"], QUERY]
    *versions, rows, smi_version, processes = _outputs([*([tool, "--version"] for tool in compilers), *smi])
    gpus = parse_gpus(GPU_FIELDS, rows)
    return Facts(
        host_id=host_id(),
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        toolchain=_toolchain(versions),
        details={
            "user": user(),
            "kernel": platform.release(),
            "os": _os_name(),
            "glibc": platform.libc_ver()[1],
            "python": platform.python_version(),
            "cpu": _cpu_name(),
            "cpus": cpus(),
            **_memory(),
            "disk": _disk(settings().root or Path.home()),
            "gpus": gpus,
            "driver": {"version": _value(gpus, "driver_version"), "cuda": parse_cuda(smi_version)},
            "nvidia_devices": len(gpus) or _nvidia_devices(),
            "gpu_processes": [vars(process) for process in parse_processes(processes)],
            "lock_folder": next((str(folder) for folder in FOLDERS if os.access(folder, os.W_OK)), ""),
            "tools": {name: shutil.which(name, path=env["PATH"]) or "" for name in TOOLS},
        },
    )


def host_id() -> str:
    """Return a digest of the machine id and the user, so that no table holds the id itself.

    Variables that hosts.yaml sets for what is measured belong to it: with another CUDA_VISIBLE_DEVICES it is another
    device, whose numbers are not this one's.
    """
    machine = _read("/etc/machine-id") or _read("/var/lib/dbus/machine-id") or socket.gethostname()
    env = settings().measured
    text = f"{machine.strip()} {os.getuid()}" + (f" {json.dumps(env, sort_keys=True)}" if env else "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def boot_id() -> str:
    """Return the kernel's id of this boot: a job from another boot is lost, whatever its folder says."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def user() -> str:
    """Return the user's name, or the number where there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def cpus() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def parse_gpus(fields: Sequence[str], text: str) -> list[dict[str, str | None]]:
    """Read nvidia-smi's csv without header and units; a value it does not know is None, a broken line is left out."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [
        {field: None if cell in NULLS else cell for field, cell in zip(fields, row, strict=True)}
        for row in rows
        if len(row) == len(fields)
    ]


def parse_cuda(text: str) -> str | None:
    """Return the newest CUDA that the driver runs, `13.0`, from nvidia-smi's versions; None where it does not say."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", text)  # UMD: from driver 610 on
    return match[1] if match else None


def state() -> dict[str, Any]:
    """Return the host's condition at this instant: what a number measured now depends on."""
    memory = _meminfo()
    gpus, processes = _outputs([_gpu_query(STATE_FIELDS), QUERY])
    return {
        "load_1min": os.getloadavg()[0],
        "mem_available_mib": memory.get("MemAvailable", 0) // 1024,
        "swap_used_mib": (memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)) // 1024,
        "cpu_mhz": _cpu_mhz(),
        "cpu_temp_c": _cpu_temp(),
        "gpus": parse_gpus(STATE_FIELDS, gpus),
        "gpu_processes": parse_processes(processes),
    }


def _toolchain(versions: Sequence[str]) -> Toolchain:
    """Return the version line of everything that turns a source into programs here, from what `--version` printed."""
    from dgxlab.model import Toolchain

    cc, cxx, cmake, nvcc = (text.strip().splitlines() or [""] for text in versions)
    machine = f"{platform.machine()} {_cpu_flags()}"
    return Toolchain(
        cc=cc[0].strip(), cxx=cxx[0].strip(), cmake=cmake[0].strip(), nvcc=nvcc[-1].strip(), machine=machine
    )


def _value(gpus: Sequence[Mapping[str, str | None]], field: str) -> str | None:
    return gpus[0][field] if gpus else None


def _nvidia_devices() -> int:
    """Return how many NVIDIA display controllers stand on the PCI bus, which needs no driver."""
    classes = (path for path in Path("/sys/bus/pci/devices").glob("*/class") if _read(str(path)).startswith("0x03"))
    return sum(_read(str(path.with_name("vendor"))).strip() == "0x10de" for path in classes)


def _memory() -> dict[str, int]:
    found = _meminfo()
    return {
        "memory_mib": found.get("MemTotal", 0) // 1024,
        "mem_available_mib": found.get("MemAvailable", 0) // 1024,
    }


def _disk(folder: Path) -> dict[str, Any]:
    """Return the size of a folder's file system and what is free of it for this user."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    found = os.statvfs(there)
    return {
        "path": str(folder),
        "total_mib": found.f_blocks * found.f_frsize >> 20,
        "free_mib": found.f_bavail * found.f_frsize >> 20,
    }


def _gpu_query(fields: Sequence[str]) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _outputs(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run short programs side by side and return what each prints, "" for one that is not there or does not end."""
    env = {**base_env(), "LC_ALL": "C"}
    started = [_start(shutil.which(program, path=env["PATH"]), args, env) for program, *args in commands]
    return [_output(child) if child else "" for child in started]


def _start(program: str | None, args: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str] | None:
    if program is None:
        return None
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        return subprocess.Popen(
            [program, *args], stdin=null, stdout=pipe, stderr=null, env=env, text=True, errors="replace"
        )
    except OSError:
        return None


def _output(child: subprocess.Popen[str]) -> str:
    with child:
        try:
            return child.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            child.kill()
            return ""


def _meminfo() -> dict[str, int]:
    """Return /proc/meminfo in kB."""
    found = re.findall(r"^(\w+):\s+(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    return {name: int(value) for name, value in found}


def _os_name() -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read("/etc/os-release"), re.MULTILINE)
    return match[1] if match else platform.system()


def _cpu_name() -> str:
    match = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _cpu_flags() -> str:
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    flags = " ".join(sorted(match[1].split())) if match else ""
    return hashlib.sha256(flags.encode()).hexdigest()[:8]


def _cpu_mhz() -> float | None:
    speeds = [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _read("/proc/cpuinfo"), re.MULTILINE)]
    return round(sum(speeds) / len(speeds), 1) if speeds else None


def _cpu_temp() -> float | None:
    zones = [_read(str(zone)).strip() for zone in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    readings = [int(zone) / 1000 for zone in zones if zone.lstrip("-").isdigit()]
    return max(readings) if readings else None
