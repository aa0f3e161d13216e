"""What programs on the host get from their surroundings: this host's settings, PATH, and the variables they inherit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KEEP_ENV = ("HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "CC", "CXX", "CUDACXX", "CUDAHOSTCXX", "XDG_CACHE_HOME")
KEEP_PREFIX = ("CCACHE_",)
"""What programs on the host inherit; everything else that could change a result comes from the plan, from hosts.yaml,
or not at all."""


@dataclass(frozen=True)
class Settings:
    """What the client's hosts.yaml says of this host.

    Attributes:
        root: The agent's folder, None where it runs on its own.
        path_prepend: Folders that come first on PATH.
        env: Variables for every program here.
        lock: The file in which people who share the machine say that they measure, None for none.
    """

    root: Path | None = None
    path_prepend: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    lock: Path | None = None

    @property
    def measured(self) -> dict[str, str]:
        """The variables that may change what is measured, and not only how it is built."""
        return {name: value for name, value in self.env.items() if not _kept(name)}


def settings() -> Settings:
    """Return this host's settings, as the client gave them to this process: DGXLAB_ROOT and DGXLAB_HOST."""
    given = json.loads(os.environ.get("DGXLAB_HOST") or "{}")
    root, lock = os.environ.get("DGXLAB_ROOT", ""), given.get("lock", "")
    return Settings(
        root=Path(root) if root else None,
        path_prepend=tuple(Path(folder).expanduser() for folder in given.get("path_prepend", ())),
        env=given.get("env", {}),
        lock=Path(lock).expanduser() if lock else None,
    )


def search_path() -> str:
    """Return the PATH of every program here.

    First what hosts.yaml puts there, then the login's own, then tools that the client sent, and the CUDA folder when
    nvcc is installed but not on PATH, as on most DGX logins.
    """
    own = os.environ.get("PATH", "/usr/bin:/bin")
    here = settings()
    sent = sorted(here.root.glob("tools/*/bin")) if here.root else []
    path = ":".join([*map(str, here.path_prepend), own, *map(str, sent)])
    if shutil.which("nvcc", path=path):
        return path
    found = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    return f"{path}:{found[0].parent}" if found else path


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
