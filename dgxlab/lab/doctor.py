"""What is missing for work, here and on a host, and the command that mends it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dgxlab.errors import DgxlabError
from dgxlab.lab.provision import TOOLS
from dgxlab.model import Facts, HostEntry
from dgxlab.source import wheels
from dgxlab.source.git import Git
from dgxlab.source.programs import run
from dgxlab.store import Store
from dgxlab.store.mounts import on_network
from dgxlab.transport.host import Host
from dgxlab.units import size

OK, NOTE, MISSING = "ok", "note", "missing"

OLDEST_GIT = (2, 32)
"""The first whose `git apply` takes --cached and --3way together, which is how a series is applied."""

CACHE_MIB = 1024
"""A pin's archive and its objects, while they are unpacked."""
HOST_DISK_MIB = 10_000
"""A CUDA build of llama.cpp takes 3 GB, a copy of its programs 1 GB, a synthetic model some more."""
HOST_MEMORY_MIB = 4096

CLIENT = "this client"

Found = tuple[str, str, str] | tuple[str, str, str, str]
"""Name, state, text, and what mends it."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        where: "this client", or the host's name.
        state: ok, note (work goes on) or missing.
        text: What is there, or what is not.
        next: What mends it, "" for what is ok.
    """

    where: str
    name: str
    state: str
    text: str
    next: str = ""


def look_at_client(database: Path, cache: Path, hosts: Mapping[str, HostEntry] | DgxlabError) -> list[Finding]:
    """Return what this machine has of what a client needs.

    Args:
        hosts: What hosts.yaml says, or what is wrong with it.
    """
    return [Finding(CLIENT, *found) for found in _client(database, cache, hosts)]


def look_at_host(host: Host) -> list[Finding]:
    """Return what a host has of what a job needs; only why not, when it cannot be asked."""
    try:
        facts = host.probe().facts
    except DgxlabError as error:
        return [Finding(host.name, "reach", MISSING, error.message, error.next)]
    return [Finding(host.name, *found) for found in judge(facts, host.name)]


def _client(database: Path, cache: Path, hosts: Mapping[str, HostEntry] | DgxlabError) -> Iterator[Found]:
    yield "python", OK, platform.python_version()
    yield _git()
    if find_spec("pip"):
        yield "pip", OK, "for pypi: sources and build tools"
    else:
        why = "pypi: sources and build tools cannot be fetched"
        yield "pip", NOTE, f"not installed for {sys.executable}: {why}", f"{sys.executable} -m ensurepip"
    yield _cache(cache)
    yield _record(database)
    if shutil.which("git"):
        yield from _merge_driver(database)
    if isinstance(hosts, DgxlabError):
        yield "hosts", MISSING, hosts.message, hosts.next
    else:
        yield "hosts", OK, ", ".join(hosts)
        yield from _ssh([entry for entry in hosts.values() if entry.ssh])


def _git() -> Found:
    try:
        said = run(["git", "--version"]).text
    except DgxlabError as error:
        return "git", MISSING, error.message, error.next
    if _version(said) >= OLDEST_GIT:
        return "git", OK, said.removeprefix("git version ")
    wanted = ".".join(map(str, OLDEST_GIT))
    return "git", MISSING, f"{said} is too old", f"install git {wanted} or newer, e.g. from backports"


def _cache(cache: Path) -> Found:
    there = next(path for path in (cache, *cache.parents) if path.exists())
    elsewhere = "set XDG_CACHE_HOME to another disk"
    if not os.access(there, os.W_OK):
        return "cache", MISSING, f"{there} cannot be written", f"{elsewhere}, or ls -ld {there}"
    free = shutil.disk_usage(there).free
    if free >> 20 < CACHE_MIB:
        return "cache", MISSING, f"{size(free)} free at {there}, {size(CACHE_MIB << 20)} is needed", elsewhere
    return "cache", OK, f"{size(free)} free at {there}"


def _record(database: Path) -> Found:
    if not database.exists():
        if mount := on_network(database):
            text = f"{database} would lie on a network file system ({mount}), where SQLite's locks cannot be trusted"
            return "record", MISSING, text, "work in a folder on a local disk, or name a --db there"
        return "record", OK, f"none yet; the first run makes {database}"
    try:
        Store.open(database, create=False).close()
    except DgxlabError as error:
        return "record", MISSING, error.message, error.next or f"ls -l {database}"
    return "record", OK, str(database)


def _merge_driver(database: Path) -> Iterator[Found]:
    """Look whether git knows how to merge a record that it tracks."""
    if not database.parent.is_dir():
        return
    git = Git.checkout(database.parent)
    if git.attempt("ls-files", "--error-unmatch", database.name).rc != 0:
        return
    if git.attempt("config", "merge.dgxlab-db.driver").text:
        yield "merge", OK, f"git merges {database.name} row by row"
    else:
        mend = 'git config merge.dgxlab-db.driver ".venv/bin/dgxlab db merge %A %B"'
        yield "merge", NOTE, f"git tracks {database.name} and does not know how to merge it", mend


def _ssh(hosts: Sequence[HostEntry]) -> Iterator[Found]:
    if not hosts:
        return
    from dgxlab.transport.ssh_trust import private_known_hosts

    folder = Path.home() / ".ssh"
    files = (folder / "known_hosts", private_known_hosts(), Path("/etc/ssh/ssh_known_hosts"))
    known = [str(path) for path in files if os.access(path, os.R_OK)]
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        yield "ssh", MISSING, f"{folder} cannot be read", f"chmod 700 {folder}"
    elif known:
        yield "ssh", OK, f"known hosts in {', '.join(known)}"
    else:
        yield "ssh", NOTE, "there is no known_hosts file: no host is trusted yet", f"dgxlab host add {hosts[0].ssh}"


def judge(facts: Facts, name: str) -> Iterator[Found]:
    """Yield what a host's facts say of what a job needs there."""
    details, there = facts.details, "" if name == "local" else f", on {name}"
    yield "reach", OK, f"{details['user']} at {facts.hostname}, {details['os']}"
    yield "python", OK, details["python"]
    yield from _compilers(facts, there)
    yield from _tools(facts, there)
    yield from _gpu(facts, name, there)
    yield from _room(details, name, there)
    for process in details["gpu_processes"]:
        who = f"{process['program']} of {process['user'] or 'somebody'}, pid {process['pid']}"
        yield "in use", NOTE, f"{who} computes on {process['gpu_uuid']}", f"nvidia-smi{there}; a job waits for its end"


def _compilers(facts: Facts, there: str) -> Iterator[Found]:
    for name, version, package in (
        ("git", facts.details["tools"]["git"], "git"),
        ("cc", facts.toolchain.cc, "gcc"),
        ("c++", facts.toolchain.cxx, "g++"),
    ):
        if version:
            yield name, OK, version
        else:
            yield name, MISSING, "not found on PATH", f"sudo apt-get install {package}{there}"


def _tools(facts: Facts, there: str) -> Iterator[Found]:
    paths = facts.details["tools"]
    install = f"sudo apt-get install cmake ninja-build{there}"
    for name in TOOLS:
        if paths[name]:
            yield name, OK, paths[name]
            continue
        try:
            wheel = wheels.find(name, facts.toolchain.machine.split()[0], facts.details["glibc"])
        except wheels.NoWheel as error:
            yield name, MISSING, f"not found on PATH, and {error}", install
        else:
            yield name, NOTE, f"not found on PATH: the first run sends {wheel.version}", f"nothing to do, or {install}"
    if paths["ccache"]:
        yield "ccache", OK, paths["ccache"]
    else:
        yield "ccache", NOTE, "recommended: not found on PATH", f"sudo apt-get install ccache{there}"


def _gpu(facts: Facts, name: str, there: str) -> Iterator[Found]:
    details, nvcc = facts.details, facts.toolchain.nvcc
    driver = details["driver"]
    if not details["nvidia_devices"]:
        yield "gpu", OK, "none: for the CPU backend alone"
        return
    if not details["gpus"]:
        smi = details["tools"]["nvidia-smi"]
        cause = "nvidia-smi lists none" if smi else "there is no nvidia-smi"
        mend = f"nvidia-smi{there}, which says why" if smi else f"sudo ubuntu-drivers install{there}, and a reboot"
        yield "driver", MISSING, f"there is an NVIDIA GPU, and {cause}", mend
    for gpu in details["gpus"]:
        yield "gpu", OK, gpu["name"]
    if details["gpus"]:
        yield "driver", OK, f"{driver['version']}, runs CUDA up to {driver['cuda'] or 'a version that it does not say'}"
    if nvcc:
        yield _cuda(details["tools"]["nvcc"], _version(nvcc), _version(driver["cuda"] or ""), there)
    else:
        path = f"edit hosts.yaml: give {name} path_prepend: [FOLDER], that of nvcc" if there else "put it on PATH"
        mend = f"{path}; or sudo apt-get install cuda-toolkit{there}"
        yield "nvcc", MISSING, "neither on PATH nor in /usr/local/cuda*/bin", mend


def _cuda(path: str, toolkit: tuple[int, ...], driver: tuple[int, ...], there: str) -> Found:
    """Compare the toolkit with what the driver runs: a minor version ahead goes well but for PTX."""
    version = ".".join(map(str, toolkit))
    if not driver or toolkit <= driver:
        return "nvcc", OK, f"{version}, {path}"
    ahead = f"{version}, {path}, is newer than the driver, which runs CUDA up to {'.'.join(map(str, driver))}"
    mend = f"update the driver{there}, or put an older toolkit on PATH"
    if toolkit[0] > driver[0]:
        return "nvcc", MISSING, f"{ahead}: what it builds does not run", mend
    return "nvcc", NOTE, f"{ahead}: what it builds runs only where CMAKE_CUDA_ARCHITECTURES names the GPU's own", mend


def _room(details: Mapping[str, Any], name: str, there: str) -> Iterator[Found]:
    disk, memory = details["disk"], details["mem_available_mib"]
    text = f"{size(disk['free_mib'] << 20)} free of {size(disk['total_mib'] << 20)} at {disk['path']}"
    if disk["free_mib"] >= HOST_DISK_MIB:
        yield "disk", OK, text
    else:
        yield "disk", MISSING, f"{text}, {size(HOST_DISK_MIB << 20)} is needed", f"dgxlab host clean {name}"
    text = f"{size(memory << 20)} free of {size(details['memory_mib'] << 20)}"
    if memory >= HOST_MEMORY_MIB:
        yield "memory", OK, text
    else:
        mend = f"ps aux --sort -rss | head{there}"
        yield "memory", NOTE, f"{text}: compilers and models may not find {size(HOST_MEMORY_MIB << 20)}", mend
    if details["lock_folder"]:
        yield "lock", OK, f"in {details['lock_folder']}"
    else:
        yield "lock", MISSING, "neither /var/lock nor /tmp can be written", f"sudo chmod 1777 /tmp{there}"


def _version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version in a text like `git version 2.39.5` or `Build cuda_13.0.r13.0/...`."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else ()
