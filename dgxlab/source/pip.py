"""pip as a downloader: the file of one package's exact version, from wherever pip is configured to look."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dgxlab.source import programs
from dgxlab.source.disk import disk_trouble, unwritable
from dgxlab.source.git import reason


class PipFailed(Exception):
    """pip does not give the file; the message is the cause, in words."""


def download(
    name: str, version: str, into: Path, flags: Sequence[str], on_progress: Callable[[str], None], sha256: str = ""
) -> Path:
    """Fetch one file of a package's version into a new folder, and run nothing of it.

    Args:
        flags: Of `pip download`: which kind of file, and for which machine.
        sha256: What the file must have; "" for the digest that the index gives.

    Raises:
        PipFailed: if there is no such file, or another one, or no index can be reached, or pip is not there.
        SpecError: if the disk is full.
    """
    # -P: a pip.py in the folder where the user types is not pip
    argv = [sys.executable, "-P", str(Path(__file__).with_name("pip_fetch.py")), name, version, sha256, str(into)]
    into.mkdir(parents=True)
    ran = programs.follow(
        [*argv, *flags],
        on_line=lambda line: on_progress(line) if line.startswith("Downloading ") else None,
        env=programs.surroundings("PIP_"),
        silence_s=900,
    )
    if full := disk_trouble(ran.err):
        raise unwritable(Path(f"{into} or {tempfile.gettempdir()}"), full)
    if ran.rc != 0:
        raise PipFailed(cause(ran.err))
    return next(into.iterdir())


def cause(output: str) -> str:
    """Return why pip gave up; an index that cannot be reached looks like a missing package in its last line."""
    for line in output.splitlines():
        if re.search(r"NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError|SSLError", line):
            found = re.search(r"(?:Failed to .*?|Cannot connect to proxy[^'\"]*|\[SSL[^\]]*\][^')]*)(?=['\")])", line)
            return f"pip reaches no package index: {found[0] if found else line[:200]}"
    if "No module named 'pip'" in output:
        return f"pip is not installed for {sys.executable}"
    return reason(output)
