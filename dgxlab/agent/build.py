"""Build an arm: one worktree and cmake folder per (pin, cmake, toolchain, ccache), finished programs under builds/<id>.

git switches the worktree between arms, so ninja compiles only what differs. An installed build has a stamp: the sha256
of every program and of every library of llama.cpp that it loads. A program that loaded another arm's library would
measure the wrong arm. Each job compares the installed files with the stamp before it uses them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from resource import RLIM_INFINITY
from signal import SIGTERM
from stat import S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO

from dgxlab.agent import child
from dgxlab.agent.boot import flush, me, settle, sync
from dgxlab.agent.environment import base_env, settings
from dgxlab.agent.facts import boot_id, user
from dgxlab.agent.files import full_disk, sha256, tail
from dgxlab.agent.lease import Holder
from dgxlab.agent.lock import TRIES, Signature, lock, lock_file
from dgxlab.agent.measure import Workbench
from dgxlab.agent.objects import Objects
from dgxlab.agent.slurm import allocation
from dgxlab.errors import AGAIN, BuildFailed
from dgxlab.model import BuildStep, Source, Toolchain, build_id, digest, from_json, to_json
from dgxlab.model.events import BuildEvent
from dgxlab.model.reasons import left_running
from dgxlab.replies import LIVE
from dgxlab.tools.rows import plain

if TYPE_CHECKING:
    from dgxlab.agent.job import Job

_STAMP = "stamp.json"
LOOK_S, TAIL = 0.25, 1 << 16  # seconds between looks at ninja's output, and how many bytes at its end are read
_OWN_LIBRARY = re.compile(r"lib(ggml|llama|mtmd)[\w.-]*\.so[\w.]*")


class Builder:
    """Builds one arm in one job; the file `log` has the output of cmake and ninja."""

    def __init__(self, bench: Workbench, step: BuildStep) -> None:
        self.bench, self.step, self.arm = bench, step, bench.plan.arm(step.arm)
        self.toolchain = bench.facts.toolchain
        self.identity = build_id(self.arm.source, self.arm.cmake, self.toolchain)
        ccache = shutil.which("ccache", path=base_env()["PATH"])  # cmake keeps its path, and fails when it is gone
        key = digest([self.arm.source.pin, self.arm.cmake, self.toolchain, ccache], 12)
        # each node of a cluster has a folder of its own: neither locks nor times of files need to agree between nodes
        self.work = bench.root.work / (f"{key}-{node}" if (node := allocation().get("node")) else key)
        self.log = bench.job.folder / f"{step.id.replace(':', '-')}.log"
        self._logs = bench.log(self.log.name)

    def build(self) -> BuildEvent:
        """Build and install the arm, unless it is installed with all its targets and unchanged; return the event.

        Raises:
            BuildFailed: if configuring, compiling or linking fails; `details` has the first error.
            RemoteError: if the source code is missing or differs from the plan's.
            HostBusy: if a job that the build would disturb measures, or one in its folder builds, for too long.
        """
        begin, folder = time.monotonic(), self.bench.root.builds / self.identity
        stamp = installed(folder, self.identity)
        if folder.exists() and not stamp:
            self.bench.note(f"build {self.identity} is not what was installed: it is built anew")
        if not (reused := self._has_all(stamp)):
            # the devices first: the holder of the work folder compiles, so that waiting for it ends when that does
            owner = Signature(self.bench.job.job_id, user())
            lease = self.bench.lease
            with lease.building() as waited, _held(self.work, owner, lease.wait) as (fd, waited_more):
                begin += waited + waited_more  # for other jobs, which is no part of what a build takes
                stamp = installed(folder, self.identity)  # by another job, for which this one has waited
                if not (reused := self._has_all(stamp)):
                    # installed programs are built again too: in the work folder they may be those of another arm
                    others = sorted(set(stamp["binaries"] if stamp else ()) - set(self.arm.targets))
                    targets = sorted([*self.arm.targets, *others])
                    self._compile(targets, [*self.step.compile, *others], fd)
                    stamp = self._install(folder, targets)
        assert stamp
        if reused:
            os.utime(folder / _STAMP)  # its last use, for `host clean`
        return BuildEvent(
            arm=self.arm.name,
            source=from_json(Source, stamp["source"]),
            toolchain=from_json(Toolchain, stamp["toolchain"]),
            **{name: stamp[name] for name in ("build_id", "cmake", "binaries", "libraries", "cmake_cache")},
            log=self.log.name,
            seconds=time.monotonic() - begin,
            reused=reused,
        )

    def _has_all(self, stamp: Mapping[str, Any] | None) -> bool:
        return bool(stamp and set(self.arm.targets) <= set(stamp["binaries"]))

    def _compile(self, targets: Sequence[str], compile: Sequence[str], lock: int) -> None:
        for path in (self.work / "cmake" / "bin").glob("*"):
            if path.name in targets or _OWN_LIBRARY.fullmatch(path.name):
                path.unlink()  # ninja would keep a program that is newer than its source, even if it was replaced
        objects, source = Objects(self.bench.root.objects), self.arm.source
        objects.check_out(self.work / "src", self.work / "index", source.commit, source.tree)
        paths = {name: str(self.work / name) for name in ("src", "cmake")}
        configure = self.bench.fill(self.step.configure, self.arm.name, **paths)
        programs = ("cmake", "ninja") if "Ninja" in configure else ("cmake",)
        required = {program: shutil.which(program, path=base_env()["PATH"]) for program in programs}
        for name, installed_at in {**required, "C++ compiler": self.toolchain.cxx}.items():
            if not installed_at:
                raise BuildFailed(f"there is no {name} on the host", next=f"dgxlab doctor {settings().name}")
        configured = self.work / "cmake" / "dgxlab-configured"
        wanted = digest([configure, objects.names(source.commit)])  # with other files cmake's globs must run again
        if not configured.exists() or configured.read_text() != wanted:
            self._step(configure, "configuring", lock)
            configured.write_text(wanted)
        self._step(self.bench.fill(compile, self.arm.name, **paths), "compiling", lock)

    def _step(self, argv: list[str], doing: str, lock: int) -> None:
        part, errors = self.log.with_suffix(".part"), self.log.with_suffix(".errors")
        self.bench.progress(self.step.id, 0, 0, doing)
        # the tree has no .git: cmake must not take the commit id of an enclosing repository
        env = {**base_env(), "GIT_CEILING_DIRECTORIES": str(self.bench.root.work)}
        ended = child.run(
            argv,
            env=env,
            stdout=part,
            stderr=errors,
            limit_s=self.step.limit_s,
            keep=[*self.bench.keep, lock],  # compilers that outlive the agent keep the folder
            look=lambda pid: self._look(part),
            death_signal=SIGTERM,  # ninja then ends its compilers
            file_limit=RLIM_INFINITY,
        )
        if ended.left:
            self.bench.note(left_running(doing, ended.left))
        failed = not (ended.ok or ended.too_long)
        text = "".join(path.read_text(errors="replace") for path in (part, errors) if failed)
        with self.log.open("ab") as log:
            log.write(f"$ {' '.join(argv)}\n".encode())
            for path in (part, errors):
                with path.open("rb") as printed:
                    shutil.copyfileobj(printed, log)
                path.unlink()
        if not ended.ok:
            raise BuildFailed(
                f"{doing} failed: {ended.reason(argv[0], self.step.limit_s)}{full_disk(self.work)}",
                details=first_error(text) or text[-2000:],
                next=self._logs,
            )

    def _look(self, printed: Path) -> float:
        """Report ninja's last progress count; return the seconds until the next look."""
        lines = tail(printed, TAIL).split("\n")[:-1]
        if counted := next(filter(None, map(progress, reversed(lines))), None):
            self.bench.progress(self.step.id, *counted)
        return LOOK_S

    def _install(self, folder: Path, targets: Sequence[str]) -> dict[str, Any]:
        """Copy the programs and their libraries, stamp them, and swap the folder into place."""
        cmake = self.work / "cmake"
        incoming, old = (folder.with_name(f".{kind}-{folder.name}-{me()}") for kind in ("in", "old"))
        shutil.rmtree(incoming, ignore_errors=True)
        bin_folder = incoming / "bin"
        bin_folder.mkdir(parents=True)
        for target in targets:
            shutil.copy2(cmake / "bin" / target, bin_folder / target)
        for _, name, path in own_libraries([cmake / "bin" / target for target in targets]):
            if not (bin_folder / name).exists():
                shutil.copyfile(path, bin_folder / name)
        loaded = own_libraries([bin_folder / target for target in targets])
        for program, name, path in loaded:
            if path.parent != bin_folder.resolve():
                raise BuildFailed(
                    f"{program.name} would load {name} from {path.parent}, not from its own build: something in the "
                    "spec's cmake section or the toolchain sets a run path",
                    next=self._logs,
                )
        stamp = {
            "build_id": self.identity,
            "source": to_json(self.arm.source),
            "cmake": to_json(self.arm.cmake),
            "toolchain": to_json(self.toolchain),
            "binaries": {target: sha256(bin_folder / target) for target in targets},
            "libraries": {name: sha256(bin_folder / name) for name in sorted({name for _, name, _ in loaded})},
            "cmake_cache": sha256(cmake / "CMakeCache.txt"),
        }
        (incoming / _STAMP).write_text(json.dumps(stamp, indent=1))
        try:
            # an earlier install with fewer programs: what runs from it keeps its files
            if folder.exists() and not self._has_all(installed(folder, self.identity)):
                folder.rename(old)
            settle(incoming, folder)
        except OSError:
            finished = installed(folder, self.identity)
            if not finished or not self._has_all(finished):
                raise
            stamp = finished  # another node was faster
            shutil.rmtree(incoming)
        shutil.rmtree(old, ignore_errors=True)
        return stamp


def installed(folder: Path, identity: str) -> dict[str, Any] | None:
    """Return the stamp of the build in a folder; None if its id is not `identity`, or the files are not the stamp's.

    An extra file counts as a difference: the loader searches this folder for libraries first.
    """
    try:
        stamp: dict[str, Any] = json.loads((folder / _STAMP).read_text())
        wanted = {**stamp["binaries"], **stamp["libraries"]}
        same = stamp["build_id"] == identity and stamp.keys() >= {"source", "cmake", "toolchain", "cmake_cache"}
        return stamp if same and {path.name: _digest(path) for path in (folder / "bin").iterdir()} == wanted else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _digest(path: Path) -> str:
    """Return a file's sha256; "" for a non-file, or a program that is not executable."""
    usable = S_ISREG(path.lstat().st_mode) and (_OWN_LIBRARY.fullmatch(path.name) or os.access(path, os.X_OK))
    return sha256(path) if usable else ""


def own_libraries(programs: Sequence[Path]) -> list[tuple[Path, str, Path]]:
    """Return (program, soname, resolved path) for each library of llama.cpp that one of the programs would load.

    Raises BuildFailed if the loader cannot find such a library.
    """
    # a single call, because ldd is a shell script that starts the loader three times
    env = {k: v for k, v in base_env().items() if not k.startswith("LD_")}
    argv = ["ldd", *map(str, programs)]
    text = subprocess.run(argv, capture_output=True, text=True, env=env, check=False).stdout
    program, libraries = programs[0], []
    for line in text.splitlines():
        if line.startswith("/"):  # for several programs ldd prints each program's name first
            program = Path(line.removesuffix(":"))
        match = re.match(r"\s*(\S+) => (not found|/.*?)(?: \(0x[0-9a-f]+\))?$", line)
        if match and _OWN_LIBRARY.fullmatch(match[1]):
            if match[2] == "not found":
                cause = f"{program.name} needs {match[1]} and the loader does not find it"
                raise BuildFailed(cause, next=AGAIN)
            libraries.append((program, match[1], Path(match[2]).resolve()))
    return libraries


@contextmanager
def _held(
    work: Path, owner: Signature, wait: Callable[[Callable[[], Holder | None], str], float]
) -> Iterator[tuple[int, float]]:
    """Lock a work folder as `owner`; yield the lock's descriptor and the seconds waited for it.

    So two jobs that share the folder build one after the other. `wait` is that of the job's DeviceLease.
    The folder is emptied if a build did not end well in it before the last boot: after a power loss an object file may
    be empty, and ninja would not make it again.
    """
    work.mkdir(parents=True, exist_ok=True)
    mark = work / "building"
    with os.fdopen(lock_file(work / "lock"), "ab") as file:

        def holder() -> Holder | None:
            if lock(file.fileno(), tries=TRIES):
                return None
            who = str(Signature.read(file.fileno()) or "an unknown job")
            return Holder(str(work), who, who)

        waited = wait(holder, "building")
        owner.write(file.fileno())
        if mark.exists() and mark.read_text() != boot_id():
            for name in ("src", "cmake", "index"):
                part = work / name
                part.unlink() if part.is_file() else shutil.rmtree(part, ignore_errors=True)
        mark.write_text(boot_id())
        sync(mark)
        sync(work)
        yield file.fileno(), waited
        flush(work)  # not after a failure, nor after `cancel`, which waits for seconds only
        mark.unlink()


# -- logs of cmake, ninja and the compilers ---------------------------------------------------------------------------

_PROGRESS = re.compile(r"\[([0-9]{1,7})/([0-9]{1,7})\] (.+)")

# gcc, clang, nvcc, ptxas, ninja; the linker; cmake. Diagnostics start in the first column: indented text is quoted
# source.
_ERRORS = re.compile(
    r"(?!.*?(?:warning|note)(?: #[\w-]+)?\s*:.*error)"
    r"\S.*?[:);] ?(?:fatal |internal compiler |catastrophic )?error(?: #[\w-]+)?\s*:"
    r"|(?:nvcc|ptxas|nvlink|fatbinary|cicc|cudafe\+\+|ninja:) ?(?:error|fatal)\s*:"
    r"|.*undefined reference to |.*multiple definition of |\S*ld: cannot find "
    r"|CMake Error"
)
_LD_FUNCTION = re.compile(r"\S*ld: .*: in function ")
FAILED = "FAILED: "
_STEP_END = re.compile(rf"{_PROGRESS.pattern}|{FAILED}|ninja: ")
_CONTEXT, _WIDTH = 5, 300
"""Lines that are kept after an error, and characters of a line: a template's name can have thousands."""


def copy_output(job: Job, out: BinaryIO) -> None:
    """Copy what a job's builds have printed to `out`, and then what they print, until all are built or the job ends."""
    for log in sorted(job.folder.glob("build*.log")):
        out.write(log.read_bytes())
    wanted = sum(step["kind"] == "build" for step in json.loads(job.plan.read_text())["steps"])
    streams: dict[int, BinaryIO] = {}  # by inode: the files are appended to the log and deleted when a command ends
    while True:
        built = job.journal.read_bytes().count(b'"event":"build"') if job.journal.exists() else 0
        ended = built >= wanted or job.status().state not in LIVE
        for path in [*job.folder.glob("build*.part"), *job.folder.glob("build*.errors")]:
            with suppress(FileNotFoundError):
                if (inode := path.stat().st_ino) not in streams:
                    streams[inode] = path.open("rb")
        for inode, stream in list(streams.items()):
            deleted = os.fstat(stream.fileno()).st_nlink == 0  # looked up before the rest is read: nothing is missed
            out.write(stream.read())
            if deleted:
                streams.pop(inode).close()
        out.flush()
        if ended:
            return
        time.sleep(LOOK_S)


def progress(line: str) -> tuple[int, int, str] | None:
    """Return (n, m, what) for ninja's line `[n/m] what`, None for any other line."""
    match = _PROGRESS.fullmatch(plain(line).strip())
    return (int(match[1]), int(match[2]), match[3]) if match and int(match[1]) <= int(match[2]) else None


def first_error(log_text: str) -> str:
    """Return the first error of a compiler, linker, cmake or ninja in a build log, with a few lines of context.

    Without one (a tool is missing or was killed) return the first FAILED step with the end of its output, else "".
    """
    lines = [line.rstrip() for line in plain(log_text).split("\n")]
    for number, line in enumerate(lines):
        if _ERRORS.match(line) and not _PROGRESS.match(line):
            after = lines[number + 1 :]
            if line.startswith("CMake"):  # cmake's message, which may quote the error of a compiler that it tried
                block = [each for each in takewhile(lambda each: not each or each[0].isspace(), after) if each]
                tried = [each.strip() for each in block if _ERRORS.match(each.strip())]
                return _text([line, *(tried or block)[:_CONTEXT]])
            before = [lines[number - 1]] if number and _LD_FUNCTION.match(lines[number - 1]) else []
            return _text([*before, line, *takewhile(lambda each: each[:1].isspace(), after[:_CONTEXT])])
    for number, line in enumerate(lines):
        if line.startswith(FAILED):
            output = list(takewhile(lambda each: not _STEP_END.match(each), lines[number + 1 :]))
            return _text([line, *output[-_CONTEXT:]])
    return ""


def _text(lines: Sequence[str]) -> str:
    return "\n".join(line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..." for line in lines)
