"""llama.cpp out of a source distribution of llama-cpp-python.

Such an archive carries the git directory of its llama.cpp submodule: a shallow repository with the objects of exactly
one commit. Only the objects are taken out, and git checks every one of them against its name; configuration and hooks
that lie beside them never reach the disk.
"""

from __future__ import annotations

import gzip
import io
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from dgxlab.source import pip
from dgxlab.source.git import Git

SPEC = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.!+_-]*)")
"""A source that names a package and its exact version."""

GITDIR = re.compile(
    r"[^/]+/(?:\.git/modules/vendor/llama\.cpp|vendor/llama\.cpp/\.git)/"
    r"(HEAD|shallow|objects/[0-9a-f]{2}/[0-9a-f]{38}|objects/pack/pack-[0-9a-f]{40}\.(?:pack|idx))"
)
"""What is taken out of the archive, by its path there."""

SDISTS = {
    "0.3.30": "798c9b42652d2e0bff5fe81e7e762089f425a99e67f66ffe5ae156957876e0d1",
    "0.3.31": "c3fd23b2c7197770321020a89f23c6515a366511dce4fcda1e81cfb749267a94",
    "0.3.32": "b06502361770f82eb08b7f1a192eb084b9ead2b88fe32cda8c397a2782eabde6",
    "0.3.33": "369ba03d02caaef42c1ed07bbdc454f7436e47c7675b8b9757fa13fbac6acd92",
    "0.3.34": "d849d286d808284f1d3ec1bd6875572430d29d1f9574a010232caa4e9cef0e35",
    "0.3.35": "1139dbb54509074b70893fab8554e3b079aa9f4d312058ce4018ef0019e3de12",
    "0.3.36": "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
}
"""Versions of llama-cpp-python that are fetched without asking, with the sha256 of each one's source distribution."""

SIZE_LIMIT = 4 << 30
"""Bytes of git objects beyond which an archive is refused; the real one has 35 MB."""


class SourceError(Exception):
    """A source does not give the pin; the message is the cause, in words."""


class NotTrusted(SourceError):
    """A package that is fetched only with the user's word."""


def download(spec: str, into: Path, on_progress: Callable[[str], None], *, trusted: bool) -> Path:
    """Fetch the sdist that `pypi:NAME==VERSION` names, from wherever pip is configured to look; none of it is run.

    Args:
        trusted: Whether the user agrees to any package, and not to SDISTS alone.

    Raises:
        NotTrusted: if it is not one of SDISTS and the user has not agreed.
        SourceError: if there is no such sdist, or no index can be reached, or pip is not there.
        SpecError: if the disk is full.
    """
    match = SPEC.fullmatch(spec)
    if not match:
        raise SourceError("not of the form pypi:NAME==VERSION")
    name, version = match.groups()
    is_llama = re.sub(r"[-_.]+", "-", name).lower() == "llama-cpp-python"
    sha256 = SDISTS.get(version, "") if is_llama else ""
    if not (sha256 or trusted):
        raise NotTrusted("dgxlab does not know this package's digest, and does not fetch it without --trust-source")
    try:
        return pip.download(name, version, into, [f"--no-binary={name}"], on_progress, sha256)
    except pip.PipFailed as error:
        raise SourceError(str(error)) from error


def unpack(archive: Path, into: Path) -> str:
    """Write the llama.cpp objects of an sdist into a new bare repository.

    Returns:
        What the archive's llama.cpp was checked out at, or "".

    Raises:
        SourceError: if the archive is damaged or carries no llama.cpp repository.
    """
    Git(into).run("init", "--quiet", "--bare", "--template=", str(into))
    try:
        with gzip.open(archive) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
            taken = 0
            for member in tar:
                taken += _take(tar, member, into, SIZE_LIMIT - taken)
            while plain.read(1 << 20):  # to its checksum, at the very end
                pass
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{archive.name} is damaged: {error}") from error
    if not taken:
        raise SourceError(f"{archive.name} carries no git repository of llama.cpp")
    head = (into / "HEAD").read_text(errors="replace").strip()
    return head if re.fullmatch(r"[0-9a-f]{40}", head) else ""


def _take(tar: tarfile.TarFile, member: tarfile.TarInfo, into: Path, room: int) -> int:
    """Copy one member if it is a git object or says where they end; return its size, 0 for one left out."""
    match = GITDIR.fullmatch(member.name)
    if not match or not member.isreg():
        return 0
    if member.size > room:
        raise SourceError(f"{member.name} claims {member.size} bytes, too much for llama.cpp")
    target = into / match[1]
    target.parent.mkdir(parents=True, exist_ok=True)
    content = tar.extractfile(member)
    with open(target, "wb") as out:
        shutil.copyfileobj(content or io.BytesIO(), out)
    return member.size
