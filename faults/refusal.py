"""Makes the n-th write of an action fail, by a library for LD_PRELOAD.

`python -m faults.refusal` runs under that library. For each line of JSON on stdin it forks, calls the action with the
n-th write failing, and prints the result as JSON: a trial does not have to start Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dgxlab.errors import DgxlabError

SHIM = r"""#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>
static char folder[4096];
static long seen, first;
static int error, lasting;
void refuse(const char * where, long n, int number, int on) {
    strncpy(folder, where, sizeof folder - 1);
    seen = 0, first = n, error = number, lasting = on;
}
long refused(void) { return seen; }
static int under(const char * path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }
static int fails(int fd, const char * path) {
    char name[32], target[4096];
    if (!folder[0]) { return 0; }
    if (!path) {
        snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(name, target, sizeof target - 1);
        if (n < 0) { return 0; }
        target[n] = 0;
        path = target;
    }
    if (!under(path)) { return 0; }
    seen += 1;
    if (!error || seen < first || (seen > first && !lasting)) { return 0; }
    errno = error;
    return 1;
}
#define WRITES(result, name, args, given, fd, path) \
    result name args { \
        static result (*real) args; \
        if (!real) { real = dlsym(RTLD_NEXT, #name); } \
        return fails(fd, path) ? (result) -1 : real given; \
    }
WRITES(ssize_t, write, (int fd, const void * p, size_t n), (fd, p, n), fd, NULL)
WRITES(ssize_t, pwrite, (int fd, const void * p, size_t n, off_t at), (fd, p, n, at), fd, NULL)
WRITES(ssize_t, pwrite64, (int fd, const void * p, size_t n, off64_t at), (fd, p, n, at), fd, NULL)
WRITES(ssize_t, sendfile, (int fd, int from, off_t * at, size_t n), (fd, from, at, n), fd, NULL)
WRITES(ssize_t, sendfile64, (int fd, int from, off64_t * at, size_t n), (fd, from, at, n), fd, NULL)
WRITES(int, fsync, (int fd), (fd), error == EINTR ? -1 : fd, NULL)
WRITES(int, fdatasync, (int fd), (fd), error == EINTR ? -1 : fd, NULL)
WRITES(int, ftruncate, (int fd, off_t n), (fd, n), fd, NULL)
WRITES(int, ftruncate64, (int fd, off64_t n), (fd, n), fd, NULL)
WRITES(int, rename, (const char * a, const char * b), (a, b), -1, error == EINTR ? "" : b)
WRITES(int, mkdir, (const char * a, mode_t mode), (a, mode), -1, error == EINTR ? "" : a)
"""
"""The library: counts writes below a folder, and lets one fail, or all from one on; EINTR only where it can occur."""

Act = Callable[..., Any]


@dataclass(frozen=True)
class Refusing:
    """The process that calls actions with failing writes."""

    child: subprocess.Popen[str]

    def do(self, act: str, folder: Path, n: int, number: int, *, lasting: bool, **given: Any) -> dict[str, Any]:
        """Call an action, let its n-th write below a folder fail, and return the result.

        Args:
            act: The name of the action in `faults.kinds.io.ACTS`.
            n: The failing write, from 1; 0 for none.
            number: The error, as in `errno`.
            lasting: Whether all later writes fail too.
            given: Further arguments of the action.

        Returns:
            `error`, the message of a DgxlabError or ""; `traceback` of any other exception; `writes`, their number; and
            `done`, what the action had acknowledged before it ended.
        """
        ask = {"act": act, "folder": str(folder), "n": n, "number": number, "lasting": lasting, "given": given}
        assert self.child.stdin
        assert self.child.stdout
        print(json.dumps(ask), file=self.child.stdin, flush=True)
        reply: dict[str, Any] = json.loads(self.child.stdout.readline())
        return reply


@contextmanager
def refusing(folder: Path, env: Mapping[str, str]) -> Iterator[Refusing]:
    """Compile the library into a folder, and yield the process that runs under it."""
    (folder / "refuse.c").write_text(SHIM)
    library = folder / "refuse.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, folder / "refuse.c", "-ldl"], check=True)
    child = subprocess.Popen(
        [sys.executable, "-m", "faults.refusal"],
        cwd=Path(__file__).resolve().parents[1],
        env={**env, "LD_PRELOAD": str(library)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Refusing(child)
    finally:
        child.communicate()


def main(acts: Mapping[str, Act]) -> None:
    """Call the action that each line of stdin names, each in a forked process."""
    for line in sys.stdin:
        ask = json.loads(line)
        ours, theirs = os.pipe()
        if not (pid := os.fork()):
            os.close(ours)
            reply = _done(acts[ask["act"]], ask)
            os.write(theirs, json.dumps(reply).encode())
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            answer = pipe.read().decode()
        os.waitpid(pid, 0)
        print(answer or json.dumps({"error": "", "traceback": "it was killed", "writes": 0, "done": []}), flush=True)


def _done(act: Act, ask: Mapping[str, Any]) -> dict[str, Any]:
    done: list[Any] = []
    library = ctypes.CDLL(None)
    library.refused.restype = ctypes.c_long
    library.refuse(
        os.fsencode(ask["folder"]), ctypes.c_long(ask["n"]), ask["number"] if ask["n"] else 0, ask["lasting"]
    )
    reply = {"error": "", "traceback": ""}
    try:
        act(Path(ask["folder"]), done, **ask["given"])
    except DgxlabError as error:
        reply["error"] = error.message
    except BaseException:
        reply["traceback"] = traceback.format_exc()
    writes = library.refused()
    library.refuse(b"", ctypes.c_long(0), 0, 0)
    return {**reply, "writes": writes, "done": done}


if __name__ == "__main__":
    from faults.kinds.io import ACTS

    with contextlib.suppress(KeyboardInterrupt):
        main(ACTS)
