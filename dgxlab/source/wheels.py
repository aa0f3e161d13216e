"""Build tools for a host that has none: the wheels of cmake and ninja, which are programs in a zip.

What is trusted is the digest written here, never where the file comes from: as with a pin, an index can be missing or
wrong, but cannot give another program.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dgxlab.agent.job import sha256
from dgxlab.source import pip
from dgxlab.source.cache import default_path
from dgxlab.source.disk import writing

GLIBC = (2, 17)
"""What the wheels below run on; manylinux2014 is its name among wheels."""


@dataclass(frozen=True)
class Wheel:
    """One file of the package index.

    Attributes:
        machine: As uname has it.
        sha256: Of the file.
    """

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


class NoWheel(Exception):
    """A tool cannot be had for a host; the message is the cause, in words."""


def find(name: str, machine: str, glibc: str) -> Wheel:
    """Return the wheel of a tool that runs on a host.

    Args:
        machine: What the host's uname says.
        glibc: Its version there, "" for another C library.

    Raises:
        NoWheel: if there is none.
    """
    wheel = next((each for each in WHEELS if (each.name, each.machine) == (name, machine)), None)
    if wheel is None:
        raise NoWheel(f"there is none to send for {machine}")
    if not glibc or tuple(map(int, glibc.split(".")[:2])) < GLIBC:
        raise NoWheel(f"the one to send needs glibc {'.'.join(map(str, GLIBC))}, it has {glibc or 'none'}")
    return wheel


def fetch(wheel: Wheel, on_progress: Callable[[str], None], folder: Path | None = None) -> Path:
    """Return a wheel's file, fetched with pip where it is not in this user's cache yet.

    Raises:
        NoWheel: if pip does not give it.
        SpecError: if the disk is full.
    """
    folder = folder or default_path().with_name("wheels")
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
            try:
                got = pip.download(wheel.name, wheel.version, Path(scratch, "got"), flags, on_progress, wheel.sha256)
            except pip.PipFailed as error:
                raise NoWheel(str(error)) from error
            got.replace(path)
    return path
