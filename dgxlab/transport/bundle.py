"""The agent as one file: the modules that run on a host, zipped, named by their digest."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import dgxlab

MODULES = ("__init__.py", "errors.py", "model", "units.py", "stats.py", "synth.py", "agent")
EPOCH = (1980, 1, 1, 0, 0, 0)
"""Every file's time in the zip: the same sources make the same bytes."""

MAIN = b"import sys\nfrom dgxlab.agent.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"


@dataclass(frozen=True)
class Bundle:
    """The agent's zip and its sha256."""

    content: bytes
    sha256: str


@cache
def bundle() -> Bundle:
    """Return the agent made from this installation."""
    package = Path(dgxlab.__file__).parent
    files = {"__main__.py": MAIN}
    for name in MODULES:
        path = package / name
        sources = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        files.update({f"dgxlab/{source.relative_to(package)}": source.read_bytes() for source in sources})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), files[name], zipfile.ZIP_DEFLATED)
    content = buffer.getvalue()
    return Bundle(content, hashlib.sha256(content).hexdigest())
