"""The agent's folder on a host, and the environment its programs get.

<root>/  agent/<digest>.pyz   src/llama.cpp.git   work/<key>/   builds/<id>/   models/   jobs/<id>/
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dgxlab.agent import facts

KEEP_ENV = ("HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "CC", "CXX", "CUDACXX", "CUDAHOSTCXX", "XDG_CACHE_HOME")
KEEP_PREFIX = ("CCACHE_",)
"""What programs on the host inherit; everything else that could change a result comes from the plan or not at all."""


class Root:
    """Paths under the root folder; created private on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.agents = path / "agent"
        self.objects = path / "src" / "llama.cpp.git"
        self.work = path / "work"
        self.builds = path / "builds"
        self.models = path / "models"
        self.jobs = path / "jobs"

    def create(self) -> None:
        """Make the folders, readable by the owner alone."""
        for folder in (self.path, self.agents, self.objects.parent, self.work, self.builds, self.models, self.jobs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def build(self, build_id: str) -> Path:
        """Return the folder of an installed build."""
        return self.builds / build_id


def base_env() -> dict[str, str]:
    """Return the environment that every program on the host starts from."""
    kept = {k: v for k, v in os.environ.items() if k in KEEP_ENV or k.startswith(KEEP_PREFIX)}
    return {**kept, "PATH": facts.search_path(), "LC_ALL": "C.UTF-8"}


def measured_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a gate or a benchmark.

    GGML_NO_BACKTRACE: an abort would otherwise run gdb and print its backtrace on stdout, in the middle of the results.
    """
    return {**base_env(), "GGML_NO_BACKTRACE": "1", **env}
