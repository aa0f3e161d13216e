"""`dgxlab sessions`, `session note`, and the commands that take the only running job."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import toy
from tests.cli.conftest import Project
from tests.cli.test_jobs import SLOW, interrupt, slow
from tests.machines import script


def test_sessions_are_listed_and_chosen(measured: Project) -> None:
    (row,) = measured.json("sessions")
    assert (row["name"], row["kind"], row["host"], row["state"], row["verdict"]) == ("toy", "run", "local", "done", "")
    header, line = measured.ok("sessions").out.splitlines()
    assert header.split()[:3] == ["session", "begun", "(UTC)"]
    assert line.startswith(row["session"][-6:])
    assert "3 of 3" in line
    for chosen in ("--host local", "--experiment toy", "--kind run", "--since 1h", "--since 2026-01-01"):
        assert measured.json("sessions", *chosen.split()) == [row]
    for other in ("--host spark", "--experiment toys", "--kind ab", "--since 0h", "--since 2099-01-01"):
        assert measured.ok("sessions", *other.split()).out == "no sessions\n"
    wrong = measured.run("sessions", "--since", "yesterday")
    assert (wrong.rc, wrong.next) == (2, "dgxlab sessions --help")


def test_notes_are_kept_and_shown(measured: Project) -> None:
    (row,) = measured.json("sessions")
    for text in ("new fan", "and new paste"):
        measured.ok("session", "note", row["alias"], text)
    assert measured.json("sessions")[0]["notes"] == ["new fan", "and new paste"]
    assert "done; new fan; and new paste" in measured.ok("sessions").out
    report = measured.ok("report", row["alias"]).out
    assert f"- **session {row['alias']}** noted: new fan" in report
    assert measured.run("session", "note", row["alias"], " ").rc == 2
    assert measured.run("session", "note", "nope", "new fan").next == "dgxlab sessions"
    measured.ok("session", "reject", row["alias"], "--because", "hot")
    assert "rejected: hot; new fan" in measured.ok("sessions").out
    assert measured.ok("db", "check").out == "ok\n"


@pytest.fixture
def running(project: Project) -> Iterator[str]:
    """Return the id of a job that runs until a file is removed."""
    hold = project.folder / "hold"
    hold.touch()
    job, _ = interrupt(project.spawn("run", slow(project, SLOW)))
    yield job
    hold.unlink(missing_ok=True)
    project.run("cancel", job)


def test_the_only_running_job_needs_no_name(project: Project, running: str) -> None:
    assert project.ok("logs", "-f", "-q").err == ""
    assert project.ok("cancel").out == f"job {running}: cancelled\n"
    for command in ("attach", "cancel", "logs -f"):
        ran = project.run(*command.split())
        assert (ran.rc, ran.error, ran.next) == (2, "no job is running that this record knows", "dgxlab jobs")
        ran = project.run(*command.split(), "--host", "local")
        assert (ran.rc, ran.next) == (2, "dgxlab jobs --host local")
    assert project.run("logs").next == "dgxlab sessions"


def test_of_several_running_jobs_one_must_be_named(project: Project, running: str) -> None:
    other = project.spec("other", (project.folder / slow(project)).read_text())
    second, _ = interrupt(project.spawn("run", other, "--set", "bench.0.llama-bench.n_prompt=[16]"))
    ran = project.run("cancel")
    assert (ran.rc, ran.error) == (2, "2 jobs are running: name one of them")
    assert {running, second} <= set(ran.err.split())
    project.ok("cancel", second[-6:])
    assert project.ok("cancel").out == f"job {running}: cancelled\n"


def test_a_running_build_is_followed(project: Project, tmp_path: Path) -> None:
    """What the compiler prints is there while it still compiles."""
    gate = tmp_path / "gate"
    wait = f'echo "compiling here" >&2\nwhile test -e {gate}; do sleep 0.05; done'
    cc = script(tmp_path / "cc", f'#!/bin/sh\n{wait}\nexec "$@"\n')
    gate.touch()
    checkout = project.checkout(tmp_path / "llama.cpp")
    lists = checkout / "CMakeLists.txt"
    launcher = f"set(CMAKE_C_COMPILER_LAUNCHER {cc})\n"
    lists.write_text(lists.read_text().replace("project(toy C)\n", f"project(toy C)\n{launcher}"))
    assert toy.git(checkout, "status", "--porcelain")
    job, _ = interrupt(project.spawn("run", "experiments/toy.yaml", "--tree", checkout))
    follower = project.spawn("logs", "-f")
    assert follower.stdout
    seen = ""
    deadline = time.monotonic() + 60
    while "Configuring done" not in seen:
        assert time.monotonic() < deadline
        line = follower.stdout.readline()
        assert line, seen
        seen += line
    assert gate.exists()
    gate.unlink()
    rest, err = follower.communicate(timeout=120)
    assert "compiling here" in seen + rest
    assert err.endswith(f"job {job} has built; what its other programs print is shown when it has ended\n")
    project.ok("attach")
