"""The agent as one file."""

import io
import subprocess
import sys
import zipfile
from pathlib import Path

from dgxlab.transport.bundle import bundle

ASK = "import sys; sys.path.insert(0, sys.argv[1]); from dgxlab.agent import work; print(work.__file__)"


def printed(*argv: str) -> str:
    return subprocess.run([sys.executable, *argv], cwd="/", capture_output=True, text=True, check=True).stdout.strip()


def loaded_from(agent: Path) -> str:
    """Return the file in the zip that a module of the agent comes from."""
    return str(Path(printed("-ES", "-c", ASK, str(agent))).relative_to(agent))


def test_the_same_python_takes_the_compiled_modules(tmp_path: Path) -> None:
    agent = tmp_path / "agent.pyz"
    agent.write_bytes(bundle().packed())
    assert loaded_from(agent) == "dgxlab/agent/work.pyc"


def test_another_python_compiles_the_sources(tmp_path: Path) -> None:
    agent = tmp_path / "agent.pyz"
    with zipfile.ZipFile(io.BytesIO(bundle().packed())) as ours, zipfile.ZipFile(agent, "w") as other:
        for name in ours.namelist():
            content = ours.read(name)
            other.writestr(name, b"\0\0\r\n" + content[4:] if name.endswith(".pyc") else content)
    assert loaded_from(agent) == "dgxlab/agent/work.py"


def test_its_digest_is_of_the_sources_alone() -> None:
    """Another process, with other modules loaded, gives it the same name: the host has it already."""
    code = "from dgxlab.transport.bundle import bundle; print(bundle().digest)"
    assert printed("-c", code) == bundle().digest
