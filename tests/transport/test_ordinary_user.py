"""An account without any rights on a machine that others measure on too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.agent.lock import BenchLock
from tests.sshd import ORDINARY, ORDINARY_UID, Sshd, sshd
from tests.transport.conftest import Client, Keys, dgxlab
from tests.transport.test_ssh_run import project

__all__ = ["project"]

pytestmark = pytest.mark.network  # cmake and ninja are sent where that user finds none

AS_ROOT = os.getuid() == 0
UID = ORDINARY_UID if AS_ROOT else os.getuid()


@pytest.fixture
def server(keys: Keys) -> Iterator[Sshd]:
    """Run an sshd as an ordinary user, where that user can reach it."""
    folder = Path(tempfile.mkdtemp(prefix="dgxlab-ordinary-"))
    folder.chmod(0o755)
    shutil.copy(keys.authorized, folder / "authorized_keys")
    (folder / "authorized_keys").chmod(0o644)
    try:
        with sshd(folder / "box", folder / "authorized_keys", ordinary=True) as running:
            yield running
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def plain(project: Path, client: Client, server: Sshd) -> Path:
    """The project of the ssh tests, its host reached as the ordinary user, whose Python is the system's."""
    client.host("plain", server.port, *([f"User {ORDINARY}"] if AS_ROOT else []))
    client.knows(server.known_hosts_line())
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    assert python, "there is no python3 here that every user may run"
    own = client.home / ".config" / "dgxlab" / "hosts.yaml"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(f"plainbox: {{ssh: plain, python: {python}}}\n")
    model = server.home / "toy.gguf"
    model.write_bytes(b"GGUF" + bytes(60))
    spec = project / "experiments" / "toy.yaml"
    spec.write_text(
        "".join(
            f"models: {{m: {{path: {model}}}}}\n" if "models:" in line else line
            for line in spec.read_text().splitlines(keepends=True)
        )
    )
    return project


def test_everything_is_that_users_own(plain: Path, server: Sshd) -> None:
    """Built, gated and measured without a right; no other user can read it."""
    ran = dgxlab(plain, "run", "experiments/toy.yaml", "--host", "plainbox")
    assert ran.returncode == 0, ran.stderr
    assert "| MUL_MAT | CPU | 4/4 | 1 | 4 | passed |" in ran.stdout
    root = server.home / ".dgxlab"
    assert {path.stat().st_uid for path in (root, *root.rglob("*"))} == {UID}
    assert root.stat().st_mode & 0o077 == 0
    if AS_ROOT:
        assert f"user {ORDINARY}" in dgxlab(plain, "host", "check", "plainbox").stdout


@pytest.mark.skipif(not AS_ROOT, reason="the other user is root")
def test_another_users_lock_is_waited_for(plain: Path, server: Sshd) -> None:
    """Who holds it is said across users; the job goes on when it comes free."""
    theirs = BenchLock("cpu", [server.locks])
    assert theirs.take({"job": "20260101-000000-theirs-abc123", "user": "root"})
    argv = [sys.executable, "-m", "dgxlab", "run", "experiments/toy.yaml", "--host", "plainbox"]
    with subprocess.Popen(argv, cwd=plain, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
        assert client.stderr is not None
        printed = []
        for line in client.stderr:
            printed.append(line)
            if line.startswith("waiting for the device"):
                break
        assert "is held by job 20260101-000000-theirs-abc123 of root, since" in printed[-1], "".join(printed)
        threading.Timer(0.2, theirs.release).start()
        printed += client.stderr.readlines()
        page = client.stdout.read() if client.stdout else ""
    assert client.returncode == 0, "".join(printed)
    assert "4/4" in page
