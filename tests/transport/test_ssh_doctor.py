"""`dgxlab doctor` and `host check` of a host over a real sshd: what is wrong is said, whatever it is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import machines
from tests.sshd import Sshd, sshd
from tests.transport.conftest import Client, Keys, dgxlab

OLD = """#!/bin/sh
# imitates an old Python: this one, with another idea of its version
shift 2
exec {python} -ESc 'import sys
sys.version_info, code = (3, 8, 10), sys.argv.pop(1)
exec(code)' "$@"
"""


@pytest.fixture
def project(tmp_path: Path, client: Client) -> Path:
    """A project whose hosts.yaml names `box`."""
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
        client.host("box", running.port)
        client.knows(running.known_hosts_line())
        yield running


def of_box(project: Path) -> dict[str, dict[str, Any]]:
    """Return what doctor finds of the host, by name; it is never all well there."""
    ran = dgxlab(project, "doctor", "box", "--format", "json")
    assert ran.returncode == 11, ran.stderr
    assert "Traceback" not in ran.stderr
    findings = json.loads(ran.stdout)
    assert [each["state"] for each in findings if each["name"] == "record"] == ["ok"]  # the client is told all the same
    return {each["name"]: each for each in findings if each["where"] == "box"}


@pytest.mark.parametrize("listens", [False, True])
def test_host_that_cannot_be_used(project: Path, client: Client, server: Sshd, listens: bool) -> None:
    """Not there, or with a key that is not trusted: a line of its own, and everything about the client before it."""
    client.host("box", server.port if listens else 1)
    (only,) = of_box(project).values()
    assert (only["name"], only["state"]) == ("reach", "missing")
    assert ("is not known" if listens else "Connection refused") in only["text"]
    assert only["next"] == "dgxlab host add box" if listens else only["next"]


def test_host_without_python(project: Path, bare: Sshd) -> None:
    """Every command says so in a sentence that names hosts.yaml's key."""
    (only,) = of_box(project).values()
    sentence = "host box has no python3 that can be started, and the agent needs Python 3.10 or newer: its python: "
    sentence += "in hosts.yaml names one"
    assert only["text"] == sentence
    ran = dgxlab(project, "host", "check", "box")
    assert (ran.returncode, ran.stdout) == (4, "")
    assert ran.stderr.startswith(f"error: {sentence}\n")
    assert ran.stderr.endswith(f"\nnext: ${{EDITOR:-vi}} {project}/hosts.yaml\n")


def test_host_with_an_old_python(project: Path, bare: Sshd, tmp_path: Path) -> None:
    """Its version is named, not the first line of ours that it does not understand."""
    old = tmp_path / "bin" / "python3"
    old.write_text(OLD.format(python=sys.executable))
    old.chmod(0o755)
    (only,) = of_box(project).values()
    assert " python3 of version 3.8, " in only["text"]


def test_what_a_bare_host_lacks(project: Path, bare: Sshd) -> None:
    """Given a Python, it tells the rest; what the client sends is no fault."""
    (project / "hosts.yaml").write_text(f"box: {{ssh: box, python: {sys.executable}}}\n")
    assert dgxlab(project, "host", "trust", "box", "--yes").returncode == 0
    findings = of_box(project)
    assert [name for name, each in findings.items() if each["state"] == "missing"] == ["c++"]
    assert findings["c++"]["next"] == "ssh -t box sudo apt-get install g++"
    assert [findings[name]["state"] for name in ("cmake", "ninja", "ccache")] == ["note"] * 3
    assert findings["git"]["text"].endswith("/bin/git")
