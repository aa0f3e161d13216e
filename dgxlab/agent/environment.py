"""This host's settings, the folders under the root, the environment and PATH of programs, and short queries to them.

<root>/  agent/<digest>.pyz  tools/<name>/  src/llama.cpp.git  work/<key>/  builds/<id>/  models/  digests/  jobs/<id>/
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dgxlab.errors import RemoteError

_COMPILERS = ("CC", "CXX", "CUDACXX", "CUDAHOSTCXX")
JOB = "DGXLAB_JOB"
"""Variable with the id of the job that a process belongs to. Everything that the agent starts inherits it."""
_KEEP_ENV = ("HOME", "USER", "LOGNAME", "TMPDIR", "TZ", *_COMPILERS, "XDG_CACHE_HOME", JOB)
_KEEP_PREFIX = ("CCACHE_",)
"""Variables that programs inherit from the login. All others come from the plan or from hosts.yaml."""

PATIENCE_S = 20.0  # max time for a program to print its version or its state
_ANSWER_LIMIT = 1 << 20  # max bytes of an answer; the longest known, nvidia-smi's list of fields, has 30 kB
_LAST_S = 0.05  # minimum timeout, so that buffered output is still read


@dataclass(frozen=True)
class Settings:
    """Settings of this host, most of them from the client's hosts.yaml."""

    name: str = "local"
    root: Path | None = None  # the agent's root folder; None if no client called the agent
    path_prepend: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    processors: tuple[int, ...] = ()  # numbers of the processors that sessions may use, in order; () for all
    lock: Path | None = None
    """The owner file, in which people who share the machine write their name while they measure."""
    slurm: tuple[str, ...] | None = None
    """Options of sbatch, which starts the jobs; None where they are started on this machine."""
    locks: tuple[Path, ...] = ()
    """Folders of the benchmark locks in place of `lock.FOLDERS`. Only the host can set them, not a spec or the client:
    jobs with different folders would not exclude each other."""

    @property
    def measured(self) -> dict[str, str]:
        """What may change measured values: processors, and variables of `env` but for those of compilers and caches."""
        own = {"processors": ",".join(map(str, self.processors))} if self.processors else {}
        return {name: value for name, value in self.env.items() if not _kept(name)} | own

    @property
    def digest(self) -> str:
        """Digest of `measured`, 16 hex digits, "" if that is empty; facts have it, because the values are private."""
        from dgxlab.model import digest  # here: short verbs need no records, and making them takes long

        return digest(self.measured, 16) if self.measured else ""


def settings() -> Settings:
    """Return this host's settings, from DGXLAB_ROOT and DGXLAB_HOST (set by the client) and the host's DGXLAB_LOCKS."""
    given = json.loads(os.environ.get("DGXLAB_HOST") or "{}")
    root, lock = os.environ.get("DGXLAB_ROOT", ""), given.get("lock", "")
    return Settings(
        name=given.get("name", "local"),
        root=Path(root) if root else None,
        path_prepend=tuple(Path(folder).expanduser() for folder in given.get("path_prepend", ())),
        env=given.get("env", {}),
        processors=tuple(given.get("processors") or ()),
        lock=Path(lock).expanduser() if lock else None,
        slurm=tuple(given["slurm"]) if "slurm" in given else None,
        locks=tuple(map(Path, filter(None, os.environ.get("DGXLAB_LOCKS", "").split(":")))),
    )


def keep_to_processors() -> None:
    """Use, with all that the agent will start, only the processors that hosts.yaml names.

    Raises RemoteError if this host lacks one of them.
    """
    here = settings()
    if missing := sorted({*here.processors} - os.sched_getaffinity(0)):
        text = f"{here.name} lacks processor {missing[0]}, which its entry in hosts.yaml names"
        raise RemoteError(text, next="ls -l /sys/devices/system/cpu")
    if here.processors:
        os.sched_setaffinity(0, here.processors)


class Root:
    """The paths of the folders under the agent's root folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.agents = path / "agent"
        self.tools = path / "tools"
        self.objects = path / "src" / "llama.cpp.git"
        self.work = path / "work"
        self.builds = path / "builds"
        self.models = path / "models"
        self.digests = path / "digests"
        self.jobs = path / "jobs"

    def create(self) -> None:
        """Make the folders, readable by the owner alone."""
        of_code = (self.agents, self.tools, self.objects.parent, self.work, self.builds)
        for folder in (self.path, *of_code, self.models, self.digests, self.jobs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def search_path() -> str:
    """Return the PATH of programs: folders in hosts.yaml, the login's PATH, tools that the client sent, then CUDA."""
    own = os.environ.get("PATH", "/usr/bin:/bin")
    host = settings()
    # a power loss may leave an empty program: skip it
    sent = sorted({file.parent for file in host.root.glob("tools/*/bin/*") if file.stat().st_size}) if host.root else []
    path = ":".join([*map(str, host.path_prepend), own, *map(str, sent)])
    if shutil.which("nvcc", path=path):
        return path
    nvcc = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))  # most DGX logins do not have it on PATH
    return f"{path}:{nvcc[0].parent}" if nvcc else path


def absent() -> list[tuple[str, str]]:
    """Return (key, value) for each path or program in hosts.yaml that does not exist on this host."""
    here, path = settings(), search_path()
    missing = [("path_prepend", str(folder)) for folder in here.path_prepend if not folder.is_dir()]
    for name in _COMPILERS:
        program, *_ = here.env.get(name, "").split() or [""]  # CC may be `ccache gcc`
        if name in here.env and shutil.which(program, path=path) is None:
            missing.append((name, here.env[name]))
    if here.lock and not here.lock.parent.is_dir():
        missing.append(("lock", str(here.lock.parent)))
    return missing


def base_env() -> dict[str, str]:
    """Return the environment of programs on the host, to which steps of a plan add variables."""
    kept = {name: value for name, value in os.environ.items() if _kept(name)}
    if "SLURM_JOB_ID" in os.environ and (gpus := os.environ.get("CUDA_VISIBLE_DEVICES")):
        kept["CUDA_VISIBLE_DEVICES"] = gpus  # the allocation: the node's other GPUs belong to other jobs
    here = settings()
    # llama.cpp starts a thread for each core of the machine: on fewer processors they would wait for each other
    limit = {"OMP_THREAD_LIMIT": str(len(here.processors))} if here.processors else {}
    return {**kept, **limit, **here.env, "PATH": search_path(), "LC_ALL": "C.UTF-8"}


def measured_env(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a gate or benchmark, given the variables that the plan adds."""
    # otherwise an abort runs gdb, which prints its backtrace on stdout in the middle of the results
    return {**base_env(), "GGML_NO_BACKTRACE": "1", **env}


def _kept(name: str) -> bool:
    return name in _KEEP_ENV or name.startswith(_KEEP_PREFIX)


class Answer(NamedTuple):
    """What a short program printed on stdout, and its exit status."""

    status: int  # 127 if the program cannot be started; negative, and the text "", if it was killed or exceeded a limit
    text: str


def ask(commands: Sequence[Sequence[str]]) -> list[Answer]:
    """Run short programs at the same time and return their answers, in order.

    A program is killed after PATIENCE_S, or when it prints more than 1 MiB.
    """
    env, pipe, null = {**base_env(), "LC_ALL": "C"}, subprocess.PIPE, subprocess.DEVNULL
    children: list[subprocess.Popen[bytes] | None] = []
    for argv in commands:
        try:
            children.append(subprocess.Popen(argv, stdin=null, stdout=pipe, stderr=null, env=env))
        except OSError:
            children.append(None)
    deadline = time.monotonic() + PATIENCE_S  # shared: two programs that hang take no longer than one
    return [_answer(child, deadline) if child else Answer(127, "") for child in children]


def _answer(child: subprocess.Popen[bytes], deadline: float) -> Answer:
    """Read until the program has ended: a daemon that it started may hold the pipe for good."""
    assert child.stdout
    pipe, end, printed = child.stdout.fileno(), os.pidfd_open(child.pid), b""
    sources = [pipe, end]
    with child:
        try:
            while ready := select.select(sources, [], [], max(_LAST_S, deadline - time.monotonic()))[0]:
                if pipe not in ready:
                    child.wait()
                    break
                chunk = os.read(pipe, 1 << 16)
                printed += chunk
                if not chunk:
                    sources.remove(pipe)
                if len(printed) > _ANSWER_LIMIT:
                    break
        finally:
            os.close(end)
            child.kill()
    return Answer(child.returncode, "" if child.returncode < 0 else printed.decode(errors="replace"))
