"""Who computes on the GPUs: what nvidia-smi lists, and which of it is not the job's own."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab.agent.environment import base_env
from dgxlab.agent.lock import plain

PATIENCE_S = 20.0
"""How long nvidia-smi may take; one that hangs says nothing."""
QUERY = ("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name,used_memory", "--format=csv,noheader,nounits")


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
    found = []
    for line in text.splitlines():
        uuid, _, rest = line.partition(", ")
        pid, _, rest = rest.partition(", ")
        program, _, used = rest.rpartition(", ")
        if pid.isdigit() and program:
            mib = int(used) if used.strip().isdigit() else None
            found.append(ComputeProcess(uuid.strip(), int(pid), program.strip(), _user(int(pid)), mib))
    return found


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
    program = plain(Path(first.program).name)
    size = "" if first.used_mib is None else f", {first.used_mib} MiB"
    words = f"pid {first.pid} ({program} of {first.user or 'somebody unknown'}{size})"
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
