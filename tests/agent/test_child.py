"""Running one program on the host."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgxlab.agent import child
from dgxlab.model.reasons import Code, reason

ENV = {"PATH": os.environ["PATH"]}


def launch(tmp_path: Path, *argv: str, limit_s: float = 20.0, **options: Any) -> child.Exit:
    return child.run(argv, env=ENV, stdout=tmp_path / "out", stderr=tmp_path / "err", limit_s=limit_s, **options)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_for_text(path: Path) -> str:
    wait_until(lambda: path.exists() and path.read_text())
    return path.read_text()


def wait_gone(pid: int) -> None:
    wait_until(lambda: not alive(pid))


def test_streams_and_status(tmp_path: Path) -> None:
    ended = launch(tmp_path, "sh", "-c", "echo one; echo two >&2; exit 3")
    assert (ended.rc, ended.signal, ended.ok) == (3, None, False)
    assert (tmp_path / "out").read_text() == "one\n"
    assert (tmp_path / "err").read_text() == "two\n"
    ended = launch(tmp_path, "sh", "-c", "kill -SEGV $$")
    assert (ended.rc, ended.signal) == (None, signal.SIGSEGV)
    assert ended.reason("llama-bench", 20) == reason(Code.KILLED, program="llama-bench", signal="SIGSEGV")


def test_it_is_looked_at_while_it_runs(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def look(pid: int) -> float:
        seen.append((pid, alive(pid)))
        if len(seen) == 5:
            hold.unlink()
            wait_gone(pid)
        return 0.05

    (hold := tmp_path / "hold").touch()
    ended = launch(tmp_path, "sh", "-c", f"while test -e {hold}; do sleep 0.01; done", look=look)
    assert ended.ok
    assert seen == [*[(ended.pid, True)] * 5, (ended.pid, False)]
    assert ended.seconds > 4 * 0.05
    assert launch(tmp_path, "sleep", "60", limit_s=0.2, look=look).timed_out


def test_limit_ends_the_whole_group(tmp_path: Path) -> None:
    script = "sh -c \"trap '' TERM; echo \\$\\$; while :; do sleep 0.1; done\" & wait"
    # at its limit only once it has printed
    ended = launch(tmp_path, "sh", "-c", script, limit_s=0.5, look=lambda _: len(wait_for_text(tmp_path / "out")))
    assert ended.timed_out
    assert ended.reason("x", 0.5) == reason(Code.TIMED_OUT, program="x", limit_s=0.5)
    wait_gone(int((tmp_path / "out").read_text()))


DAEMON = """
import os, sys, time
how, folder = sys.argv[1:]
os.chdir(folder)
if os.fork():
    while not os.path.exists("pid"):
        time.sleep(0.01)
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
    ended = launch(tmp_path, sys.executable, "-c", DAEMON, how, str(tmp_path))
    assert ended.ok
    assert len(ended.left) == 1
    assert "(python" in ended.left[0]
    assert not alive(int((tmp_path / "pid").read_text()))
    assert child._strays() == []


def test_a_run_takes_no_longer_for_what_it_leaves(
    tmp_path: Path, adopts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_LEFT_S", 2.0)
    assert launch(tmp_path, "setsid", "-f", "sleep", "60").seconds < 2.0


def test_what_ends_right_after_its_program_was_not_left(
    tmp_path: Path, adopts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_LEFT_S", 30.0)  # on a busy machine it may not end as soon as it would
    sampler = child.beside(["sh", "-c", "sleep 60 & echo there; wait"], env=ENV, output=tmp_path / "sampled")
    wait_for_text(tmp_path / "sampled")
    assert launch(tmp_path, "sh", "-c", "setsid sleep 0.05 &").left == ()
    assert sampler.poll() is None
    sampler.kill()
    sampler.wait()
    assert launch(tmp_path, "true").left == ()  # of the sampler there is a sleep
    os.killpg(sampler.pid, signal.SIGKILL)


def test_children_are_found_on_a_kernel_that_does_not_list_them(
    tmp_path: Path, adopts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Path.read_text
    unlisted = lambda path, *args: listed(path.with_name("none") if path.name == "children" else path, *args)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", unlisted)
    assert len(launch(tmp_path, "setsid", "-f", "sleep", "60").left) == 1


def test_output_without_end_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "OUTPUT_LIMIT", 1 << 20)
    monkeypatch.setattr(child, "OUTPUT_LOOK_S", 0.05)
    for words in ("yes", "yes >&2"):
        ended = launch(tmp_path, "sh", "-c", words, file_limit=resource.RLIM_INFINITY)
        assert (ended.too_long, ended.timed_out, ended.ok) == (True, False, False)
        assert ended.reason("x", 20) == reason(Code.TOO_LONG, program="x", mib=1)
        assert max((tmp_path / name).stat().st_size for name in ("out", "err")) == 1 << 20

    # the kernel ends a program that writes faster than it is looked at
    ended = launch(tmp_path, "yes", file_limit=2 << 20, look=lambda pid: 60.0)
    assert (ended.too_long, ended.signal) == (True, signal.SIGXFSZ)


def test_kept_descriptors_are_inherited(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        launch(tmp_path, "sh", "-c", f"readlink /proc/self/fd/{fd}", keep=[fd])
    finally:
        os.close(fd)
    assert (tmp_path / "out").read_text().strip() == str(tmp_path)


def test_program_dies_with_the_agent(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dgxlab.agent import child\n"
        f"child.run(['sh', '-c', 'echo $$ > {tmp_path}/pid; exec sleep 60'], env={ENV!r}, stdout=Path('{tmp_path}/o'),"
        f" stderr=Path('{tmp_path}/e'), limit_s=60)"
    )
    agent = subprocess.Popen([sys.executable, "-c", code])
    pid = int(wait_for_text(tmp_path / "pid"))
    agent.kill()
    agent.wait()
    wait_gone(pid)
