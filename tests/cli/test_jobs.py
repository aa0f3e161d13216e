"""Ctrl-C, `dgxlab jobs`, `attach`, `cancel`: a job outlives its client."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dgxlab.agent.facts import host_id
from dgxlab.agent.lock import BenchLock, Signature
from tests.cli.conftest import Project
from tests.machines import script

SLOW = "extends: toy.yaml\nbench: [{llama-bench: {model: m, n_prompt: [16, 32], env: {TOY_HOLD: HERE}}}]\n"


@pytest.fixture
def hold(project: Project) -> Path:
    """The file that what is slow waits for to be removed."""
    file = project.folder / "hold"
    file.touch()
    return file


def slow(project: Project, text: str = SLOW) -> Path:
    return project.spec("slow", text.replace("HERE", str(project.folder / "hold")))


def interrupt(child: subprocess.Popen[str], when: str = "runs on local") -> tuple[str, str]:
    """Wait until stderr says `when`, press Ctrl-C as a terminal does, and return the job's id and all of stderr."""
    assert child.stderr
    seen = ""
    while when not in seen:
        line = child.stderr.readline()
        assert line, seen
        seen += line
    os.killpg(child.pid, signal.SIGINT)
    _, rest = child.communicate(timeout=60)
    (job,) = [line.split()[1] for line in seen.splitlines() if re.search(r" runs on \w+$", line)]
    return job, seen + rest


def listed(project: Project, job: str, *args: object) -> dict[str, Any]:
    (row,) = [row for row in project.json("jobs", *args) if row["job"] == job]
    return dict(row)


def test_ctrl_c_leaves_the_job_running(project: Project, hold: Path) -> None:
    child = project.spawn("run", slow(project))
    job, err = interrupt(child)
    stopped = f"stopped watching; job {job} goes on, and dgxlab cancel {job} ends it"
    how_to_go_on = [stopped, f"next: dgxlab attach {job}"]
    assert (child.returncode, err.splitlines()[-2:]) == (130, how_to_go_on)
    row = listed(project, job)
    assert (row["host"], row["on_host"], row["name"], row["kind"]) == ("local", "running", "slow", "run")
    assert row["recorded"] in ("intended", "running")
    attached = project.spawn("attach", job[:-3])
    assert attached.stderr
    attached.stderr.readline()
    os.killpg(attached.pid, signal.SIGINT)
    out, err = attached.communicate(timeout=60)
    assert (attached.returncode, out, err.splitlines()[-2:]) == (130, "", how_to_go_on)
    again = project.spawn("run", "experiments/slow.yaml", "--again", "--wait", "0")
    assert again.stderr
    while f"job {job} of this experiment " not in (line := again.stderr.readline()):
        assert line
    assert line.endswith(" still runs: following it; options such as --again and --wait are for a new job\n")
    hold.unlink()
    out, err = again.communicate(timeout=60)
    assert (again.returncode, "2 cells, 0 measured now, 2 up to date" in err) == (0, True)
    assert "| pp16 | 1600 ± 0.2 (5) |" in out
    attached = project.run("attach", job)
    assert (attached.rc, attached.err, attached.out.splitlines()[0]) == (0, "", f"# Session {job}")
    assert "| pp16 | 1600 ± 0.2 (5) |" in attached.out


@pytest.mark.usefixtures("hold")
def test_cancel_ends_the_job_and_keeps_what_it_measured(project: Project) -> None:
    quick = "{batched-bench: {model: m, npp: 16, ntg: 4, npl: 1}}"
    child = project.spawn("run", slow(project, SLOW.replace("bench: [", f"bench: [{quick}, ")))
    assert child.stderr
    while "S_PP" not in (line := child.stderr.readline()):
        assert line
    job = project.json("jobs", "-q")[-1]["job"]
    cancelled = project.run("cancel", job)
    assert (cancelled.rc, cancelled.out, cancelled.err) == (0, f"job {job}: cancelled\n", "")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "| 32.0 | " in out
    assert f"\njob {job} was cancelled\nnext: dgxlab run experiments/slow.yaml\n" in err
    attached = project.run("attach", job)
    assert (attached.rc, attached.err.splitlines()[0]) == (130, f"job {job} was cancelled")
    assert f"- **session {job[-6:]}** cancelled: " in attached.out
    for host in ([], ["--host", "local"]):
        again = project.ok("cancel", job, *host)
        assert (again.out, again.err) == (f"job {job} has ended (cancelled): nothing of it runs\n", "")


def test_what_has_ended_needs_no_host(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project.hosts.write_text("box: {local: true}\n")
    project.ok("run", "experiments/toy.yaml", "--host", "box")
    failing = project.spec(
        "failing", "extends: toy.yaml\ngates: [{backend-ops: {op: MUL_MAT, backend: CPU, expect: 5/5}}]\n"
    )
    assert project.run("run", failing, "--host", "box").rc == 5
    project.hosts.unlink()
    good, bad = (row["session"] for row in project.json("sessions"))
    attached = project.ok("attach", good)
    assert (attached.out.splitlines()[0], attached.err) == (f"# Session {good}", "")
    attached = project.run("attach", bad)
    assert (attached.rc, attached.out.splitlines()[0]) == (5, f"# Session {bad}")
    assert project.ok("cancel", good).out == f"job {good} has ended (done): there is nothing to cancel\n"
    told = project.json("cancel", bad)
    assert told == {"job": bad, "state": "done", "rc": {"status": "failed", "exit_code": 5}}
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    ran = project.run("logs", good)
    assert ran.error.startswith(f"the raw files of job {good} are not on this machine, and host box is not known")
    assert (ran.rc, ran.next) == (9, f"dgxlab report {good}")
    assert "\n  to fetch them: dgxlab host add box\n" in ran.err


def test_a_job_says_whose_build_it_waits_for(project: Project, tmp_path: Path, hold: Path) -> None:
    launcher = script(tmp_path / "launcher", f'#!/bin/sh\nwhile [ -e {hold} ]; do sleep 0.1; done\nexec "$@"\n')
    held = f"extends: toy.yaml\ncmake: {{CMAKE_C_COMPILER_LAUNCHER: {launcher}}}\n"
    builds, _ = interrupt(project.spawn("run", project.spec("first", held)), "step 1 of ")
    waits, err = interrupt(project.spawn("run", project.spec("second", held)), "waiting for the build of ")
    assert re.search(rf"\nwaiting for the build of job {builds} of \S+, since \S+ \S+, in the same folder /", err)
    assert re.match(rf"waits for job {builds} of \S+, since ", listed(project, waits)["why"])
    assert listed(project, builds)["why"] == ""
    attached = project.spawn("attach", waits)
    assert attached.stderr
    assert attached.stderr.readline().startswith(f"job {waits} waits for job {builds} of ")
    hold.unlink()
    _, err = attached.communicate(timeout=60)
    assert re.match(r"build \w+ of second: reused\n", err)


def started_elsewhere(project: Project, tmp_path: Path) -> str:
    spec = slow(project, f"hypothesis: toys can be slow\n{SLOW}")
    job, _ = interrupt(project.spawn("run", spec, "--again", "--db", tmp_path / "other.db"))
    return job


def test_jobs_that_another_record_knows(measured: Project, tmp_path: Path, hold: Path) -> None:
    job = started_elsewhere(measured, tmp_path)
    row = listed(measured, job)
    assert (row["on_host"], row["recorded"], row["name"], row["kind"]) == ("running", "not here", "slow", "run")
    assert 0 <= row["age_s"] < 60
    header, *lines = measured.run("jobs").out.splitlines()
    assert header.split() == ["job", "name", "kind", "age", "on_host", "recorded"]
    (line,) = [line.split() for line in lines if line.startswith(job[-6:])]
    assert (line[:3], line[-3:]) == ([job[-6:], "slow", "run"], ["running", "not", "here"])
    for command in ("attach", "cancel"):
        unknown = measured.run(command, job)
        assert (unknown.rc, unknown.out) == (2, "")
        assert unknown.error.startswith(f"no job begins with {job!r} or has this alias in this record; ")
        assert unknown.error.endswith(" that another started, add --host HOST")
    hold.unlink()
    attached = measured.run("attach", job[:-2], "--host", "local")
    assert (attached.rc, attached.out.startswith(f"# Session {job}\n")) == (0, True), attached.err
    assert "| pp16 | 1600 ± 0.2 (5) |" in attached.out
    assert listed(measured, job)["recorded"] == "done"
    measured.ok("attach", job, "--db", tmp_path / "other.db")
    merged = measured.json("db", "merge", "results.db", tmp_path / "other.db")
    assert not any(merged.values())  # a job brings its experiment along
    assert measured.run("db", "check").out == "ok\n"
    assert measured.run("report", "slow").out.startswith("# Experiment slow\n\n> toys can be slow\n")


@pytest.mark.usefixtures("hold")
def test_a_first_record_is_made_for_a_job_of_a_host(project: Project, tmp_path: Path) -> None:
    job = started_elsewhere(project, tmp_path)
    for host in ([], ["--host", "local"]):
        assert listed(project, job, *host)["recorded"] == "not here"
    for words in (["attach"], ["cancel"], ["logs", "-f"]):
        assert project.run(*words, job).next == f"dgxlab {' '.join(words)} {job} --host local"
        assert project.run(*words, "nope").next == "dgxlab jobs"
    assert not (project.folder / "results.db").exists()
    assert project.run("cancel", job[:-2], "--host", "local").out == f"job {job}: cancelled\n"


@pytest.mark.usefixtures("hold")
@pytest.mark.parametrize("way", ["attach", "merge"])
def test_a_job_that_another_record_started_is_cancelled_only_by_name(
    project: Project, tmp_path: Path, way: str
) -> None:
    job = started_elsewhere(project, tmp_path)
    named = f"dgxlab cancel {job} --host local"

    def refused(*args: str) -> None:
        ran = project.run("cancel", *args)
        assert (ran.rc, ran.error.startswith(f"job {job} was not started "), ran.next) == (2, True, named)

    refused("--host", "local")
    if way == "attach":
        attached = project.spawn("attach", job, "--host", "local")
        assert attached.stderr
        attached.stderr.readline()
        os.killpg(attached.pid, signal.SIGINT)
        attached.communicate(timeout=60)
    else:
        project.ok("db", "merge", "results.db", tmp_path / "other.db")
    refused()
    refused("--host", "local")
    assert project.ok(*named.split()[1:]).out == f"job {job}: cancelled\n"
    row = listed(project, job)
    assert (row["on_host"], row["recorded"]) == ("cancelled", "cancelled")


@pytest.mark.usefixtures("hold")
def test_killed_agent_is_lost_and_reported(project: Project) -> None:
    project.hosts.write_text("box: {local: true}\n")
    job, _ = interrupt(project.spawn("run", slow(project), "--again", "--host", "box"), when="gate MUL_MAT")
    started = json.loads((project.machine.home / ".dgxlab" / "jobs" / job / "started").read_text())
    os.kill(started["pid"], signal.SIGKILL)
    attached = project.run("attach", job)
    assert (attached.rc, attached.next) == (12, "dgxlab run slow --host box")
    assert attached.error.startswith(f"job {job} was lost")
    assert "| MUL_MAT | CPU | 4/4 |" in attached.out
    row = listed(project, job)
    assert (row["on_host"], row["recorded"]) == ("lost", "lost")
    project.hosts.unlink()
    for words in (["attach"], ["cancel"], ["logs", "-f"]):
        ran = project.run(*words, job)
        unknown = "host box is not known: no hosts.yaml names it; known: local"
        assert ran.error == f"the record has job {job} as lost, and its host cannot be asked: {unknown}"
        assert (ran.rc, ran.next) == (9, f"dgxlab report {job}")
        assert "\n  to ask it again: dgxlab host add box\n" in ran.err
    project.ok("report", job)


def test_a_job_below_another_root_is_not_lost(
    project: Project, tmp_path: Path, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host's root is a folder of the user's home."""
    job, _ = interrupt(project.spawn("run", slow(project), "--again"), when="gate MUL_MAT")
    root, other = project.machine.home / ".dgxlab", tmp_path / "home" / ".dgxlab"
    here = f"{socket.gethostname()} ({host_id()})"
    roots = f"job {job} began on {here} below {root}, and host local is {here} with the root {other}"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("HOME", str(other.parent))
        row = listed(project, job)
        assert (row["on_host"], row["recorded"]) == ("elsewhere", "running")
        assert row["why"].startswith(f"measures, below another root: job {job} of ")
        unknown = f"{roots}: whether it still runs is not known"
        attached = project.run("attach", job)
        assert (attached.rc, attached.error, attached.next) == (4, unknown, f"dgxlab report {job}")
        for command in ("attach", "cancel"):
            ran = project.run(command, job, "--host", "local")
            assert ran.error.endswith(" below ~/.dgxlab; jobs below another root or home can be named only there")
        project.hosts.write_text(f"before: {{local: true, root: {root}}}\n")
        hold.unlink()
        assert project.ok("attach", job, "--host", "before").out.startswith(f"# Session {job}\n")
        assert project.ok("jobs").out == "no jobs\n"
    assert listed(project, job)["recorded"] == "done"


ANOTHER = """set -e
hostname another
for id in /etc/machine-id /var/lib/dbus/machine-id; do test ! -e $id || mount --bind /dev/null $id; done
mount -t tmpfs -o mode=700 tmpfs "$HOME/.dgxlab"
exec "$@"
"""
"""Makes this another machine, on which nothing was measured yet, for one command."""


def test_a_job_of_another_machine_is_not_lost(project: Project, tmp_path: Path, hold: Path) -> None:
    """Its record was merged: `local` is another machine there, with the same root."""
    job, _ = interrupt(project.spawn("run", slow(project), "--again"), when="gate MUL_MAT")
    root = project.machine.home / ".dgxlab"
    began = f"job {job} began on {socket.gethostname()} ({host_id()}) below {root}, and host local is another ("
    (tmp_path / "locks").mkdir()

    def there(*args: str) -> subprocess.CompletedProcess[str]:
        own = () if os.getuid() == 0 else ("--map-current-user", "--keep-caps")
        argv = ["unshare", *own, "--mount", "--uts", "sh", "-c", ANOTHER, "sh", sys.executable, "-m", "dgxlab", *args]
        env = {**os.environ, "DGXLAB_LOCKS": str(tmp_path / "locks")}
        return subprocess.run(argv, check=False, cwd=project.folder, env=env, capture_output=True, text=True)

    (row,) = json.loads(there("jobs", "--format", "json").stdout)
    assert (row["job"], row["on_host"], row["recorded"]) == (job, "absent", "running")
    assert (
        row["why"].startswith(began),
        row["why"].endswith(f" with the root {root}: whether it still runs is not known"),
    ) == (True, True)
    attached = there("attach", job)
    assert (attached.returncode, f"\nerror: {row['why']}\n" in f"\n{attached.stderr}") == (4, True)
    hold.unlink()
    assert project.ok("attach", job).out.startswith(f"# Session {job}\n")
    assert listed(project, job)["recorded"] == "done"


def test_another_users_job_is_listed_while_it_measures(measured: Project) -> None:
    lock, theirs = BenchLock("GPU-1"), "20260101-000000-theirs-abc123"
    assert lock.take(Signature(theirs, "bob"))
    row = listed(measured, theirs)
    assert (row["on_host"], row["recorded"]) == ("elsewhere", "not here")
    assert row["why"].startswith(f"measures, below another root: job {theirs} of bob, since ")
    assert f"\nabc123: {row['why']}\n" in measured.ok("jobs").out
    for command in ("attach", "cancel"):
        assert measured.run(command, theirs, "--host", "local").error.startswith(f"no job begins with {theirs!r} ")
    lock.release()
    assert theirs not in measured.ok("jobs").out


@pytest.mark.usefixtures("hold")
def test_a_cancelled_job_of_a_checkout_has_a_next_command_to_type(project: Project, tmp_path: Path) -> None:
    """No record says where the checkout is."""
    checkout = project.checkout(tmp_path / "llama.cpp")
    (checkout / "tools" / "new.h").touch()
    job, _ = interrupt(project.spawn("run", slow(project), "--tree", checkout))
    project.ok("cancel", job)
    attached = project.run("attach", job)
    assert (attached.rc, attached.next) == (130, f"dgxlab report {job} --wide")
    project.ok(*attached.next.split()[1:])


@pytest.mark.usefixtures("hold")
def test_a_cancelled_job_is_repeated_only_by_a_command_that_measures_the_same(project: Project) -> None:
    job, _ = interrupt(project.spawn("run", slow(project), "--set", "bench.0.llama-bench.n_prompt=[16]"))
    project.ok("cancel", job)
    assert project.run("attach", job).next == f"dgxlab report {job} --wide"
    job, _ = interrupt(project.spawn("run", "slow"))
    project.ok("cancel", job)
    assert project.run("attach", job).next == "dgxlab run slow --host local"
    (project.folder / "experiments" / "slow.yaml").unlink()
    assert project.run("attach", job).next == f"dgxlab report {job} --wide"


def test_ctrl_c_before_a_job_is_said_too(project: Project, tmp_path: Path) -> None:
    slow = f'case "$*" in *fetch*) touch {tmp_path}/here; sleep 60;; esac'
    git = script(tmp_path / "bin" / "git", f'#!/bin/sh\n{slow}\nexec {shutil.which("git")} "$@"\n')
    env = {**os.environ, "HOME": str(tmp_path), "PATH": f"{git.parent}:{os.environ['PATH']}"}
    child = project.spawn("run", "experiments/toy.yaml", env=env)
    while not (tmp_path / "here").exists():
        assert child.poll() is None
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, "Traceback" in err) == (130, "", False)
    assert err.endswith("\nstopped\nnext: dgxlab run experiments/toy.yaml\n")


def test_jobs_that_the_record_does_not_know(measured: Project) -> None:
    measured.hosts.write_text("box: {local: true}\nspark: {ssh: spark}\n")
    for command in ("attach", "cancel", "logs"):
        assert measured.run(command, "nope").next == "dgxlab jobs"
    assert measured.run("report", "nope").next == "dgxlab sessions"
    for command in ("attach", "cancel"):
        assert measured.run(command, "nope", "--host", "box").next == "dgxlab jobs --host box"
    attach = "dgxlab attach nope --host box"
    assert measured.run("logs", "nope", "--host", "box").next == attach
    assert measured.run("logs", "nope", "--host", "box", "--db", "results.db").next == attach.replace(
        " ", " --db results.db ", 1
    )
    Path("results.db").unlink()
    assert measured.run("logs", "nope", "--host", "box").next == attach
    assert not Path("results.db").exists()
