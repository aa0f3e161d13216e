"""What decides whether a change lands runs on a bare machine, whatever was installed on this one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import machines
from tests.conftest import PROJECT

FIND = "import shutil, sys; print(*filter(shutil.which, sys.argv[1:]))"
NAMED = ["git", "make", "cc", "c++", "python3", "ssh", "sshd", "chromium", "chromedriver"]


@pytest.mark.slow
def test_a_tool_installed_by_hand_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the caller's PATH, and in no package of the base system or of the README."""
    machines.ccache(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    argv = [PROJECT / ".ci" / "run", "python3", "-c", FIND, "ccache", *NAMED]
    ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    if shutil.which("dpkg-query"):
        assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, NAMED, "")
    else:
        assert (ran.returncode, ran.stdout) == (1, "")
        assert ran.stderr.endswith("on Debian and Ubuntu only; next: make test\n")
