"""Build tools from wheels: whole, inside their folder, and run once before they are found on PATH."""

from __future__ import annotations

import hashlib
import io
import stat
import sys
import threading
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgxlab.agent.__main__ import main
from dgxlab.agent.environment import Root, search_path
from dgxlab.agent.wheels import unpack
from dgxlab.errors import AGAIN, RemoteError

SCRIPT = "#!/bin/sh\necho toy version 1.0\n"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """An empty root."""
    empty = Root(tmp_path / "root")
    empty.create()
    return empty


def wheel(files: Mapping[str, str], mode: int = 0o755) -> bytes:
    """Return a zip; every file has the same mode."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (mode | stat.S_IFREG if not stat.S_IFMT(mode) else mode) << 16
            archive.writestr(entry, text)
    return buffer.getvalue()


def take(root: Root, content: bytes, sha256: str = "") -> None:
    """Unpack a wheel of `toy` 1.0."""
    unpack(root, "toy", "1.0", sha256 or hashlib.sha256(content).hexdigest(), io.BytesIO(content))


def tools(root: Root) -> dict[str, int]:
    """Return every file under tools with its mode."""
    files = (path for path in root.tools.rglob("*") if path.is_file())
    return {str(path.relative_to(root.tools)): stat.S_IMODE(path.stat().st_mode) for path in files}


@pytest.mark.parametrize(
    ("files", "unpacked"),
    [
        (
            {"toy/data/bin/toy": SCRIPT, "toy/data/share/x/y.txt": "y", "toy/__init__.py": "raise"},
            {"toy-1.0/bin/toy": 0o755, "toy-1.0/share/x/y.txt": 0o755},
        ),
        ({"toy-1.0.data/scripts/toy": SCRIPT, "toy-1.0.dist-info/RECORD": ""}, {"toy-1.0/bin/toy": 0o755}),
    ],
    ids=["cmake", "ninja"],
)
def test_the_tool_is_unpacked_without_the_files_of_python(
    root: Root, files: dict[str, str], unpacked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the verb that the client calls. Data has bin and share side by side, scripts are its bin."""
    content = wheel(files)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert main(["tool", str(root.path), "toy", "1.0", hashlib.sha256(content).hexdigest()]) == 0
    assert tools(root) == unpacked


def test_several_at_once_and_again(root: Root) -> None:
    """All of them succeed, one tool is there, and as it may be in use it stays the very files it was."""
    content = wheel({"toy/data/bin/toy": SCRIPT, **{f"toy/data/share/{n}": "x" * n for n in range(200)}})
    failures: list[BaseException] = []

    def send() -> None:
        try:
            take(root, content)
        except BaseException as error:  # a thread's own would be lost
            failures.append(error)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [path.name for path in root.tools.iterdir()] == ["toy-1.0"]
    assert len(tools(root)) == 201
    before = (root.tools / "toy-1.0" / "bin" / "toy").stat()
    take(root, content)
    after = (root.tools / "toy-1.0" / "bin" / "toy").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (wheel({"toy/data/../../../outside": "x"}), "would be written elsewhere"),
        (wheel({"toy/data//etc/outside": "x"}), "would be written elsewhere"),
        (wheel({"toy/data/bin/toy": "/bin/true"}, stat.S_IFLNK | 0o777), "would be written elsewhere"),
        (wheel({"toy/data/bin/toy": SCRIPT})[:-30], "is damaged"),
        (b"<html>not found</html>", "is damaged"),
        (b"", "is damaged"),
        (wheel({"toy/data/bin/toy": SCRIPT}).replace(b"toy version", b"boy version"), "is damaged"),
    ],
    ids=["parent", "absolute", "link", "cut", "page", "empty", "flipped"],
)
def test_damaged_or_hostile(root: Root, content: bytes, cause: str, tmp_path: Path) -> None:
    """Nothing is written outside, and nothing is left inside."""
    with pytest.raises(RemoteError, match=cause):
        take(root, content)
    assert list(root.tools.iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_a_cut_connection(root: Root) -> None:
    """It looks like the end of the stream; the digest tells."""
    content = wheel({"toy/data/bin/toy": SCRIPT})
    with pytest.raises(RemoteError, match=r"toy 1\.0 did not arrive whole") as caught:
        take(root, content[:100], hashlib.sha256(content).hexdigest())
    assert caught.value.next == AGAIN
    assert list(root.tools.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "mode", "cause"),
    [
        ("#!/bin/sh\necho toy: libtoy.so.6: cannot open shared object file >&2\nexit 127\n", 0o755, "libtoy.so.6: can"),
        ("\x7fELF of another machine", 0o755, "Exec format error"),
        (SCRIPT, 0o644, "Permission denied"),
    ],
)
def test_a_tool_that_does_not_run_is_not_kept(root: Root, program: str, mode: int, cause: str) -> None:
    """Its own words, the command that mends it, and nothing for PATH to find."""
    with pytest.raises(RemoteError, match=cause) as caught:
        take(root, wheel({"toy/data/bin/toy": program}, mode))
    assert "apt-get install cmake ninja-build" in caught.value.next
    assert list(root.tools.iterdir()) == []


def test_a_disk_that_takes_nothing(root: Root) -> None:
    """What cannot be written is said, with where to look."""
    root.tools.rmdir()
    with pytest.raises(RemoteError, match=r"toy 1\.0 cannot be written on the host: No such file") as caught:
        take(root, wheel({"toy/data/bin/toy": SCRIPT}))
    assert caught.value.next == f"df -h {root.tools}"


def test_a_tool_that_a_power_loss_emptied_is_replaced(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program is not found on PATH, so that it is sent again, and then the whole one takes its place."""
    content = wheel({"toy/data/bin/toy": SCRIPT})
    take(root, content)
    monkeypatch.setenv("DGXLAB_ROOT", str(root.path))
    folder = root.tools / "toy-1.0" / "bin"
    assert str(folder) in search_path().split(":")
    (folder / "toy").write_bytes(b"")
    assert str(folder) not in search_path().split(":")
    take(root, content)
    assert str(folder) in search_path().split(":")
