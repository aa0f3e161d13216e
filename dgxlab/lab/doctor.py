"""Check what is missing here and on a host, with the command that fixes it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dgxlab.errors import AGAIN, DgxlabError, SpecError, command, edit
from dgxlab.lab.provision import BUILD_TOOLS, wheel_for
from dgxlab.lab.starter import merge_driver
from dgxlab.model import Facts, HostEntry
from dgxlab.project import or_init
from dgxlab.source import packages
from dgxlab.source.git import Git
from dgxlab.source.programs import install, run
from dgxlab.spec.hosts import load_hosts
from dgxlab.store import Store
from dgxlab.store.connect import on_network
from dgxlab.transport.host import Host
from dgxlab.units import size

OK, NOTE, MISSING = "ok", "note", "missing"

_OLDEST_GIT = (2, 32)  # the first version whose `git apply` accepts --cached with --3way, which applying a series needs
_CACHE_MIB = 1024  # space for a pin's archive and its objects during unpacking
_HOST_DISK_MIB = 10_000
"""A CUDA build of llama.cpp takes 3 GB, a copy of its programs 1 GB, a synthetic model some more."""
_HOST_MEMORY_MIB = 4096
_COMPILER_NAMES = {"CC": "cc", "CXX": "c++"}  # default compiler names, by the variable that overrides them
_Install = Callable[..., str]  # returns the command that installs packages on a host


@dataclass(frozen=True)
class Finding:
    """The result of one check by `dgxlab doctor`."""

    name: str
    state: str  # OK, NOTE (jobs run all the same) or MISSING
    text: str
    next: str = ""  # the command that mends it, "" if OK
    where: str = "this client"  # "this client" or the host's name


def _either(good: object, name: str, text: str, lacking: str, next: str, state: str = MISSING) -> Finding:
    return Finding(name, OK, text) if good else Finding(name, state, lacking, next)


def check_host(host: Host) -> list[Finding]:
    """Check a host for what jobs need; return only the reason if it cannot be reached."""
    entry = edit(host.entry.file or "hosts.yaml")
    try:
        probe = host.probe()
    except DgxlabError as error:
        circular = host.entry.slurm and error.next == command("dgxlab", "doctor", host.name)
        return [Finding("reach", MISSING, error.message, entry if circular else error.next or AGAIN, host.name)]
    findings = [*check_facts(probe.facts, host.entry, probe.absent)]
    if host.entry.slurm:
        findings += [Finding(name, state, text, "" if state == OK else entry) for name, state, text in host.cluster()]
    return [replace(finding, where=host.name) for finding in findings]


def check_client(database: Path, cache: Path, hosts_files: tuple[Path, Path]) -> Iterator[Finding]:
    """Check this machine for what the client needs: Python, git, pip, disk, record, hosts.yaml.

    The record need not exist; `hosts_files` are the user's hosts.yaml and the project's.
    """
    yield Finding("python", OK, platform.python_version())
    yield _git()
    lacking = f"not installed for {sys.executable}: pypi: sources and build tools cannot be fetched"
    mend = f"{sys.executable} -m ensurepip"
    yield _either(find_spec("pip"), "pip", "for pypi: sources and build tools", lacking, mend, NOTE)
    yield _cache(cache)
    if or_init("") and not database.exists():
        yield Finding("project", NOTE, f"none in {Path.cwd()}", or_init(""))
    yield _record(database)
    if shutil.which("git") and database.parent.is_dir():
        git = Git.checkout(database.parent)
        if git.attempt("ls-files", "--error-unmatch", database.name).rc == 0:  # git merges only tracked files
            key = "merge.dgxlab-db.driver"
            driver = git.attempt("config", key).text
            text, lacking = f"git merges {database.name} row by row", f"git does not know how to merge {database.name}"
            mend = command("git", "config", key, merge_driver()[key])
            yield _either(driver, "merge", text, lacking, mend, NOTE)
    try:
        hosts = load_hosts(hosts_files)
    except SpecError as error:
        yield Finding("hosts", MISSING, error.message, error.next)
        return
    yield Finding("hosts", OK, ", ".join(hosts))


def _git() -> Finding:
    try:
        text = run(["git", "--version"]).text
    except DgxlabError as error:
        return Finding("git", MISSING, error.message, error.next)
    lacking = f"{text} is too old: {'.'.join(map(str, _OLDEST_GIT))} is needed, e.g. from backports"
    version = text.removeprefix("git version ")
    return _either(_version(text) >= _OLDEST_GIT, "git", version, lacking, install("git"))


def _cache(cache: Path) -> Finding:
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    elsewhere = "XDG_CACHE_HOME can name a folder on another disk"
    if not os.access(existing, os.W_OK):
        return Finding("cache", MISSING, f"{existing} cannot be written; {elsewhere}", command("ls", "-ld", existing))
    free = shutil.disk_usage(existing).free
    text = f"{size(free)} free at {existing}"
    lacking = f"{text}, {size(_CACHE_MIB << 20)} is needed; {elsewhere}"
    return _either(free >> 20 >= _CACHE_MIB, "cache", text, lacking, command("df", "-h", existing))


def _record(database: Path) -> Finding:
    if database.exists():
        try:
            Store.open(database, create=False).close()
        except DgxlabError as error:
            return Finding("record", MISSING, error.message, error.next or command("ls", "-l", database))
        return Finding("record", OK, str(database))
    if mount := on_network(database):
        text = f"{database} would be on a network file system ({mount}), where SQLite's locks cannot be trusted"
        return Finding("record", MISSING, f"{text}: work in a folder on a local disk, or name a --db there", "df -hl")
    return Finding("record", OK, f"none yet; the first run makes {database}")


def check_facts(facts: Facts, host: HostEntry, absent: Sequence[tuple[str, str]] = ()) -> Iterator[Finding]:
    """Check a host's facts for what jobs need; `absent` is as in `Probe`."""
    details = facts.details
    keys = [key for key, _ in absent]

    def install_there(*packages: str) -> str:
        if "path_prepend" in keys:  # a missing folder in path_prepend is reported first
            return edit(host.file)
        return host.typed(f"sudo apt-get install {' '.join(packages)}")

    yield Finding("reach", OK, f"{details['user']} at {facts.hostname}, {details['os']}")
    yield Finding("python", OK, details["python"])
    says = f"of {host.name} in {host.file}"
    for key, what in absent:
        if key == "path_prepend":
            yield Finding("path", MISSING, f"{what}, a path_prepend: {says}, is no folder there", edit(host.file))
        elif key == "root":
            yield Finding("root", MISSING, what, edit(host.file or "hosts.yaml"))
        elif key == "setsid":
            yield Finding("setsid", MISSING, what, host.typed("sudo apt-get install util-linux"))
        elif key == "lock":
            text = f"{what}, the folder of lock: {says}, is not there: users who measure cannot write into it"
            yield Finding("owner", NOTE, text, host.typed(command("mkdir", "-p", what)))
        else:
            text = f"{what}, the {key} of env: {says}, is not there"
            yield Finding(_COMPILER_NAMES.get(key, key.lower()), MISSING, text, edit(host.file))
    yield from _tools(facts, install_there, keys)
    yield from _gpu(facts, host, install_there)
    yield from _room(details, host)
    for process in details["gpu_processes"]:
        who = f"{process['program']} of {process['user'] or 'an unknown user'}, pid {process['pid']}"
        text = f"{who} computes on {process['gpu_uuid']}; a job waits for its end"
        yield Finding("in use", NOTE, text, host.typed("nvidia-smi"))


def _tools(facts: Facts, install: _Install, absent: Collection[str]) -> Iterator[Finding]:
    paths, toolchain = facts.details["tools"], facts.toolchain
    reported = {_COMPILER_NAMES.get(key) for key in absent}
    needed = {"git": (paths["git"], "git"), "cc": (toolchain.cc, "gcc"), "c++": (toolchain.cxx, "g++")}
    for name, (version, package) in needed.items():
        if version:
            yield Finding(name, OK, version)
        elif name not in reported:
            yield Finding(name, MISSING, "not found on PATH", install(package))
    for name in BUILD_TOOLS:
        mend = install("cmake", "ninja-build")
        if paths[name]:
            yield Finding(name, OK, paths[name])
            continue
        try:
            wheel = wheel_for(name, facts)
            yield Finding(name, NOTE, f"not found on PATH: the first run sends {wheel.version}", mend)
        except packages.SourceError as error:
            yield Finding(name, MISSING, f"not found on PATH, and {error}", mend)
    ccache, lacking = paths["ccache"], "recommended: not found on PATH"
    yield _either(ccache, "ccache", ccache, lacking, install("ccache"), NOTE)


def _gpu(facts: Facts, host: HostEntry, install: _Install) -> Iterator[Finding]:
    details, nvcc = facts.details, facts.toolchain.nvcc
    if not details["nvidia_devices"]:
        yield Finding("gpu", OK, "none: for the CPU backend alone")
        return
    driver = details["driver"]
    for gpu in details["gpus"]:
        yield Finding("gpu", OK, gpu["name"] or "one without a name")
    if details["gpus"]:
        cuda = driver["cuda"] or "a version that it does not say"
        yield Finding("driver", OK, f"{driver['version']}, runs CUDA up to {cuda}")
    else:
        smi = details["tools"].get("nvidia-smi")
        cause = "nvidia-smi lists none" if smi else "there is no nvidia-smi"
        mend = host.typed("nvidia-smi" if smi else "sudo ubuntu-drivers install")
        yield Finding("driver", MISSING, f"there is an NVIDIA GPU, and {cause}", mend)
    if nvcc:
        yield _cuda(details["tools"]["nvcc"], _version(nvcc), _version(driver["cuda"] or ""), host)
    else:
        way = f"path_prepend: of {host.name} in {host.file} can name its folder" if host.file else "PATH can name it"
        text = f"neither on PATH nor in /usr/local/cuda*/bin; where it is elsewhere, {way}"
        yield Finding("nvcc", MISSING, text, install("cuda-toolkit"))


def _cuda(path: str, toolkit: tuple[int, ...], driver: tuple[int, ...], host: HostEntry) -> Finding:
    """Compare the toolkit with the CUDA version of the driver: a newer minor version works, except for PTX."""
    version = ".".join(map(str, toolkit))
    if not driver or toolkit <= driver:
        return Finding("nvcc", OK, f"{version}, {path}")
    ahead = f"{version}, {path}, is newer than the driver, which runs CUDA up to {'.'.join(map(str, driver))}"
    state, why = NOTE, "what it builds runs only where CMAKE_CUDA_ARCHITECTURES names the GPU's own"
    if toolkit[0] > driver[0]:
        state, why = MISSING, "what it builds does not run, unless the driver is updated or PATH has an older one"
    return Finding("nvcc", state, f"{ahead}: {why}", host.typed("sudo ubuntu-drivers install"))


def _room(details: Mapping[str, Any], host: HostEntry) -> Iterator[Finding]:
    disk, memory = details["disk"], details["mem_available_mib"]
    text = f"{size(disk['free_mib'] << 20)} free of {size(disk['total_mib'] << 20)} at {disk['path']}"
    lacking = f"{text}, {size(_HOST_DISK_MIB << 20)} is needed"
    yield _either(disk["free_mib"] >= _HOST_DISK_MIB, "disk", text, lacking, f"dgxlab host clean {host.name}")
    if killer := details.get("logout_kills"):
        text = f"{killer} says KillUserProcesses=yes, which ends every job at logout: write no, restart systemd-logind"
        yield Finding("logout", MISSING, text, host.typed(command("sudoedit", killer)))
    text = f"{size(memory << 20)} free of {size(details['memory_mib'] << 20)}"
    lacking = f"{text}: compilers and models may not find {size(_HOST_MEMORY_MIB << 20)}"
    mend = host.typed("ps aux --sort -rss | head")
    yield _either(memory >= _HOST_MEMORY_MIB, "memory", text, lacking, mend, NOTE)
    lacking, mend = "neither /var/lock nor /tmp can be written", host.typed("sudo chmod 1777 /tmp")
    yield _either(details["lock_folder"], "lock", f"in {details['lock_folder']}", lacking, mend)


def _version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version in a text like `git version 2.39.5` or `Build cuda_13.0.r13.0/...`."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else ()
