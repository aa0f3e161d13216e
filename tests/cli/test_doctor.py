"""`dgxlab doctor`: a line for everything, what mends it below, and an exit code for scripts."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests import machines, toy
from tests.cli.conftest import Project, Ran


def told(ran: Ran) -> dict[str, str]:
    findings: dict[str, str] = {}
    where = key = ""
    for line in ran.out.splitlines():
        if not line.startswith(" "):
            where = line
        elif line.startswith(" " * 19 + "next: "):
            findings[key] += f"\n{line.strip()}"
        else:
            key = f"{where} {line[11:19].strip()}"
            findings[key] = f"{line[2:11].strip()} {line[19:]}"
    return findings


def test_this_machine_lacks_nothing(project: Project) -> None:
    ran = project.run("doctor")
    assert (ran.rc, ran.err) == (0, "")
    findings = told(ran)
    assert findings["this client record"].endswith(f" {project.folder / 'results.db'}")
    assert findings["this client hosts"] == "ok local"
    client = {f"this client {name}" for name in ("python", "git", "pip", "cache")}
    host = {f"local {name}" for name in ("reach", "python", "git", "cc", "c++", "cmake", "disk", "lock")}
    assert client | host <= set(findings)
    assert not (project.folder / "results.db").exists()


def test_what_is_missing_is_said_with_its_mend(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(machines.programs(tmp_path / "bin", "git")))
    ran = project.run("doctor")
    assert (ran.rc, ran.error, ran.next) == (11, "2 things missing", "sudo apt-get install gcc")
    findings = told(ran)
    assert findings["local c++"].endswith("\nnext: sudo apt-get install g++")
    assert findings["local disk"].startswith("ok ")
    as_json = project.run("doctor", "--format", "json")
    listed = {f"{each['where']} {each['name']}": each for each in json.loads(as_json.out)}
    assert (as_json.rc, set(listed)) == (11, set(findings))
    assert listed["local c++"]["next"] == "sudo apt-get install g++"


def test_client_with_an_old_git(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f'if [ "$1" = --version ]; then echo git version 2.25.1; else exec {shutil.which("git")} "$@"; fi\n'
    old = machines.script(tmp_path / "bin" / "git", f"#!/bin/sh\n{text}")
    monkeypatch.setenv("PATH", str(old.parent), prepend=":")
    ran = project.run("doctor")
    finding = told(ran)["this client git"]
    assert (ran.rc, finding.startswith("missing git version 2.25.1 ")) == (11, True)
    assert finding.endswith("\nnext: sudo apt-get install git")


def test_record_that_cannot_be_opened(project: Project) -> None:
    (project.folder / "results.db").write_text("no database, only text that is long enough to be looked at" * 20)
    ran = project.run("doctor")
    assert ran.rc == 11
    assert told(ran)["this client record"].startswith("missing ")
    assert "is not an SQLite database" in told(ran)["this client record"]
    assert told(ran)["local reach"].startswith("ok ")


def test_merge_driver_of_a_tracked_record(measured: Project) -> None:
    assert "this client merge" not in told(measured.run("doctor"))
    toy.git(measured.folder, "init", "-q")
    assert "this client merge" not in told(measured.run("doctor"))
    toy.git(measured.folder, "add", "results.db")
    ran = measured.run("doctor")
    state, _, mend = told(ran)["this client merge"].partition("\nnext: git config ")
    assert (ran.rc, state.split()[0]) == (0, "note")
    toy.git(measured.folder, "config", *shlex.split(mend))
    assert told(measured.run("doctor"))["this client merge"].startswith("ok ")


def test_hosts_file_that_is_wrong_or_has_no_such_host(project: Project) -> None:
    hosts = project.folder / "hosts.yaml"
    hosts.write_text("dgx: {ssh: dgx, rot: /x}\n")
    ran = project.run("doctor", "dgx")
    assert (ran.rc, ran.error) == (11, "1 thing missing")
    assert "hosts.yaml:1: dgx.rot: unknown key; " in told(ran)["this client hosts"]
    assert not [key for key in told(ran) if key.startswith("dgx ")]
    hosts.unlink()
    ran = project.run("doctor", "dgx")
    assert (ran.rc, told(ran)["dgx reach"].startswith("missing ")) == (11, True)
    assert "\nnext: dgxlab host add dgx" in told(ran)["dgx reach"]
    hosts.write_text("dgx: {ssh: dgx}\nlocal: {local: true, root: /data/lab}\n")  # would be passed over
    ran = project.run("host", "list")
    assert (ran.rc, ran.out, ran.next) == (9, "", f"${{EDITOR:-vi}} {project.folder}/hosts.yaml")
    assert "hosts.yaml:2: local: " in ran.error


def test_cache_that_cannot_be_written(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    finding = told(project.run("doctor"))["this client cache"]
    assert finding.startswith("missing ")
    assert finding.endswith(("\nnext: ls -ld /proc", "\nnext: df -h /proc"))
