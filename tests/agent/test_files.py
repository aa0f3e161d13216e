"""What the operating system refused, in words."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dgxlab.agent import files
from dgxlab.agent.gates import run_gate
from dgxlab.agent.measure import Bench
from dgxlab.agent.telemetry import Telemetry
from dgxlab.errors import RemoteError
from dgxlab.model import Expectation, GateStep, ParityGate
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests.conftest import GOLDEN
from tests.machines import programs


@pytest.fixture(autouse=True)
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client calls this host dgx."""
    monkeypatch.setenv("DGXLAB_HOST", json.dumps({"name": "dgx"}))


@pytest.mark.parametrize(
    ("error", "cause", "next"),
    [
        (OSError(errno.ENOSPC, "x"), "the disk of dgx is full", files.clean),
        (OSError(errno.EDQUOT, "x"), "the disk of dgx is full", files.clean),
        (OSError(errno.EIO, "x"), "an I/O error on the disk of dgx", None),
        (OSError(errno.EACCES, "no", "/x"), "[Errno 13] no: '/x'", None),
        (OSError(errno.ENOENT, "no", "no-such-git"), "there is no no-such-git on dgx", None),
    ],
)
def test_what_the_system_refuses(error: OSError, cause: str, next: Callable[[], str] | None) -> None:
    """The cause, and the command that mends it; a file that was not found without a folder is a program."""
    told = files.refused("submit", error)
    assert told.message == f"submit failed: {cause}"
    assert told.next == (next() if next else "dgxlab doctor dgx")


def test_a_nearly_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that could not write seldom says so itself."""
    assert files.full_disk(tmp_path) == ""
    monkeypatch.setattr(files, "NEARLY_FULL", 1 << 62)
    assert files.full_disk(tmp_path) == ": the disk of dgx is full"


def test_a_verb_on_a_host_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence and no traceback reach the client."""
    monkeypatch.setenv("PATH", str(programs(tmp_path / "bin")))
    host = Host(LocalTransport(str(tmp_path / "root"), python=sys.executable))
    with pytest.raises(RemoteError, match="receive failed: there is no git on local") as caught:
        host.send_objects("a" * 40, ["a" * 40], lambda: [b"PACK"])
    assert "Traceback" not in caught.value.message + caught.value.details


def test_a_gate_on_a_full_disk_blames_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that printed nothing that was kept; not one that printed its failing cases."""
    monkeypatch.setattr(files, "NEARLY_FULL", 1 << 62)
    bench = Bench(tmp_path, (), Telemetry(tmp_path, tmp_path / "agent.pyz", {}), lambda note: None)
    step = GateStep("gate:0", "one", ParityGate("MUL_MAT", "CPU", Expectation(1, 1), 0), ("-o", "MUL_MAT"), {})
    gate = run_gate(bench, step, ["echo", "-o", "MUL_MAT"], "B").event
    assert gate.status == "failed"
    assert gate.reasons[-1].endswith(": the disk of dgx is full")
    print_failing = f"cat {GOLDEN / 'cpu' / 'tbo-test-failing.txt'}; exit 1"
    failing = run_gate(bench, step, ["sh", "-c", print_failing, "-o", "MUL_MAT"], "B").event
    assert failing.failed
    assert "disk" not in " ".join(failing.reasons)
