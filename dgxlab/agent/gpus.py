"""Queries to nvidia-smi: fields of GPUs, whose names differ between drivers, and compute processes."""

from __future__ import annotations

import csv
import os
import pwd
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab.agent.environment import ask
from dgxlab.errors import one_line

_NULLS = frozenset({"", "N/A", "[N/A]", "[Not Supported]", "Not Supported", "[Unknown Error]", "[Not Found]"})
"""nvidia-smi's spellings of an unknown value, which becomes None, never 0."""

HELP = ("nvidia-smi", "--help-query-gpu")
"""Command that prints the fields that this driver knows; it needs no GPU and takes 18 ms on an H200."""
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")

_EVERY = ("uuid", "temperature.gpu", "clocks.sm", "clocks.mem", "power.draw", "utilization.gpu", "pstate")
BASIC = {name: name for name in _EVERY}  # fields that every driver knows, in the form of `choose`
_COUNTERS = ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
FIELDS = (
    *BASIC,
    "driver_version",
    "clocks_event_reasons.active",
    *(f"clocks_event_reasons_counters.{counter}" for counter in _COUNTERS),
)
"""The sampled fields, by the newest driver's names; older drivers have `throttle` in place of `event`."""


def choose(printed: str) -> dict[str, str]:
    """Return, by name in FIELDS, this driver's name of each field that it knows, given the output of `HELP`."""
    # one unknown field makes a whole query fail
    known = set(re.findall(r'"([\w.]+)"', printed))
    words = {name: name if name in known else name.replace("event", "throttle") for name in FIELDS}
    return {name: word for name, word in words.items() if word in known} if "uuid" in known else dict(BASIC)


def query(fields: Sequence[str]) -> list[str]:
    """Return the command that prints these fields once, a line for each GPU."""
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def sampling(uuids: Sequence[str], fields: Sequence[str], period_s: float) -> list[str]:
    """Return the command that prints a header, and every `period_s` seconds a line per GPU with time and fields."""
    asked = f"--query-gpu={','.join(('timestamp', *fields))}"
    return ["nvidia-smi", "-i", ",".join(uuids), asked, "--format=csv,nounits", "-lms", f"{period_s * 1000:.0f}"]


def parse_gpus(fields: Sequence[str], text: str) -> list[dict[str, str | None]]:
    """Parse the output of `query(fields)`; an unknown value is None, a line with missing or extra cells is left out."""
    rows = [[None if cell.strip() in _NULLS else cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


@dataclass(frozen=True)
class ComputeProcess:
    """A process with a CUDA context."""

    gpu_uuid: str
    pid: int
    program: str
    user: str  # "" if /proc does not have the process, e.g. because it is in another pid namespace
    used_mib: int | None  # device memory, None if the driver does not count it, as on unified memory


def compute_processes() -> list[ComputeProcess] | None:
    """Return every compute process on this host's GPUs; None if nvidia-smi is missing, fails or hangs."""
    (answer,) = ask([QUERY])
    return None if answer.status else parse_processes(answer.text)


def parse_processes(text: str) -> list[ComputeProcess]:
    """Parse the output of QUERY."""
    processes = []
    for line in text.splitlines():  # nothing is quoted: commas between pid and memory belong to the program's name
        uuid, _, rest = line.partition(", ")
        pid, _, rest = rest.partition(", ")
        program, _, used = rest.rpartition(", ")
        if pid.isdigit() and program:
            mib = int(used) if used.strip().isdigit() else None
            processes.append(ComputeProcess(uuid.strip(), int(pid), program.strip(), _user(int(pid)), mib))
    return processes


def foreign(processes: Iterable[ComputeProcess], own: Collection[int]) -> list[ComputeProcess]:
    """Return the processes that are not of this process's session, each once even if it uses several GPUs.

    `own` are the pids that this process started: nvidia-smi may list a process briefly after its end.
    """
    others = {}
    for process in processes:
        try:
            mine = os.getsid(process.pid) == os.getsid(0)
        except ProcessLookupError:
            mine = process.pid in own
        except OSError:
            mine = False
        if not mine:
            others[process.pid] = process
    return list(others.values())


def phrase(processes: Sequence[ComputeProcess]) -> str:
    """Return one or more processes in words: `pid 430 (python3 of alice, 518 MiB) and 2 more`."""
    first, more = processes[0], len(processes) - 1
    program = one_line(Path(first.program).name, 120)
    size = "" if first.used_mib is None else f", {first.used_mib} MiB"
    words = f"pid {first.pid} ({program} of {first.user or 'an unknown user'}{size})"
    return f"{words} and {more} more" if more else words


def _user(pid: int) -> str:
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
        return pwd.getpwuid(uid).pw_name
    except OSError:
        return ""
    except KeyError:
        return str(uid)
