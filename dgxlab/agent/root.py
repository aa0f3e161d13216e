"""The agent's folder on a host.

<root>/  agent/<digest>.pyz   tools/<name>/   src/llama.cpp.git   work/<key>/   builds/<id>/   models/   jobs/<id>/
"""

from __future__ import annotations

from pathlib import Path


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
