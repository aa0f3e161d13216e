"""One look at a host, read from real captures where this machine has no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dgxlab.agent import environment, facts
from dgxlab.model import Facts, from_json, to_json


def test_facts_of_this_machine() -> None:
    """What compiles here is found, and the record survives the wire."""
    found = facts.gather()
    assert found.toolchain.cxx
    assert found.details["cpus"] == len(os.sched_getaffinity(0))
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert from_json(Facts, to_json(found)) == found


def test_host_id_does_not_leak_the_machine_id() -> None:
    """The id is a digest, the same each time."""
    machine = Path("/etc/machine-id")
    assert facts.host_id() == facts.host_id()
    assert len(facts.host_id()) == 16
    if machine.exists():
        assert machine.read_text().strip()[:16] != facts.host_id()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "0, GPU-68b2, NVIDIA H200, 143771\n",
            [{"index": "0", "uuid": "GPU-68b2", "name": "NVIDIA H200", "mem": "143771"}],
        ),
        ("0, GPU-1, NVIDIA GB10, [N/A]\n", [{"index": "0", "uuid": "GPU-1", "name": "NVIDIA GB10", "mem": None}]),
        (
            "0, GPU-1, NVIDIA GB10, [Not Supported]\n",
            [{"index": "0", "uuid": "GPU-1", "name": "NVIDIA GB10", "mem": None}],
        ),
        ("No devices were found\n", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", []),
        ("", []),
    ],
)
def test_gpu_query(text: str, expected: list[dict[str, str | None]]) -> None:
    """N/A in any spelling is null, never 0; a message instead of rows is no GPU."""
    assert facts.parse_gpus(("index", "uuid", "name", "mem"), text) == expected


def test_state_has_no_invented_zero() -> None:
    """What this machine cannot measure is null."""
    state = facts.state()
    assert state["mem_available_mib"] > 0
    assert state["cpu_temp_c"] is None or state["cpu_temp_c"] > 0


def test_nvcc_beside_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH without nvcc gets the installed CUDA's folder, if there is one, at its end."""
    monkeypatch.setenv("PATH", str(tmp_path))
    installed = sorted(Path("/usr/local").glob("cuda*/bin/nvcc"))
    assert environment.search_path() == (f"{tmp_path}:{installed[0].parent}" if installed else str(tmp_path))
