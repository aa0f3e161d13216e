"""--wait: how long a command waits for a machine that others use."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgxlab.cli._display import Lines
from dgxlab.model.events import LockEvent
from tests.cli.conftest import Project

TOY = "experiments/toy.yaml"


def test_busy_host_exits_with_10(project: Project, tmp_path: Path) -> None:
    """Without waiting: one sentence, the next command, and a report of what there is."""
    (tmp_path / "owner").write_text("carol tunes vllm\n")
    project.hosts.write_text(f"box: {{local: true, lock: {tmp_path / 'owner'}}}\n")
    ran = project.run("run", TOY, "--host", "box", "--wait", "0")
    assert ran.rc == 10, ran.err
    assert ran.error.startswith("the device is busy: /")
    assert " is held by " in ran.error
    assert ran.error.endswith("; --wait 60 waits longer")
    assert ran.next == f"dgxlab run {TOY} --host box --wait 0"
    assert (tmp_path / "owner").read_text() == "carol tunes vllm\n"


@pytest.mark.parametrize("minutes", ["-1", "soon"])
def test_only_minutes_are_taken(project: Project, minutes: str) -> None:
    """A time that is none is a usage error."""
    assert project.run("run", TOY, "--wait", minutes).rc == 2


@pytest.mark.parametrize(
    ("state", "path", "owner", "lines"),
    [
        ("waiting", "/l", "job J of alice", ["waiting for the device: /l is held by job J of alice"]),
        ("unwatched", "/o", "no folder", ["the lock file /o is neither read nor signed: no folder"]),
        ("held", "/l", "", []),
    ],
)
def test_waiting_is_said(state: str, path: str, owner: str, lines: list[str]) -> None:
    """What is held, and by whom."""
    assert Lines().of(LockEvent(state=state, path=path, owner=owner)) == lines
