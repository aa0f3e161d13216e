"""Facts of a host and what nvidia-smi tells, read from real captures where this machine has no GPU."""

import os
import platform
import pwd
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from dgxlab.agent import environment, facts
from dgxlab.agent.environment import Answer, ask
from dgxlab.agent.gpus import (
    BASIC,
    FIELDS,
    ComputeProcess,
    choose,
    compute_processes,
    foreign,
    parse_gpus,
    parse_processes,
    phrase,
)
from dgxlab.errors import RemoteError
from dgxlab.model import Facts, from_json, to_json
from tests import machines
from tests.conftest import GOLDEN
from tests.machines import UUID

HELP = (GOLDEN / "h200" / "help-query-gpu.txt").read_text()
BROKEN = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
GONE = 2**22 + 1
"""A pid that no Linux gives."""


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ("0, GPU-68b2, NVIDIA H200, 143771\n", [["0", "GPU-68b2", "NVIDIA H200", "143771"]]),
        ("0, GPU-1, NVIDIA GB10, [N/A]\n", [["0", "GPU-1", "NVIDIA GB10", None]]),
        *((text, []) for text in ("No devices were found\n", BROKEN, "")),
    ],
)
def test_gpu_query(text: str, expected: list[list[str | None]]) -> None:
    assert [list(gpu.values()) for gpu in parse_gpus(("index", "uuid", "name", "mem"), text)] == expected


def test_facts_of_an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines.h200(machines.programs(tmp_path / "bin"), f"{UUID}, {os.getpid()}, /opt/bin/python3, 1634")
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
        *((text, None) for text in ("CUDA Version        : Not Found\n", BROKEN, "")),
    ],
)
def test_cuda_of_the_driver(text: str, expected: str | None) -> None:
    assert facts.parse_cuda(text) == expected


def test_programs_that_hang_share_one_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PATIENCE_S", 2.0)  # enough for the one that answers
    hang = ["sleep", "30"]
    assert ask([hang, ["echo", "hello"], *[hang] * 9]) == [Answer(-9, ""), Answer(0, "hello\n"), *[Answer(-9, "")] * 9]


def test_answers_without_end_and_of_a_program_whose_daemon_holds_the_pipe() -> None:
    begin = time.monotonic()
    endless, daemon, missing = ask([["yes"], ["sh", "-c", "echo here; sleep 30 &"], ["no-such-program"]])
    assert (endless, daemon, missing) == (Answer(-9, ""), Answer(0, "here\n"), Answer(127, ""))
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
def test_jobs_that_systemd_ends_at_logout(tmp_path: Path, files: dict[str, str], killer: str) -> None:
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
    program = machines.script(tmp_path / "cmake", KILLED_ONCE.format(mark=tmp_path / "mark"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert facts.gather().toolchain.cmake == "cmake version 3.31.0"
    program.write_text(KILLED_ONCE.format(mark=tmp_path / "never" / "there"))
    with pytest.raises(RemoteError, match=r"^cmake .* killed"):
        facts.gather()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{UUID}, {GONE}, /opt/torch/bin/python3, 518\n", [(UUID, GONE, "/opt/torch/bin/python3", "", 518)]),
        (f"{UUID}, {GONE}, /a, b, c, [N/A]\n", [(UUID, GONE, "/a, b, c", "", None)]),
        (f"{UUID}, {GONE}, [Not Found], 7\n", [(UUID, GONE, "[Not Found]", "", 7)]),
        (f"{UUID}, {os.getpid()}, x, 1", [(UUID, os.getpid(), "x", pwd.getpwuid(os.getuid()).pw_name, 1)]),
        *((text, []) for text in ("No devices were found\n", BROKEN, f"{UUID}, [N/A], x, 1\n", "")),
    ],
    ids=["gone", "commas", "unnamed", "mine", "none", "broken", "no pid", "empty"],
)
def test_compute_processes_in_csv_without_quotes(text: str, expected: list[tuple[object, ...]]) -> None:
    assert [tuple(vars(process).values()) for process in parse_processes(text)] == expected


def test_an_nvidia_smi_that_fails_hangs_or_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the processes are not known, which is not the same as none."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi = machines.script(tmp_path / "nvidia-smi", f'#!/bin/sh\necho "{UUID}, {GONE}, $1, 3"\n')
    (process,) = compute_processes() or ()
    assert process.program == "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    smi.write_text("#!/bin/sh\n")
    assert compute_processes() == []
    monkeypatch.setattr(environment, "PATIENCE_S", 0.5)
    for script in ("/bin/sh\necho No devices were found\nexit 6\n", "/no/such/shell\n", "/bin/sh\nexec sleep 600\n"):
        smi.write_text(f"#!{script}")
        assert compute_processes() is None
    smi.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compute_processes() is None


def process(pid: int, uuid: str = UUID) -> ComputeProcess:
    return ComputeProcess(uuid, pid, "/usr/bin/python3", "alice", 518)


def test_foreign_processes() -> None:
    """Not this session's, nor one of our own that has just ended; each once."""
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
    assert phrase([process(430)]) == "pid 430 (python3 of alice, 518 MiB)"
    unknown = ComputeProcess(UUID, 7, "/x/\x1b[2Jy", "", None)
    assert phrase([unknown, process(8), process(9)]) == "pid 7 (\\u001b[2Jy of an unknown user) and 2 more"


def test_an_old_driver_is_asked_under_its_own_names() -> None:
    """It says throttle where newer ones say event, and has no counters; one unknown field would fail the query."""
    assert choose(HELP) == {name: name for name in FIELDS}
    lines = [line for line in HELP.splitlines() if "reasons_counters" not in line]
    old = "\n".join(lines).replace('"clocks_event_reasons.active" or ', "")
    fields = choose(old)
    assert fields["clocks_event_reasons.active"] == "clocks_throttle_reasons.active"
    assert not any("counters" in name for name in fields)
    assert choose(old.replace('"pstate"', '"p-state"')).keys() == fields.keys() - {"pstate"}
    for nothing in ("", BROKEN, 'unknown option "help"\n'):
        assert choose(nothing) == BASIC


def test_the_clock_is_a_mean_over_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of cores, each with one clock; the fast one's fourth processor is not for this process."""
    kinds = dict.fromkeys(range(4), "3900000") | dict.fromkeys(range(4, 20), "2800000")
    clocks = {f"/sys/devices/system/cpu/cpu{number}/cpufreq/scaling_cur_freq": khz for number, khz in kinds.items()}
    monkeypatch.setattr(facts, "read", lambda path: clocks.get(path, ""))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(20)} - {3})
    assert facts.condition()["cpu_mhz"] == round((3 * 3900 + 16 * 2800) / 19, 1)
    clocks.clear()
    assert facts.condition()["cpu_mhz"] is None
