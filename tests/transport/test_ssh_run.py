"""`dgxlab run --host` over a real sshd: one line in hosts.yaml is all that changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import toy
from tests.sshd import Sshd
from tests.transport.conftest import Client, dgxlab

SPEC = """
name: toy
llama_cpp: {{pin: "{pin}", sources: [{repository}]}}
models: {{m: {{path: {model}}}}}
gates:
  - backend-ops: {{op: MUL_MAT, backend: CPU, expect: 4/4, unsupported: 1}}
bench:
  - llama-bench: {{model: m, n_prompt: [16, 32], n_gen: 4}}
"""


@pytest.fixture
def project(tmp_path: Path, client: Client, server: Sshd) -> Path:
    """A project with a toy experiment and a hosts.yaml that names the server."""
    folder = tmp_path / "project"
    for part in ("patches", "experiments"):
        (folder / part).mkdir(parents=True)
    pin = toy.make_repository(tmp_path / "repository")
    model = tmp_path / "toy.gguf"
    model.write_bytes(b"GGUF" + bytes(60))
    text = SPEC.format(pin=pin, repository=tmp_path / "repository", model=model)
    (folder / "experiments" / "toy.yaml").write_text(text)
    (folder / "hosts.yaml").write_text("toybox: {ssh: box}\n")
    client.host("box", server.port)
    return folder


def test_run_and_again(project: Path, client: Client, server: Sshd) -> None:
    """Built, gated, measured and recorded there; the second time nothing is measured; jobs asks the host."""
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
    """The fingerprint is shown; afterwards the host can be used under its name; a no writes nothing."""
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
    """Exit code 3 and ssh's own sentence: the key stays trusted, no entry is written."""
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
    """With a command that works as it is printed."""
    ran = dgxlab(project, "host", "add", destination)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (2, f"next: dgxlab host add {better}")
