"""The processors of a run: those it is pinned to, and what others took of them: captured, and a busy loop beside."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dgxlab.agent import child, processors
from dgxlab.agent.conditions import Conditions
from dgxlab.agent.measure import threads
from dgxlab.agent.processors import Contention, ContentionWatch, parse_pressure, parse_stat, parse_times, pinned
from dgxlab.model import CellResult
from dgxlab.tools.rows import Parsed
from tests.conftest import GOLDEN
from tests.machines import BUSY, busy_processor

STATE = {"boot_id": "b", "gpus": []}
CHILD = ("sh", "-c", f"({BUSY[-1]}); exit")
"""A busy program that another one started and waits for."""
EIGHT = """
import os, time
for _ in range(3):
    os.fork()
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""
"""Eight busy processes."""


def captured(name: str) -> str:
    return (GOLDEN / "cpu" / "contention" / f"{name}.txt").read_text()


def test_captured_counters() -> None:
    assert parse_stat(captured("stat-before"), {0, 1}, 100) == pytest.approx({"others": 1025.69, "steal": 4.97})
    assert parse_stat(captured("stat-after"), {1}, 100) == pytest.approx({"others": 593.55, "steal": 2.38})
    assert parse_times(captured("schedstat").encode()) == (499684605, 1509978968)
    assert parse_times(b"731871 0 1\n") == (731871, 0)
    assert parse_pressure(captured("pressure-before")) == {"psi": 145.60248}


def test_counters_that_a_host_does_not_have_are_unknown() -> None:
    for text in ("", "cpu  1 2 3 4 5 6 7 8 0 0\n", "cpu0 1 2 3 4 5 6 7 8 0 0\ncpu1 1 2 3\n"):
        assert parse_stat(text, {0, 1}, 100) == parse_pressure(text) == {}
    assert [parse_times(text) for text in (b"", b"0 0 0\n", b"1 2", b"1 x 3", b"1 -2 3")] == [None] * 5


class Counters:
    """A host whose counters and clock are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        self.clock, self.children = 100.0, 7.0
        monkeypatch.setattr(processors, "read", lambda path: self.files.get(path, ""))
        monkeypatch.setattr(processors.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(processors.os, "sched_getaffinity", lambda pid: {0, 1})
        usage = type("Usage", (), {"ru_utime": property(lambda _: self.children), "ru_stime": 0.5})
        monkeypatch.setattr(processors.resource, "getrusage", lambda who: usage())


def files(when: str) -> dict[str, str]:
    return {"/proc/stat": captured(f"stat-{when}"), "/proc/pressure/cpu": captured(f"pressure-{when}")}


def test_what_grew_during_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured 4.23 s: a program that used 1.97 s of two processors, on which more ran than they could carry."""
    host = Counters(monkeypatch, files("before"))
    watch = ContentionWatch()
    host.files, host.clock, host.children = files("after"), 104.23, 8.97
    seen = watch.ended()
    assert (seen.processors, seen.run_queue, seen.steal) == (2, None, 0.0)
    assert seen.others == pytest.approx((8.46 - 1.97) / 4.23)
    assert seen.psi == pytest.approx(4.038613 / 4.23)
    again = ContentionWatch()
    host.clock, host.children = 105.0, 8.99  # a run's own time is measured finer than the processors'
    assert again.ended() == Contention(2, None, 0.0, 0.0, 0.0)
    short = ContentionWatch()
    host.clock += processors.SHORTEST_S / 2
    assert short.ended() == Contention(2)


def test_without_its_files_before_and_after_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Counters(monkeypatch, {})
    watch = ContentionWatch()
    host.clock = 104.23
    for host.files in ({}, files("after")):
        assert watch.ended() == Contention(2)


def test_the_last_count_of_each_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a task waited before it ended is kept; with too few looks nothing is known.

    The last look is at the end of the program: what follows until all it left is gone does not count.
    """
    looks = [{"7": 1e8}, {"7": 2e8, "8": 5e8}, {"7": 3e8, "9": 1e8}, {"7": 4e8}, {"7": 4e8}]
    host = Counters(monkeypatch, {})
    watch = ContentionWatch()
    monkeypatch.setattr(processors.os, "getpgid", lambda pid: pid)
    monkeypatch.setattr(watch, "_note", lambda task, path: ContentionWatch._note(watch, task, str(tmp_path / task)))
    pauses, known = [], []
    for tasks in looks:
        host.clock += 0.5
        for task, ns in tasks.items():
            (tmp_path / task).write_text(f"1 {ns:.0f} 1\n")
        monkeypatch.setattr(processors.os, "listdir", {"/proc": ["7"], "/proc/7/task": [*tasks]}.__getitem__)
        pauses.append(watch.look(7))
        known.append(watch.ended().run_queue)
    host.clock += 5.0
    known.append(watch.ended().run_queue)
    assert pauses == [processors.FIRST_PERIOD_S] + [processors.PERIOD_S] * 4
    assert known == [None] * 4 + [pytest.approx((0.4 + 0.5 + 0.1) / 2.5)] * 2


@pytest.mark.parametrize(
    ("others", "children", "worst"), [(0.5, 0.0, 0.5), (0.25, 0.0, 0.25), (0.0, 0.5, 0.0), (None, 0.0, None)]
)
def test_the_worst_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, others: float | None, children: float, worst: float | None
) -> None:
    """In one of ten seconds a program waits half of the time, while others or its ended children use a processor."""
    host = Counters(monkeypatch, {})
    watch = ContentionWatch()
    monkeypatch.setattr(processors.os, "getpgid", lambda pid: pid)
    monkeypatch.setattr(processors.os, "listdir", {"/proc": ["7"], "/proc/7/task": ["7"]}.__getitem__)
    monkeypatch.setattr(watch, "_note", lambda task, path: ContentionWatch._note(watch, task, str(tmp_path / task)))
    for look in range(21):
        host.clock += 0.5
        bad = min(1.0, max(0.0, look / 2 - 5))
        ran, waited = look / 2 - bad / 2, bad / 2
        (tmp_path / "7").write_text(f"{ran * 1e9:.0f} {waited * 1e9:.0f} 1\n")
        host.files["/proc/7/stat"] = f"7 (a) b) R{' 0' * 10} {ran * 100:.0f} 0 {bad * children * 100:.0f} 0 20 0 1"
        if others is not None:
            used = ran + bad * (children + others)
            host.files["/proc/stat"] = f"cpu0 {used * 100:.0f} 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n"
        watch.look(7)
    seen = watch.ended()
    assert (seen.run_queue, seen.burst) == (pytest.approx(0.5 / 10.5), worst)


def test_threads_are_those_that_the_tool_names() -> None:
    """The most in any row; where it names none, as many as there are processors."""

    def parsed(*rows: Mapping[str, object]) -> Parsed:
        return Parsed(tuple(CellResult(str(i), (), row) for i, row in enumerate(rows)))

    captures = {"cpu/llama-bench-q4_0": 2, "h200/llama-bench-q4_k": 16, "cpu/batched-bench": 2}
    for name, count in captures.items():
        lines = (GOLDEN / f"{name}.jsonl").read_text().splitlines()
        assert threads(parsed(*(json.loads(line) for line in lines if line.startswith("{")))) == count
    assert threads(parsed({"n_threads": 2}, {"n_threads": 4})) == 4
    assert threads(parsed({"n_threads": 2, "n_threads_batch": 12})) == 12
    for silent in (parsed(), parsed({"n_threads": "8"}), parsed({"n_threads": 0})):
        assert threads(silent) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("argv", "most", "limit_s", "kind"),
    [
        (BUSY, 1, 3.0, "run_queue"),
        (CHILD, 1, 3.0, "run_queue"),
        (BUSY, 16, 3.0, "run_queue"),
        (BUSY, 1, 0.25, "others_cpu"),
    ],
)
def test_a_busy_loop_beside_a_program(
    tmp_path: Path, argv: Sequence[str], most: int, limit_s: float, kind: str
) -> None:
    """Each wants the whole processor: a hard flag, by how long it waited, or of a short one by what others used.

    All but one of 16 threads may sleep.
    """
    streams = {"stdout": tmp_path / "out", "stderr": tmp_path / "err"}
    with busy_processor():
        watch = ContentionWatch()
        ended = child.run(argv, env={}, **streams, limit_s=limit_s, look=watch.look)
        seen = watch.ended()
    conditions = Conditions((), STATE, STATE, {}, ended.seconds, seen, most)
    assert conditions.contended
    assert kind in [flag.kind for flag in conditions.flags() if flag.hard]
    assert seen.processors == 1
    assert seen.others is not None
    assert seen.others >= 0.25
    assert (seen.burst or 0.0) >= 0.25 * (limit_s > processors.WINDOW_S)


def test_a_busy_loop_beside_a_program_that_does_not_wait(tmp_path: Path) -> None:
    """It uses all of the only processor: a soft flag."""
    streams = {"stdout": tmp_path / "out", "stderr": tmp_path / "err"}
    with busy_processor():
        watch = ContentionWatch()
        ended = child.run(("sleep", "3"), env={}, **streams, limit_s=30, look=watch.look)
        seen = watch.ended()
    flags = Conditions((), STATE, STATE, {}, ended.seconds, seen, threads=1).flags()
    assert [flag.hard for flag in flags if flag.kind == "others_cpu"] == [False]


def test_processes_of_a_launch_that_wait_for_each_other(tmp_path: Path) -> None:
    """Eight on one processor: they wait long, but others would have to use most of it for a hard flag."""
    usable = os.sched_getaffinity(0)
    watch = ContentionWatch((min(usable),))
    argv, streams = (sys.executable, "-c", EIGHT), {"stdout": tmp_path / "out", "stderr": tmp_path / "err"}
    ended = child.run(argv, env={}, **streams, limit_s=30, look=watch.look, processors=(min(usable),))
    seen = watch.ended()
    assert (ended.rc, seen.run_queue) == (0, pytest.approx(7.0, abs=2.0))
    assert seen.burst is not None
    assert seen.burst < 0.15
    conditions = Conditions((), STATE, STATE, {}, ended.seconds, seen, threads=8)
    hard = seen.others is not None and seen.others >= 0.8  # that of other tests, on a busy machine
    assert [flag.hard for flag in conditions.flags() if flag.kind == "run_queue"] == [hard]


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
        ("-t 2", (0, 1)),
        ("-t 1,6", (0, 1, 2, 3, 4, 5)),
        ("-t 2 --threads-batch 4", (0, 1, 2, 3)),
        ("-t 99", tuple(range(8))),
        ("-p 512", (0, 1, 2, 3)),
        ("-t", (0, 1, 2, 3)),
    ],
)
@pytest.mark.usefixtures("cores")
def test_as_many_as_there_are_threads_and_cores_first(argv: str, expected: tuple[int, ...]) -> None:
    assert pinned(["x", *argv.split()]) == expected


def test_which_processors_come_first(cores: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast cores; every processor where the kernel tells no cores; of what is free, whatever thread of its core."""
    for number in range(8):
        (cores / f"cpu{number}" / "cpu_capacity").write_text("1024\n" if number % 4 >= 2 else "718\n")
    assert [pinned(["x", "-t", str(n)]) for n in (1, 3, 5)] == [(2,), (0, 2, 3), (0, 1, 2, 3, 6)]
    with monkeypatch.context() as silent:
        silent.setattr(processors, "TOPOLOGY", str(cores / "none"))
        assert pinned(["x"]) == tuple(range(8))
    for path in cores.glob("*/cpu_capacity"):
        path.unlink()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4, 5, 7})
    assert pinned(["x", "-t", "3"]) == (3, 4, 5)


def test_a_program_runs_on_the_processors_that_it_is_pinned_to(tmp_path: Path) -> None:
    own = os.sched_getaffinity(0)
    argv, out = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"], tmp_path / "out"
    ended = child.run(argv, env={}, stdout=out, stderr=tmp_path / "err", limit_s=30, processors=(max(own),))
    assert (ended.rc, out.read_text()) == (0, f"{{{max(own)}}}\n")
    assert os.sched_getaffinity(0) == own
