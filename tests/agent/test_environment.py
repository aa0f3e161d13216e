"""What programs on a host get from their surroundings."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dgxlab.agent import environment, facts
from dgxlab.agent.environment import Settings, absent, base_env, measured_env, search_path, settings


def given(monkeypatch: pytest.MonkeyPatch, root: Path | None = None, **host: object) -> None:
    """Say what hosts.yaml says."""
    monkeypatch.setenv("DGXLAB_HOST", json.dumps(host))
    if root:
        monkeypatch.setenv("DGXLAB_ROOT", str(root))


@pytest.fixture(autouse=True)
def usual_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the locks that all tests use."""
    monkeypatch.delenv("DGXLAB_LOCKS")


def test_settings_as_the_client_sends_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tildes are this host's; an agent that was started by hand has none."""
    assert settings() == Settings()
    assert settings().measured == {}
    given(monkeypatch, tmp_path, path_prepend=["~/bin", "/opt/x"], env={"CC": "gcc-12"}, lock="~/gpu_bench_lock/owner")
    home = Path(os.environ["HOME"])
    expected = Settings(
        root=tmp_path,
        path_prepend=(home / "bin", Path("/opt/x")),
        env={"CC": "gcc-12"},
        lock=home / "gpu_bench_lock" / "owner",
    )
    assert settings() == expected


def test_folders_of_locks_are_the_machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the agent's environment, not from the client; programs do not get them."""
    given(monkeypatch, locks="/x", env={"DGXLAB_LOCKS": "/x"})
    assert settings().locks == ()
    monkeypatch.setenv("DGXLAB_LOCKS", "/var/lock:/srv/locks")
    assert settings().locks == (Path("/var/lock"), Path("/srv/locks"))
    given(monkeypatch)
    assert "DGXLAB_LOCKS" not in measured_env({})


def test_the_order_of_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What hosts.yaml prepends wins over the login's PATH, and that over what the client had to send."""
    sent = tmp_path / "tools" / "cmake-1" / "bin"
    sent.mkdir(parents=True)
    (sent / "cmake").write_bytes(b"x")
    monkeypatch.setenv("PATH", "/opt/login:/opt/last")
    given(monkeypatch, tmp_path, path_prepend=["/opt/first"])
    assert search_path().split(":")[:4] == ["/opt/first", "/opt/login", "/opt/last", str(sent)]


def test_nvcc_beside_the_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A PATH without nvcc gets the installed CUDA's folder, if there is one, at its end."""
    monkeypatch.setenv("PATH", str(tmp_path))
    installed = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    assert environment.search_path() == (f"{tmp_path}:{installed[0].parent}" if installed else str(tmp_path))


def test_only_what_is_named_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login's stray variable changes no result; hosts.yaml's and the plan's do, the plan's last."""
    for name, value in {"GGML_CUDA_FORCE_MMQ": "1", "CUDA_VISIBLE_DEVICES": "3", "CCACHE_DIR": "/c"}.items():
        monkeypatch.setenv(name, value)
    assert not {"GGML_CUDA_FORCE_MMQ", "CUDA_VISIBLE_DEVICES"} & set(base_env())
    given(monkeypatch, env={"CUDA_VISIBLE_DEVICES": "1", "X": "host"})
    env = measured_env({"X": "plan"})
    assert (env["CUDA_VISIBLE_DEVICES"], env["X"], env["CCACHE_DIR"]) == ("1", "plan", "/c")


def test_another_device_is_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of one GPU are no numbers of the other; a variable for the compiler changes nothing of that."""
    plain = facts.host_id()
    given(monkeypatch, env={"CUDA_VISIBLE_DEVICES": "1"})
    other = facts.host_id()
    given(monkeypatch, env={"CCACHE_DIR": "/c", "CC": "gcc-12"})
    assert other != plain == facts.host_id()


def test_what_is_named_and_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders, compilers and the folder of the owner file; what is there is not told, nor a file not yet signed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mycc").symlink_to("/bin/sh")
    folders = [str(tmp_path / "bin"), str(tmp_path / "gone")]
    given(monkeypatch, path_prepend=folders, env={"CC": "mycc -m64", "CXX": "g++-99", "X": "g++-99"}, lock="/no/such")
    assert absent() == [("path_prepend", folders[1]), ("CXX", "g++-99"), ("lock", "/no")]
    given(monkeypatch, path_prepend=folders[:1], lock=str(tmp_path / "owner"))
    assert absent() == []
