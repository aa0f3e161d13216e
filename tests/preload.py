"""Libraries for LD_PRELOAD that change what the C library answers, and a Python that runs with one."""

import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

PYTHON = """#!/bin/bash
export {variables}
exec -a "$0" {python} "$@"
"""
"""A script that starts Python; sys.executable is the script, so that child Pythons have the library too."""

NO_LOCKS = r"""#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int flock(int fd, int kind) {
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    char name[32], path[4096] = "";
    const char * folder = getenv("NO_LOCKS");
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    if (readlink(name, path, sizeof path - 1) > 0 && strncmp(path, folder, strlen(folder)) == 0) {
        errno = ENOLCK;
        return -1;
    }
    return real(fd, kind);
}
"""
"""Refuses locks below the folder NO_LOCKS, as NFS without its lock service does."""


def library(path: Path, source: str) -> Path:
    """Compile C to a library at `path`."""
    argv = ["cc", "-shared", "-fPIC", "-O2", "-x", "c", "-o", str(path), "-", "-ldl"]
    subprocess.run(argv, input=source, text=True, check=True)
    return path


def python(folder: Path, env: Mapping[str, str]) -> Path:
    """Make an interpreter in a folder, which has variables and the standard library alone."""
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text(f"home = {sysconfig.get_config_var('BINDIR')}\n")
    variables = " ".join(f"{name}={value}" for name, value in env.items())
    path.write_text(PYTHON.format(variables=variables, python=Path(sys.executable).resolve()))
    path.chmod(0o755)
    return path
