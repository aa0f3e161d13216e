"""One look at the host: who it is, what compiles on it, what state it is in.

`sense` prints that state twice a second, beside what is measured.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import platform
import re
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgxlab.agent.environment import base_env, settings
from dgxlab.agent.gpus import QUERY, compute_processes, parse_gpus, parse_processes, query
from dgxlab.agent.lock import FOLDERS
from dgxlab.errors import RemoteError

if TYPE_CHECKING:  # most of the agent's verbs are done before the vocabulary would be loaded
    from dgxlab.model import Facts, Toolchain

GPU_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "memory.total")

TOOLS = ("git", "cmake", "ninja", "ccache", "nvcc", "nvidia-smi")
OTHERS = ("git", "ccache")
"""Tools that shape no program, whose versions are told all the same."""

SYSTEMD = tuple(Path(folder, "systemd") for folder in ("/etc", "/run", "/usr/local/lib", "/usr/lib"))

PATIENCE_S = 20.0
"""How long a program may take to say its version or its state."""
ANSWER_LIMIT = 1 << 20
"""Bytes that it may say: the longest answer, nvidia-smi's list of its fields, has 30 kB."""
LAST_S = 0.05
"""Minimum timeout, so that buffered output is still read."""
PERIOD_S = 0.5
"""Between two samples: often enough for a run of seconds, seldom enough to cost nothing."""


def gather() -> Facts:
    """Return what is true of this host now.

    Every program is asked at the same time: this is a part of each command's first round trip.

    Raises:
        RemoteError: if a compiler that is here cannot be asked for its version.
    """
    from dgxlab.model import Facts

    env = base_env()
    compilers = (env.get("CC", "cc"), env.get("CXX", "c++"), "cmake", "nvcc")
    # --version and not the table whose header says the same: that takes 100 ms on an H200, this 18 ms
    asked = [query(GPU_FIELDS), ["nvidia-smi", "--version"], QUERY]
    told = _answers([*([tool, "--version"] for tool in (*compilers, *OTHERS)), *asked])
    others, (rows, smi_version, processes) = ([each or "" for each in part] for part in (told[4:-3], told[-3:]))
    gpus = parse_gpus(GPU_FIELDS, rows)
    memory = _pairs("/proc/meminfo")
    folder = settings().root or Path.home()
    disk = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
    classes = Path("/sys/bus/pci/devices").glob("*/class")  # a GPU is there without a driver too
    displays = [path.with_name("vendor") for path in classes if read(str(path)).startswith("0x03")]
    return Facts(
        host_id=host_id(),
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        toolchain=_toolchain(_certain(compilers, told[:4])),
        details={
            "user": user(),
            "kernel": platform.release(),
            "os": _line("/etc/os-release", r'PRETTY_NAME="?([^"\n]+)') or platform.system(),
            "glibc": platform.libc_ver()[1],
            "python": platform.python_version(),
            "cpu": _line("/proc/cpuinfo", r"(?:model name|Model)\s*:\s*(.+)$").strip() or platform.machine(),
            "cpus": cpus(),
            "memory_mib": memory.get("MemTotal", 0) // 1024,
            "mem_available_mib": memory.get("MemAvailable", 0) // 1024,
            "disk": {
                "path": str(folder),
                "total_mib": disk.f_blocks * disk.f_frsize >> 20,
                "free_mib": disk.f_bavail * disk.f_frsize >> 20,
            },
            "logout_kills": logout_kills(user()),
            "gpus": gpus,
            "driver": {"version": gpus[0]["driver_version"] if gpus else None, "cuda": parse_cuda(smi_version)},
            "nvidia_devices": len(gpus) or sum(read(str(path)).strip() == "0x10de" for path in displays),
            "gpu_processes": [vars(process) for process in parse_processes(processes)],
            "lock_folder": next((str(f) for f in settings().locks or FOLDERS if os.access(f, os.W_OK)), ""),
            "versions": dict(zip(OTHERS, map(_first_line, others), strict=True)),
            "tools": {name: shutil.which(name, path=env["PATH"]) or "" for name in TOOLS},
        },
    )


def host_id() -> str:
    """Return a digest of the machine id and the user, so that no table holds the id itself.

    Variables that hosts.yaml sets for what is measured belong to it: with another CUDA_VISIBLE_DEVICES it is another
    device, whose numbers are not this one's.
    """
    machine = read("/etc/machine-id") or read("/var/lib/dbus/machine-id") or socket.gethostname()
    env = settings().measured
    text = f"{machine.strip()} {os.getuid()}" + (f" {json.dumps(env, sort_keys=True)}" if env else "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def boot_id() -> str:
    """Return the kernel's id of this boot: a job from another boot is lost, whatever its folder says."""
    return read("/proc/sys/kernel/random/boot_id").strip()


def user() -> str:
    """Return the user's name, or the number where there is none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def cpus() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def parse_cuda(text: str) -> str | None:
    """Return the newest CUDA that the driver runs, `13.0`, from nvidia-smi's versions; None where it does not say."""
    match = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)", text)  # UMD: from driver 610 on
    return match[1] if match else None


def state(fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the host's condition at this instant: what a number measured now depends on.

    Args:
        fields: What this driver calls each field of ours that it knows.
    """
    (gpus,) = outputs([query(tuple(fields.values()))])
    return {
        "boot_id": boot_id(),
        **condition(),
        "gpus": parse_gpus(tuple(fields), gpus),
        "gpu_processes": compute_processes(),
    }


def _toolchain(versions: Sequence[str]) -> Toolchain:
    """Return the version line of everything that turns a source into programs here, from what `--version` printed."""
    from dgxlab.model import Toolchain

    cc, cxx, cmake = map(_first_line, versions[:3])
    nvcc = (versions[3].strip().splitlines() or [""])[-1].strip()
    flags = " ".join(sorted(_line("/proc/cpuinfo", r"(?:flags|Features)\s*:\s*(.+)$").split()))
    machine = f"{platform.machine()} {hashlib.sha256(flags.encode()).hexdigest()[:8]}"
    return Toolchain(cc=cc, cxx=cxx, cmake=cmake, nvcc=nvcc, machine=machine)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].strip()


def logout_kills(user: str, systemd: Sequence[Path] = SYSTEMD) -> str:
    """Return the file by which systemd ends a user's processes when the user logs out, "" where it does not.

    Args:
        systemd: The folders of its configuration, the first of which counts.
    """
    main = [folder / "logind.conf" for folder in systemd]
    extra = {path.name: path for folder in reversed(systemd) for path in folder.glob("logind.conf.d/*.conf")}
    killer, only, spared = "", set[str](), {"root"}
    for path in (*[path for path in main if path.is_file()][:1], *[extra[name] for name in sorted(extra)]):
        for key, value in re.findall(r"^\s*(Kill\w+)\s*=(.*)$", read(str(path)), re.MULTILINE):
            if key == "KillUserProcesses":
                killer = str(path) if value.strip().lower() in ("yes", "true", "on", "1") else ""
            elif key == "KillOnlyUsers":
                only = only | set(value.split()) if value.strip() else set()
            elif key == "KillExcludeUsers":
                spared = spared | set(value.split()) if value.strip() else set()
    return killer if user not in spared and (not only or user in only) else ""


def outputs(commands: Sequence[Sequence[str]]) -> list[str]:
    """Run short programs side by side and return what each prints, "" for one that is not there or does not end."""
    return [answer or "" for answer in _answers(commands)]


def _answers(commands: Sequence[Sequence[str]]) -> list[str | None]:
    """As `outputs`, but None for a program that is there and was killed, or did not end."""
    env = {**base_env(), "LC_ALL": "C"}
    started = [_start(shutil.which(program, path=env["PATH"]), args, env) for program, *args in commands]
    deadline = time.monotonic() + PATIENCE_S  # for all of them: two that hang take no longer than one
    return [_output(child, deadline) if child else "" for child in started]


def _certain(tools: Sequence[str], answers: Sequence[str | None]) -> list[str]:
    """Return what tools say of their versions, asked again where one was killed: builds are known by it.

    Raises:
        RemoteError: if one cannot be asked; without its version all would be built, and measured, as something else.
    """
    versions = []
    for tool, answer in zip(tools, answers, strict=True):
        version = _answers([[tool, "--version"]])[0] if answer is None else answer
        if version is None:
            how = f"it was killed, or did not end within {PATIENCE_S:g} s"
            raise RemoteError(f"{tool} on {settings().name} does not say its version: {how}", next=f"{tool} --version")
        versions.append(version)
    return versions


def _start(program: str | None, args: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    if program is None:
        return None
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    try:
        return subprocess.Popen([program, *args], stdin=null, stdout=pipe, stderr=null, env=env)
    except OSError:
        return None


def _output(child: subprocess.Popen[bytes], deadline: float) -> str | None:
    """Return what a program prints, None where it does not end in time, prints too much, or is killed.

    It is read until the program has ended: a daemon that it left may hold the pipe for good.
    """
    assert child.stdout
    pipe, end, printed = child.stdout.fileno(), os.pidfd_open(child.pid), b""
    sources = [pipe, end]
    with child:
        try:
            while ready := select.select(sources, [], [], max(LAST_S, deadline - time.monotonic()))[0]:
                if pipe not in ready:
                    return None if child.wait() < 0 else printed.decode(errors="replace")
                chunk = os.read(pipe, 1 << 16)
                printed += chunk
                if not chunk:
                    sources.remove(pipe)
                if len(printed) > ANSWER_LIMIT:
                    break
        finally:
            os.close(end)
            child.kill()
    return None


def _line(path: str, pattern: str) -> str:
    """Return what the group of a pattern is in the first line of a file that begins like it, "" for no such line."""
    match = re.search(f"^{pattern}", read(path), re.MULTILINE)
    return match[1] if match else ""


# -- the condition that changes all the time --------------------------------------------------------------------------


def condition() -> dict[str, float | None]:
    """Return memory, swapping, load, clock and temperature of the host now; what it does not tell is None, never 0."""
    memory, counted = _pairs("/proc/meminfo"), _pairs("/proc/vmstat")
    swapped = memory["SwapTotal"] - memory["SwapFree"] if "SwapFree" in memory else None
    # the mean over all processors: of the kernel's clock control, else (in a virtual machine) of cpuinfo
    policies = Path("/sys/devices/system/cpu/cpufreq").glob("policy*/scaling_cur_freq")
    mhz = [int(khz) / 1000 for path in policies if (khz := read(str(path)).strip()).isdigit()]
    mhz = mhz or [float(text) for text in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", read("/proc/cpuinfo"), re.M)]
    zones = [read(str(zone)).strip() for zone in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    return {
        "load_1min": os.getloadavg()[0],
        "mem_available_mib": _mib(memory.get("MemAvailable")),
        "swap_used_mib": _mib(swapped),
        "swap_in_mib": counted["pswpin"] * os.sysconf("SC_PAGE_SIZE") / (1 << 20) if "pswpin" in counted else None,
        "oom_kills": counted.get("oom_kill"),
        "cpu_mhz": round(sum(mhz) / len(mhz), 1) if mhz else None,
        "cpu_temp_c": max((int(zone) / 1000 for zone in zones if zone.lstrip("-").isdigit()), default=None),
    }


def sense() -> None:
    """Write the host's condition to stdout twice a second, a line of JSON each, until this process is ended."""
    while True:
        os.write(1, json.dumps({"t": time.time(), **condition()}).encode() + b"\n")
        time.sleep(PERIOD_S)


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
