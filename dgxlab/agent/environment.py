"""What programs on the host get from their surroundings: this host's settings, PATH, and the variables they inherit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

COMPILERS = ("CC", "CXX", "CUDACXX", "CUDAHOSTCXX")
JOB = "DGXLAB_JOB"
"""The job that a process belongs to: set for the agent and inherited by all that it starts, so that it can be found."""
KEEP_ENV = ("HOME", "USER", "LOGNAME", "TMPDIR", "TZ", *COMPILERS, "XDG_CACHE_HOME", JOB)
KEEP_PREFIX = ("CCACHE_",)
"""What programs on the host inherit; everything else that could change a result comes from the plan, from hosts.yaml,
or not at all."""


@dataclass(frozen=True)
class Settings:
    """What the client's hosts.yaml says of this host.

    Attributes:
        name: What the client calls this host.
        root: The agent's folder, None where it runs on its own.
        path_prepend: Folders that come first on PATH.
        env: Variables for every program here.
        lock: The file in which people who share the machine say that they measure, None for none.
        locks: Folders of the benchmark locks in place of the usual ones, for tests, and for machines that have neither.
            It is the host's word, never a spec's or the client's: who looks elsewhere excludes nobody.
    """

    name: str = "local"
    root: Path | None = None
    path_prepend: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    lock: Path | None = None
    locks: tuple[Path, ...] = ()

    @property
    def measured(self) -> dict[str, str]:
        """The variables that may change what is measured, and not only how it is built."""
        return {name: value for name, value in self.env.items() if not _kept(name)}


def settings() -> Settings:
    """Return this host's settings: the client's DGXLAB_ROOT and DGXLAB_HOST, and DGXLAB_LOCKS, which is set there."""
    given = json.loads(os.environ.get("DGXLAB_HOST") or "{}")
    root, lock = os.environ.get("DGXLAB_ROOT", ""), given.get("lock", "")
    return Settings(
        name=given.get("name", "local"),
        root=Path(root) if root else None,
        path_prepend=tuple(Path(folder).expanduser() for folder in given.get("path_prepend", ())),
        env=given.get("env", {}),
        lock=Path(lock).expanduser() if lock else None,
        locks=tuple(map(Path, filter(None, os.environ.get("DGXLAB_LOCKS", "").split(":")))),
    )


def search_path() -> str:
    """Return the PATH of every program here.

    First what hosts.yaml puts there, then the login's own, then tools that the client sent, and the CUDA folder when
    nvcc is installed but not on PATH, as on most DGX logins.
    """
    own = os.environ.get("PATH", "/usr/bin:/bin")
    here = settings()
    # an empty program is what a power loss left of it: another of its name, or none, is better
    sent = sorted({file.parent for file in here.root.glob("tools/*/bin/*") if file.stat().st_size}) if here.root else []
    path = ":".join([*map(str, here.path_prepend), own, *map(str, sent)])
    if shutil.which("nvcc", path=path):
        return path
    found = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    return f"{path}:{found[0].parent}" if found else path


def absent() -> list[tuple[str, str]]:
    """Return what this host's settings name and is not here, each as its key in hosts.yaml and the path or program."""
    here, path = settings(), search_path()
    found = [("path_prepend", str(folder)) for folder in here.path_prepend if not folder.is_dir()]
    compilers = {name: value for name, value in here.env.items() if name in COMPILERS}
    found += [(name, value) for name, value in compilers.items() if not _starts(value, path)]
    if here.lock and not here.lock.parent.is_dir():
        found.append(("lock", str(here.lock.parent)))
    return found


def base_env() -> dict[str, str]:
    """Return the environment that every program on the host starts from."""
    kept = {name: value for name, value in os.environ.items() if _kept(name)}
    return {**kept, **settings().env, "PATH": search_path(), "LC_ALL": "C.UTF-8"}


def measured_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a gate or a benchmark.

    GGML_NO_BACKTRACE: an abort would otherwise run gdb and print its backtrace on stdout, in the middle of the results.
    """
    return {**base_env(), "GGML_NO_BACKTRACE": "1", **env}


def _starts(command: str, path: str) -> bool:
    """Whether the program of a command is there; CC may be `ccache gcc`."""
    program, *_ = command.split() or [""]
    return shutil.which(program, path=path) is not None


def _kept(name: str) -> bool:
    return name in KEEP_ENV or name.startswith(KEEP_PREFIX)
