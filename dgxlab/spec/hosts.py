"""hosts.yaml: machines by name, in the user's configuration and in the project.

The user's entry takes precedence. A project's entry may name any machine; its programs and settings, and `local`, need
the user's consent, stored beside the user's hosts.yaml: opening a checkout must not let it choose programs to run.
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

from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from dgxlab.errors import HostError, SpecError, command, edit, one_line
from dgxlab.model import HostEntry, Text, digest
from dgxlab.spec.fields import Env, Few, Line, ModelPath, Name, Strict, unsafe_flags
from dgxlab.spec.nodes import explain, locate, nearest, plain, refuse
from dgxlab.spec.yaml_file import read_file

DESTINATION = re.compile(r"[A-Za-z0-9_][^\s\0]*")  # a valid ssh destination: never an option
_CONSENTS = "trusted_hosts"
"""File beside the user's hosts.yaml: a line for each entry consented to, with digest, name and hosts.yaml."""

_Ssh = Annotated[str, Text(DESTINATION.pattern, "what ssh is given: an alias, user@host or ssh://user@host:port")]


class _HostSpec(Strict):
    """One machine; the keys are the fields of HostEntry."""

    ssh: _Ssh = ""
    local: bool = False  # this machine, under another name
    root: ModelPath = "~/.dgxlab"
    python: Line = ""
    path_prepend: Few[ModelPath] = Field(default_factory=list)
    env: Env = Field(default_factory=dict)
    lock: ModelPath = ""

    @model_validator(mode="after")
    def _one_way(self) -> _HostSpec:
        if bool(self.ssh) == self.local:
            raise ValueError("must have exactly one of ssh: and local: true")
        return self

    @field_validator("env")
    @classmethod
    def _flags_alone(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if wrong := unsafe_flags(name, value):
                raise ValueError(f"{name} {wrong}")
        return env


_HOSTS = TypeAdapter(dict[Name, _HostSpec])


def load_hosts(paths: Sequence[Path]) -> dict[str, HostEntry]:
    """Return all hosts by name: `local`, and the entries of those hosts.yaml files that exist.

    If several files name a host, the entry of the first file is used. Raises SpecError with file, line and key of what
    is wrong.
    """
    hosts = {"local": HostEntry("local")}
    for path in filter(Path.exists, paths):
        hosts = {**_read(path), **hosts}
    return hosts


def look_up(name: str, paths: Sequence[Path]) -> HostEntry:
    """Return a host by name without asking for consent; raises SpecError if none of the hosts.yaml files names it."""
    hosts = load_hosts(paths)
    if name not in hosts:
        why = f"host {name} is not known: no hosts.yaml names it{nearest(name, hosts)}"
        places = "\n".join(f"looked in {path}" for path in paths)
        raise SpecError(why, details=places, next=f"dgxlab host add {shlex.quote(name)}")
    return hosts[name]


def find_host(name: str, paths: Sequence[Path]) -> HostEntry:
    """Return a host by name, whose consent is given or not needed; `paths` begins with the user's own hosts.yaml.

    Raises:
        SpecError: if no file names it.
        HostError: if a project's entry needs a consent that the user has not given.
    """
    entry = look_up(name, paths)
    path = paths[0].with_name(_CONSENTS)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    consents = {line.partition(" ")[0] for line in lines}
    if (keys := to_consent(entry, paths[0])) and digest(vars(entry)) not in consents:
        why = f"{entry.file} sets its {', '.join(keys)}, and a project may do so only with your consent"
        raise HostError(f"host {name} is not trusted: {why}", next=f"dgxlab host trust {shlex.quote(name)}")
    return entry


def to_consent(entry: HostEntry, own: Path) -> dict[str, object]:
    """Return the settings of a host that need the user's consent; {} if it is in `own`, the user's own hosts.yaml."""
    if entry.file in ("", str(own)):
        return {}
    keys = {"local": not entry.ssh, "python": entry.python, "path_prepend": list(entry.path_prepend)}
    return {key: value for key, value in {**keys, "env": dict(entry.env), "lock": entry.lock}.items() if value}


def consent(entry: HostEntry, own: Path) -> None:
    """Store the user's consent to a host's entry as it is now, beside `own`; SpecError if that cannot be written."""
    path = own.with_name(_CONSENTS)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            out.write(one_line(f"{digest(vars(entry))} {entry.name} {entry.file}") + "\n")
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {error.strerror}", next=command("ls", "-ld", path)) from error


def add_host(path: Path, name: str, ssh: str) -> None:
    """Append a host to the hosts.yaml at `path`, or create the file; `ssh` is what `ssh` is called with.

    The file is replaced atomically. Raises SpecError if it cannot be written, or would become invalid.
    """
    path = path.resolve()  # keep a link: people store their settings elsewhere
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
            hosts = _HOSTS.validate_python(plain(tree))
        except ValidationError as error:
            refuse(explain(error, tree, _HOSTS.json_schema()))
        if "local" in hosts:
            refuse([locate(tree, ("local",), "is this machine; give it another name, with local: true, to change it")])
    except SpecError as error:
        error.next = edit(path)
        raise
    entries = {}
    for name, host in hosts.items():
        keys = host.model_dump(exclude={"local", "path_prepend"})
        entries[name] = HostEntry(name, **keys, path_prepend=tuple(host.path_prepend), file=str(path))
    return entries
