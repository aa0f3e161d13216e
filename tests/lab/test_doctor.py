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
        found = facts.gather()
        return replace(found, details={**found.details, **changes})

    return gather


DGX = HostEntry("dgx", "me@dgx", file="/etc/lab/hosts.yaml")
EDIT = "${EDITOR:-vi} /etc/lab/hosts.yaml"


def found(machine: Facts, host: HostEntry = DGX, *absent: tuple[str, str]) -> dict[str, Found]:
    """Return what is found, by name."""
    return {each[0]: each for each in judge(machine, host, absent)}


def test_a_complete_machine_lacks_nothing(machine: Callable[..., Facts]) -> None:
    """GPU, driver and toolkit of one age."""
    told = found(machine(*COMPLETE, stubs=[machines.h200, machines.ccache], cuda="13.0"))
    assert {name for name, state, *_ in told.values() if state != "ok"} == set()
    assert told["gpu"][2] == "NVIDIA H200"
    assert told["driver"][2] == "580.159.04, runs CUDA up to 13.0"
    assert told["nvcc"][2].startswith("13.0, /")
    assert {"reach", "git", "cc", "c++", "cmake", "ninja", "ccache", "disk", "memory", "lock"} <= set(told)


@pytest.mark.parametrize(
    ("lacking", "package"), [("git", "git"), ("cc", "gcc"), ("c++", "g++")], ids=lambda value: value
)
def test_what_nothing_can_replace_is_missing(machine: Callable[..., Facts], lacking: str, package: str) -> None:
    """With the command, and where to type it."""
    told = found(machine(*(name for name in COMPLETE if name != lacking)))
    assert told[lacking] == (lacking, "missing", "not found on PATH", f"ssh -t me@dgx sudo apt-get install {package}")
    assert [name for name, state, *_ in told.values() if state == "missing"] == [lacking]


def test_what_the_client_sends_is_only_noted(machine: Callable[..., Facts]) -> None:
    """Of cmake and ninja it says so: they come with the first run. ccache is a comfort."""
    told = found(machine("git", "cc", "c++"))
    assert [state for _, state, *_ in (told["cmake"], told["ninja"], told["ccache"])] == ["note"] * 3
    assert "the first run sends 3." in told["cmake"][2]
    assert "missing" not in {state for _, state, *_ in told.values()}


def test_where_no_wheel_runs_the_build_tools_are_missing(machine: Callable[..., Facts]) -> None:
    """Another C library, another processor."""
    without_glibc = found(machine("git", "cc", "c++", glibc=""))
    assert (without_glibc["cmake"][1], without_glibc["ninja"][1]) == ("missing", "missing")
    assert "needs glibc 2.17" in without_glibc["cmake"][2]
    assert without_glibc["cmake"][3] == "ssh -t me@dgx sudo apt-get install cmake ninja-build"


def test_gpu_without_a_toolkit(machine: Callable[..., Facts]) -> None:
    """Both ways to mend it; on this very machine PATH is the way, as hosts.yaml cannot change `local`."""
    gathered = machine(*COMPLETE, stubs=[machines.h200])
    gathered = replace(gathered, toolchain=replace(gathered.toolchain, nvcc=""))  # one in /usr/local is found too
    name, state, text, mend = found(gathered)["nvcc"]
    assert (name, state) == ("nvcc", "missing")
    assert text.startswith("neither on PATH nor in /usr/local/cuda*/bin; ")
    assert text.endswith("path_prepend: of dgx in /etc/lab/hosts.yaml can name its folder")
    assert mend == "ssh -t me@dgx sudo apt-get install cuda-toolkit"
    told = found(gathered, HostEntry("local"))["nvcc"]
    assert (told[2].endswith("PATH can name it"), told[3]) == (True, "sudo apt-get install cuda-toolkit")


@pytest.mark.parametrize(
    ("toolkit", "state", "words"),
    [
        ("12.8", "ok", "12.8, "),
        ("13.0", "ok", "13.0, "),
        ("13.1", "note", "CMAKE_CUDA_ARCHITECTURES"),
        ("14.0", "missing", "what it builds does not run"),
    ],
)
def test_toolkit_newer_than_the_driver(machine: Callable[..., Facts], toolkit: str, state: str, words: str) -> None:
    """A minor version ahead goes well but for PTX, a major one does not."""
    told = found(machine(*COMPLETE, stubs=[machines.h200], cuda=toolkit))["nvcc"]
    assert told[1] == state
    assert words in told[2]
    assert len(told) == 3 or told[3] == "ssh -t me@dgx sudo ubuntu-drivers install"


def test_gpu_without_a_driver(machine: Callable[..., Facts]) -> None:
    """The bus shows one: nvidia-smi fails, or is not there at all."""
    broken = found(machine(*COMPLETE, stubs=[machines.broken_driver], nvidia_devices=1))
    assert broken["driver"][1:3] == ("missing", "there is an NVIDIA GPU, and nvidia-smi lists none")
    assert "gpu" not in broken


def test_machine_without_a_gpu_lacks_none(machine: Callable[..., Facts]) -> None:
    """It measures on the CPU backend, with nvcc or without."""
    told = found(machine(*COMPLETE, nvidia_devices=0))
    assert told["gpu"] == ("gpu", "ok", "none: for the CPU backend alone")
    assert not {"driver", "nvcc"} & set(told)


def test_little_room(machine: Callable[..., Facts]) -> None:
    """A disk without 10 GB keeps a build from its end; little memory is noted; nowhere to lock is told."""
    disk = {"path": "/home/me/.dgxlab", "total_mib": 100_000, "free_mib": 9_000}
    told = found(machine(*COMPLETE, disk=disk, mem_available_mib=1000, memory_mib=8000, lock_folder=""))
    assert told["disk"][1:] == (
        "missing",
        "8.79 GiB free of 97.7 GiB at /home/me/.dgxlab, 9.77 GiB is needed",
        "dgxlab host clean dgx",
    )
    assert told["memory"][1] == "note"
    assert told["memory"][3] == "ssh -t me@dgx 'ps aux --sort -rss | head'"
    assert told["lock"][1:] == (
        "missing",
        "neither /var/lock nor /tmp can be written",
        "ssh -t me@dgx sudo chmod 1777 /tmp",
    )


def test_a_logout_that_ends_jobs(machine: Callable[..., Facts]) -> None:
    """Systemd may end what a user has started when the last session closes."""
    told = found(machine(*COMPLETE, logout_kills="/etc/systemd/logind.conf"))["logout"]
    assert (told[1], told[3]) == ("missing", "ssh -t me@dgx sudoedit /etc/systemd/logind.conf")


def test_others_on_the_gpu_are_named(machine: Callable[..., Facts]) -> None:
    """Who, with which program, on which device: a note, for they will end."""
    process = {"gpu_uuid": machines.UUID, "pid": 77, "program": "/opt/python3", "user": "bob", "used_mib": 3}
    told = found(machine(*COMPLETE, stubs=[machines.h200], cuda="13.0", gpu_processes=[process]))["in use"]
    assert told[1:3] == ("note", f"/opt/python3 of bob, pid 77 computes on {machines.UUID}; a job waits for its end")


def test_what_hosts_yaml_names_in_vain(machine: Callable[..., Facts]) -> None:
    """A compiler that is not there is no missing package; the file, its key and what it says are named."""
    told = found(machine("git", "c++"), DGX, ("CC", "gcc-99"))
    assert told["cc"] == ("cc", "missing", "gcc-99, the CC of env: of dgx in /etc/lab/hosts.yaml, is not there", EDIT)
    assert told["c++"][1] == "ok"


def test_folder_of_path_that_is_not_there(machine: Callable[..., Facts]) -> None:
    """What is then not found may be in it: hosts.yaml comes before any installing."""
    told = found(machine("git", "c++"), DGX, ("path_prepend", "/opt/cuda/bin"))
    text = "/opt/cuda/bin, a path_prepend: of dgx in /etc/lab/hosts.yaml, is no folder there"
    assert told["path"] == ("path", "missing", text, EDIT)
    assert told["cc"] == ("cc", "missing", "not found on PATH", EDIT)


def test_folder_of_the_owner_file_is_a_note(machine: Callable[..., Facts]) -> None:
    """Work goes on; others do not learn of it."""
    told = found(machine(*COMPLETE), DGX, ("lock", "/srv/bench"))["owner"]
    assert told[1] == "note"
    assert "nobody can sign in it who measures" in told[2]
    assert told[3] == "ssh -t me@dgx mkdir -p /srv/bench"


def test_a_root_without_locks(machine: Callable[..., Facts]) -> None:
    """A job would find none either; the root: of hosts.yaml is what to change."""
    why = "/nfs/x/in-use.lock cannot be locked: No locks available"
    told = found(machine(*COMPLETE), DGX, ("root", why))
    assert told["root"] == ("root", "missing", why, EDIT)


def test_a_host_without_setsid(machine: Callable[..., Facts]) -> None:
    """No job could outlive its connection."""
    told = found(machine(*COMPLETE), DGX, ("setsid", "not found on PATH"))
    assert told["setsid"][1:] == ("missing", "not found on PATH", "ssh -t me@dgx sudo apt-get install util-linux")
