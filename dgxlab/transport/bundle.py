"""The agent as one zip file of the modules that run on a host, named by the digest of their sources.

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

_MODULES = (
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
_EPOCH = (1980, 1, 1, 0, 0, 0)

OLD_PYTHON = 98
"""Exit status by which the agent says that the host's Python is too old; its version is the last word on stderr."""
_NEW_ENOUGH = f"""import sys
if sys.version_info < (3, 10):  # in words that any Python reads
    sys.stderr.write("%d.%d\\n" % sys.version_info[:2])
    sys.exit({OLD_PYTHON})
"""
_MAIN = f"""{_NEW_ENOUGH}from dgxlab.agent.__main__ import main
sys.exit(main(sys.argv[1:]))
""".encode()
# one line, which every login shell passes on; nothing is imported from the folder that it starts in
BOOT = f"exec({_NEW_ENOUGH!r}); sys.path.remove(''); exec({Path(boot.__file__).read_text()!r})"
"""The program for `python -c` that starts the agent."""


@dataclass(frozen=True)
class Bundle:
    """The agent's source files by name in the zip, and the sha256 of all of them, which names the agent on hosts."""

    sources: Mapping[str, bytes]
    digest: str

    def packed(self) -> bytes:
        """Return the zip, with compiled modules; it ends with the sha256 of all before, which the host checks."""
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
                archive.writestr(zipfile.ZipInfo(name, _EPOCH), files[name], zipfile.ZIP_DEFLATED)
            archive.comment = bytes(boot.SEAL)
        content = buffer.getvalue()[: -boot.SEAL]
        return content + hashlib.sha256(content).hexdigest().encode()


@cache
def bundle() -> Bundle:
    """Return the agent of this installation of dgxlab."""
    package = Path(dgxlab.__file__).parent
    sources = {"__main__.py": _MAIN}
    for name in _MODULES:
        files = (package / name).rglob("*.py") if (package / name).is_dir() else [package / f"{name}.py"]
        sources.update({f"dgxlab/{file.relative_to(package)}": file.read_bytes() for file in files})
    total = hashlib.sha256()
    for name in sorted(sources):
        total.update(f"{name} {len(sources[name])}\n".encode() + sources[name])
    return Bundle(sources, total.hexdigest())
