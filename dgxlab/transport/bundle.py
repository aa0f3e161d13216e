"""The agent as one file: the modules that run on a host, zipped, named by the digest of their sources.

Each module is in it twice, as source and compiled by this Python: compiling takes as long as all the rest of a short
verb. A host with another version of Python ignores the compiled ones.
"""

from __future__ import annotations

import hashlib
import io
import py_compile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import dgxlab
from dgxlab.agent import boot

MODULES = (
    "__init__",
    "errors",
    "units",
    "replies",
    "gguf_header",
    "quantise",
    "synth",
    "chains",
    "model",
    "stats",
    "tools",
    "agent",
)
EPOCH = (1980, 1, 1, 0, 0, 0)

OLD_PYTHON = 98
"""Exit status by which the agent says that the host's Python is too old; its version is the last word on stderr."""
NEW_ENOUGH = f"""import sys
if sys.version_info < (3, 10):  # in words that any Python reads
    sys.stderr.write("%d.%d\\n" % sys.version_info[:2])
    sys.exit({OLD_PYTHON})
"""
MAIN = f"""{NEW_ENOUGH}from dgxlab.agent.__main__ import main
sys.exit(main(sys.argv[1:]))
""".encode()
# one line, which every login shell passes on; nothing is imported from the folder that it starts in
BOOT = f"exec({NEW_ENOUGH!r}); sys.path.remove(''); exec({Path(boot.__file__).read_text()!r})"
"""What starts the agent, for `python -c`."""


@dataclass(frozen=True)
class Bundle:
    """The agent: its files by their names in the zip, and a sha256 of them, whatever Python packs them."""

    sources: Mapping[str, bytes]
    digest: str

    def packed(self) -> bytes:
        """Return the zip; its comment, at the end, is the digest of all bytes before it, which the host checks."""
        files = dict(self.sources)
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "module.py"), Path(folder, "module.pyc")
            for name, text in self.sources.items():
                source.write_bytes(text)
                # byte code that is not compared with the source: a zip's times would never agree
                mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
                py_compile.compile(str(source), str(target), dfile=name, doraise=True, invalidation_mode=mode)
                files[f"{name}c"] = target.read_bytes()
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name in sorted(files):
                archive.writestr(zipfile.ZipInfo(name, EPOCH), files[name], zipfile.ZIP_DEFLATED)
            archive.comment = bytes(boot.SEAL)
        content = buffer.getvalue()[: -boot.SEAL]
        return content + hashlib.sha256(content).hexdigest().encode()


@cache
def bundle() -> Bundle:
    """Return the agent made from this installation."""
    package = Path(dgxlab.__file__).parent
    sources = {"__main__.py": MAIN}
    for name in MODULES:
        files = (package / name).rglob("*.py") if (package / name).is_dir() else [package / f"{name}.py"]
        sources.update({f"dgxlab/{file.relative_to(package)}": file.read_bytes() for file in files})
    total = hashlib.sha256()
    for name in sorted(sources):
        total.update(f"{name} {len(sources[name])}\n".encode() + sources[name])
    return Bundle(sources, total.hexdigest())
