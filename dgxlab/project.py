"""The project: the folder that holds results.db, patches/, kernels/, experiments/ and hosts.yaml.

Also the user's folders, for what belongs to no project: pins, raw files, hosts.
"""

from __future__ import annotations

import os
from pathlib import Path

MARKER = ".dgxlab-root"
"""An empty file that marks a project's folder; all folders below belong to the project."""


def root(spec: Path | None = None) -> Path:
    """Return the nearest folder with the marker above a spec's absolute path, or else above the current folder.

    Without a marker, the nearest one with a `patches` folder, else the current folder.
    """
    here = Path.cwd()
    above = [*(spec.parents if spec else ()), here, *here.parents]
    marked = [folder for folder in above if is_marked(folder)]
    guessed = [folder for folder in above if (folder / "patches").is_dir()]
    return [*marked, *guessed, here][0]


def specs(project: Path) -> dict[str, list[Path]]:
    """Return the spec files anywhere below a project's experiments/, by file name without suffix."""
    files: dict[str, list[Path]] = {}
    for path in sorted((project / "experiments").rglob("*.yaml")):
        files.setdefault(path.stem, []).append(path)
    return files


def spec_at(path: Path) -> Path:
    """Return a spec's file: the path itself, or a file of that name below its experiments/ folder.

    So commands and `extends` still work after the file is moved into a device's folder.
    """
    if path.parent.name != "experiments" or path.exists():
        return path
    below = list(path.parent.rglob(path.name))
    return below[0] if len(below) == 1 else path


def is_marked(folder: Path) -> bool:
    """Return whether a folder belongs to a marked project."""
    return (folder / MARKER).is_file()


def user_folder(variable: str, default: str) -> Path:
    """Return dgxlab's folder in the user's folder that an XDG variable names, if that is absolute, or the default."""
    base = Path(os.environ.get(variable, ""))
    return (base if base.is_absolute() else Path.home() / default) / "dgxlab"
