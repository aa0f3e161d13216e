"""What programs on a host get from their surroundings."""

import json
import os
from pathlib import Path

import pytest

from dgxlab.agent import facts
from dgxlab.agent.environment import Settings, absent, base_env, measured_env, search_path, settings


def given(monkeypatch: pytest.MonkeyPatch, root: Path | None = None, **host: object) -> None:
    monkeypatch.setenv("DGXLAB_HOST", json.dumps(host))
    if root:
        monkeypatch.setenv("DGXLAB_ROOT", str(root))


@pytest.fixture(autouse=True)
def usual_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DGXLAB_LOCKS")  # which all tests use


def test_settings_as_the_client_sends_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settings() == Settings()
    assert settings().measured == {}
    given(monkeypatch, tmp_path, path_prepend=["~/bin", "/opt/x"], env={"CC": "gcc-12"}, lock="~/x", processors=[3, 5])
    home = Path(os.environ["HOME"])
    known = {"path_prepend": (home / "bin", Path("/opt/x")), "env": {"CC": "gcc-12"}, "lock": home / "x"}
    assert settings() == Settings(root=tmp_path, processors=(3, 5), **known)


def test_folders_of_locks_are_the_machines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, locks="/x", env={"DGXLAB_LOCKS": "/x"})
    assert settings().locks == ()
    monkeypatch.setenv("DGXLAB_LOCKS", "/var/lock:/srv/locks")
    assert settings().locks == (Path("/var/lock"), Path("/srv/locks"))
    given(monkeypatch)
    assert "DGXLAB_LOCKS" not in measured_env({})


def test_the_order_of_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sent = tmp_path / "tools" / "cmake-1" / "bin"
    sent.mkdir(parents=True)
    (sent / "cmake").write_bytes(b"x")
    monkeypatch.setenv("PATH", "/opt/login:/opt/last")
    given(monkeypatch, tmp_path, path_prepend=["/opt/first"])
    nvcc = [str(path.parent) for path in sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))[:1]]
    assert search_path().split(":") == ["/opt/first", "/opt/login", "/opt/last", str(sent), *nvcc]


def test_only_named_variables_are_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GGML_CUDA_FORCE_MMQ": "1", "CUDA_VISIBLE_DEVICES": "3", "CCACHE_DIR": "/c"}.items():
        monkeypatch.setenv(name, value)
    assert not {"GGML_CUDA_FORCE_MMQ", "CUDA_VISIBLE_DEVICES"} & set(base_env())
    given(monkeypatch, env={"CUDA_VISIBLE_DEVICES": "1", "X": "host"})
    env = measured_env({"X": "plan"})
    assert (env["CUDA_VISIBLE_DEVICES"], env["X"], env["CCACHE_DIR"]) == ("1", "plan", "/c")


def test_another_device_is_another_host_and_another_compiler_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = facts.host_id()
    given(monkeypatch, env={"CUDA_VISIBLE_DEVICES": "1"})
    other = facts.host_id()
    given(monkeypatch, env={"CCACHE_DIR": "/c", "CC": "gcc-12"})
    assert other != plain == facts.host_id()
    given(monkeypatch, processors=[0, 1])
    assert facts.host_id() not in (plain, other)
    assert base_env()["OMP_THREAD_LIMIT"] == "2"


def test_what_hosts_yaml_names_and_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mycc").symlink_to("/bin/sh")
    folders = [str(tmp_path / "bin"), str(tmp_path / "gone")]
    given(monkeypatch, path_prepend=folders, env={"CC": "mycc -m64", "CXX": "g++-99", "X": "g++-99"}, lock="/no/such")
    assert absent() == [("path_prepend", folders[1]), ("CXX", "g++-99"), ("lock", "/no")]
    given(monkeypatch, path_prepend=folders[:1], lock=str(tmp_path / "owner"))
    assert absent() == []
