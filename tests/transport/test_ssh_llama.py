"""The real llama.cpp over a real sshd, as the README says."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import CACHE, PROJECT, Quickstart
from tests.sshd import Sshd, sshd
from tests.transport.conftest import Client, Keys

pytestmark = [pytest.mark.llama, pytest.mark.usefixtures("quickstart")]


def screen() -> list[str]:
    """Return the lines that the README tells a reader to type."""
    block = re.search(r"(?s)\n## On a remote machine\n.*?```sh\n(.*?)```", (PROJECT / "README.md").read_text())
    assert block
    return block[1].splitlines()


@pytest.fixture
def dgx(tmp_path: Path, client: Client, keys: Keys) -> Iterator[Sshd]:
    """A machine that `ssh dgx` reaches, as a reader has it; llama.cpp is built there already."""
    with sshd(tmp_path / "dgx", keys.authorized) as server:
        (server.home / ".dgxlab").symlink_to(CACHE / "host")
        client.host("dgx", server.port)
        yield server


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    for part in ("experiments", "patches", "schema"):
        shutil.copytree(PROJECT / part, folder / part)
    (folder / ".venv").symlink_to(sys.prefix)
    pins = Path(os.environ["HOME"]) / ".cache" / "dgxlab"
    pins.mkdir(parents=True)
    (pins / "llama.cpp.git").symlink_to(CACHE / "llama.cpp.git")
    return folder


def test_the_screen_works_word_for_word(quickstart: Quickstart, clone: Path, dgx: Sshd) -> None:
    """Typed in one shell, with a yes to the one question; each line ends well and does what is written beside it."""
    lines = screen()
    typed = "\n".join(f"{line}\necho == $?" for line in lines)
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    ran = subprocess.run(
        ["bash", "-c", typed], cwd=clone, env=env, input="y\n", capture_output=True, text=True, timeout=900, check=False
    )
    outputs = re.split(r"(?m)^== (\d+)\n", ran.stdout)
    assert outputs[1::2] == ["0"] * len(lines), ran.stdout + ran.stderr
    _, added, doctor, report, jobs, _ = outputs[0::2]
    assert "lets us in" in added
    assert "missing" not in doctor
    assert "MUL_MAT | CPU | 1103/1103 | 306 | 1103 | passed" in report
    assert "SHA256:" in ran.stderr
    assert "12 cells, 12 measured now, 0 up to date" in ran.stderr
    assert re.search(r"(?m)^\w{6} +quickstart +run .* done +done$", jobs)
