"""Wheels of build tools: which one suits a host, and none but the one that is known by its digest."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from dgxlab.source import wheels
from dgxlab.source.wheels import GLIBC, WHEELS, NoWheel, Wheel, fetch, find
from tests.repos import quiet


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for wheels, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def publish(index: Path, machine: str = "aarch64") -> Wheel:
    """Put a wheel for a machine, seldom this one, into the index."""
    path = index / f"toytool-1.0-py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toytool/data/bin/toytool", "#!/bin/sh\necho 1.0\n")
        archive.writestr("toytool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toytool\nVersion: 1.0\n")
        archive.writestr("toytool-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: py3-none-manylinux2014_{machine}\n")
        archive.writestr("toytool-1.0.dist-info/RECORD", "")
    return Wheel("toytool", "1.0", machine, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_machine_has_both_tools_in_one_version(machine: str) -> None:
    """A DGX Spark and any other box build with the same cmake and ninja."""
    found = [find(name, machine, "2.39") for name in ("cmake", "ninja")]
    assert {(wheel.name, wheel.version) for wheel in found} == {(wheel.name, wheel.version) for wheel in WHEELS}


@pytest.mark.parametrize(
    ("machine", "glibc", "cause"),
    [
        ("riscv64", "2.39", "there is none to send for riscv64"),
        ("x86_64", "2.5", "needs glibc 2.17, it has 2.5"),
        ("x86_64", "", "needs glibc 2.17, it has none"),
    ],
)
def test_a_host_that_no_wheel_suits(machine: str, glibc: str, cause: str) -> None:
    """Another processor, an old or another C library: said before anything is fetched."""
    assert GLIBC == (2, 17)
    with pytest.raises(NoWheel, match=cause):
        find("cmake", machine, glibc)


def test_fetched_once(index: Path, tmp_path: Path) -> None:
    """Real pip gives another machine's wheel; the second time it is in the cache, and no index is asked."""
    wheel = publish(index)
    path = fetch(wheel, quiet, tmp_path / "cache")
    next(index.iterdir()).unlink()
    said: list[str] = []
    assert fetch(wheel, said.append, tmp_path / "cache") == path
    assert said == []
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256
    assert list(path.parent.iterdir()) == [path]


def test_the_users_cache(index: Path, tmp_path: Path) -> None:
    """It lies beside the pins."""
    assert fetch(publish(index), quiet).parent == tmp_path / "home" / ".cache" / "dgxlab" / "wheels"


def test_a_spoilt_copy_is_fetched_again(index: Path, tmp_path: Path) -> None:
    """A cache is only as good as its digest."""
    wheel = publish(index)
    path = fetch(wheel, quiet, tmp_path / "cache")
    path.write_bytes(path.read_bytes()[:-1])
    assert hashlib.sha256(fetch(wheel, quiet, tmp_path / "cache").read_bytes()).hexdigest() == wheel.sha256


def test_another_file_of_the_same_name_is_refused(index: Path, tmp_path: Path) -> None:
    """An index cannot give another program than the one that is known."""
    wheel = Wheel("toytool", "1.0", "aarch64", "0" * 64)
    publish(index)
    with pytest.raises(NoWheel, match=r"has another toytool-1\.0-.* than is expected"):
        fetch(wheel, quiet, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_index(index: Path, tmp_path: Path) -> None:
    """Pip's own cause is kept, and nothing is left behind."""
    with pytest.raises(NoWheel, match="pip finds no version of it at all"):
        fetch(WHEELS[0], quiet, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.network
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: f"{wheel.name}-{wheel.machine}")
def test_the_real_ones(wheel: Wheel, tmp_path: Path) -> None:
    """The package index has each of them, for both machines, whichever this is."""
    try:
        path = wheels.fetch(wheel, quiet, tmp_path / "cache")
    except NoWheel as error:
        if "package index" in str(error):
            pytest.skip(f"no package index here: {error}")
        raise
    assert zipfile.ZipFile(path).testzip() is None
