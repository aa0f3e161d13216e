"""What nvidia-smi is asked, and who computes on the GPUs as it tells it."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import pytest

from dgxlab.agent import gpus
from dgxlab.agent.gpus import BASIC, FIELDS, ComputeProcess, choose, compute_processes, foreign, parse_processes, phrase
from tests.conftest import GOLDEN

HELP = (GOLDEN / "h200" / "help-query-gpu.txt").read_text()
UUID = "GPU-4a0f4724-ce2e-401e-401a-c916ec5586e7"
GONE = 2**22 + 1
"""A pid that no Linux gives."""


def process(pid: int, uuid: str = UUID) -> ComputeProcess:
    """Return a process of that id."""
    return ComputeProcess(uuid, pid, "/usr/bin/python3", "alice", 518)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (  # as an H200 said it
            f"{UUID}, {GONE}, /opt/torch/.venv/bin/python3, 518\n",
            [ComputeProcess(UUID, GONE, "/opt/torch/.venv/bin/python3", "", 518)],
        ),
        (f"{UUID}, {GONE}, /a, b, c, [N/A]\n", [ComputeProcess(UUID, GONE, "/a, b, c", "", None)]),
        (f"{UUID}, {GONE}, [Not Found], 7\n", [ComputeProcess(UUID, GONE, "[Not Found]", "", 7)]),
        ("No devices were found\n", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
        (f"{UUID}, [N/A], x, 1\n", []),
        ("", []),
    ],
)
def test_listing(text: str, expected: list[ComputeProcess]) -> None:
    """A comma in a program's name is its own; memory that is not counted is null; a message is no process."""
    assert parse_processes(text) == expected
    (mine,) = parse_processes(f"{UUID}, {os.getpid()}, x, 1")
    assert mine.user == pwd.getpwuid(os.getuid()).pw_name


def test_nvidia_smi_is_found_as_everything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the PATH that programs get; one that fails, hangs, cannot run or is missing does not list no process."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "{UUID}, {GONE}, $1, 3"\n')
    smi.chmod(0o755)
    (process,) = compute_processes() or ()
    assert process.program == "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    smi.write_text("#!/bin/sh\n")
    assert compute_processes() == []
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.5)
    for script in ("/bin/sh\necho No devices were found\nexit 6\n", "/no/such/shell\n", "/bin/sh\nexec sleep 600\n"):
        smi.write_text(f"#!{script}")
        assert compute_processes() is None
    smi.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compute_processes() is None


def test_own_session_is_not_foreign() -> None:
    """This process, its children, and one of its own that has just ended; all else is foreign, and told once."""
    child = subprocess.Popen(["sleep", "600"])
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        listed = [process(pid) for pid in (os.getpid(), child.pid, stranger.pid, GONE)] + [process(GONE, "GPU-2")]
        assert [p.pid for p in foreign(listed, own=())] == [stranger.pid, GONE]
        assert [p.pid for p in foreign(listed, own={GONE, stranger.pid})] == [stranger.pid]
    finally:
        for started in (child, stranger):
            started.kill()
            started.wait()


def test_phrase() -> None:
    """Pid, program, user and memory, as far as they are known, and how many more."""
    assert phrase([process(430)]) == "pid 430 (python3 of alice, 518 MiB)"
    unknown = ComputeProcess(UUID, 7, "/x/\x1b[2Jy", "", None)
    assert phrase([unknown, process(8), process(9)]) == "pid 7 (\\u001b[2Jy of an unknown user) and 2 more"


def test_an_old_driver_is_asked_under_its_own_names() -> None:
    """It says throttle where newer ones say event, and has no counters: none is asked for, or the query would fail."""
    assert choose(HELP) == {name: name for name in FIELDS}
    lines = [line for line in HELP.splitlines() if "reasons_counters" not in line]
    old = "\n".join(lines).replace('"clocks_event_reasons.active" or ', "")
    fields = choose(old)
    assert fields["clocks_event_reasons.active"] == "clocks_throttle_reasons.active"
    assert not any("counters" in name for name in fields)
    assert choose(old.replace('"pstate"', '"p-state"')).keys() == fields.keys() - {"pstate"}


@pytest.mark.parametrize("printed", ["", "NVIDIA-SMI has failed.\n", 'unknown option "help"\n'])
def test_a_driver_that_lists_nothing_is_asked_the_least(printed: str) -> None:
    """What every driver knows."""
    assert choose(printed) == BASIC
