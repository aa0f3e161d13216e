"""`dgxlab host list`, `check` and `clean` on this machine."""

import getpass
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from tests import machines
from tests.cli.conftest import Machine, Project, new_project, refuse


@pytest.fixture
def box(project: Project) -> Path:
    """A host of the user's own, this machine under another name; returns its root."""
    root = project.folder / "root"
    project.hosts.write_text(f"box: {{local: true, root: {root}}}\nspark: {{ssh: me@spark}}\n")
    return root


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_hosts_are_a_table(project: Project, box: Path) -> None:
    ran = project.run("host", "list")
    assert rows(ran.out) == [
        ["name", "reached", "by", "root"],
        ["box", "this", "machine", str(box)],
        ["spark", "me@spark", "~/.dgxlab"],
        ["local", "this", "machine", "~/.dgxlab"],
    ]
    title, *lines = ran.out.splitlines()
    assert [line[title.index("root") - 1 :].strip() for line in lines] == [str(box), "~/.dgxlab", "~/.dgxlab"]
    listed = project.json("host", "list")
    assert [host["name"] for host in listed] == ["box", "spark", "local"]


def test_check_shows_what_is_there(
    project: Project, box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a GPU that another program computes on, and without ccache."""
    folder = machines.programs(tmp_path / "bin", "git", "cc", "c++", "cmake", "ninja")
    machines.h200(folder, f"{machines.UUID}, {os.getpid()}, /opt/bin/python3, 1634")
    machines.nvcc(folder, "13.0")
    monkeypatch.setenv("PATH", str(folder))
    ran = project.run("host", "check", "box")
    assert (ran.rc, ran.err) == (0, "")
    shown = {line[9:17].strip(): f"{line[:9].strip()} {line[17:]}" for line in ran.out.splitlines()}
    assert (shown["gpu"], shown["driver"]) == ("ok NVIDIA H200", "ok 580.159.04, runs CUDA up to 13.0")
    assert shown["in use"].startswith(f"note /opt/bin/python3 of {getpass.getuser()}, pid {os.getpid()} computes on ")
    assert (shown["nvcc"], shown["git"]) == (f"ok 13.0, {folder}/nvcc", f"ok {folder}/git")
    assert shown["ccache"].startswith("note ")
    assert shown["disk"].endswith(f" at {box}")
    facts = project.json("host", "check", "box")
    assert facts["details"]["driver"] == {"version": "580.159.04", "cuda": "13.0"}
    assert facts["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.mark.parametrize("command", ["host check box", "doctor box"])
def test_what_a_host_says_cannot_take_over_the_terminal(
    project: Project, box: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """A program's name is whatever its owner wants."""
    folder = machines.programs(tmp_path / "bin")
    machines.h200(folder, f"{machines.UUID}, {os.getpid()}, /opt/\033[2Jevil, 1")
    monkeypatch.setenv("PATH", str(folder))
    ran = project.run(*command.split())
    assert ("/opt/\\u001b[2Jevil" in ran.out, "\033" in ran.out) == (True, False)


@pytest.fixture(scope="module")
def once_used(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose host box has run the toy's experiment."""
    new = new_project(machine, tmp_path_factory.mktemp("used") / "project", refuse)
    new.hosts.write_text(f"box: {{local: true, root: {new.folder / 'root'}}}\n")
    new.measure("--host", "box", XDG_CONFIG_HOME=str(new.hosts.parent.parent))
    return new.folder


@pytest.fixture
def used(project: Project, box: Path, once_used: Path) -> Path:
    """The project's host after a run, forty days ago; returns its root."""
    shutil.copyfile(once_used / "results.db", project.folder / "results.db")
    shutil.copytree(once_used / "root", box, symlinks=True)
    machines.age(box, 40)
    return box


def left(root: Path) -> list[int]:
    """Return how many builds, work folders and jobs there are."""
    return [len(list((root / name).iterdir())) for name in ("builds", "work", "jobs")]


def test_dry_run_only_lists(project: Project, used: Path) -> None:
    ran = project.run("host", "clean", "box", "--dry-run")
    assert (ran.rc, ran.err) == (0, "")
    listed = {line[0]: line for line in rows(ran.out)}
    assert [listed[kind][-1] for kind in ("builds", "work", "jobs")] == ["goes"] * 3
    assert listed["sources"][-3:] == ["stays:", "never", "removed"]
    assert "3 of 5 go, " in ran.out.splitlines()[-1]
    as_json = project.json("host", "clean", "box", "--dry-run")
    kinds = {each["kind"]: (each["goes"], each["kept"]) for each in as_json}
    assert (kinds["builds"], kinds["agents"]) == ((True, ""), (False, "this dgxlab's own agent"))
    assert left(used) == [1, 1, 1]


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_without_a_yes_nothing_goes(project: Project, used: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """A no, or no terminal to ask on: exit code 2, with what was to go on stderr, also where it was to be quiet."""
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    quiet = "-q " if answer else ""
    ran = project.run("host", "clean", "box", "--older-than", "20", "--kind", "builds", *quiet.split())
    assert (ran.rc, ran.out, ran.error) == (2, "", "nothing was removed")
    assert ran.next == f"dgxlab host clean box --older-than 20 --kind builds {quiet}--yes"
    assert [line[-1] for line in rows(ran.err) if line[0] == "builds"] == ["goes"]
    assert left(used) == [1, 1, 1]


def test_a_typed_yes_is_enough(project: Project, used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is on stderr, so that stdout is the result alone; the results are still in the record."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    ran = project.ok("host", "clean", "box", "--format", "json")
    assert {item["kind"] for item in json.loads(ran.out)["removed"]} == {"builds", "work", "jobs"}
    assert left(used) == [0, 0, 0]
    assert "| pp16 |" in project.run("report", "toy").out
    again = project.run("host", "clean", "box")
    assert (again.rc, again.out) == (0, "nothing removed\n")


def test_kinds_and_age(project: Project, used: Path) -> None:
    none = project.run("host", "clean", "box", "--yes", "--older-than", "60", "--kind", "work")
    assert none.out == "nothing removed\n"
    assert " stays: used in the last 60 days" in none.err
    listed = project.run(*["host", "clean", "box", "--kind", "work", "--older-than", "0", "--dry-run"])
    assert (listed.rc, left(used)) == (0, [1, 1, 1])
    assert [line[-1] for line in rows(listed.out) if line[0] in ("work", "builds")] == ["for", "goes"]
    project.ok("host", "clean", "box", "--yes", "--kind", "work", "--kind", "builds")
    assert left(used) == [0, 0, 1]
    assert project.run("host", "clean", "box", "--kind", "src").rc == 2


def test_without_a_record_jobs_stay(
    project: Project, used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ran = project.run("host", "clean", "box", "--yes")
    assert (ran.rc, "first: dgxlab attach " in ran.err) == (0, True)
    assert left(used) == [0, 0, 1]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_projects_entry_needs_consent(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It chooses the program that runs here: the user is shown it and agrees, and again when it has changed."""
    program = machines.script(tmp_path / "python", f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    theirs = project.folder / "hosts.yaml"
    theirs.write_text(f"box: {{local: true, python: {program}, root: {tmp_path}/root}}\nspark: {{ssh: spark}}\n")
    for command in ("host check box", "run experiments/toy.yaml --host box", "jobs --host box"):
        ran = project.run(*command.split())
        assert (ran.rc, ran.next) == (3, "dgxlab host trust box")
        assert f"{theirs} sets its local, python, " in ran.error
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    ran = project.run("host", "trust", "box")
    assert (ran.rc, f"  python: {program}" in ran.err.splitlines()) == (2, True)
    assert project.run("host", "check", "box").rc == 3
    project.ok("host", "trust", "box", "--yes")
    project.run("host", "check", "box")
    assert (tmp_path / "ran").exists()
    theirs.write_text(theirs.read_text() + "# a comment changes nothing\n")
    assert project.run("host", "check", "box").rc == 4
    theirs.write_text(theirs.read_text().replace(str(program), f"{program}2"))
    assert project.run("host", "check", "box").rc == 3
    project.ok("host", "trust", "spark")
    assert project.run("host", "trust", "nope").rc == 9
