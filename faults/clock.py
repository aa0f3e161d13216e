"""A clock for some programs that can be set, without a change of the machine's own clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.preload import library, python

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
"""A library for LD_PRELOAD: adds the seconds in a file to the time of day, and to no other clock."""


@dataclass(frozen=True)
class Clock:
    """The clock of the programs that are started with its `python` or `env`.

    Attributes:
        folder: Has the library, the interpreter, and the seconds that the clock is off.
    """

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Clock:
        """Build the library in a new folder, and return a clock that is right."""
        clock = cls(folder)
        python(folder, clock.env)
        library(clock._shim, SHIM)
        return clock

    @property
    def python(self) -> Path:
        """A Python with this clock and the standard library alone."""
        return self.folder / "bin" / "python"

    @property
    def env(self) -> dict[str, str]:
        """Environment variables that give a program this clock."""
        return {"LD_PRELOAD": str(self._shim), "CLOCK_SHIFT": str(self._shift)}

    def set(self, seconds: int) -> None:
        """Set the clock this many seconds ahead of the machine's."""
        part = self._shift.with_suffix(".part")
        part.write_text(str(seconds))
        part.rename(self._shift)

    @property
    def _shim(self) -> Path:
        return self.folder / "shim.so"

    @property
    def _shift(self) -> Path:
        return self.folder / "shift"
