"""--wait: how long a command waits for a machine that others use."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgxlab.cli._display import lines
from tests.cli.conftest import Project

TOY = "experiments/toy.yaml"


@pytest.mark.parametrize("command", ["run", "gate"])
def test_busy_host_exits_with_10(project: Project, tmp_path: Path, command: str) -> None:
    """Without waiting: one sentence, the next command, and a report of what there is."""
    (tmp_path / "owner").write_text("carol tunes vllm\n")
    project.hosts.write_text(f"box: {{local: true, lock: {tmp_path / 'owner'}}}\n")
    ran = project.run(command, TOY, "--host", "box", "--wait", "0")
    assert ran.rc == 10, ran.err
    assert ran.error.startswith("the device is busy: /")
    assert " is held by " in ran.error
    assert ran.error.endswith("; --wait 60 waits longer")
    assert ran.next == f"dgxlab {command} {TOY} --host box --wait 0"
    assert (tmp_path / "owner").read_text() == "carol tunes vllm\n"


@pytest.mark.parametrize("minutes", ["-1", "nan", "soon"])
def test_only_minutes_are_taken(project: Project, minutes: str) -> None:
    """A time that is none is a usage error."""
    assert project.run("run", TOY, "--wait", minutes).rc == 2


def test_waiting_is_said() -> None:
    """What is held, and by whom."""
    event = {"event": "lock", "state": "waiting", "path": "/var/lock/dgxlab-cpu", "owner": "job J of alice, since noon"}
    said = "waiting for the device: /var/lock/dgxlab-cpu is held by job J of alice, since noon"
    assert lines(event) == [said]
    assert lines({**event, "state": "held"}) == []
