"""Build tools that the client sends to a host without them: wheels, unpacked under tools/<name>-<version>/.

`environment.search_path` has their bin folders last on PATH.
"""

from __future__ import annotations

import contextlib
import stat
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from dgxlab.agent.boot import settle
from dgxlab.agent.environment import Root, base_env
from dgxlab.agent.files import incoming
from dgxlab.errors import RemoteError

PATIENCE_S = 20.0
"""How long a tool may take to say its version."""


def unpack(root: Root, name: str, version: str, sha256: str, stream: IO[bytes]) -> None:
    """Unpack a tool's wheel from a stream; a tool that is there already stays, unless it does not run.

    The folder gets its name last, after the tool ran, so that PATH never holds half a tool or one for another machine.

    Raises:
        RemoteError: if it did not arrive whole, is damaged or does not run here, or the disk is full.
    """
    folder = root.tools / f"{name}-{version}"
    with incoming(stream, sha256, root.tools, f"{name} {version}") as wheel:
        tool = wheel.with_name("tool")
        try:
            with zipfile.ZipFile(wheel) as archive:
                for entry, inside in _files(archive, name, version):
                    target = tool / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(entry))
                    target.chmod(0o755 if entry.external_attr >> 16 & 0o111 else 0o644)
        except (zipfile.BadZipFile, ValueError) as error:
            raise RemoteError(f"the wheel of {name} {version} is damaged: {error}") from error
        _try(tool / "bin" / name)
        with contextlib.suppress(OSError, RemoteError):
            _try(folder / "bin" / name)
            return  # sent before, or by another client just now
        with contextlib.suppress(FileNotFoundError):
            folder.rename(wheel.with_name("broken"))
        try:
            settle(tool, folder)
        except OSError:
            if not folder.exists():
                raise


def _files(archive: zipfile.ZipFile, name: str, version: str) -> Iterator[tuple[zipfile.ZipInfo, PurePosixPath]]:
    """Yield the files of a tool with their places in its folder, without those of Python.

    cmake has bin and share side by side under data, and finds share from bin; ninja is one script.
    """
    places = {f"{name}/data/": "", f"{name}-{version}.data/scripts/": "bin/"}
    for entry in archive.infolist():
        for prefix, place in places.items():
            if entry.is_dir() or not entry.filename.startswith(prefix):
                continue
            inside = PurePosixPath(place + entry.filename.removeprefix(prefix))
            if inside.is_absolute() or ".." in inside.parts or stat.S_ISLNK(entry.external_attr >> 16):
                raise ValueError(f"{entry.filename} would be written elsewhere")
            yield entry, inside


def _try(program: Path) -> None:
    try:
        argv = [str(program), "--version"]
        subprocess.run(argv, capture_output=True, text=True, env=base_env(), timeout=PATIENCE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        raise RemoteError(
            f"the {program.name} that was sent does not run on the host: {reason}",
            next="sudo apt-get install cmake ninja-build",
        ) from error
