"""hosts.yaml: machines by name, in the user's configuration and in the project.

The user's entry wins. A project's entry may name any machine; what runs there, and that it is this one, only with the
user's consent, which is kept beside the user's hosts.yaml: a checkout must not choose programs by being looked at.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, RootModel, ValidationError, field_validator, model_validator

from dgxlab.errors import HostError, SpecError, command, edit, one_line
from dgxlab.model import HostEntry, Text, digest
from dgxlab.spec.fields import Env, Few, Line, ModelPath, Name, Strict, shell_text
from dgxlab.spec.nodes import explain, locate, nearest, plain, refuse
from dgxlab.spec.yaml_file import read_file

DESTINATION = re.compile(r"[A-Za-z0-9_][^\s\0]*")
"""What ssh may be given: never an option."""


CONSENTS = "trusted_hosts"
"""The file with the user's consents: a line of digest, name and hosts.yaml for each entry of a project."""


class HostSpec(Strict):
    """One machine."""

    ssh: Annotated[str, Text(DESTINATION.pattern, "what ssh is given: an alias, user@host or ssh://user@host:port")] = (
        ""
    )
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
    lock: ModelPath = ""
    """A file in which those who share the machine say who measures; empty, or FREE, when it is free."""

    @model_validator(mode="after")
    def _one_way(self) -> HostSpec:
        if bool(self.ssh) == self.local:
            raise ValueError("must have exactly one of ssh: and local: true")
        return self

    @field_validator("env")
    @classmethod
    def _flags_alone(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if wrong := shell_text(name, value):
                raise ValueError(f"{name} {wrong}")
        return env


class HostsSpec(RootModel[dict[Name, HostSpec]]):
    """A hosts.yaml."""


def load_hosts(paths: Sequence[Path]) -> dict[str, HostEntry]:
    """Read hosts.yaml files, the first one's entries before the later ones'; a file that is not there says nothing.

    `local` is always there; a file that names it is refused.

    Raises:
        SpecError: naming file, line and key of the first thing that is wrong.
    """
    hosts = {"local": HostEntry("local")}
    for path in paths:
        if path.exists():
            hosts = {**_read(path), **hosts}
    return hosts


def look_up(name: str, paths: Sequence[Path]) -> HostEntry:
    """Return the host of that name, whether the user has consented to its entry or not.

    Raises:
        SpecError: if no file names it; with the nearest name that there is.
    """
    hosts = load_hosts(paths)
    if name not in hosts:
        raise SpecError(
            f"host {name} is not known: no hosts.yaml names it{nearest(name, hosts)}",
            details="\n".join(f"looked in {path}" for path in paths),
            next=f"dgxlab host add {shlex.quote(name)}",
        )
    return hosts[name]


def find_host(name: str, paths: Sequence[Path]) -> HostEntry:
    """Return the host of that name, to be used.

    Args:
        paths: The user's own hosts.yaml first.

    Raises:
        SpecError: if no file names it.
        HostError: if a project's entry needs a consent that the user has not given.
    """
    entry = look_up(name, paths)
    path = paths[0].with_name(CONSENTS)
    given = path.read_text(errors="replace").splitlines() if path.exists() else []
    consents = {line.partition(" ")[0] for line in given}
    if (keys := to_consent(entry, paths[0])) and digest(vars(entry)) not in consents:
        raise HostError(
            f"host {name} is not trusted: {entry.file} sets its {', '.join(keys)}, and a project may do so only with "
            "your consent",
            next=f"dgxlab host trust {shlex.quote(name)}",
        )
    return entry


def to_consent(entry: HostEntry, own: Path) -> dict[str, object]:
    """Return what an entry says that a project may say only with the user's consent; {} in the user's own file.

    Args:
        own: The user's hosts.yaml.
    """
    if entry.file in ("", str(own)):
        return {}
    local, folders = not entry.ssh, list(entry.path_prepend)
    keys = {"local": local, "python": entry.python, "path_prepend": folders, "env": dict(entry.env), "lock": entry.lock}
    return {key: value for key, value in keys.items() if value}


def consent(entry: HostEntry, own: Path) -> None:
    """Record that the user consents to a project's entry as it is now; a changed one needs another consent.

    Raises:
        SpecError: if the record cannot be written.
    """
    path = own.with_name(CONSENTS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            out.write(one_line(f"{digest(vars(entry))} {entry.name} {entry.file}") + "\n")
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}", next=command("ls", "-ld", path)) from error


def add_host(path: Path, name: str, ssh: str) -> None:
    """Add an entry to a hosts.yaml, or make one; what is there stays as it is, byte for byte.

    The result is read before it takes the old file's place, which it does at once and whole.

    Raises:
        SpecError: if the file cannot be written, or would not be right with another line.
    """
    path = path.resolve()  # a link, as people keep their settings elsewhere, stays one
    line = f"{json.dumps(name)}: {{ssh: {json.dumps(ssh, ensure_ascii=False)}}}"
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        old = path.read_bytes() if path.exists() else b""
        new.write_bytes(old + b"\n" * (old[-1:] not in (b"", b"\n")) + f"{line}\n".encode())
        if path.exists():
            shutil.copymode(path, new)
        if _read(new)[name].ssh != ssh:
            raise KeyError(name)
        new.replace(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}", next=command("ls", "-ld", path)) from error
    except (SpecError, KeyError) as error:
        raise SpecError(f"{path} cannot take another line at its end; add by hand {line}", next=edit(path)) from error
    finally:
        new.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, HostEntry]:
    try:
        tree = read_file(path, str(path), may_be_empty=True)
        try:
            hosts = HostsSpec.model_validate(plain(tree)).root
        except ValidationError as error:
            refuse(explain(error, tree, HostsSpec.model_json_schema()))
        if "local" in hosts:
            why = "is this machine as it is and cannot be changed; give it another name, with local: true"
            refuse([locate(tree, ("local",), why)])
    except SpecError as error:
        error.next = edit(path)
        raise
    return {
        name: HostEntry(
            name, host.ssh, host.root, host.python, tuple(host.path_prepend), host.env, host.lock, str(path)
        )
        for name, host in hosts.items()
    }
