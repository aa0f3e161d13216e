"""The git program as it is run here."""

import os
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.source import PinCache
from dgxlab.source.git import Git, reason
from tests.repos import commit, git, upstream


@pytest.mark.parametrize(
    ("err", "cause"),
    [
        ("", "it gave no reason"),
        ("warning: x\nfatal: early EOF\n", "early EOF"),
        ("remote: Counting\nfatal: remote error: upload-pack: not our ref abc\n", "upload-pack: not our ref abc"),
        (
            "ssh: connect to host box port 22: No route to host\r\nfatal: Could not read from remote repository.\n\n"
            "Please make sure you have the correct access rights\n",
            "ssh: connect to host box port 22: No route to host",
        ),
        ("error: RPC failed; curl 56\nfatal: the remote end hung up\n", "RPC failed; curl 56"),
        ("something else\n", "something else"),
    ],
)
def test_reason(err: str, cause: str) -> None:
    assert reason(err) == cause


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SpecError, match="not installed") as caught:
        PinCache(tmp_path / "cache").ensure("a" * 40, ["/x"], lambda line: None)
    assert "apt-get install git" in caught.value.next
    with pytest.raises(SpecError, match="not installed"):
        Git(tmp_path).follow("version", on_line=lambda line: None)


def test_nothing_of_the_user_gets_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own commands see neither configuration files nor GIT variables; the user's see the former."""
    upstream(tmp_path / "clone")
    (Path.home() / ".gitconfig").write_text("[user]\n name = Someone\n")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "user.email")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "x@y")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere")
    ours, users = Git(tmp_path / "clone/.git"), Git.checkout(tmp_path / "clone")
    assert "user." not in ours.run("config", "--list")
    assert {"user.name=Someone", "user.email=x@y"} <= set(users.run("config", "--list").splitlines())
    assert "GIT_INDEX_FILE" not in ours.env() | users.env()
    assert os.environ["GIT_INDEX_FILE"] == "/nowhere"


def test_no_token_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Git gets what it needs to find files, the network and agents; only the user's git gets GIT variables."""
    wanted = {"HTTPS_PROXY": "http://p", "no_proxy": "x", "SSH_AUTH_SOCK": "/s", "LC_TIME": "C", "GIT_SSH_COMMAND": "s"}
    secret = {"HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "k", "PIP_INDEX_URL": "https://u:p@i"}
    for name, value in {**wanted, **secret}.items():
        monkeypatch.setenv(name, value)
    ours, users = Git(tmp_path).env(), Git(tmp_path).configured(user=True).env()
    assert not secret.keys() & (ours.keys() | users.keys())
    assert wanted.items() <= users.items()
    assert ours.keys() & wanted.keys() == wanted.keys() - {"GIT_SSH_COMMAND"}


def test_replaced_objects_do_not_count(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    first = upstream(clone)
    second = commit(clone, {"ggml/ggml.c": "2\n"})
    git(clone, "replace", first, second)
    assert git(clone, "cat-file", "blob", f"{first}:ggml/ggml.c") == "2"
    assert Git(clone / ".git").run("cat-file", "blob", f"{first}:ggml/ggml.c") != "2"
