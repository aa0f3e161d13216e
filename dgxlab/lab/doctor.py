"""What is missing for work, here and on a host, and the command that mends it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dgxlab.errors import AGAIN, DgxlabError, command, edit
from dgxlab.lab.provision import TOOLS
from dgxlab.model import Facts, HostEntry
from dgxlab.source import packages
from dgxlab.source.git import Git
from dgxlab.source.programs import run
from dgxlab.store import Store
from dgxlab.store.connect import on_network
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

COMPILER_NAMES = {"CC": "cc", "CXX": "c++"}
"""What the compilers are called here, by the variable that names another one."""

Install = Callable[..., str]
"""Returns the command that installs packages on a host."""

Found = tuple[str, str, str] | tuple[str, str, str, str]
"""Name, state, text, and what mends it."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what mends it."""

    where: str
    """`this client`, or the host's name."""
    name: str
    state: str
    """ok, note (work goes on) or missing."""
    text: str
    next: str = ""


def look_at_client(database: Path, cache: Path, hosts: Mapping[str, HostEntry] | DgxlabError) -> list[Finding]:
    """Return what this machine has of what a client needs.

    Args:
        hosts: What hosts.yaml says, or what is wrong with it.
    """
    return [Finding("this client", *finding) for finding in _client(database, cache, hosts)]


def look_at_host(host: Host) -> list[Finding]:
    """Return what a host has of what a job needs; only why not, when it cannot be asked."""
    try:
        probe = host.probe()
    except DgxlabError as error:
        return [Finding(host.name, "reach", MISSING, error.message, error.next or AGAIN)]
    return [Finding(host.name, *finding) for finding in judge(probe.facts, host.entry, probe.absent)]


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
    if shutil.which("git") and database.parent.is_dir():
        git = Git.checkout(database.parent)
        if git.attempt("ls-files", "--error-unmatch", database.name).rc != 0:
            pass  # a record that git does not track is not merged
        elif git.attempt("config", "merge.dgxlab-db.driver").text:
            yield "merge", OK, f"git merges {database.name} row by row"
        else:
            mend = 'git config merge.dgxlab-db.driver ".venv/bin/dgxlab db merge %A %B"'
            yield "merge", NOTE, f"git tracks {database.name} and does not know how to merge it", mend
    if isinstance(hosts, DgxlabError):
        yield "hosts", MISSING, hosts.message, hosts.next
        return
    yield "hosts", OK, ", ".join(hosts)
    if remote := [entry for entry in hosts.values() if entry.ssh]:
        yield _ssh(remote[0])


def _git() -> Found:
    try:
        text = run(["git", "--version"]).text
    except DgxlabError as error:
        return "git", MISSING, error.message, error.next
    if _version(text) >= OLDEST_GIT:
        return "git", OK, text.removeprefix("git version ")
    wanted = ".".join(map(str, OLDEST_GIT))
    return "git", MISSING, f"{text} is too old: {wanted} is needed, e.g. from backports", "sudo apt-get install git"


def _cache(cache: Path) -> Found:
    there = next(path for path in (cache, *cache.parents) if path.exists())
    elsewhere = "XDG_CACHE_HOME can name a folder on another disk"
    if not os.access(there, os.W_OK):
        return "cache", MISSING, f"{there} cannot be written; {elsewhere}", f"ls -ld {shlex.quote(str(there))}"
    free = shutil.disk_usage(there).free
    if free >> 20 < CACHE_MIB:
        text = f"{size(free)} free at {there}, {size(CACHE_MIB << 20)} is needed; {elsewhere}"
        return "cache", MISSING, text, f"df -h {shlex.quote(str(there))}"
    return "cache", OK, f"{size(free)} free at {there}"


def _record(database: Path) -> Found:
    if database.exists():
        try:
            Store.open(database, create=False).close()
        except DgxlabError as error:
            return "record", MISSING, error.message, error.next or command("ls", "-l", database)
        return "record", OK, str(database)
    if mount := on_network(database):
        text = f"{database} would lie on a network file system ({mount}), where SQLite's locks cannot be trusted"
        return "record", MISSING, f"{text}: work in a folder on a local disk, or name a --db there", "df -hl"
    return "record", OK, f"none yet; the first run makes {database}"


def _ssh(host: HostEntry) -> Found:
    from dgxlab.transport.ssh_trust import private_known_hosts

    folder = Path.home() / ".ssh"
    files = (folder / "known_hosts", private_known_hosts(), Path("/etc/ssh/ssh_known_hosts"))
    known = [str(path) for path in files if os.access(path, os.R_OK)]
    if folder.exists() and not os.access(folder, os.R_OK | os.X_OK):
        return "ssh", MISSING, f"{folder} cannot be read", f"chmod 700 {folder}"
    if known:
        return "ssh", OK, f"known hosts in {', '.join(known)}"
    add = ["dgxlab", "host", "add", host.ssh, *([] if host.name == host.ssh else ["--name", host.name])]
    return "ssh", NOTE, "there is no known_hosts file: no host is trusted yet", shlex.join(add)


def judge(facts: Facts, host: HostEntry, absent: Sequence[tuple[str, str]] = ()) -> Iterator[Found]:
    """Yield what a host's facts say of what a job needs there.

    Args:
        absent: What hosts.yaml names and the host does not have.
    """
    details = facts.details
    keys = [key for key, _ in absent]

    def install(*packages: str) -> str:
        if "path_prepend" in keys:  # hosts.yaml puts a folder on PATH that is not there: that comes first
            return edit(host.file)
        return host.typed(f"sudo apt-get install {' '.join(packages)}")

    yield "reach", OK, f"{details['user']} at {facts.hostname}, {details['os']}"
    yield "python", OK, details["python"]
    says = f"of {host.name} in {host.file}"
    for key, what in absent:
        if key == "path_prepend":
            yield "path", MISSING, f"{what}, a path_prepend: {says}, is no folder there", edit(host.file)
        elif key == "root":
            yield "root", MISSING, what, edit(host.file or "hosts.yaml")
        elif key == "setsid":
            yield "setsid", MISSING, what, host.typed("sudo apt-get install util-linux")
        elif key == "lock":
            text = f"{what}, the folder of lock: {says}, is not there: no user can write into it who measures"
            yield "owner", NOTE, text, host.typed(command("mkdir", "-p", what))
        else:
            text = f"{what}, the {key} of env: {says}, is not there"
            yield COMPILER_NAMES.get(key, key.lower()), MISSING, text, edit(host.file)
    yield from _tools(facts, install, keys)
    yield from _gpu(facts, host, install)
    yield from _room(details, host)
    for process in details["gpu_processes"]:
        who = f"{process['program']} of {process['user'] or 'an unknown user'}, pid {process['pid']}"
        text = f"{who} computes on {process['gpu_uuid']}; a job waits for its end"
        yield "in use", NOTE, text, host.typed("nvidia-smi")


def _tools(facts: Facts, install: Install, absent: Collection[str]) -> Iterator[Found]:
    paths, toolchain = facts.details["tools"], facts.toolchain
    told = {COMPILER_NAMES.get(key) for key in absent}
    needed = {"git": (paths["git"], "git"), "cc": (toolchain.cc, "gcc"), "c++": (toolchain.cxx, "g++")}
    for name, (version, package) in needed.items():
        if version:
            yield name, OK, version
        elif name not in told:
            yield name, MISSING, "not found on PATH", install(package)
    for name in (*TOOLS, "ccache"):
        mend = install("ccache") if name == "ccache" else install("cmake", "ninja-build")
        if paths[name]:
            yield name, OK, paths[name]
        elif name == "ccache":
            yield name, NOTE, "recommended: not found on PATH", mend
        else:
            try:
                wheel = packages.find_wheel(name, toolchain.machine.partition(" ")[0], facts.details["glibc"])
                yield name, NOTE, f"not found on PATH: the first run sends {wheel.version}", mend
            except packages.SourceError as error:
                yield name, MISSING, f"not found on PATH, and {error}", mend


def _gpu(facts: Facts, host: HostEntry, install: Install) -> Iterator[Found]:
    details, nvcc = facts.details, facts.toolchain.nvcc
    driver = details["driver"]
    if not details["nvidia_devices"]:
        yield "gpu", OK, "none: for the CPU backend alone"
        return
    if not details["gpus"]:
        smi = details["tools"].get("nvidia-smi")
        cause = "nvidia-smi lists none" if smi else "there is no nvidia-smi"
        mend = host.typed("nvidia-smi" if smi else "sudo ubuntu-drivers install")
        yield "driver", MISSING, f"there is an NVIDIA GPU, and {cause}", mend
    for gpu in details["gpus"]:
        yield "gpu", OK, gpu["name"] or "one without a name"
    if details["gpus"]:
        yield "driver", OK, f"{driver['version']}, runs CUDA up to {driver['cuda'] or 'a version that it does not say'}"
    if nvcc:
        yield _cuda(details["tools"]["nvcc"], _version(nvcc), _version(driver["cuda"] or ""), host)
    else:
        way = f"path_prepend: of {host.name} in {host.file} can name its folder" if host.file else "PATH can name it"
        text = f"neither on PATH nor in /usr/local/cuda*/bin; where it is elsewhere, {way}"
        yield "nvcc", MISSING, text, install("cuda-toolkit")


def _cuda(path: str, toolkit: tuple[int, ...], driver: tuple[int, ...], host: HostEntry) -> Found:
    """Compare the toolkit with what the driver runs: a minor version ahead works, except for PTX."""
    version = ".".join(map(str, toolkit))
    if not driver or toolkit <= driver:
        return "nvcc", OK, f"{version}, {path}"
    ahead = f"{version}, {path}, is newer than the driver, which runs CUDA up to {'.'.join(map(str, driver))}"
    mend = host.typed("sudo ubuntu-drivers install")
    if toolkit[0] > driver[0]:
        why = "what it builds does not run, unless the driver is updated or PATH has an older one"
        return "nvcc", MISSING, f"{ahead}: {why}", mend
    return "nvcc", NOTE, f"{ahead}: what it builds runs only where CMAKE_CUDA_ARCHITECTURES names the GPU's own", mend


def _room(details: Mapping[str, Any], host: HostEntry) -> Iterator[Found]:
    disk, memory = details["disk"], details["mem_available_mib"]
    text = f"{size(disk['free_mib'] << 20)} free of {size(disk['total_mib'] << 20)} at {disk['path']}"
    if disk["free_mib"] >= HOST_DISK_MIB:
        yield "disk", OK, text
    else:
        yield "disk", MISSING, f"{text}, {size(HOST_DISK_MIB << 20)} is needed", f"dgxlab host clean {host.name}"
    if killer := details.get("logout_kills"):
        text = f"{killer} says KillUserProcesses=yes, which ends every job at logout: write no, restart systemd-logind"
        yield "logout", MISSING, text, host.typed(command("sudoedit", killer))
    text = f"{size(memory << 20)} free of {size(details['memory_mib'] << 20)}"
    if memory >= HOST_MEMORY_MIB:
        yield "memory", OK, text
    else:
        mend = host.typed("ps aux --sort -rss | head")
        yield "memory", NOTE, f"{text}: compilers and models may not find {size(HOST_MEMORY_MIB << 20)}", mend
    if details["lock_folder"]:
        yield "lock", OK, f"in {details['lock_folder']}"
    else:
        yield "lock", MISSING, "neither /var/lock nor /tmp can be written", host.typed("sudo chmod 1777 /tmp")


def _version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version in a text like `git version 2.39.5` or `Build cuda_13.0.r13.0/...`."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else ()
