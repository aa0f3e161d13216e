"""pip as a downloader: the file of one package's exact version, from wherever pip is configured to look."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dgxlab.source import programs
from dgxlab.source.disk import disk_trouble, unwritable
from dgxlab.source.git import reason

STEPS = re.compile(r"Downloading |Using cached |Installing build |Preparing metadata ")
"""Lines of pip's that tell somebody who waits how far it is."""


class PipFailed(Exception):
    """pip does not give the file; the message is the cause, in words."""


def download(requirement: str, into: Path, flags: list[str], on_progress: Callable[[str], None]) -> Path:
    """Fetch the one file that `requirement` and pip's `flags` name into a new folder.

    Raises:
        PipFailed: if there is no such file, or no index can be reached, or pip is not there.
        SpecError: if the disk is full.
    """
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
    argv += ["--progress-bar=off", "--retries=2", f"--dest={into}", *flags, requirement]
    into.mkdir(parents=True)
    ran = programs.follow(argv, on_line=lambda line: on_progress(line) if STEPS.match(line) else None, silence_s=900)
    found = list(into.iterdir())
    if full := disk_trouble(ran.err):
        raise unwritable(Path(f"{into} or {tempfile.gettempdir()}"), full)
    if ran.rc != 0 or len(found) != 1:
        raise PipFailed(cause(ran.err))
    return found[0]


def cause(output: str) -> str:
    """Return why pip gave up; an index that cannot be reached looks like a missing package in its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip() != "ERROR: Exception:"]
    for line in lines:
        if re.search(r"NewConnectionError|ConnectTimeout|NameResolutionError|ProxyError|SSLError", line):
            found = re.search(r"(?:Failed to .*?|Cannot connect to proxy[^'\"]*|\[SSL[^\]]*\][^')]*)(?=['\")])", line)
            return f"pip reaches no package index: {found[0] if found else line[:200]}"
    if any("No module named pip" in line for line in lines):
        return f"pip is not installed for {sys.executable}"
    if any("(from versions: none)" in line for line in lines):
        return "pip finds no version of it at all: no package index has it, or none can be reached"
    return reason("\n".join(line for line in lines if line.startswith("ERROR: No matching")) or "\n".join(lines))
