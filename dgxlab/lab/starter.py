"""Make a new project, and in a project a new experiment or series, from the files in templates/."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from dgxlab.agent import gpus
from dgxlab.errors import SpecError, UsageError, access, command
from dgxlab.model import NAME
from dgxlab.project import MARKER, is_marked, or_init, specs
from dgxlab.source import programs
from dgxlab.source.git import Git

_LINES = {
    ".gitignore": ("*.db-wal", "*.db-shm", "*.db.backups/"),
    ".gitattributes": ("results.db merge=dgxlab-db diff=dgxlab-db -text",),
}
"""Lines that files for git need; what the files have is kept."""


@dataclass(frozen=True)
class Kind:
    """What a new project is for: a folder of templates/init/, the first candidate in it, and words of the files."""

    folder: str
    candidate: str
    words: Mapping[str, str]


_AGENTS = "AGENTS.md"
_NO_HOST = "# box: {ssh: user@box}"
KINDS = {
    "cpu": Kind("cpu", "one-thread", {"hosts": _NO_HOST}),
    "cuda": Kind(
        "gpu", "no-graphs", {"machine": "an NVIDIA GPU", "host": "local", "arch": "90", "counts": "", "hosts": _NO_HOST}
    ),
    "spark": Kind(
        "gpu",
        "no-graphs",
        {
            "machine": "a DGX Spark (GB10)",
            "host": "dgx",
            "arch": "121",
            "hosts": "dgx: {ssh: dgx}",
            "counts": ", expect: 1103/1103, cases: 886b1ca8db5f34c5",
        },
    ),
}


def merge_driver() -> dict[str, str]:
    """Return git's settings that merge and show a results.db, by name; they call this program."""
    program = f"'{sys.executable}' -m dgxlab"
    return {
        "merge.dgxlab-db.name": "dgxlab's record, row by row",
        "merge.dgxlab-db.driver": f"{program.replace('%', '%%')} db merge %A %B",
        "diff.dgxlab-db.textconv": f"{program} db text",
    }


def init(folder: Path, kind: Kind) -> list[str]:
    """Make `folder` a project under git, and return its files.

    Raises UsageError if it is in a project already, or has a file that would be written.
    """
    if there := next((above for above in (folder, *folder.parents) if is_marked(above)), None):
        plans = [path for files in specs(there).values() for path in files]
        mend = command("dgxlab", "plan", plans[0]) if plans else command("ls", "-A", there)
        raise UsageError(f"{there} is a project already", next=mend)
    words = {**kind.words, "candidate": kind.candidate}
    texts = {**_texts("init/all", words), **_texts(f"init/{kind.folder}", words), MARKER: ""}
    if (folder / _AGENTS).exists():  # its owner's own, which may say more
        del texts[_AGENTS]
    if known := next((path for path in texts if (folder / path).exists()), None):
        raise UsageError(f"{folder / known} is there already, and nothing is written over", next="ls -A")
    for path, lines in _LINES.items():
        old = (folder / path).read_text() if (folder / path).exists() else ""
        missing = [line for line in lines if line not in old.splitlines()]
        texts[path] = "\n".join([*old.splitlines(), *missing, ""])
    _write(folder, texts)
    git = Git(folder, user=True, is_work_tree=True)
    if git.attempt("rev-parse", "--git-dir").rc != 0:
        git.run("init", "--quiet")
    for name, value in merge_driver().items():
        git.run("config", name, value)
    return sorted(texts)


def new_experiment(root: Path, name: str, parent: Path) -> Path:
    """Write an experiment that extends the spec `parent`, beside it, and return its path; UsageError if it has one."""
    if there := specs(root).get(_checked(name, "an experiment")):
        raise UsageError(f"there is an experiment {name} already: {there[0]}", next=command("dgxlab", "plan", name))
    path = parent.with_name(f"{name}.yaml")
    if path.exists():  # below no experiments/
        raise UsageError(f"{path} is there already, and nothing is written over", next=command("dgxlab", "plan", path))
    texts = _texts("new/experiment", {"name": name, "parent": parent.name, "baseline": parent.stem})
    _write(path.parent, {path.name: texts["experiment.yaml"]})
    return path


def new_series(root: Path, name: str) -> Path:
    """Make the folder of a series, with a page about it; UsageError if there is one of that name, or no project."""
    if mend := or_init(""):
        raise UsageError(f"{root} is no project", next=mend)
    folder = root / "patches" / _checked(name, "a series")
    if folder.exists():
        raise UsageError(f"there is a series {name} already: {folder}", next=command("ls", "-A", folder))
    _write(folder, _texts("new/series", {"name": name}))
    return folder


def compute_capability() -> str:
    """Return the compute capability of this machine's first GPU as CMake names it, as 121; "" if there is none."""
    fields = ("compute_cap",)
    try:
        first = gpus.parse_gpus(fields, programs.run(gpus.query(fields)).text)[:1]
    except SpecError:  # nvidia-smi is not installed
        return ""
    return "".join((gpu["compute_cap"] or "").replace(".", "") for gpu in first)


def _checked(name: str, what: str) -> str:
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for {what}", next="use letters, digits, dots and dashes")
    return name


def _texts(folder: str, words: Mapping[str, str]) -> dict[str, str]:
    with resources.as_file(resources.files("dgxlab") / "templates" / folder) as top:
        files = sorted(path for path in top.rglob("*") if path.is_file())
        return {str(path.relative_to(top)): Template(path.read_text()).substitute(words) for path in files}


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    with access(folder, "written", UsageError):
        for path, text in texts.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
