"""Errors of the operating system, full disks, and build tools from wheels."""

import errno
import hashlib
import io
import json
import stat
import sys
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dgxlab.agent import files
from dgxlab.agent.__main__ import main
from dgxlab.agent.environment import Root, search_path
from dgxlab.agent.files import unpack
from dgxlab.agent.gates import run_gate
from dgxlab.agent.measure import Workbench
from dgxlab.agent.work import Worker
from dgxlab.errors import AGAIN, GateFailed, RemoteError
from dgxlab.model import ARM, CheckCommand, Expectation, GateStep, ParityGate
from dgxlab.model.events import GateEvent
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests.conftest import GOLDEN
from tests.journals import read
from tests.machines import programs

SCRIPT = "#!/bin/sh\necho toy version 1.0\n"


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGXLAB_HOST", json.dumps({"name": "dgx"}))


@pytest.mark.parametrize(
    ("error", "cause", "next"),
    [
        (OSError(errno.ENOSPC, "x"), "the disk of dgx is full", files.clean_command),
        (OSError(errno.EDQUOT, "x"), "the disk of dgx is full", files.clean_command),
        (OSError(errno.EIO, "x"), "an I/O error on the disk of dgx", None),
        (OSError(errno.EACCES, "no", "/x"), "[Errno 13] no: '/x'", None),
        (OSError(errno.ENOENT, "no", "no-such-git"), "there is no no-such-git on dgx", None),
    ],
)
def test_errors_of_the_system(error: OSError, cause: str, next: Callable[[], str] | None) -> None:
    told = files.remote_error("submit", error)
    assert told.message == f"submit failed: {cause}"
    assert told.next == (next() if next else "dgxlab doctor dgx")


def test_a_verb_on_a_host_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(programs(tmp_path / "bin")))
    host = Host(LocalTransport(str(tmp_path / "root"), python=sys.executable))
    with pytest.raises(RemoteError, match=r"^receive failed: .* git") as caught:
        host.send_objects("a" * 40, ["a" * 40], lambda: [b"PACK"])
    assert "Traceback" not in caught.value.message + caught.value.details


def test_a_gate_on_a_full_disk_blames_the_disk(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If it printed nothing that was kept; not if it printed its failing cases."""
    assert files.full_disk(tmp_path) == ""
    monkeypatch.setattr(files, "NEARLY_FULL", 1 << 62)

    def gated(*argv: str) -> GateEvent:
        gate = ParityGate("MUL_MAT", "CPU", Expectation(1, 1), 0)
        step = GateStep("gate:0", "one", gate, (CheckCommand(ARM, argv, {}),))
        return run_gate(bench, step)

    gate = gated("echo", "-o", "MUL_MAT")
    assert gate.status == "failed"
    assert str(gate.reasons[-1]).endswith(files.full_disk(tmp_path))
    print_failing = f"cat {GOLDEN / 'cpu' / 'tbo-test-failing.txt'}; exit 1"
    failing = gated("sh", "-c", print_failing, "-o", "MUL_MAT")
    assert failing.counts["failed"]
    assert "disk" not in " ".join(map(str, failing.reasons))
    for event, after in ((gate, files.clean_command()), (failing, "dgxlab logs J")):
        error = GateFailed("; ".join(map(str, event.reasons)), next="dgxlab logs J")
        Worker.report(cast(Worker, SimpleNamespace(bench=bench, emit=bench.journal.emit)), error)
        assert error.next == read(bench.job.journal)[-1].next == after


def wheel(files: Mapping[str, str], mode: int = 0o755) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (mode | stat.S_IFREG if not stat.S_IFMT(mode) else mode) << 16
            archive.writestr(entry, text)
    return buffer.getvalue()


TOY = wheel({"toy/data/bin/toy": SCRIPT})


def take(root: Root, content: bytes = TOY, sha256: str = "") -> None:
    unpack(root, "toy", "1.0", sha256 or hashlib.sha256(content).hexdigest(), io.BytesIO(content))


def tools(root: Root) -> dict[str, int]:
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
def test_a_tool_is_unpacked_without_the_files_of_python(
    root: Root, files: dict[str, str], unpacked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = wheel(files)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert main(["tool", str(root.path), "toy", "1.0", hashlib.sha256(content).hexdigest()]) == 0
    assert tools(root) == unpacked


def test_several_clients_at_once_and_again(root: Root) -> None:
    """All of them succeed, and a tool that may be in use stays the very files it was."""
    content = wheel({"toy/data/bin/toy": SCRIPT, **{f"toy/data/share/{n}": "x" * n for n in range(200)}})
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: take(root, content), range(4))) == [None] * 4
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
        (TOY[:-30], "is damaged"),
        (b"<html>not found</html>", "is damaged"),
        (b"", "is damaged"),
        (TOY.replace(b"toy version", b"boy version"), "is damaged"),
        (wheel({"toy/data/bin/toy": "#!/bin/sh\necho no libtoy.so.6 >&2\nexit 127\n"}), "run on the host: no libtoy.s"),
        (wheel({"toy/data/bin/toy": "\x7fELF of another machine"}), "Exec format error"),
        (wheel({"toy/data/bin/toy": SCRIPT}, 0o644), "Permission denied"),
    ],
    ids=["parent", "absolute", "link", "cut", "page", "empty", "flipped", "fails", "machine", "mode"],
)
def test_a_wheel_that_is_damaged_hostile_or_does_not_run(
    root: Root, content: bytes, cause: str, tmp_path: Path
) -> None:
    with pytest.raises(RemoteError, match=cause) as caught:
        take(root, content)
    assert caught.value.next.startswith("sudo apt-get") == ("does not run" in caught.value.message)
    assert list(root.tools.iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_a_cut_connection_and_a_missing_folder(root: Root) -> None:
    with pytest.raises(RemoteError, match=r"toy 1\.0 .* whole") as caught:
        take(root, TOY[:100], hashlib.sha256(TOY).hexdigest())
    assert caught.value.next == AGAIN
    root.tools.rmdir()
    with pytest.raises(RemoteError, match=r"toy 1\.0 .*: No such file") as caught:
        take(root)
    assert caught.value.next == f"df -h {root.tools}"


def test_a_tool_that_a_power_loss_emptied_is_not_on_path_and_is_replaced(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DGXLAB_ROOT", str(root.path))
    folder = root.tools / "toy-1.0" / "bin"
    for _ in range(2):
        take(root)
        assert str(folder) in search_path().split(":")
        (folder / "toy").write_bytes(b"")
        assert str(folder) not in search_path().split(":")
