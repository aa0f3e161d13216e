"""docs/cluster.md, executed word for word: sshd as the login node of a real Slurm, the toy as its llama.cpp."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import toy
from tests.conftest import PROJECT
from tests.slurm import Slurm, slurm
from tests.sshd import make_key, sshd
from tests.test_tutorial import BLOCK

pytestmark = [pytest.mark.slow, pytest.mark.slurm]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as running:
        yield running


def test_the_page_about_clusters(cluster: Slurm, tmp_path: Path) -> None:
    """Every command exits with 0, and each node has its own numbers."""
    project, ssh = tmp_path / "project", tmp_path / "home" / ".ssh"
    (project / "experiments").mkdir(parents=True)
    (project / "patches").mkdir()
    (tmp_path / "toy.gguf").write_bytes(toy.GGUF)
    places = {"repository": tmp_path / "repository", "model": tmp_path / "toy.gguf"}
    spec = toy.SPEC.format(name="quickstart", pin=toy.make_repository(places["repository"]), **places)
    (project / "experiments" / "quickstart.yaml").write_text(spec)
    ssh.mkdir(mode=0o700)
    (tmp_path / "authorized").write_text(make_key(ssh / "id_ed25519"))
    login = tmp_path / "login"
    script = ["set -euo pipefail", f"PATH={Path(sys.executable).parent}:$PATH"]
    for language, title, text in BLOCK.findall((PROJECT / "docs" / "cluster.md").read_text()):
        if title:
            (project / title).write_text(text)
        elif language == "sh":
            script.append(text)
    with sshd(login, tmp_path / "authorized", env=cluster.env) as server:
        (ssh / "config").write_text(f"Host login\n  HostName 127.0.0.1\n  Port {server.port}\n")
        (ssh / "known_hosts").write_text(f"{server.known_hosts_line()}\n")
        argv = ["bash", "-c", "\n".join(script)]
        ran = subprocess.run(argv, cwd=project, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"submit +sbatch: Job \d+ to start|submit +Job \d+ to start", ran.stdout)
    assert "is shared with node node" in ran.stdout
    assert re.search(r"job \S+ is queued on cluster: PENDING.*, Slurm job \d+|job \S+ runs on cluster", ran.stderr)
    assert "0 measured now" in ran.stderr
    assert "2 hosts, 2 of 2 devices measured" in ran.stderr
    assert "3 experiments on 2 hosts, 3 of 3 experiments measured" in ran.stderr
    assert len(re.findall(r"over 2 devices: \d", ran.stdout)) == 2  # ab, and its report again
    assert re.search(r"(?m)^\| cluster/node1 \| +\d", ran.stdout)
    assert re.search(r"(?m)^\| cluster/node2 \| +\d", ran.stdout)
