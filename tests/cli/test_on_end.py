"""`on_end` and `bell` of the user's own config.yaml."""

import json
import os
import pty
from pathlib import Path

import pytest

from tests.cli.conftest import Project, shown_on
from tests.machines import script


@pytest.fixture
def told(project: Project, tmp_path: Path) -> Path:
    """Return the file in which a user's command writes its arguments and its stdin."""
    program = script(tmp_path / "tell", f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/told\ncat >> {tmp_path}/told\n')
    project.hosts.with_name("config.yaml").write_text(
        f'on_end: [{program}, "{{state}} {{name}}", "{{text}}", "{{x}}"]\n'
    )
    return tmp_path / "told"


def test_the_users_command_gets_the_result(project: Project, told: Path) -> None:
    project.ok("run", "toy")
    first, text, unknown, stdin = told.read_text().splitlines()
    assert (first, unknown) == ("done toy", "{x}")
    assert text.startswith("toy on local done: 8 cells, 8 measured now, 0 up to date")
    assert json.loads(stdin) == {"text": text}
    project.ok("run", "toy")  # up to date: no job
    assert len(told.read_text().splitlines()) == 4
    assert project.run("run", "toy", "--again", "--set", "gates.0.backend-ops.expect=5/5").rc == 5
    assert told.read_text().splitlines()[4] == "failed toy"


def test_attach_tells_too_and_a_failure_is_only_a_note(measured: Project, told: Path) -> None:
    (row,) = measured.json("sessions")
    config = measured.hosts.with_name("config.yaml")
    measured.ok("attach", row["alias"])
    assert told.read_text().startswith("done toy\n")
    failing = {
        "[sh, -c, exit 1]": "exit status 1",
        "[/nowhere]": "No such file",
        "[sh, -c, 'echo no >&2; exit 3']": "no",
    }
    for argv, why in failing.items():
        config.write_text(f"on_end: {argv}\n")
        ran = measured.ok("attach", row["alias"])
        assert "on_end of your config.yaml failed" in ran.err
        assert why in ran.err
    config.write_text("on_and: [x]\n")
    wrong = measured.run("attach", row["alias"])
    assert (wrong.rc, wrong.out, "on_and" in wrong.error, str(config) in wrong.next) == (9, "", True, True)


def test_a_project_cannot_set_it(measured: Project, tmp_path: Path) -> None:
    (measured.folder / "config.yaml").write_text(f"on_end: [touch, {tmp_path}/ran]\n")
    (row,) = measured.json("sessions")
    measured.ok("attach", row["alias"])
    assert not (tmp_path / "ran").exists()
    spec = measured.spec("sly", f"extends: toy.yaml\non_end: [touch, {tmp_path}/ran]\n")
    assert measured.run("plan", spec).rc == 9


def test_the_bell_rings_on_a_terminal_alone(measured: Project) -> None:
    measured.hosts.with_name("config.yaml").write_text("bell: true\n")
    (row,) = measured.json("sessions")
    assert "\a" not in measured.ok("attach", row["alias"]).err
    terminal, end = pty.openpty()
    child = measured.spawn("attach", row["alias"], stderr=end)
    os.close(end)
    seen = shown_on(terminal)
    child.communicate(timeout=60)
    assert seen.count(b"\a") == 1
