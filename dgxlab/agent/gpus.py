"""What nvidia-smi tells: the GPUs' fields, whose names differ between drivers, and who computes on them."""

from __future__ import annotations

import csv
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab.agent.environment import base_env
from dgxlab.errors import one_line

NULLS = frozenset({"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]", "[Not Found]"})
"""nvidia-smi's spellings of 'not known': null, never 0."""

HELP = ("nvidia-smi", "--help-query-gpu")
"""Prints the fields that this driver knows; it needs no GPU and takes 18 ms on an H200."""

BASIC = {
    name: name
    for name in ("uuid", "temperature.gpu", "clocks.sm", "clocks.mem", "power.draw", "utilization.gpu", "pstate")
}
"""Fields that every driver knows."""

_COUNTERS = ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
FIELDS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*BASIC, "driver_version")},
    "clocks_event_reasons.active": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    **{name: (name,) for name in (f"clocks_event_reasons_counters.{counter}" for counter in _COUNTERS)},
}
"""What we want to know, under the newest driver's name for it, and all that drivers have called it, newest first."""

PATIENCE_S = 20.0
"""How long nvidia-smi may take; one that hangs says nothing."""
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")


def choose(printed: str) -> dict[str, str]:
    """Return by our name how this driver calls each field that it knows, from what `HELP` printed.

    One field that it does not know would fail a whole query.
    """
    known = set(re.findall(r'"([\w.]+)"', printed))
    fields = {name: next((word for word in words if word in known), "") for name, words in FIELDS.items()}
    return {name: word for name, word in fields.items() if word} if fields["uuid"] else dict(BASIC)


def query(fields: Sequence[str]) -> list[str]:
    """Return the command that prints these fields once, a line a GPU."""
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def sampling(uuids: Sequence[str], fields: Sequence[str], period_s: float) -> list[str]:
    """Return the command that prints the time and these fields of these GPUs again and again, after a header."""
    asked = f"--query-gpu={','.join(('timestamp', *fields))}"
    return ["nvidia-smi", "-i", ",".join(uuids), asked, "--format=csv,nounits", "-lms", f"{period_s * 1000:.0f}"]


def parse_gpus(fields: Sequence[str], text: str) -> list[dict[str, str | None]]:
    """Read nvidia-smi's csv without header and units; a value it does not know is None, a broken line is left out."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [
        {field: None if cell in NULLS else cell for field, cell in zip(fields, row, strict=True)}
        for row in rows
        if len(row) == len(fields)
    ]


@dataclass(frozen=True)
class ComputeProcess:
    """A process with a CUDA context.

    Attributes:
        program: Its path, as far as nvidia-smi may tell.
        user: Who owns it, "" where /proc does not know it, e.g. in another pid namespace.
        used_mib: Device memory, None where the driver does not count it, as on unified memory.
    """

    gpu_uuid: str
    pid: int
    program: str
    user: str
    used_mib: int | None


def compute_processes() -> list[ComputeProcess] | None:
    """Return every compute process on this host's GPUs, None where nvidia-smi is missing, fails or does not answer."""
    env = base_env()
    program = shutil.which(QUERY[0], path=env["PATH"])
    if program is None:
        return None
    try:
        asked = subprocess.run(
            [program, *QUERY[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=env,
            text=True,
            errors="replace",
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if asked.returncode else parse_processes(asked.stdout)


def parse_processes(text: str) -> list[ComputeProcess]:
    """Read nvidia-smi's csv, in which nothing is quoted: a comma between pid and memory is the program's own."""
    processes = []
    for line in text.splitlines():
        uuid, _, rest = line.partition(", ")
        pid, _, rest = rest.partition(", ")
        program, _, used = rest.rpartition(", ")
        if pid.isdigit() and program:
            mib = int(used) if used.strip().isdigit() else None
            processes.append(ComputeProcess(uuid.strip(), int(pid), program.strip(), _user(int(pid)), mib))
    return processes


def foreign(processes: Iterable[ComputeProcess], own: Collection[int]) -> list[ComputeProcess]:
    """Return those that do not belong to this process's session, each once however many GPUs it uses.

    Args:
        own: Pids that this process started: one that has just ended may still be listed for an instant.
    """
    session = os.getsid(0)
    once = {process.pid: process for process in processes}
    return [process for pid, process in once.items() if _session(pid, own, session) != session]


def phrase(processes: Sequence[ComputeProcess]) -> str:
    """Return processes in words: `pid 430 (python3 of alice, 518 MiB) and 2 more`."""
    first, more = processes[0], len(processes) - 1
    program = one_line(Path(first.program).name, 120)
    size = "" if first.used_mib is None else f", {first.used_mib} MiB"
    words = f"pid {first.pid} ({program} of {first.user or 'an unknown user'}{size})"
    return f"{words} and {more} more" if more else words


def _session(pid: int, own: Collection[int], ended: int) -> int | None:
    """Return a process's session, `ended` for one of our own that is gone, None for a pid that is not known here."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return ended if pid in own else None
    except OSError:
        return None


def _user(pid: int) -> str:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
