"""What a host's facts say of what a job needs there, on machines that lack it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.agent import facts
from dgxlab.lab.doctor import Finding, check_facts
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


def findings(machine: Facts, host: HostEntry = DGX, *absent: tuple[str, str]) -> dict[str, Finding]:
    return {each.name: each for each in check_facts(machine, host, absent)}


def test_a_complete_machine_lacks_nothing(machine: Callable[..., Facts]) -> None:
    told = findings(machine(*COMPLETE, stubs=[machines.h200, machines.ccache], cuda="13.0"))
    assert {each.name for each in told.values() if each.state != "ok"} == set()
    assert told["gpu"].text == "NVIDIA H200"
    assert told["driver"].text == "580.159.04, runs CUDA up to 13.0"
    assert told["nvcc"].text.startswith("13.0, /")
    assert {"reach", "git", "cc", "c++", "cmake", "ninja", "ccache", "disk", "memory", "lock"} <= set(told)


BARE = {"programs": ("git", "cc", "c++")}
BROKEN_DRIVER = {"stubs": [machines.broken_driver], "nvidia_devices": 1}
LOGIND = "/etc/logind.conf"
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
        (BROKEN_DRIVER, "driver", "missing", "there is an NVIDIA GPU, ", f"{SSH} nvidia-smi"),
        ({"nvidia_devices": 0}, "gpu", "ok", "none: for the CPU backend alone", ""),
        ({"disk": CRAMPED}, "disk", "missing", "8.79 GiB free of 97.7 GiB at /home/me/", "dgxlab host clean dgx"),
        ({"mem_available_mib": 1000}, "memory", "note", "0.98 GiB free of ", f"{SSH} 'ps aux --sort -rss | head'"),
        ({"lock_folder": ""}, "lock", "missing", "neither /var/lock nor /tmp", f"{SSH} sudo chmod 1777 /tmp"),
        ({"logout_kills": LOGIND}, "logout", "missing", LOGIND, f"{SSH} sudoedit {LOGIND}"),
        ({"gpu_processes": [OTHER]}, "in use", "note", "/opt/python3 of bob, pid 77 computes on ", f"{SSH} nvidia-smi"),
    ],
)
def test_what_is_missing_has_its_mend(
    machine: Callable[..., Facts], gathered: dict[str, Any], name: str, state: str, text: str, mend: str
) -> None:
    options = {key: value for key, value in gathered.items() if key != "programs"}
    told = findings(machine(*gathered.get("programs", COMPLETE), **options))[name]
    assert told.state == state
    assert told.text.startswith(text)
    assert told.next == mend


def test_gpu_without_a_toolkit(machine: Callable[..., Facts]) -> None:
    gathered = machine(*COMPLETE, stubs=[machines.h200])
    gathered = replace(gathered, toolchain=replace(gathered.toolchain, nvcc=""))  # one in /usr/local is found too
    told = findings(gathered)["nvcc"]
    assert told.state == "missing"
    assert told.text.startswith("neither on PATH nor in /usr/local/cuda*/bin; ")
    assert "path_prepend: of dgx in /etc/lab/hosts.yaml" in told.text
    assert told.next == "ssh -t me@dgx sudo apt-get install cuda-toolkit"
    told = findings(gathered, HostEntry("local"))["nvcc"]
    assert (told.text.endswith("PATH can name it"), told.next) == (True, "sudo apt-get install cuda-toolkit")


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
    told = findings(machine("git", "c++"), DGX, (key, what))
    assert told[name].state == state
    assert told[name].text.startswith(text)
    assert told[name].next == mend
    assert key != "path_prepend" or told["cc"].next == EDIT
