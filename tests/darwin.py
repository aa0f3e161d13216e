"""Run this program as on macOS: `python -m tests.darwin ARGS`. What macOS lacks is missing or refused."""

import builtins
import ctypes
import io
import os
import pathlib
import resource
import select
import signal
import socket
import sys
import sysconfig
import time
import urllib.request  # noqa: F401 - early: elsewhere it needs a module of macOS
from typing import Any

LACKING = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "fdatasync", "pidfd_open"),
        *("memfd_create", "eventfd", "copy_file_range", "splice", "pipe2", "getrandom", "setns", "unshare", "O_PATH"),
        *("O_TMPFILE", "O_DIRECT", "O_NOATIME", "getresuid", "setresuid", "preadv2", "process_cpu_count"),
    ),
    select: ("epoll",),
    signal: ("sigtimedwait", "sigwaitinfo", "SIGRTMIN", "SIGPWR", "SIGSTKFLT", "pidfd_send_signal"),
    resource: ("prlimit",),
    socket: ("SO_PEERCRED", "AF_NETLINK", "SOCK_CLOEXEC"),
    time: ("CLOCK_BOOTTIME",),
}


def absent(path: object) -> None:
    """Refuse a path of Linux."""
    if str(path).startswith(("/proc", "/sys", "/var/lock", "/run")):
        raise FileNotFoundError(2, "No such file or directory", str(path))


def become() -> None:
    """Let this process see macOS; those parts of Python that ask early are those of the machine that it is on."""
    sysconfig.get_config_vars()
    sys.platform = "darwin"
    for module, names in LACKING.items():
        for name in names:
            vars(module).pop(name, None)
    opened, stat, listed, scanned = os.open, os.stat, os.listdir, os.scandir

    def guard(function: Any) -> Any:
        def guarded(path: Any = ".", *args: Any, **options: Any) -> Any:
            absent(path)
            return function(path, *args, **options)

        return guarded

    os.open, os.stat, os.listdir, os.scandir = map(guard, (opened, stat, listed, scanned))
    builtins.open = io.open = guard(open)
    pathlib.os = os  # type: ignore[attr-defined]

    def library(name: object = None, *args: object, **options: object) -> None:
        raise OSError(f"dlopen({name}): not here")

    ctypes.CDLL = library  # type: ignore[misc, assignment]


if __name__ == "__main__":
    become()
    from dgxlab.cli import main

    main()
