"""Run one program: its own process group, a time limit, its output in files, and no way to outlive the agent unseen."""

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

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""Between TERM and KILL."""
NICE = 10
"""What runs beside a measured program yields to it."""
OUTPUT_LIMIT = 64 << 20
"""Bytes that it may print, a week of samples of one GPU: one that goes mad must not fill the disk."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Ended:
    """How a program ended.

    Attributes:
        rc: Exit status, None when a signal ended it.
        signal: Number of that signal, None otherwise.
        started: Unix seconds.
        seconds: Wall time on the monotonic clock.
        timed_out: It ran past its limit and was killed for it.
        pid: Its process id, which is free again.
    """

    rc: int | None
    signal: int | None
    started: float
    seconds: float
    timed_out: bool = False
    pid: int = 0

    @property
    def ok(self) -> bool:
        """Whether it exited with status 0 by itself."""
        return self.rc == 0 and not self.timed_out

    def sentence(self, program: str, limit_s: float) -> str:
        """Say how it ended, for a reason column: `llama-bench was killed by SIGSEGV`."""
        if self.timed_out:
            return f"{program} ran past its limit of {limit_s:g} s and was killed"
        if self.signal is not None:
            return f"{program} was killed by {signal.Signals(self.signal).name}"
        return f"{program} ended with exit status {self.rc}"


def run(  # noqa: PLR0913 - all but argv by name
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    limit_s: float,
    cwd: Path | None = None,
    keep: Sequence[int] = (),
    on_line: Callable[[str], None] | None = None,
    look: Callable[[int], float] | None = None,
    death_signal: int = signal.SIGKILL,
) -> Ended:
    """Run `argv` to its end with stdin closed and both streams in files.

    Args:
        keep: Lock descriptors that the program inherits, so that an orphan still holds them.
        on_line: Called with each line of stdout as it comes; without it the agent sleeps until the end, or the next
            look, which costs the measured program nothing.
        look: Called with its pid once it runs, whenever the seconds that it returned are over, and when it has ended;
            not beside `on_line`.
        death_signal: What the kernel sends the program when the agent dies.

    Raises:
        OSError: if the program cannot be started.
    """
    started, begin = time.time(), time.monotonic()
    with stdout.open("wb") as out, stderr.open("wb") as err:
        child = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if on_line else out,
            stderr=err,
            env=dict(env),
            cwd=cwd,
            pass_fds=tuple(keep),
            preexec_fn=_prepare(death_signal),  # noqa: PLW1509 - the agent has no threads
        )
        try:
            deadline = begin + limit_s
            ended = _copy_lines(child, out, on_line, deadline) if on_line else _wait(child, deadline, look)
        finally:
            # a program's own children must not outlive it: they would measure beside the next run
            end_group(child)
            if child.stdout:
                child.stdout.close()
    code = child.returncode
    return Ended(
        rc=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        started=started,
        seconds=time.monotonic() - begin,
        timed_out=not ended,
        pid=child.pid,
    )


def beside(argv: Sequence[str], *, env: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start a small program that runs beside what is measured, what it prints appended to a file.

    It dies with the agent, and inherits none of its descriptors.

    Raises:
        OSError: if it cannot be started.
    """
    agent, die = os.getpid(), _prepare(signal.SIGKILL)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limit = OUTPUT_LIMIT if most == resource.RLIM_INFINITY else min(most, OUTPUT_LIMIT)

    def prepare() -> None:
        die()
        if os.getppid() != agent:  # it was gone before the kernel was told
            os._exit(1)
        os.nice(NICE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    with output.open("ab") as out:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=dict(env),
            preexec_fn=prepare,  # noqa: PLW1509 - the agent has no threads
        )


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End what is left of a child's process group and collect the child.

    The group is killed before its leader is collected: until then the kernel cannot give the number to anybody else.
    """
    if not _wait(child, time.monotonic()):
        _signal_group(child.pid, signal.SIGTERM)
        _wait(child, time.monotonic() + GRACE_S)
    _signal_group(child.pid, signal.SIGKILL)
    child.wait()


def _signal_group(pgid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def _prepare(death_signal: int) -> Callable[[], None]:
    def prepare() -> None:
        os.setpgid(0, 0)
        _libc.prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0)

    return prepare


def _wait(child: subprocess.Popen[bytes], deadline: float, look: Callable[[int], float] | None = None) -> bool:
    """Wait for the end without collecting it.

    Not by Popen.wait(timeout), which sleeps up to 50 ms past the end: a short run would feel that.
    """
    fd = os.pidfd_open(child.pid)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while True:
            pause = look(child.pid) if look else math.inf
            left = max(0.0, deadline - time.monotonic())
            ended = bool(poll.poll(min(left, pause) * 1000))
            if ended or left <= pause:
                break
        if look:
            look(child.pid)
    finally:
        os.close(fd)
    return ended


def _copy_lines(child: subprocess.Popen[bytes], out: object, on_line: Callable[[str], None], deadline: float) -> bool:
    assert child.stdout is not None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN | select.POLLHUP)
    rest = b""
    while True:
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
        chunk = os.read(child.stdout.fileno(), 1 << 16)
        if not chunk:
            return _wait(child, deadline)
        out.write(chunk)  # type: ignore[attr-defined]
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            on_line(line.decode(errors="replace"))
