"""Which processors a pinned run gets, and that it runs there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dgxlab.agent import child, processors
from dgxlab.agent.processors import pinned


@pytest.fixture
def cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two threads each, numbered as on most machines: 0 and 4 share the first."""
    for number in range(8):
        folder = tmp_path / f"cpu{number}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number % 4},{number % 4 + 4}\n")
    monkeypatch.setattr(processors, "TOPOLOGY", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["x", "-t", "2"], (0, 1)),
        (["x", "-t", "1,6"], (0, 1, 2, 3, 4, 5)),
        (["x", "-t", "2", "--threads-batch", "4"], (0, 1, 2, 3)),
        (["x", "-t", "99"], tuple(range(8))),
        (["x", "-p", "512"], (0, 1, 2, 3)),
        (["x", "-t"], (0, 1, 2, 3)),
    ],
)
@pytest.mark.usefixtures("cores")
def test_as_many_as_there_are_threads_and_cores_first(argv: list[str], expected: tuple[int, ...]) -> None:
    """Two threads share a core only where there are more threads than cores."""
    assert pinned(argv) == expected


@pytest.mark.usefixtures("cores")
def test_only_what_the_agent_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread of a core whose first belongs to others stands for that core."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 5, 7})
    assert pinned(["x", "-t", "3"]) == (3, 4, 5)


def test_fast_cores_come_first(cores: Path) -> None:
    """A single thread is not put on a slow core because that has the number 0."""
    for number in range(8):
        (cores / f"cpu{number}" / "cpu_capacity").write_text("1024\n" if number % 4 >= 2 else "718\n")
    assert [pinned(["x", "-t", str(n)]) for n in (1, 3, 5)] == [(2,), (0, 2, 3), (0, 1, 2, 3, 6)]


def test_without_a_topology_every_processor_is_a_core(cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in some containers."""
    monkeypatch.setattr(processors, "TOPOLOGY", str(cores / "none"))
    assert pinned(["x"]) == tuple(range(8))


def test_a_program_runs_on_the_processors_that_it_is_pinned_to(tmp_path: Path) -> None:
    """All of its threads inherit them, and the agent keeps its own."""
    own = os.sched_getaffinity(0)
    last = max(own)
    argv = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    out = tmp_path / "out"
    ended = child.run(argv, env={}, stdout=out, stderr=tmp_path / "err", limit_s=30, processors=(last,))
    assert (ended.rc, out.read_text()) == (0, f"{{{last}}}\n")
    assert os.sched_getaffinity(0) == own
