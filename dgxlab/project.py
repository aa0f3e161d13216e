"""The project: the folder that holds results.db, patches/, kernels/, experiments/ and hosts.yaml.

Also the user's folders, for what belongs to no project: pins, raw files, hosts.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

Specs = dict[str, list[Path]]  # files in experiments/ by name without suffix
MARKER = ".dgxlab-root"  # an empty file that marks a project's folder; all folders below belong to the project


def root(spec: Path | None = None) -> Path:
    """Return the project's folder: the nearest one above a spec, else above the current folder, that has the marker.

    Without any marker, the nearest one that has a `patches` folder; without that, the current folder. The path of a
    `spec` is absolute.
    """
    cwd = Path.cwd()
    above = [*(spec.parents if spec else ()), cwd, *cwd.parents]
    marked = [folder for folder in above if is_marked(folder)]
    guessed = [folder for folder in above if (folder / "patches").is_dir()]
    return [*marked, *guessed, cwd][0]


def specs(project: Path) -> Specs:
    """Return all spec files below a project's experiments/, by file name without suffix; several may share a name."""
    files: dict[str, list[Path]] = {}
    for path in sorted((project / "experiments").rglob("*.yaml")):
        files.setdefault(path.stem, []).append(path)
    return files


def spec_at(path: Path) -> Path:
    """Return the path of a spec that may have moved: experiments/x.yaml is now experiments/DEVICE/x.yaml.

    A path that exists, or for which not exactly one such file exists, is returned unchanged.
    """
    if path.parent.name != "experiments" or path.exists():
        return path
    below = list(path.parent.rglob(path.name))
    return below[0] if len(below) == 1 else path


def is_marked(folder: Path) -> bool:
    """Return whether a folder has the marker itself."""
    return (folder / MARKER).is_file()


def or_init(next: str) -> str:
    """Return an error's `next` command, which is `dgxlab init` in a folder with nothing of a project."""
    folder = root()
    parts = (MARKER, "patches", "experiments", "results.db")
    return next if any((folder / part).exists() for part in parts) else "dgxlab init"


def first_command() -> str:
    """Return what to type where nothing is recorded yet; in a project as `dgxlab init` makes it, its first verdict."""
    known = specs(root())
    if known.pop("stock", None) is None:
        return or_init("dgxlab doctor")
    return shlex.join(["dgxlab", "ab", "stock", *known] if len(known) == 1 else ["dgxlab", "run", "stock"])


def user_folder(variable: str, default: str) -> Path:
    """Return a folder for the user's files: $VARIABLE/dgxlab, or ~/DEFAULT/dgxlab if the variable is no absolute path.

    `default` is the path below the home folder that XDG gives for the variable, as `.cache` for XDG_CACHE_HOME.
    """
    base = Path(os.environ.get(variable, ""))
    return (base if base.is_absolute() else Path.home() / default) / "dgxlab"


def hosts_files() -> tuple[Path, Path]:
    """Return the paths of the user's own hosts.yaml and of the project's; they need not exist."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "hosts.yaml", root() / "hosts.yaml"
