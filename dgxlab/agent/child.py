"""Run one program in its own process group, with limits of time and output, and end everything that it started.

A program may leave others running, in a session of their own and with closed descriptors. They become children of the
agent, because it is a subreaper. The agent ends every child that it did not start, and names it as left running.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab.errors import AGAIN, RemoteError, one_line
from dgxlab.model.reasons import Code, Reason, reason

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37
_GRACE_S = 5.0  # wait between TERM and KILL, and after KILL
_LEFT_S = 0.2  # a process that ends this soon after its parent does not count as left running
_NICE = 10  # niceness of programs that `beside` starts, so that they yield to the measured program
OUTPUT_LIMIT = 64 << 20
"""Max bytes that a program may print on a stream: a week of samples of one GPU. More would fill disk and memory."""
OUTPUT_LOOK_S = 0.5  # pause between looks at how much was printed
_FILE_LIMIT = 1 << 30
"""Max bytes per file for a program that writes only its output; CUDA's kernel cache is such a file too."""

_libc = ctypes.CDLL(None, use_errno=True)
_beside: set[int] = set()  # process groups of programs that `beside` started


@dataclass(frozen=True)
class Exit:
    """How a program ended."""

    rc: int | None  # exit status, None if a signal ended the program
    signal: int | None
    started: float  # Unix seconds
    seconds: float
    timed_out: bool = False
    too_long: bool = False  # the program printed more than OUTPUT_LIMIT and was ended; only that much was kept
    left: tuple[str, ...] = ()  # processes that the program left running, and that were ended: `pid 77 (sleep)`
    pid: int = 0

    @property
    def ok(self) -> bool:
        """Whether the program exited with status 0 by itself, and its output is complete."""
        return self.rc == 0 and not self.stopped

    @property
    def stopped(self) -> bool:
        """Whether the program was ended because it exceeded its limit of time or output."""
        return self.timed_out or self.too_long

    def reason(self, program: str, limit_s: float, last: str = "") -> Reason:
        """Return why the program, which is not `ok`, failed; `limit_s` was its time limit, `last` its last line."""
        more = {"program": program, **({"last": last} if last else {})}
        if self.too_long:
            return reason(Code.TOO_LONG, mib=OUTPUT_LIMIT >> 20, **more)
        if self.timed_out:
            return reason(Code.TIMED_OUT, limit_s=limit_s, **more)
        if self.signal is not None:
            return reason(Code.KILLED, signal=signal.Signals(self.signal).name, **more)
        return reason(Code.EXITED, status=self.rc, **more)


def adopt() -> None:
    """Make this process a subreaper: it becomes the parent of processes that its programs leave running."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(  # noqa: PLR0913 - all but argv by name
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    limit_s: float,
    keep: Sequence[int] = (),
    look: Callable[[int], float] | None = None,
    death_signal: int = signal.SIGKILL,
    file_limit: int = _FILE_LIMIT,
    processors: Sequence[int] = (),
) -> Exit:
    """Run a program to its end, with stdin closed and its output in the files `stdout` and `stderr`.

    Args:
        limit_s: Max duration, in seconds.
        keep: Lock descriptors that the program inherits, so that a process that outlives the agent still holds them.
        look: Called with the pid at the start, after each number of seconds that it returned, and at the end.
        death_signal: The signal that the kernel sends the program when the agent dies.
        file_limit: Max bytes of each file that the program writes.
        processors: Processors to pin the program to; empty for all that the agent may use.

    Raises:
        OSError: if the program cannot be started.
        RemoteError: if a process that the program left running cannot be ended.
    """
    # files, not pipes: a process that is left running would keep a pipe open
    started, begin = time.time(), time.monotonic()
    with stdout.open("wb") as out, stderr.open("wb") as err:
        streams = (out.fileno(), err.fileno())
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=dict(env),
            pass_fds=tuple(keep),
            preexec_fn=_prepare(death_signal, file_limit, processors),  # noqa: PLW1509 - the agent has no threads
        )
        try:
            ended = _wait(child, begin + limit_s, look, streams)
            seconds = time.monotonic() - begin
        finally:
            # a program's own children must not outlive it: they would measure beside the next run
            left = _end(child, streams)
        too_long = _too_long(streams)
        for fd in streams:
            os.ftruncate(fd, min(os.fstat(fd).st_size, OUTPUT_LIMIT))
    code = child.returncode
    rc, number = (code, None) if code >= 0 else (None, -code)
    timed_out = not ended and not too_long
    return Exit(rc, number, started, seconds, timed_out=timed_out, too_long=too_long, left=left, pid=child.pid)


def beside(argv: Sequence[str], *, env: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start a program that runs beside a measured one and prints to the file `output`.

    The program dies with the agent, and inherits none of the agent's descriptors.
    """
    agent, begin = os.getpid(), _prepare(signal.SIGKILL, OUTPUT_LIMIT)

    def prepare() -> None:
        begin()
        if os.getppid() != agent:  # the agent died before the death signal was set
            os._exit(1)
        os.nice(_NICE)

    with output.open("ab") as out:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            preexec_fn=prepare,  # noqa: PLW1509 - the agent has no threads
        )
    _beside.add(child.pid)
    return child


def _end(child: subprocess.Popen[bytes], streams: Sequence[int]) -> tuple[str, ...]:
    """End a program and its children, and collect them; return what it left running, if it ended by itself.

    Raises RemoteError if something of it survives.
    """
    left: list[int] = []
    if _wait(child, time.monotonic()):
        deadline = time.monotonic() + _LEFT_S
        while (left := _strays(but=child.pid)) and time.monotonic() < deadline:
            time.sleep(0.005)
    named = tuple(map(_named, left))
    # the group is killed before its leader is collected: until then the kernel gives the number to no other group
    if not _wait(child, time.monotonic()):
        _signal_group(child.pid, signal.SIGTERM)
        _wait(child, time.monotonic() + _GRACE_S, streams=streams)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + _GRACE_S
    while strays := _strays():
        if time.monotonic() > deadline:
            program = Path(str(child.args[0])).name  # type: ignore[index]
            names = " and ".join(map(_named, strays))
            raise RemoteError(f"{names}, which {program} left running, cannot be ended", next=AGAIN)
        for pid in strays:  # with its group: a process that keeps forking has a new pid by then
            group = os.getpgid(pid)
            if group == os.getpgrp():
                os.kill(pid, signal.SIGKILL)
            else:
                _signal_group(group, signal.SIGKILL)
    return named


def _strays(but: int = 0) -> list[int]:
    """Return the living children that this process did not start and therefore adopted; collect the dead ones."""
    adopts = ctypes.c_int()
    _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    if not adopts.value:
        return []
    while True:
        strays = [pid for pid in _children() if pid != but and os.getpgid(pid) not in _beside]
        living = [pid for pid in strays if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        if living == strays:  # otherwise repeat: children of the processes just collected are adopted now
            return living


def _children() -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        children = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                    children.append(int(stat.parent.name))
        return children


def _named(pid: int) -> str:
    return f"pid {pid} ({one_line(Path(f'/proc/{pid}/comm').read_text().strip())})"


def _signal_group(pgid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _prepare(death_signal: int, file_limit: int, processors: Sequence[int] = ()) -> Callable[[], None]:
    unlimited, (_, most) = resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = min((each for each in (file_limit, most) if each != unlimited), default=unlimited)

    def prepare() -> None:
        os.setpgid(0, 0)
        _libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        if processors:
            os.sched_setaffinity(0, processors)

    return prepare


def _too_long(streams: Sequence[int]) -> bool:
    return any(os.fstat(fd).st_size > OUTPUT_LIMIT for fd in streams)


def _wait(
    child: subprocess.Popen[bytes],
    deadline: float,
    look: Callable[[int], float] | None = None,
    streams: Sequence[int] = (),
) -> bool:
    """Wait for the child's end without collecting it; return False if it exceeds the deadline or the output limit."""
    fd = os.pidfd_open(child.pid)  # Popen.wait(timeout) sleeps up to 50 ms past the end
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            pause = min(look(child.pid) if look else math.inf, OUTPUT_LOOK_S if streams else math.inf)
            left = max(0.0, deadline - time.monotonic())
            ended = bool(poll.poll(min(left, pause) * 1000))
            if ended or left <= pause or _too_long(streams):
                break
        if look:
            look(child.pid)
    finally:
        os.close(fd)
    return ended
