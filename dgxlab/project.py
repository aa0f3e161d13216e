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


def specs(project: Path) -> dict[str, list[Path]]:
    """Return the spec files anywhere below a project's experiments/, by the file's name without its ending."""
    files: dict[str, list[Path]] = {}
    for path in sorted((project / "experiments").rglob("*.yaml")):
        files.setdefault(path.stem, []).append(path)
    return files


def spec_at(path: Path) -> Path:
    """Return a spec's file: that of the path, or of its name in a folder below the experiments/ that the path names.

    So a command, and an `extends`, stay right when the file is put into the folder of its device.
    """
    if path.parent.name != "experiments" or path.exists():
        return path
    below = list(path.parent.rglob(path.name))
    return below[0] if len(below) == 1 else path


def is_marked(folder: Path) -> bool:
    """Tell whether a folder is known to be a project's."""
    return (folder / MARKER).is_file()
