"""One look at a host, read from real captures where this machine has no GPU."""

from __future__ import annotations

import os
import platform
import shutil
import time
from pathlib import Path

import pytest

from dgxlab.agent import facts, gpus
from dgxlab.errors import RemoteError
from dgxlab.model import Facts, from_json, to_json
from tests import machines
from tests.conftest import GOLDEN


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compiles here, what decides whether a program that is sent runs, the room that is left, where jobs lock."""
    root = tmp_path / "not" / "yet"
    monkeypatch.setenv("DGXLAB_ROOT", str(root))
    monkeypatch.setenv("DGXLAB_LOCKS", f"{tmp_path / 'closed'}:{tmp_path}")
    seen = facts.gather()
    assert from_json(Facts, to_json(seen)) == seen
    assert seen.toolchain.cxx
    assert seen.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert len(seen.host_id) == 16
    machine = Path("/etc/machine-id")
    assert not machine.exists() or machine.read_text().strip()[:16] != seen.host_id
    details, usage = seen.details, shutil.disk_usage(tmp_path)
    assert details["cpus"] == len(os.sched_getaffinity(0))
    assert details["glibc"] == os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    assert details["python"] == platform.python_version()
    assert details["versions"]["git"].startswith("git version 2.")
    assert details["lock_folder"] == str(tmp_path)
    assert (details["disk"]["path"], details["disk"]["total_mib"]) == (str(root), usage.total >> 20)
    assert 0 < details["disk"]["free_mib"] <= usage.free + (1 << 30) >> 20
    assert 0 < details["mem_available_mib"] <= details["memory_mib"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "0, GPU-68b2, NVIDIA H200, 143771\n",
            [{"index": "0", "uuid": "GPU-68b2", "name": "NVIDIA H200", "mem": "143771"}],
        ),
        ("0, GPU-1, NVIDIA GB10, [N/A]\n", [{"index": "0", "uuid": "GPU-1", "name": "NVIDIA GB10", "mem": None}]),
        ("No devices were found\n", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
        ("", []),
    ],
)
def test_gpu_query(text: str, expected: list[dict[str, str | None]]) -> None:
    """N/A in any spelling is null, never 0; a message instead of rows is no GPU."""
    assert gpus.parse_gpus(("index", "uuid", "name", "mem"), text) == expected


def test_state_has_no_invented_zero() -> None:
    """What this machine cannot measure is null."""
    state = facts.state(gpus.BASIC)
    assert state["mem_available_mib"] > 0
    assert state["cpu_temp_c"] is None or state["cpu_temp_c"] > 0


def test_facts_of_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU, driver, the CUDA that it runs, who else computes, and where nvcc lies, as the tools there said it."""
    machines.h200(machines.programs(tmp_path / "bin"), f"{machines.UUID}, {os.getpid()}, /opt/bin/python3, 1634")
    machines.nvcc(tmp_path / "cuda", "13.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{tmp_path / 'cuda'}")
    seen = facts.gather()
    details = seen.details
    assert [gpu["name"] for gpu in details["gpus"]] == ["NVIDIA H200"]
    assert details["driver"] == {"version": "580.159.04", "cuda": "13.0"}
    assert details["nvidia_devices"] == 1
    (process,) = details["gpu_processes"]
    assert (process["pid"], process["program"], process["used_mib"]) == (os.getpid(), "/opt/bin/python3", 1634)
    assert seen.toolchain.nvcc == "Build cuda_13.0.r13.0/compiler.36424714_0"
    assert details["tools"]["nvcc"] == str(tmp_path / "cuda" / "nvcc")
    assert from_json(Facts, to_json(seen)) == seen


def test_a_driver_that_does_not_answer_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sentence is taken for no value."""
    machines.broken_driver(machines.programs(tmp_path / "bin"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    details = facts.gather().details
    assert (details["gpus"], details["driver"], details["gpu_processes"]) == ([], {"version": None, "cuda": None}, [])
    assert details["tools"]["nvidia-smi"] == str(tmp_path / "bin" / "nvidia-smi")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((GOLDEN / "h200" / "nvidia-smi-version.txt").read_text(), "13.0"),
        ("DRIVER version      : 610.43.02\nCUDA UMD Version    : 13.3\n", "13.3"),
        ("CUDA Version        : Not Found\n", None),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", None),
        ("", None),
    ],
)
def test_cuda_of_the_driver(text: str, expected: str | None) -> None:
    """Under the name that it has had since driver 610 as well; what is not known is null."""
    assert facts.parse_cuda(text) == expected


def test_programs_that_hang_share_one_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers is told; what hangs is given up all at once, however many there are."""
    monkeypatch.setattr(facts, "PATIENCE_S", 0.3)
    assert facts.outputs([["sleep", "30"], ["echo", "hello"], *[["sleep", "30"]] * 9]) == ["", "hello\n", *[""] * 9]


def test_an_answer_without_end_is_none() -> None:
    """One that a program gave is heard although a daemon that it started holds the pipe."""
    begin = time.monotonic()
    assert facts.outputs([["yes"], ["sh", "-c", "echo here; sleep 30 &"], ["echo", "hello"]]) == [
        "",
        "here\n",
        "hello\n",
    ]
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize(
    ("files", "killer"),
    [
        ({}, ""),
        ({"etc/logind.conf": "[Login]\n#KillUserProcesses=yes\n"}, ""),
        ({"etc/logind.conf": "[Login]\nKillUserProcesses=yes\n"}, "etc/logind.conf"),
        ({"lib/logind.conf": "KillUserProcesses=yes", "etc/logind.conf": "KillUserProcesses=no"}, ""),
        (
            {"etc/logind.conf": "KillUserProcesses=no", "lib/logind.conf.d/9.conf": "KillUserProcesses = true"},
            "lib/logind.conf.d/9.conf",
        ),
        ({"lib/logind.conf.d/9.conf": "KillUserProcesses=yes", "etc/logind.conf.d/9.conf": ""}, ""),
        ({"etc/logind.conf": "KillUserProcesses=yes\nKillExcludeUsers=bob alice"}, ""),
        ({"etc/logind.conf": "KillUserProcesses=yes\nKillOnlyUsers=bob"}, ""),
        ({"etc/logind.conf": "KillUserProcesses=yes\nKillOnlyUsers=alice"}, "etc/logind.conf"),
    ],
)
def test_who_ends_jobs_at_logout(tmp_path: Path, files: dict[str, str], killer: str) -> None:
    """What systemd reads last counts, and whom it spares."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    file = facts.logout_kills("alice", (tmp_path / "etc", tmp_path / "lib"))
    assert file == (str(tmp_path / killer) if killer else "")


KILLED_ONCE = """#!/bin/sh
echo "cmake version 3.31.0"
[ -e {mark} ] || {{ touch {mark}; kill -KILL $$; }}
"""


def test_a_compiler_that_is_killed_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is part of a build's identity: without it all would be built and measured as something else."""
    program = tmp_path / "cmake"
    program.write_text(KILLED_ONCE.format(mark=tmp_path / "mark"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert facts.gather().toolchain.cmake == "cmake version 3.31.0"
    program.write_text(KILLED_ONCE.format(mark=tmp_path / "never" / "there"))
    with pytest.raises(RemoteError, match="cmake on local does not say its version: it was killed"):
        facts.gather()
