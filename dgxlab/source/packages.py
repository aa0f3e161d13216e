"""Downloads from the package index: llama.cpp in the sdist of llama-cpp-python, and cmake and ninja for hosts.

pip fetches one file of a package's exact version, from its configured index, and runs no code of it. Only the digest
written here is trusted, not the index: as with a pin, an index can be missing or wrong, but cannot give another
program.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dgxlab.agent.files import sha256
from dgxlab.source import programs
from dgxlab.source.git import Git, reason
from dgxlab.source.programs import cache_path, disk_trouble, unwritable, writing

_SPEC = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
"""A source that names a package and its exact version."""

_GITDIR = re.compile(
    r"[^/]+/(?:\.git/modules/vendor/llama\.cpp|vendor/llama\.cpp/\.git)/"
    r"(HEAD|shallow|objects/[0-9a-f]{2}/[0-9a-f]{38}|objects/pack/pack-[0-9a-f]{40}\.(?:pack|idx))"
)
"""Paths extracted from an sdist: a shallow repository with the objects of exactly one commit. git checks every object
against its name; configuration and hooks in the sdist are never written to the disk."""

_SDISTS = {
    "0.3.30": "798c9b42652d2e0bff5fe81e7e762089f425a99e67f66ffe5ae156957876e0d1",
    "0.3.31": "c3fd23b2c7197770321020a89f23c6515a366511dce4fcda1e81cfb749267a94",
    "0.3.32": "b06502361770f82eb08b7f1a192eb084b9ead2b88fe32cda8c397a2782eabde6",
    "0.3.33": "369ba03d02caaef42c1ed07bbdc454f7436e47c7675b8b9757fa13fbac6acd92",
    "0.3.34": "d849d286d808284f1d3ec1bd6875572430d29d1f9574a010232caa4e9cef0e35",
    "0.3.35": "1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12",
    "0.3.36": "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
}
"""Sha256 of the source distribution, by version of llama-cpp-python; only these need no consent of the user."""

SIZE_LIMIT = 4 << 30  # bytes of git objects beyond which an sdist is refused; the real one has 35 MB
_GLIBC = (2, 17)  # oldest glibc for the wheels below, called manylinux2014

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Wheel:
    """A build tool to send to hosts that lack it; `machine` is as in `uname -m`."""

    name: str
    version: str
    machine: str
    sha256: str


WHEELS = (
    Wheel("cmake", "3.31.10", "x86_64", "2f766bb46367e5e0559fa33184653754bce044583a06014dcaebf8e6dff8a1f1"),
    Wheel("cmake", "3.31.10", "aarch64", "a4a5615f31f692c9b9aa8b365704e4b76172348af6fa40e16fea3f118bb01194"),
    Wheel("ninja", "1.11.1.4", "x86_64", "096487995473320de7f65d622c3f1d16c3ad174797602218ca8c967f51ec38a0"),
    Wheel("ninja", "1.11.1.4", "aarch64", "d3090d4488fadf6047d0d7a1db0c9643a8d391f0d94729554dbb89b5bdc769d7"),
)
"""cmake 3.31 is the last that still configures projects written for cmake before 3.5, and knows CUDA 13."""


class SourceError(Exception):
    """A pin cannot be taken from a source, or a file from the package index; the message is the cause alone."""


class ConsentNeeded(SourceError):
    """A package is fetched only with the user's consent, and there is none."""


def download_sdist(spec: str, into: Path, on_progress: Progress, *, trusted: bool) -> Path:
    """Fetch a package's source distribution into a new folder, and return the file's path.

    The package is `pypi:NAME==VERSION`; `trusted` allows any, not only versions of llama-cpp-python whose digest is
    known here.

    Raises:
        SourceError: if there is no such sdist, no index, no pip.
        ConsentNeeded: if the package needs the user's consent.
        SpecError: if the disk is full.
    """
    match = _SPEC.fullmatch(spec)
    if not match:
        raise SourceError("not of the form pypi:NAME==VERSION")
    name, version = match.groups()
    is_llama = re.sub(r"[-_.]+", "-", name).lower() == "llama-cpp-python"
    digest = _SDISTS.get(version, "") if is_llama else ""
    if not (digest or trusted):
        raise ConsentNeeded("dgxlab does not know this package's digest, and does not fetch it without --trust-source")
    return _download(name, version, into, [f"--no-binary={name}"], on_progress, digest)


def unpack_sdist(archive: Path, into: Path) -> str:
    """Copy llama.cpp's git objects from an sdist into a new bare repository; return its HEAD commit, "" if unknown."""
    Git(into).run("init", "--quiet", "--bare", "--template=", str(into))
    room = SIZE_LIMIT
    try:
        with gzip.open(archive) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
            for member in tar:
                match = _GITDIR.fullmatch(member.name)
                if not match or not member.isreg():
                    continue
                if member.size > room:
                    raise SourceError(f"{member.name} claims {member.size} bytes, too much for llama.cpp")
                room -= member.size
                target = into / match[1]
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(target, "wb") as out:
                    shutil.copyfileobj(tar.extractfile(member) or io.BytesIO(), out)
            while plain.read(1 << 20):  # to its checksum, at the very end
                pass
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{archive.name} is damaged: {error}") from error
    if room == SIZE_LIMIT:
        raise SourceError(f"{archive.name} carries no git repository of llama.cpp")
    head = (into / "HEAD").read_text(errors="replace").strip()
    return head if re.fullmatch(r"[0-9a-f]{40}", head) else ""


def find_wheel(name: str, machine: str, glibc: str) -> Wheel:
    """Return the wheel of a build tool that runs on a host; SourceError if there is none.

    `machine` is as in `uname -m`; `glibc` is the version of the host's, "" if it has none.
    """
    wheel = next((each for each in WHEELS if (each.name, each.machine) == (name, machine)), None)
    if wheel is None:
        raise SourceError(f"there is none to send for {machine}")
    if not glibc or tuple(map(int, glibc.split(".")[:2])) < _GLIBC:
        raise SourceError(f"the one to send needs glibc {'.'.join(map(str, _GLIBC))}, it has {glibc or 'none'}")
    return wheel


def fetch_wheel(wheel: Wheel, on_progress: Progress, folder: Path | None = None) -> Path:
    """Return the path of a wheel in `folder`, by default the user's cache; fetch it if missing, or SourceError."""
    folder = folder or cache_path().with_name("wheels")
    path = folder / f"{wheel.name}-{wheel.version}-{wheel.machine}.whl"
    if sha256(path) == wheel.sha256:
        return path
    on_progress(f"fetching {wheel.name} {wheel.version} for {wheel.machine}")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            # no --python-version 3: that means 3.0, for which newer wheels are not made
            flags = ["--only-binary=:all:", "--python-version=3.10", "--implementation=py"]
            flags.append(f"--platform=manylinux2014_{wheel.machine}")
            got = _download(wheel.name, wheel.version, Path(scratch, "got"), flags, on_progress, wheel.sha256)
            got.replace(path)
    return path


def _download(name: str, version: str, into: Path, flags: Sequence[str], on_progress: Progress, digest: str) -> Path:
    """Fetch a package's file into a new folder; `flags` of `pip download` select it, "" takes the index's digest."""
    # -P: do not import a pip.py from the current folder
    argv = [sys.executable, "-P", str(Path(__file__).with_name("pip_fetch.py")), name, version, digest, str(into)]
    into.mkdir(parents=True)
    ran = programs.follow(
        [*argv, *flags],
        on_line=lambda line: on_progress(line) if line.startswith("Downloading ") else None,
        env=programs.environment("PIP_"),
        silence_s=900,
    )
    if full := disk_trouble(ran.err):
        raise unwritable(Path(f"{into} or {tempfile.gettempdir()}"), full)
    if ran.rc != 0:
        raise SourceError(pip_cause(ran.err))
    return next(into.iterdir())


def pip_cause(output: str) -> str:
    """Return why pip failed. The last line is not enough: with an unreachable index it says that no version exists."""
    for line in output.splitlines():
        if re.search(r"NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError|SSLError", line):
            cause = re.search(r"(?:Failed to .*?|Cannot connect to proxy[^'\"]*|\[SSL[^\]]*\][^')]*)(?=['\")])", line)
            return f"pip reaches no package index: {cause[0] if cause else line[:200]}"
    if "No module named 'pip'" in output:
        return f"pip is not installed for {sys.executable}"
    return reason(output)
