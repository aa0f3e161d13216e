"""The program over a real sshd: one line in hosts.yaml is all that changes, and what is wrong there is told."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dgxlab.agent.lock import BenchLock, Signature
from tests import machines, toy
from tests.sshd import ORDINARY, ORDINARY_UID, Sshd, sshd
from tests.transport.conftest import Client, Keys, dgxlab


@pytest.fixture
def project(tmp_path: Path, client: Client, server: Sshd) -> Path:
    folder = tmp_path / "project"
    for part in ("patches", "experiments"):
        (folder / part).mkdir(parents=True)
    pin = toy.make_repository(tmp_path / "repository")
    model = tmp_path / "toy.gguf"
    model.write_bytes(toy.GGUF)
    text = toy.SPEC.format(name="toy", pin=pin, repository=tmp_path / "repository", model=model)
    (folder / "experiments" / "toy.yaml").write_text(text)
    (folder / "hosts.yaml").write_text("toybox: {ssh: box}\n")
    client.host("box", server.port)
    return folder


def test_run_and_again(project: Path, client: Client, server: Sshd) -> None:
    client.knows(server.known_hosts_line())
    first = dgxlab(project, "run", "experiments/toy.yaml", "--host", "toybox")
    assert first.returncode == 0, first.stderr
    assert "| MUL_MAT | CPU | 4/4 | 1 | 4 | passed |" in first.stdout
    assert "host toybox" in first.stdout
    again = dgxlab(project, "run", "experiments/toy.yaml", "--host", "toybox")
    assert again.returncode == 0, again.stderr
    assert "0 measured now" in again.stderr
    (job,) = json.loads(dgxlab(project, "jobs", "--host", "toybox", "--format", "json").stdout)
    assert (job["host"], job["on_host"], job["recorded"]) == ("toybox", "done", "done")


def test_host_add_trusts_and_names(project: Path, server: Sshd) -> None:
    refused = dgxlab(project, "host", "add", "box", "--name", "mybox")
    assert refused.returncode == 2
    assert refused.stderr.endswith("\nnext: dgxlab host add box --name mybox\n")
    unknown = dgxlab(project, "run", "experiments/toy.yaml", "--host", "toybox")
    assert unknown.returncode == 3
    assert unknown.stderr.splitlines()[-1] == "next: dgxlab host add box --name toybox"
    added = dgxlab(project, "host", "add", "box", "--name", "mybox", "--yes")
    assert added.returncode == 0, added.stderr
    assert "SHA256:" in added.stderr
    listed = dgxlab(project, "host", "list").stdout.splitlines()
    assert ["mybox", "box", "~/.dgxlab"] in [line.split() for line in listed]
    checked = dgxlab(project, "host", "check", "mybox")
    assert checked.returncode == 0, checked.stderr
    assert "c++" in checked.stdout
    again = dgxlab(project, "host", "add", "box", "--name", "mybox")
    assert again.returncode == 0
    assert again.stdout.startswith("mybox ")
    assert again.stderr.startswith("box shows ssh-ed25519 SHA256:")
    assert again.stderr.endswith("/.config/dgxlab/known_hosts:1\n")


def test_host_add_of_a_key_that_ssh_knows(project: Path, client: Client, server: Sshd) -> None:
    """Shown and not asked about; a host of the project's own file is said to be there, and written nowhere else."""
    client.knows(server.known_hosts_line())
    added = dgxlab(project, "host", "add", "box", "--name", "toybox")
    assert (added.returncode, added.stdout.endswith(f" {project}/hosts.yaml\n")) == (0, True)
    assert added.stderr.endswith(f", known from {client.known_hosts}:1\n")
    assert not (client.home / ".config" / "dgxlab" / "hosts.yaml").exists()


def test_host_add_that_does_not_let_us_in(project: Path, client: Client) -> None:
    for path in (client.home / ".ssh").glob("id_*"):
        path.unlink()
    ran = dgxlab(project, "host", "add", "box", "--yes")
    assert ran.returncode == 3
    assert "does not let" in ran.stderr
    assert ran.stderr.endswith("\nnext: ssh -o BatchMode=yes box true\n")
    assert (client.home / ".config" / "dgxlab" / "known_hosts").exists()
    assert not (client.home / ".config" / "dgxlab" / "hosts.yaml").exists()


@pytest.mark.parametrize(
    ("destination", "better"),
    [("me@box", "me@box --name box"), ("ssh://me@box:22", "ssh://me@box:22 --name box"), ("a;b", "'a;b' --name box")],
)
def test_host_add_names_what_is_no_name(project: Path, destination: str, better: str) -> None:
    ran = dgxlab(project, "host", "add", destination)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (2, f"next: dgxlab host add {better}")


# -- doctor and host check -----------------------------------------------------------------------------------------

OLD = """#!/bin/sh
# imitates an old Python: this one, with another idea of its version
shift 2
exec {python} -ESc 'import sys
sys.version_info, code = (3, 8, 10), sys.argv.pop(1)
exec(code)' "$@"
"""


@pytest.fixture
def bare_project(tmp_path: Path, client: Client) -> Path:
    folder = tmp_path / "project"
    (folder / "patches").mkdir(parents=True)
    (folder / "hosts.yaml").write_text("box: {ssh: box}\n")
    return folder


@pytest.fixture
def bare(tmp_path: Path, keys: Keys, client: Client) -> Iterator[Sshd]:
    """A known server with git and a compiler for C, and neither Python nor anything else on its PATH."""
    folder = machines.programs(tmp_path / "bin", "git", "cc", "uname")
    config = f"SetEnv HOME={tmp_path}/there PATH={folder}\n"
    (tmp_path / "there").mkdir()
    with sshd(tmp_path / "sshd", keys.authorized, config=config) as running:
        client.add("box", running)
        yield running


def of_box(bare_project: Path) -> dict[str, dict[str, Any]]:
    """Return what doctor finds of the host, by name; it is never all well there."""
    ran = dgxlab(bare_project, "doctor", "box", "--format", "json")
    assert ran.returncode == 11, ran.stderr
    assert "Traceback" not in ran.stderr
    findings = json.loads(ran.stdout)
    assert [each["state"] for each in findings if each["name"] == "record"] == ["ok"]  # the client is told all the same
    return {each["name"]: each for each in findings if each["where"] == "box"}


@pytest.mark.parametrize("listens", [False, True])
def test_host_that_cannot_be_used(bare_project: Path, client: Client, server: Sshd, listens: bool) -> None:
    client.host("box", server.port if listens else 1)
    (only,) = of_box(bare_project).values()
    assert (only["name"], only["state"]) == ("reach", "missing")
    assert ("is not known" if listens else "Connection refused") in only["text"]
    assert only["next"] == "dgxlab host add box" if listens else only["next"]


def test_host_without_python(bare_project: Path, bare: Sshd) -> None:
    (only,) = of_box(bare_project).values()
    sentence = "host box has no python3 that can be started, and the agent needs Python 3.10 or newer"
    assert only["text"].startswith(sentence)
    ran = dgxlab(bare_project, "host", "check", "box")
    assert (ran.returncode, ran.stdout) == (4, "")
    assert ran.stderr.startswith(f"error: {sentence}: ")
    assert ran.stderr.endswith(f"\nnext: ${{EDITOR:-vi}} {bare_project}/hosts.yaml\n")


def test_host_with_an_old_python(bare_project: Path, bare: Sshd, tmp_path: Path) -> None:
    """Its version is named, not the first line of ours that it does not understand."""
    machines.script(tmp_path / "bin" / "python3", OLD.format(python=sys.executable))
    (only,) = of_box(bare_project).values()
    assert " python3 of version 3.8, " in only["text"]


# -- an account without any rights, on a machine that others measure on too ----------------------------------------

AS_ROOT = os.getuid() == 0
UID = ORDINARY_UID if AS_ROOT else os.getuid()


@pytest.fixture
def ordinary(keys: Keys) -> Iterator[Sshd]:
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
def plain(project: Path, client: Client, ordinary: Sshd) -> Path:
    """The project of the ssh tests, its host reached as the ordinary user, whose Python is the system's."""
    client.host("plain", ordinary.port, *([f"User {ORDINARY}"] if AS_ROOT else []))
    client.knows(ordinary.known_hosts_line())
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    assert python, "there is no python3 here that every user may run"
    own = client.home / ".config" / "dgxlab" / "hosts.yaml"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(f"plainbox: {{ssh: plain, python: {python}}}\n")
    model = ordinary.home / "toy.gguf"
    model.write_bytes(toy.GGUF)
    spec = project / "experiments" / "toy.yaml"
    spec.write_text(re.sub("(?m)^models:.*$", f"models: {{m: {{path: {model}}}}}", spec.read_text()))
    return project


@pytest.mark.network  # cmake and ninja are sent where that user finds none
def test_everything_is_that_users_own(plain: Path, ordinary: Sshd) -> None:
    ran = dgxlab(plain, "run", "experiments/toy.yaml", "--host", "plainbox")
    assert ran.returncode == 0, ran.stderr
    assert "| MUL_MAT | CPU | 4/4 | 1 | 4 | passed |" in ran.stdout
    root = ordinary.home / ".dgxlab"
    assert {path.stat().st_uid for path in (root, *root.rglob("*"))} == {UID}
    assert root.stat().st_mode & 0o077 == 0
    if AS_ROOT:
        assert f"{ORDINARY} at " in dgxlab(plain, "host", "check", "plainbox").stdout


@pytest.mark.network
@pytest.mark.skipif(not AS_ROOT, reason="the other user is root")
def test_another_users_lock_is_waited_for(plain: Path, ordinary: Sshd) -> None:
    theirs = BenchLock("cpu", [ordinary.locks])
    assert theirs.take(Signature("20260101-000000-theirs-abc123", "root"))
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
