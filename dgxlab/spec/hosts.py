"""hosts.yaml: machines by name, in the project and in the user's configuration."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, RootModel, ValidationError, model_validator

from dgxlab.errors import SpecError
from dgxlab.model import HostEntry
from dgxlab.spec import explain
from dgxlab.spec.fields import Env, Few, Line, Maybe, ModelPath, Name, Strict, matching
from dgxlab.spec.nodes import nearest, plain, refuse
from dgxlab.spec.yaml_file import read_file

DESTINATION = re.compile(r"[A-Za-z0-9_][^\s\0]*")
"""What ssh may be given: never an option."""


class HostSpec(Strict):
    """One machine."""

    ssh: Annotated[str, *matching(DESTINATION, "what ssh is given: an alias, user@host or ssh://user@host:port")] = ""
    """What ssh would be given."""
    local: bool = False
    """This machine, under another name."""
    root: ModelPath = "~/.dgxlab"
    """The folder for sources, builds, models and jobs there."""
    python: Line = ""
    """The Python 3.10 or newer that runs the agent there."""
    path_prepend: Few[ModelPath] = Field(default_factory=list)
    """Folders that come first on PATH there: where cmake, the compiler or nvcc are."""
    env: Env = Field(default_factory=dict)
    """Environment of every program there, compilers too."""
    lock: Maybe[ModelPath] = None
    """A file in which those who share the machine say who measures; empty, or FREE, when nobody does."""

    @model_validator(mode="after")
    def _one_way(self) -> HostSpec:
        if bool(self.ssh) == self.local:
            raise ValueError("must have exactly one of ssh: and local: true")
        return self


class HostsSpec(RootModel[dict[Name, HostSpec]]):
    """A hosts.yaml."""


def load_hosts(paths: Sequence[Path]) -> dict[str, HostEntry]:
    """Read hosts.yaml files, the first one's entries before the later ones'; a file that is not there says nothing.

    `local` is always there and cannot be changed.

    Raises:
        SpecError: naming file, line and key of the first thing that is wrong.
    """
    hosts = {"local": HostEntry("local")}
    for path in paths:
        if path.exists():
            hosts = {**_read(path), **hosts}
    return hosts


def find_host(name: str, paths: Sequence[Path]) -> HostEntry:
    """Return the host of that name.

    Raises:
        SpecError: if no file names it; with the nearest name that there is.
    """
    hosts = load_hosts(paths)
    if name not in hosts:
        raise SpecError(
            f"host {name} is not known: no hosts.yaml names it{nearest(name, hosts)}",
            details="\n".join(f"looked in {path}" for path in paths),
            next=f"dgxlab host add {name}, with what ssh is given",
        )
    return hosts[name]


def _read(path: Path) -> dict[str, HostEntry]:
    tree = read_file(path, str(path))
    try:
        spec = HostsSpec.model_validate(plain(tree))
    except ValidationError as error:
        refuse(explain.explain(error, tree, HostsSpec.model_json_schema()), next=f"edit {path}")
    return {name: _entry(name, host) for name, host in spec.root.items()}


def _entry(name: str, host: HostSpec) -> HostEntry:
    return HostEntry(name, host.ssh, host.root, host.python, tuple(host.path_prepend), host.env, host.lock or "")
