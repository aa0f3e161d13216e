"""Facts of the host: its identity, its compilers, and its condition now."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab.agent import slurm
from dgxlab.agent.environment import PATIENCE_S, Answer, ask, base_env, settings
from dgxlab.agent.gpus import QUERY, parse_gpus, parse_processes, query
from dgxlab.agent.lock import FOLDERS
from dgxlab.errors import RemoteError

if TYPE_CHECKING:  # most verbs of the agent end before the vocabulary would be loaded
    from dgxlab.model import Facts, Toolchain

_GPU_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "memory.total")

_TOOLS = ("git", "cmake", "ninja", "ccache", "nvcc", "nvidia-smi")
_OTHERS = ("git", "ccache")  # tools whose versions are reported, although they do not change what is built

_SYSTEMD = tuple(Path(folder, "systemd") for folder in ("/etc", "/run", "/usr/local/lib", "/usr/lib"))

PERIOD_S = 0.5
"""Time between two samples of the host's condition: enough samples in a run of seconds, at no measurable cost."""


def gather() -> Facts:
    """Return the facts of this host; raises RemoteError if a compiler does not print its version in time."""
    # all programs run at the same time, because a client waits for this at each command
    from dgxlab.model import Facts

    env = base_env()
    compilers = (env.get("CC", "cc"), env.get("CXX", "c++"), "cmake", "nvcc")
    # nvidia-smi --version takes 18 ms on an H200, the table whose header has the same versions 100 ms
    asked = [query(_GPU_FIELDS), ["nvidia-smi", "--version"], QUERY]
    answers = ask([*([tool, "--version"] for tool in (*compilers, *_OTHERS)), *asked])
    rows, smi_version, processes = (answer.text for answer in answers[-3:])
    gpus = slurm.granted(parse_gpus(_GPU_FIELDS, rows))
    memory = _pairs("/proc/meminfo")
    folder = settings().root or Path.home()
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    classes = Path("/sys/bus/pci/devices").glob("*/class")  # lists a GPU without a driver too
    displays = [path.with_name("vendor") for path in classes if read(str(path)).startswith("0x03")]
    return Facts(
        host_id=host_id(),
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        toolchain=_toolchain(compilers, answers),
        details={
            "user": user(),
            "kernel": platform.release(),
            "os": _line("/etc/os-release", r'PRETTY_NAME="?([^"\n]+)') or platform.system(),
            "glibc": platform.libc_ver()[1],
            "python": platform.python_version(),
            "cpu": _line("/proc/cpuinfo", r"(?:model name|Model)\s*:\s*(.+)$").strip() or platform.machine(),
            "cpus": cpus(),
            "processors": list(settings().processors),
            "settings": settings().digest,
            "memory_mib": memory.get("MemTotal", 0) // 1024,
            "mem_available_mib": memory.get("MemAvailable", 0) // 1024,
            "disk": {"path": str(folder), "total_mib": disk.total >> 20, "free_mib": disk.free >> 20},
            "logout_kills": logout_kills(user()),
            "gpus": gpus,
            "driver": {"version": gpus[0]["driver_version"] if gpus else None, "cuda": parse_cuda(smi_version)},
            "nvidia_devices": len(gpus) or sum(read(str(path)).strip() == "0x10de" for path in displays),
            "gpu_processes": [vars(process) for process in parse_processes(processes)],
            "slurm": slurm.allocation(),
            "lock_folder": next((str(f) for f in settings().locks or FOLDERS if os.access(f, os.W_OK)), ""),
            "versions": {name: _lines(answer)[0] for name, answer in zip(_OTHERS, answers[4:-3], strict=True)},
            "tools": {name: shutil.which(name, path=env["PATH"]) or "" for name in _TOOLS},
        },
    )


def host_id() -> str:
    """Return the identity of this host, 16 hex digits: a digest, because the machine id must stay private.

    It depends on machine, user and `Settings.measured`: another CUDA_VISIBLE_DEVICES means another device, whose values
    must not be compared. Nodes of a cluster may share one image with its machine id, so the node's name is part of it.
    """
    machine = read("/etc/machine-id") or read("/var/lib/dbus/machine-id") or socket.gethostname()
    env = settings().measured
    node = slurm.allocation().get("node", "")
    words = [machine.strip(), str(os.getuid()), *(["node", node] if node else [])]
    text = " ".join([*words, *([json.dumps(env, sort_keys=True)] if env else [])])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def boot_id() -> str:
    """Return the kernel's id of this boot, which changes with every restart of the machine."""
    return read("/proc/sys/kernel/random/boot_id").strip()


def user() -> str:
    """Return the user's name, or the uid if it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def cpus() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def parse_cuda(text: str) -> str | None:
    """Return the newest CUDA version that the driver supports, `13.0`, as `nvidia-smi --version` prints it."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", text)  # UMD: from driver 610 on
    return match[1] if match else None


def _toolchain(compilers: Sequence[str], answers: Sequence[Answer]) -> Toolchain:
    from dgxlab.model import Toolchain

    cc, cxx, cmake, nvcc = map(_version, compilers, answers)
    flags = " ".join(sorted(_line("/proc/cpuinfo", r"(?:flags|Features)\s*:\s*(.+)$").split()))
    machine = f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:8]}"
    return Toolchain(cc=cc[0], cxx=cxx[0], cmake=cmake[0], nvcc=nvcc[-1], machine=machine)


def _version(tool: str, answer: Answer) -> list[str]:
    """Return the lines of a tool's version; a killed tool is asked once more, and killed again a RemoteError.

    The version names builds: with an empty one everything would be built and measured again.
    """
    if answer.status < 0:
        (answer,) = ask([[tool, "--version"]])
    if answer.status < 0:
        how = f"it was killed, or did not end within {PATIENCE_S:g} s"
        raise RemoteError(f"{tool} on {settings().name} does not say its version: {how}", next=f"{tool} --version")
    return _lines(answer)


def _lines(answer: Answer) -> list[str]:
    return [line.strip() for line in answer.text.strip().splitlines()] or [""]


def logout_kills(user: str, systemd: Sequence[Path] = _SYSTEMD) -> str:
    """Return the path of the logind.conf that makes systemd end this user's processes at logout, "" if none does.

    `systemd` are the folders of systemd's configuration, the one with precedence first.
    """
    main = [folder / "logind.conf" for folder in systemd]  # the first folder has precedence
    extra = {path.name: path for folder in reversed(systemd) for path in folder.glob("logind.conf.d/*.conf")}
    killer = ""
    users = {"KillOnlyUsers": set[str](), "KillExcludeUsers": {"root"}}
    for path in (*[path for path in main if path.is_file()][:1], *[extra[name] for name in sorted(extra)]):
        for key, value in re.findall(r"^\s*(Kill\w+)\s*=(.*)$", read(str(path)), re.MULTILINE):
            if key == "KillUserProcesses":
                killer = str(path) if value.strip().lower() in ("yes", "true", "on", "1") else ""
            elif key in users:  # an empty value empties the list
                users[key] = users[key] | set(value.split()) if value.strip() else set()
    only, spared = users.values()
    return killer if user not in spared and (not only or user in only) else ""


def _line(path: str, pattern: str) -> str:
    match = re.search(f"^{pattern}", read(path), re.MULTILINE)
    return match[1] if match else ""


def condition() -> dict[str, float | None]:
    """Return memory, swapping, load, clock and temperature of the host now, by name; an unknown value is None, never 0.

    Sources: /proc/meminfo, /proc/vmstat, scaling_cur_freq of cpufreq, thermal_zone*. /proc/cpuinfo is not read: in a
    virtual machine its clock is the nominal one, also while the processor is throttled. The clock is the mean over the
    processors that this process may use, of all kinds: a sampler does not know to which of them a run is pinned.
    """
    memory, counted = _pairs("/proc/meminfo"), _pairs("/proc/vmstat")
    clocks = (f"/sys/devices/system/cpu/cpu{number}/cpufreq/scaling_cur_freq" for number in os.sched_getaffinity(0))
    mhz = [int(khz) / 1000 for path in clocks if (khz := read(path).strip()).isdigit()]
    zones = [read(str(zone)).strip() for zone in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    return {
        "load_1min": os.getloadavg()[0],
        "mem_available_mib": memory["MemAvailable"] // 1024 if "MemAvailable" in memory else None,
        "swap_used_mib": (memory["SwapTotal"] - memory["SwapFree"]) // 1024 if "SwapFree" in memory else None,
        "swap_in_mib": counted["pswpin"] * os.sysconf("SC_PAGE_SIZE") / (1 << 20) if "pswpin" in counted else None,
        "oom_kills": counted.get("oom_kill"),
        "cpu_mhz": round(sum(mhz) / len(mhz), 1) if mhz else None,
        "cpu_temp_c": max((int(zone) / 1000 for zone in zones if zone.lstrip("-").isdigit()), default=None),
    }


def sense() -> None:
    """Print the host's `condition` every PERIOD_S as a line of JSON, with `t` in Unix seconds; never returns."""
    while True:
        os.write(1, json.dumps({"t": time.time(), **condition()}).encode() + b"\n")
        time.sleep(PERIOD_S)


def read(path: str) -> str:
    """Return a small file's text, "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _pairs(path: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+):?\s+(\d+)", read(path), re.MULTILINE)}
