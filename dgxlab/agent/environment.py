"""The surroundings of the agent and its programs: this host's settings, the root's folders, PATH and variables.

<root>/  agent/<digest>.pyz   tools/<name>/   src/llama.cpp.git   work/<key>/   builds/<id>/   models/   jobs/<id>/
"""

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
            Only the host sets it, never a spec or the client: a lock elsewhere excludes no other job.
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


class Root:
    """Paths under the root folder; created private on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.agents = path / "agent"
        self.tools = path / "tools"
        self.objects = path / "src" / "llama.cpp.git"
        self.work = path / "work"
        self.builds = path / "builds"
        self.models = path / "models"
        self.jobs = path / "jobs"

    def create(self) -> None:
        """Make the folders, readable by the owner alone."""
        inside = (self.agents, self.tools, self.objects.parent, self.work, self.builds, self.models, self.jobs)
        for folder in (self.path, *inside):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def build(self, build_id: str) -> Path:
        """Return the folder of an installed build."""
        return self.builds / build_id


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
    nvcc = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    return f"{path}:{nvcc[0].parent}" if nvcc else path


def absent() -> list[tuple[str, str]]:
    """Return what this host's settings name and is not here, each as its key in hosts.yaml and the path or program."""
    here, path = settings(), search_path()
    missing = [("path_prepend", str(folder)) for folder in here.path_prepend if not folder.is_dir()]
    for name in COMPILERS:
        program, *_ = here.env.get(name, "").split() or [""]  # CC may be `ccache gcc`
        if name in here.env and shutil.which(program, path=path) is None:
            missing.append((name, here.env[name]))
    if here.lock and not here.lock.parent.is_dir():
        missing.append(("lock", str(here.lock.parent)))
    return missing


def base_env() -> dict[str, str]:
    """Return the environment that every program on the host starts from."""
    kept = {name: value for name, value in os.environ.items() if _kept(name)}
    return {**kept, **settings().env, "PATH": search_path(), "LC_ALL": "C.UTF-8"}


def measured_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a gate or a benchmark.

    GGML_NO_BACKTRACE: an abort would otherwise run gdb and print its backtrace on stdout, in the middle of the results.
    """
    return {**base_env(), "GGML_NO_BACKTRACE": "1", **env}


def _kept(name: str) -> bool:
    return name in KEEP_ENV or name.startswith(KEEP_PREFIX)
