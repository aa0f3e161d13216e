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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from dgxlab.errors import HostError, SpecError, access, command, edit, one_line
from dgxlab.model import SPANS, HostEntry, Slurm, Text, digest, limit_s, spans
from dgxlab.spec.fields import Env, Few, Line, ModelPath, Name, Strict, unsafe_flags
from dgxlab.spec.nodes import locate, nearest, refuse
from dgxlab.spec.yaml_file import read_settings

DESTINATION = re.compile(r"[A-Za-z0-9_][^\s\0]*")  # a valid ssh destination: never an option
_CONSENTS = "trusted_hosts"
"""File beside the user's hosts.yaml: a line for each entry consented to, with digest, name and hosts.yaml."""

_Ssh = Annotated[str, Text(DESTINATION.pattern, "what ssh is given: an alias, user@host or ssh://user@host:port")]


_MOST = 1 << 16  # processors


def _numbers(given: object) -> tuple[int, ...]:
    """Return the numbers of 0-15,32 in order; raise ValueError if it is of another form."""
    text = str(given)  # 3 alone is a number to YAML
    parts = spans(text) if SPANS.fullmatch(text) else []
    if not parts or not all(first <= last < _MOST for first, last in parts):
        raise ValueError("must be numbers of processors, as 0-15,32")
    return tuple(sorted({number for first, last in parts for number in range(first, last + 1)}))


_Processors = Annotated[tuple[int, ...], BeforeValidator(_numbers)]
_Option = Annotated[str, Text(r"--?[A-Za-z][^\0\n]*", "an option of sbatch, as --qos=low")]
_KEYS = {"partition": "p", "gres": "", "time": "t", "account": "A", "constraint": "C"}
"""Options of sbatch that are keys, from which they are read; with the letter of each, "" for none."""
_SHORT = (
    *("job-name", "array", "output", "error", "input", "chdir"),
    *("nodes", "nodelist", "wait", "clusters", "help", "version"),
)
_LONG = ("export", "export-file", "parsable", "wrap", "signal", "test-only", "usage")
_OURS = {**dict(zip(_SHORT, "JaoeiDNwWMhV", strict=True)), **dict.fromkeys(_LONG, "")}
"""Options on which the way back to a job depends, in the same form."""


def _which(word: str, options: Mapping[str, str]) -> str:
    """Return the option that a word sets, as sbatch reads it, "" if it sets none of them.

    It may have the first letters of the name alone, or letters without a value before its own.
    """
    if word.startswith("--"):
        name = word.partition("=")[0].removeprefix("--")
        return next((option for option in options if option.startswith(name)), "")
    short = re.match(r"-[HkOsQv]*(.)", word)
    return next((option for option, letter in options.items() if short and letter == short[1]), "")


class _Submission(Strict):
    """What a job asks of Slurm; the keys are the fields of model.Slurm."""

    partition: Line = ""
    gres: Line = ""
    time: Line = ""
    account: Line = ""
    constraint: Line = ""
    exclusive: bool = False
    extra: Few[_Option] = Field(default_factory=list)

    @field_validator("time", mode="before")
    @classmethod
    def _limit(cls, value: object) -> str:
        limit_s(str(value))
        return str(value)  # 90 is a number to YAML

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, extra: list[str]) -> list[str]:
        for word in extra:
            if _which(word, _OURS):
                raise ValueError(f"{word} is an option that dgxlab sets itself")
            if key := _which(word, _KEYS):
                raise ValueError(f"{word} is the key {key}: give it there")
        return extra


class _SlurmSpec(_Submission):
    build: _Submission | None = None

    @field_validator("build", mode="before")
    @classmethod
    def _login(cls, build: object) -> object:
        if not isinstance(build, dict | None) and build != "login":
            raise ValueError("must be login, or a map of what a job that builds asks for")
        return {} if build == "login" else build  # a job for nothing is none

    def entry(self) -> Slurm:
        fields = self.model_dump(exclude={"build"}) | {"extra": tuple(self.extra)}
        return Slurm(**fields, build=self.build.model_dump(exclude_unset=True) if self.build else None)


class _HostSpec(Strict):
    """One machine; the keys are the fields of HostEntry."""

    ssh: _Ssh = ""
    local: bool = False  # this machine, under another name
    root: ModelPath = "~/.dgxlab"
    python: Line = ""
    path_prepend: Few[ModelPath] = Field(default_factory=list)
    env: Env = Field(default_factory=dict)
    processors: _Processors | None = None
    lock: ModelPath = ""
    slurm: _SlurmSpec | None = None

    @model_validator(mode="after")
    def _one_way(self) -> _HostSpec:
        if bool(self.ssh) == self.local:
            raise ValueError("must have exactly one of ssh: and local: true")
        if self.slurm and self.processors:
            raise ValueError("cannot have processors: with slurm:, which gives each job its own")
        return self

    @field_validator("env")
    @classmethod
    def _flags_alone(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if wrong := unsafe_flags(name, value):
                raise ValueError(f"{name} {wrong}")
        return env


_HOSTS = TypeAdapter(dict[Name, _HostSpec], config=ConfigDict(defer_build=True))


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
    """Return a host by name without asking for consent; CLUSTER/NODE is one node of a host with slurm:.

    Raises SpecError if none of the hosts.yaml files names it.
    """
    hosts = load_hosts(paths)
    cluster, _, node = name.partition("/")
    if node and cluster in hosts and (slurm := hosts[cluster].slurm):
        return replace(hosts[cluster], name=name, slurm=replace(slurm, nodelist=node))
    if name not in hosts:
        near = nearest(name, hosts)
        places = "\n".join(f"looked in {path}" for path in paths)
        # a misspelt name is not to be added
        mend = "dgxlab host list" if near.endswith("?") else command("dgxlab", "host", "add", name)
        raise SpecError(f"host {name} is not known: no hosts.yaml names it{near}", details=places, next=mend)
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
    if (keys := to_consent(entry, paths[0])) and _identity(entry) not in consents:
        why = f"{entry.file} sets its {', '.join(keys)}, and a project may do so only with your consent"
        raise HostError(f"host {name} is not trusted: {why}", next=f"dgxlab host trust {shlex.quote(name)}")
    return entry


def to_consent(entry: HostEntry, own: Path) -> dict[str, object]:
    """Return the settings of a host that need the user's consent; {} if it is in `own`, the user's own hosts.yaml."""
    if entry.file in ("", str(own)):
        return {}
    keys = {"local": not entry.ssh, "python": entry.python, "path_prepend": list(entry.path_prepend)}
    keys["processors"] = list(entry.processors or ())
    if slurm := entry.slurm:
        build = dict(slurm.build or {})
        keys["slurm"] = [*slurm.options(), *Slurm(**{**build, "extra": tuple(build.get("extra", ()))}).options()]
    return {key: value for key, value in {**keys, "env": dict(entry.env), "lock": entry.lock}.items() if value}


def _identity(entry: HostEntry) -> str:
    """Return the digest of an entry; a node's is its cluster's, and a key that was added later counts if it is set."""
    slurm = entry.slurm and replace(entry.slurm, nodelist="")
    fields = {**vars(entry), "name": entry.name.partition("/")[0], "slurm": slurm}
    return digest({key: value for key, value in fields.items() if value is not None})


def consent(entry: HostEntry, own: Path) -> None:
    """Store the user's consent to a host's entry as it is now, beside `own`; SpecError if that cannot be written."""
    path = own.with_name(_CONSENTS)
    with access(path, "written", SpecError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            out.write(one_line(f"{_identity(entry)} {entry.name} {entry.file}") + "\n")


def add_host(path: Path, name: str, ssh: str) -> None:
    """Append a host to the hosts.yaml at `path`, or create the file; `ssh` is what `ssh` is called with.

    The file is replaced atomically. Raises SpecError if it cannot be written, or would become invalid.
    """
    path = path.resolve()  # keep a link: people store their settings elsewhere
    line = f"{json.dumps(name)}: {{ssh: {json.dumps(ssh, ensure_ascii=False)}}}"
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with access(path, "written", SpecError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            old = path.read_bytes() if path.exists() else b""
            new.write_bytes(old + b"\n" * (old[-1:] not in (b"", b"\n")) + f"{line}\n".encode())
            if path.exists():
                shutil.copymode(path, new)
            if _read(new)[name].ssh != ssh:
                raise KeyError(name)
            new.replace(path)
        except (SpecError, KeyError) as error:
            what = f"{path} cannot take another line at its end; add by hand {line}"
            raise SpecError(what, next=edit(path)) from error
        finally:
            new.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, HostEntry]:
    hosts, tree = read_settings(path, _HOSTS)
    if "local" in hosts:
        refuse([locate(tree, ("local",), "is this machine; give it another name, with local: true, to change it")])
    entries = {}
    for name, host in hosts.items():
        keys = host.model_dump(exclude={"local", "path_prepend", "slurm"})
        slurm = host.slurm.entry() if host.slurm else None
        entries[name] = HostEntry(name, **keys, path_prepend=tuple(host.path_prepend), slurm=slurm, file=str(path))
    return entries
