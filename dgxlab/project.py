"""The project: the folder that holds results.db, patches/, kernels/, experiments/ and hosts.yaml."""

from __future__ import annotations

from pathlib import Path

MARKER = ".dgxlab-root"
"""An empty file in a project's folder, so that every folder below is of the same project."""


def root(spec: Path | None = None) -> Path:
    """Return the nearest folder with the marker above a spec, or else above the current folder.

    Without a marker the first such folder with `patches`, and without one the current folder.

    Args:
        spec: Absolute path of an experiment's file, where one was named.
    """
    here = Path.cwd()
    above = [*(spec.parents if spec else ()), here, *here.parents]
    marked = [folder for folder in above if is_marked(folder)]
    guessed = [folder for folder in above if (folder / "patches").is_dir()]
    return [*marked, *guessed, here][0]


def is_marked(folder: Path) -> bool:
    """Tell whether a folder is known to be a project's."""
    return (folder / MARKER).is_file()
