"""What a host's facts say of what a job needs there, on machines that lack it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.agent import facts
from dgxlab.lab.doctor import Found, judge
from dgxlab.model import Facts, HostEntry
from tests import machines

COMPLETE = ("git", "cc", "c++", "as", "ld", "cmake", "ninja")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Facts]:
    """Gather facts where PATH has these programs and these stand-ins alone."""

    def gather(*programs: str, stubs: Sequence[Callable[[Path], None]] = (), cuda: str = "", **changes: Any) -> Facts:
        machines.programs(tmp_path / "bin", *programs)
        for stub in stubs:
            stub(tmp_path / "bin")
        if cuda:
            machines.nvcc(tmp_path / "bin", cuda)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
        findings = facts.gather()
        return replace(findings, details={**findings.details, **changes})

    return gather


DGX = HostEntry("dgx", "me@dgx", file="/etc/lab/hosts.yaml")
EDIT = "${EDITOR:-vi} /etc/lab/hosts.yaml"
SSH = "ssh -t me@dgx"


def findings(machine: Facts, host: HostEntry = DGX, *absent: tuple[str, str]) -> dict[str, Found]:
    """Return what is found, by name."""
    return {each[0]: each for each in judge(machine, host, absent)}


def test_a_complete_machine_lacks_nothing(machine: Callable[..., Facts]) -> None:
    """GPU, driver and toolkit of one age."""
    told = findings(machine(*COMPLETE, stubs=[machines.h200, machines.ccache], cuda="13.0"))
    assert {name for name, state, *_ in told.values() if state != "ok"} == set()
    assert told["gpu"][2] == "NVIDIA H200"
    assert told["driver"][2] == "580.159.04, runs CUDA up to 13.0"
    assert told["nvcc"][2].startswith("13.0, /")
    assert {"reach", "git", "cc", "c++", "cmake", "ninja", "ccache", "disk", "memory", "lock"} <= set(told)


BARE = {"programs": ("git", "cc", "c++")}
CRAMPED = {"path": "/home/me/.dgxlab", "total_mib": 100_000, "free_mib": 9_000}
OTHER = {"gpu_uuid": machines.UUID, "pid": 77, "program": "/opt/python3", "user": "bob", "used_mib": 3}
BUILD_TOOLS = f"{SSH} sudo apt-get install cmake ninja-build"
DRIVER = f"{SSH} sudo ubuntu-drivers install"


@pytest.mark.parametrize(
    ("gathered", "name", "state", "text", "mend"),
    [
        ({"programs": ("cc", "c++")}, "git", "missing", "not found on PATH", f"{SSH} sudo apt-get install git"),
        ({"programs": ("git", "c++")}, "cc", "missing", "not found on PATH", f"{SSH} sudo apt-get install gcc"),
        ({"programs": ("git", "cc")}, "c++", "missing", "not found on PATH", f"{SSH} sudo apt-get install g++"),
        (BARE, "cmake", "note", "not found on PATH: the first run sends 3.", BUILD_TOOLS),
        ({**BARE, "glibc": ""}, "ninja", "missing", "not found on PATH, and ", BUILD_TOOLS),
        (BARE, "ccache", "note", "recommended: ", f"{SSH} sudo apt-get install ccache"),
        ({"stubs": [machines.h200], "cuda": "12.8"}, "nvcc", "ok", "12.8, ", ""),
        ({"stubs": [machines.h200], "cuda": "13.1"}, "nvcc", "note", "13.1, ", DRIVER),
        ({"stubs": [machines.h200], "cuda": "14.0"}, "nvcc", "missing", "14.0, ", DRIVER),
        (
            {"stubs": [machines.broken_driver], "nvidia_devices": 1},
            "driver",
            "missing",
            "there is an NVIDIA GPU, ",
            f"{SSH} nvidia-smi",
        ),
        ({"nvidia_devices": 0}, "gpu", "ok", "none: for the CPU backend alone", ""),
        ({"disk": CRAMPED}, "disk", "missing", "8.79 GiB free of 97.7 GiB at /home/me/", "dgxlab host clean dgx"),
        ({"mem_available_mib": 1000}, "memory", "note", "0.98 GiB free of ", f"{SSH} 'ps aux --sort -rss | head'"),
        ({"lock_folder": ""}, "lock", "missing", "neither /var/lock nor /tmp", f"{SSH} sudo chmod 1777 /tmp"),
        (
            {"logout_kills": "/etc/logind.conf"},
            "logout",
            "missing",
            "/etc/logind.conf",
            f"{SSH} sudoedit /etc/logind.conf",
        ),
        ({"gpu_processes": [OTHER]}, "in use", "note", "/opt/python3 of bob, pid 77 computes on ", f"{SSH} nvidia-smi"),
    ],
)
def test_what_is_missing_has_its_mend(
    machine: Callable[..., Facts], gathered: dict[str, Any], name: str, state: str, text: str, mend: str
) -> None:
    """What is there, and the command with where to type it; what the client can send is only noted."""
    options = {key: value for key, value in gathered.items() if key != "programs"}
    told = findings(machine(*gathered.get("programs", COMPLETE), **options))[name]
    assert told[1] == state
    assert told[2].startswith(text)
    assert "".join(told[3:]) == mend


def test_gpu_without_a_toolkit(machine: Callable[..., Facts]) -> None:
    """Both ways to mend it; on this very machine PATH is the way, as hosts.yaml cannot change `local`."""
    gathered = machine(*COMPLETE, stubs=[machines.h200])
    gathered = replace(gathered, toolchain=replace(gathered.toolchain, nvcc=""))  # one in /usr/local is found too
    name, state, text, mend = findings(gathered)["nvcc"]
    assert (name, state) == ("nvcc", "missing")
    assert text.startswith("neither on PATH nor in /usr/local/cuda*/bin; ")
    assert "path_prepend: of dgx in /etc/lab/hosts.yaml" in text
    assert mend == "ssh -t me@dgx sudo apt-get install cuda-toolkit"
    told = findings(gathered, HostEntry("local"))["nvcc"]
    assert (told[2].endswith("PATH can name it"), told[3]) == (True, "sudo apt-get install cuda-toolkit")


@pytest.mark.parametrize(
    ("key", "what", "name", "state", "text", "mend"),
    [
        ("CC", "gcc-99", "cc", "missing", "gcc-99, the CC of env: of dgx", EDIT),
        ("path_prepend", "/opt/bin", "path", "missing", "/opt/bin, a path_prepend: of dgx", EDIT),
        ("lock", "/srv/bench", "owner", "note", "/srv/bench, the folder of lock: of dgx", f"{SSH} mkdir -p /srv/bench"),
        ("root", "cannot be locked", "root", "missing", "cannot be locked", EDIT),
        ("setsid", "not found", "setsid", "missing", "not found", f"{SSH} sudo apt-get install util-linux"),
    ],
)
def test_what_hosts_yaml_names_and_the_host_lacks(
    machine: Callable[..., Facts], key: str, what: str, name: str, state: str, text: str, mend: str
) -> None:
    """Each names its line; where a folder on PATH is not there, no package is to be installed."""
    told = findings(machine("git", "c++"), DGX, (key, what))
    assert told[name][1] == state
    assert told[name][2].startswith(text)
    assert told[name][3] == mend
    assert key != "path_prepend" or told["cc"][3] == EDIT
