"""A clock that can be set: what time a program is told it is, without touching the machine's own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

SHIM = """#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long shift(void) {
    char text[24] = "";
    const char * path = getenv("CLOCK_SHIFT");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) { return 0; }
    ssize_t n = read(file, text, sizeof text - 1);
    close(file);
    return n > 0 ? atol(text) : 0;
}
int clock_gettime(clockid_t clock, struct timespec * now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real(clock, now);
    if (rc == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) { now->tv_sec += shift(); }
    return rc;
}
int gettimeofday(struct timeval * restrict now, void * restrict zone) {
    struct timespec t;
    int rc = clock_gettime(CLOCK_REALTIME, &t);
    now->tv_sec = t.tv_sec;
    now->tv_usec = t.tv_nsec / 1000;
    return rc;
}
time_t time(time_t * out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return out ? *out = t.tv_sec : t.tv_sec;
}
"""
"""Loaded between a program and its C library: adds the seconds in a file to the time of day, and to no other clock."""

PYTHON = """#!/bin/bash
export LD_PRELOAD={shim} CLOCK_SHIFT={shift}
exec -a "$0" {python} "$@"
"""
"""A Python that takes this script for itself, so that those that it starts of its own kind have its clock too."""


@dataclass(frozen=True)
class Clock:
    """The clock of some programs.

    Attributes:
        folder: With the shim, the interpreter and how far off it is.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Clock:
        """Build it; it is right as yet."""
        clock = cls(folder)
        (folder / "bin").mkdir(parents=True)
        (folder / "shim.c").write_text(SHIM)
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", clock._shim, folder / "shim.c", "-ldl"], check=True)
        own = Path(sysconfig.get_config_var("BINDIR"))
        (folder / "pyvenv.cfg").write_text(f"home = {own}\n")
        python = Path(sys.executable).resolve()
        clock.python.write_text(PYTHON.format(shim=clock._shim, shift=clock._shift, python=python))
        clock.python.chmod(0o755)
        return clock

    @property
    def python(self) -> Path:
        """An interpreter with this clock, for what needs the standard library alone."""
        return self.folder / "bin" / "python"

    @property
    def env(self) -> dict[str, str]:
        """What makes any program have it."""
        return {"LD_PRELOAD": str(self._shim), "CLOCK_SHIFT": str(self._shift)}

    def set(self, seconds: int) -> None:
        """Let it be that many seconds off, from this moment on."""
        part = self._shift.with_suffix(".part")
        part.write_text(str(seconds))
        part.rename(self._shift)

    @property
    def _shim(self) -> Path:
        return self.folder / "shim.so"

    @property
    def _shift(self) -> Path:
        return self.folder / "shift"
