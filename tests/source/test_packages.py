"""What comes from the package index: llama.cpp's sdist and wheels of build tools, made here and the real ones."""

import gzip
import hashlib
import io
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.source import PinCache
from dgxlab.source.packages import WHEELS, SourceError, Wheel, fetch_wheel, find_wheel, pip_cause
from tests.journals import PIN
from tests.machines import script
from tests.ports import kept_port
from tests.repos import commit, git, quiet, upstream

GITDIR = "toy_python-1.0/.git/modules/vendor/llama.cpp"

BACKEND = """
import pathlib
pathlib.Path.home().joinpath("backend-ran").touch()
"""

PROJECT = {
    "toy_python-1.0/pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "toy_python-1.0/backend.py": BACKEND,
    "toy_python-1.0/PKG-INFO": "Metadata-Version: 2.1\nName: toy-python\nVersion: 1.0\n",
}


@pytest.fixture
def pin(tmp_path: Path) -> str:
    """A toy commit with a history that the archive does not carry."""
    where = tmp_path / "clone"
    upstream(where)
    return commit(where, {"ggml/ggml.c": "second\n"})


@pytest.fixture
def gitdir(pin: str, tmp_path: Path) -> Path:
    """The git directory of a shallow clone at the pin, as a submodule checkout in an archive has it."""
    where = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth=1", (tmp_path / "clone").as_uri(), str(where))
    git(where, "checkout", "--quiet", "--detach")
    return where / ".git"


def archive(path: Path, folder: Path, prefix: str = GITDIR, extra: Mapping[str, str | tarfile.TarInfo] = {}) -> Path:
    """Write a .tar.gz with a git directory at `prefix`, and further members by name."""
    with tarfile.open(path, "w:gz") as tar:
        tar.add(folder, prefix)
        for name, member in {**PROJECT, **extra}.items():
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                entry = tarfile.TarInfo(name)
                entry.size = len(member)
                tar.addfile(entry, io.BytesIO(member.encode()))
    return path


@pytest.mark.parametrize("prefix", [GITDIR, "x-1/vendor/llama.cpp/.git"])
def test_archive_file(prefix: str, pin: str, gitdir: Path, cache: PinCache, tmp_path: Path) -> None:
    cache.ensure(pin, [str(archive(tmp_path / "toy.tar.gz", gitdir, prefix))], quiet)
    assert cache.git.run("cat-file", "blob", f"{pin}:ggml/ggml.c") == "second"
    assert list((cache.path / "tmp").iterdir()) == []


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which pip looks for packages, and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def test_through_pip(
    pin: str, gitdir: Path, index: Path, cache: PinCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real pip finds the archive where it is configured to look, and runs nothing: no backend, no pip.py lying here."""
    archive(index / "toy_python-1.0.tar.gz", gitdir)
    (tmp_path / "pip.py").write_text(BACKEND)
    monkeypatch.chdir(tmp_path)
    cache.trusted = True
    with pytest.raises(SpecError, match="pip finds no"):
        cache.ensure(pin, ["pypi:llama-toy==1.0"], quiet)
    with pytest.raises(SpecError, match=r"toy-python==2\.0"):
        cache.ensure(pin, ["pypi:toy-python==2.0"], quiet)
    cache.ensure(pin, ["pypi:toy-python==1.0"], quiet)
    assert cache.git.run("cat-file", "blob", f"{pin}:ggml/ggml.c") == "second"
    assert not Path.home().joinpath("backend-ran").exists()


@pytest.mark.parametrize(
    "source", ["pypi:toy-python==1.0", "pypi:llama-cpp-pyhton==0.3.30", "pypi:llama_cpp.python==9"]
)
def test_a_package_that_is_not_known(source: str, pin: str, index: Path, cache: PinCache) -> None:
    """Another name, or a version whose digest is not known, needs the user's word; no index is asked before."""
    lines: list[str] = []
    with pytest.raises(SpecError) as caught:
        cache.ensure(pin, [source, str(index)], lines.append)
    assert "without --trust-source" in caught.value.details
    assert caught.value.next.endswith("with --trust-source")
    assert not any(line.startswith("Downloading") for line in lines)


def test_another_file_than_the_known_one(pin: str, gitdir: Path, index: Path, cache: PinCache) -> None:
    archive(index / "llama_cpp_python-0.3.30.tar.gz", gitdir)
    with pytest.raises(SpecError, match=r"has another llama_cpp_python-0\.3\.30\.tar\.gz"):
        cache.ensure(pin, ["pypi:llama-cpp-python==0.3.30"], quiet)


def test_archive_without_the_commit(pin: str, gitdir: Path, cache: PinCache, tmp_path: Path) -> None:
    """The error says which commit the archive carries instead, if any."""
    for prefix, cause in (
        (GITDIR, f"it has no commit aaaaaaaaaaaa, it carries {pin[:12]}"),
        ("toy-1/.git", r"carries no git repository of llama\.cpp"),
    ):
        with pytest.raises(SpecError, match=cause):
            cache.ensure("a" * 40, [str(archive(tmp_path / "toy.tar.gz", gitdir, prefix))], quiet)


@pytest.mark.parametrize("damage", ["cut", "cut at the end", "flipped", "not gzip", "gzip of noise", "empty"])
def test_damaged_archive(damage: str, pin: str, gitdir: Path, cache: PinCache, tmp_path: Path) -> None:
    path = archive(tmp_path / "toy.tar.gz", gitdir)
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "cut": whole[:middle],
            "cut at the end": whole[:-4],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 0xFF]) + whole[middle + 1 :],
            "not gzip": b"<html>not found</html>",
            "gzip of noise": gzip.compress(b"noise" * 1000),
            "empty": b"",
        }[damage]
    )
    with pytest.raises(SpecError, match=r"toy\.tar\.gz (is damaged|carries no)"):
        cache.ensure(pin, [str(path)], quiet)
    assert not cache.has(pin)
    cache.ensure(pin, [str(path), str(tmp_path / "clone")], quiet)
    assert cache.has(pin)


def test_hostile_archive(pin: str, gitdir: Path, cache: PinCache, tmp_path: Path) -> None:
    """Nothing of an archive is written outside, linked, run or believed."""
    link = tarfile.TarInfo(f"{GITDIR}/objects/ab/{'c' * 38}")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    folder = tarfile.TarInfo(f"{GITDIR}/objects/pack/pack-{'d' * 40}.pack")
    folder.type = tarfile.DIRTYPE
    evil = f"#!/bin/sh\ntouch {tmp_path}/was-here\n"
    extra = {
        f"{GITDIR}/../../../../../outside": "x",
        f"/{GITDIR}/objects/ab/{'a' * 38}": "x",
        f"{GITDIR}/objects/../../../../../{'b' * 38}": "x",
        f"{GITDIR}/hooks/post-checkout": evil,
        f"{GITDIR}/objects/info/alternates": "/\n",
        f"{GITDIR}/config": f"[core]\n fsmonitor = {tmp_path}/evil\n[uploadpack]\n packObjectsHook = {tmp_path}/evil\n",
        link.name: link,
        folder.name: folder,
    }
    script(tmp_path / "evil", evil)
    before = {path.name for path in tmp_path.iterdir()}
    path = archive(tmp_path / "toy.tar.gz", gitdir, extra=extra)
    cache.ensure(pin, [str(path)], quiet)
    assert cache.git.run("cat-file", "blob", f"{pin}:ggml/ggml.c") == "second"
    assert {path.name for path in tmp_path.iterdir()} == before | {"toy.tar.gz", "cache"}


def test_huge_claim(pin: str, gitdir: Path, cache: PinCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgxlab.source.packages.SIZE_LIMIT", 100)
    with pytest.raises(SpecError, match="too much"):
        cache.ensure(pin, [str(archive(tmp_path / "toy.tar.gz", gitdir))], quiet)


@pytest.mark.network
def test_the_real_one(tmp_path: Path) -> None:
    """The sdist on the package index carries llama.cpp at the very pin; sources before it may fail."""
    cache = PinCache(tmp_path / "cache")
    closed, port = kept_port()
    lines: list[str] = []
    try:
        cache.ensure(PIN, [f"http://127.0.0.1:{port}/llama.cpp", "pypi:llama-cpp-python==0.3.30"], lines.append)
    except SpecError as error:
        if "package index" in error.details:
            pytest.skip(f"no package index here: {error.details}")
        raise
    finally:
        closed.close()
    assert cache.git.run("rev-parse", f"{PIN}^{{tree}}") == "b86f2b55024aef84c7fd09860893a35411ad58d2"
    assert len(cache.git.run("ls-tree", "-r", "--name-only", PIN).splitlines()) == 2977
    assert any(line.startswith("Downloading") for line in lines)


# -- wheels ------------------------------------------------------------------------------------------------------------


def publish(index: Path, machine: str = "aarch64") -> Wheel:
    """Put a wheel for a machine, seldom this one, into the index."""
    path = index / f"toytool-1.0-py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("toytool/data/bin/toytool", "#!/bin/sh\necho 1.0\n")
        archive.writestr("toytool-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toytool\nVersion: 1.0\n")
        archive.writestr("toytool-1.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: py3-none-manylinux2014_{machine}\n")
        archive.writestr("toytool-1.0.dist-info/RECORD", "")
    return Wheel("toytool", "1.0", machine, hashlib.sha256(path.read_bytes()).hexdigest())


def test_every_machine_has_both_tools_in_one_version() -> None:
    """A DGX Spark and any other box build with the same cmake and ninja."""
    for machine in ("x86_64", "aarch64"):
        wheels = [find_wheel(name, machine, "2.39") for name in ("cmake", "ninja")]
        assert {(wheel.name, wheel.version) for wheel in wheels} == {(wheel.name, wheel.version) for wheel in WHEELS}


@pytest.mark.parametrize(
    ("machine", "glibc", "cause"),
    [
        ("riscv64", "2.39", "there is none to send for riscv64"),
        ("x86_64", "2.5", "needs glibc 2.17, it has 2.5"),
        ("x86_64", "", "needs glibc 2.17, it has none"),
    ],
)
def test_a_host_that_no_wheel_suits(machine: str, glibc: str, cause: str) -> None:
    with pytest.raises(SourceError, match=cause):
        find_wheel("cmake", machine, glibc)


def test_fetched_once(index: Path, tmp_path: Path) -> None:
    """Real pip gives another machine's wheel; from then on it is in the cache, unless its digest is wrong."""
    wheel = publish(index)
    folder = tmp_path / "home" / ".cache" / "dgxlab" / "wheels"
    folder.mkdir(parents=True)
    (folder / "toytool-1.0-aarch64.whl").write_bytes(b"damaged")
    path = fetch_wheel(wheel, quiet)
    assert path.parent == folder
    next(index.iterdir()).unlink()
    lines: list[str] = []
    assert fetch_wheel(wheel, lines.append) == path
    assert lines == []
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256
    assert list(path.parent.iterdir()) == [path]


def test_another_file_of_the_same_name_is_refused(index: Path, tmp_path: Path) -> None:
    wheel = Wheel("toytool", "1.0", "aarch64", "0" * 64)
    publish(index)
    with pytest.raises(SourceError, match=r"has another toytool-1\.0-.* than is expected"):
        fetch_wheel(wheel, quiet, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.network
@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: f"{wheel.name}-{wheel.machine}")
def test_the_real_ones(wheel: Wheel, tmp_path: Path) -> None:
    """The package index has each of them, for both machines, whichever this is."""
    try:
        path = fetch_wheel(wheel, quiet, tmp_path / "cache")
    except SourceError as error:
        if "package index" in str(error):
            pytest.skip(f"no package index here: {error}")
        raise
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('<pip._vendor.urllib3."
            "connection.HTTPSConnection object at 0x7f>: Failed to establish a new connection: [Errno 111] Connection "
            "refused')': /simple/x/\nERROR: No matching distribution found for x==1",
            "pip reaches no package index: Failed to establish a new connection: [Errno 111] Connection refused",
        ),
        ("Traceback\nModuleNotFoundError: No module named 'pip'", "pip is not installed for "),
        ("Location 'file:///x' is ignored\nERROR: No matching distribution", "No matching distribution"),
        ("ERROR: [Errno 28] No space left on device: '/x'", "[Errno 28] No space left on device: '/x'"),
        ("", "it gave no reason"),
    ],
)
def test_what_pip_says(output: str, expected: str) -> None:
    assert pip_cause(output).startswith(expected)
