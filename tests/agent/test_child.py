"""Running one program on the host."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dgxlab.agent import child

ENV = {"PATH": os.environ["PATH"]}


def launch(tmp_path: Path, *argv: str, limit_s: float = 20.0, **options: Any) -> child.Ended:
    """Run argv with its streams under tmp_path."""
    return child.run(argv, env=ENV, stdout=tmp_path / "out", stderr=tmp_path / "err", limit_s=limit_s, **options)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_gone(pid: int, patience_s: float = 5.0) -> bool:
    """Wait for a process to go."""
    deadline = time.monotonic() + patience_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def test_streams_and_status(tmp_path: Path) -> None:
    """Stdout and stderr land in their own files; a status is the program's, a crash is named by its signal."""
    ended = launch(tmp_path, "sh", "-c", "echo one; echo two >&2; exit 3")
    assert (ended.rc, ended.signal, ended.ok) == (3, None, False)
    assert (tmp_path / "out").read_text() == "one\n"
    assert (tmp_path / "err").read_text() == "two\n"
    ended = launch(tmp_path, "sh", "-c", "kill -SEGV $$")
    assert (ended.rc, ended.signal) == (None, signal.SIGSEGV)
    assert str(ended.reason("llama-bench", 20)) == "llama-bench was killed by SIGSEGV"


def test_it_is_looked_at_while_it_runs(tmp_path: Path) -> None:
    """From its start on, as often as each look says, and once more when it has ended and still has its pid."""
    seen: list[tuple[int, bool]] = []

    def look(pid: int) -> float:
        seen.append((pid, alive(pid)))
        return 0.05

    ended = launch(tmp_path, "sleep", "0.4", look=look)
    assert ended.ok
    assert 3 < len(seen) < 3 + ended.seconds / 0.05
    assert [live for _, live in seen] == [True] * (len(seen) - 1) + [False]
    assert {pid for pid, _ in seen} == {ended.pid}
    assert launch(tmp_path, "sleep", "60", limit_s=0.2, look=look).timed_out


def test_limit_ends_the_whole_group(tmp_path: Path) -> None:
    """A program that hangs is killed with the children it started, even those that ignore TERM."""
    script = "sh -c \"trap '' TERM; echo \\$\\$; while :; do sleep 0.1; done\" & wait"
    ended = launch(tmp_path, "sh", "-c", script, limit_s=0.5)
    assert ended.timed_out
    assert "ran past its limit" in str(ended.reason("x", 0.5))
    assert wait_gone(int((tmp_path / "out").read_text()))


DAEMON = """
import os, sys, time
how = sys.argv[1]
if os.fork():
    os._exit(0)
if "own session" in how:
    os.setsid()
if "closed" in how:
    os.closerange(0, 100)
while True:
    with open("pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.replace("pid.new", "pid")  # it may be killed at any time
    if "forks" in how and os.fork():
        os._exit(0)
    time.sleep(0.02 if "forks" in how else 60)
"""


@pytest.mark.parametrize("how", ["group", "own session", "own session, closed", "own session, closed, forks"])
def test_what_a_program_leaves_running_is_ended_and_named(tmp_path: Path, adopts: None, how: str) -> None:
    """Also in a session of its own, with closed descriptors, and when it is another process every 20 ms."""
    ended = launch(tmp_path, sys.executable, "-c", DAEMON, how, cwd=tmp_path)
    assert ended.ok
    assert len(ended.left) == 1
    assert "(python" in ended.left[0]
    time.sleep(0.1)
    assert not alive(int((tmp_path / "pid").read_text()))
    assert child._strays() == []


def test_what_ends_right_after_its_program_was_not_left(tmp_path: Path, adopts: None) -> None:
    """And what `beside` started is no program's."""
    sampler = child.beside(["sh", "-c", "sleep 60 & wait"], env=ENV, output=tmp_path / "sampled")
    assert launch(tmp_path, "sh", "-c", "setsid sleep 0.05 &").left == ()
    assert sampler.poll() is None
    sampler.kill()
    sampler.wait()
    assert launch(tmp_path, "true").left == ()  # of the sampler there is a sleep
    os.killpg(sampler.pid, signal.SIGKILL)


def test_children_are_found_on_a_kernel_that_does_not_list_them(
    tmp_path: Path, adopts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then every process is looked at."""
    listed = Path.read_text
    unlisted = lambda path, *args: listed(path.with_name("none") if path.name == "children" else path, *args)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", unlisted)
    assert len(launch(tmp_path, "setsid", "-f", "sleep", "60").left) == 1


def test_output_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program that goes beyond its limit: ended, with what was kept, and the reason; on stderr too."""
    monkeypatch.setattr(child, "OUTPUT_LIMIT", 1 << 20)
    monkeypatch.setattr(child, "OUTPUT_LOOK_S", 0.05)
    for words in ("yes", "yes >&2"):
        ended = launch(tmp_path, "sh", "-c", words, file_limit=resource.RLIM_INFINITY)
        assert (ended.too_long, ended.timed_out, ended.ok) == (True, False, False)
        assert ended.seconds < 5
        assert str(ended.reason("llama-bench", 20)) == "llama-bench printed more than 1 MiB"
        assert max((tmp_path / name).stat().st_size for name in ("out", "err")) == 1 << 20

    # the kernel ends a program that writes faster than it is looked at
    ended = launch(tmp_path, "yes", file_limit=2 << 20, look=lambda pid: 60.0)
    assert (ended.too_long, ended.signal) == (True, signal.SIGXFSZ)


def test_kept_descriptors_are_inherited(tmp_path: Path) -> None:
    """A lock's descriptor reaches the program: an orphan would still hold it."""
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        launch(tmp_path, "sh", "-c", f"readlink /proc/self/fd/{fd}", keep=[fd])
    finally:
        os.close(fd)
    assert (tmp_path / "out").read_text().strip() == str(tmp_path)


def test_program_dies_with_the_agent(tmp_path: Path) -> None:
    """SIGKILL of the agent takes the measured program along."""
    code = (
        "import sys; from pathlib import Path; from dgxlab.agent import child\n"
        f"child.run(['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60'], env={ENV!r}, stdout=Path('{tmp_path}/o'),"
        f" stderr=Path('{tmp_path}/e'), limit_s=60)"
    )
    agent = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 10
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    agent.kill()
    agent.wait()
    assert wait_gone(int((tmp_path / "pid").read_text()))
