"""Running one program on the host."""

from __future__ import annotations

import os
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


def test_streams_are_kept_apart(tmp_path: Path) -> None:
    """Stdout and stderr land in their own files, and the exit status is the program's."""
    ended = launch(tmp_path, "sh", "-c", "echo one; echo two >&2; exit 3")
    assert (ended.rc, ended.signal, ended.ok) == (3, None, False)
    assert (tmp_path / "out").read_text() == "one\n"
    assert (tmp_path / "err").read_text() == "two\n"


def test_signal_is_not_an_exit_status(tmp_path: Path) -> None:
    """A crash is named by its signal."""
    ended = launch(tmp_path, "sh", "-c", "kill -SEGV $$")
    assert (ended.rc, ended.signal) == (None, signal.SIGSEGV)
    assert ended.sentence("llama-bench", 20) == "llama-bench was killed by SIGSEGV"


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
    assert "ran past its limit" in ended.sentence("x", 0.5)
    assert wait_gone(int((tmp_path / "out").read_text()))


def test_nothing_outlives_a_good_end(tmp_path: Path) -> None:
    """A background process of a program that ended well does not go on beside the next run."""
    ended = launch(tmp_path, "sh", "-c", "sleep 60 & echo $!")
    assert ended.ok
    assert wait_gone(int((tmp_path / "out").read_text()))


def test_stdin_is_closed(tmp_path: Path) -> None:
    """A program that reads stdin sees its end at once instead of hanging."""
    assert launch(tmp_path, "cat").ok


def test_lines_arrive_and_are_logged(tmp_path: Path) -> None:
    """With on_line each line is seen, and the file holds them all."""
    seen: list[str] = []
    ended = launch(tmp_path, "sh", "-c", "echo a; echo b; printf c", on_line=seen.append)
    assert ended.ok
    assert seen == ["a", "b"]
    assert (tmp_path / "out").read_text() == "a\nb\nc"


def test_limit_holds_with_lines_too(tmp_path: Path) -> None:
    """A compiler that hangs without output is ended."""
    assert launch(tmp_path, "sleep", "60", limit_s=0.3, on_line=lambda line: None).timed_out


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


def test_missing_program_is_an_os_error(tmp_path: Path) -> None:
    """A program that is not there is told apart from one that failed."""
    with pytest.raises(FileNotFoundError):
        launch(tmp_path, "no-such-program")
