"""Jobs whose processes are killed: a small part of the campaign, and what its checks see."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from faults import aftermath
from faults.campaign import trials
from faults.fault import Broken
from faults.host import Box, Ran, box
from faults.kinds.agent import BENCH, CELLS, KILLED, _told


@pytest.fixture(scope="module")
def place() -> Iterator[Box]:
    """A box with an experiment that was measured without a fault."""
    with box() as made:
        assert made.run("run", made.spec("good", bench=BENCH), "--host", "box").rc == 0
        yield made


def test_killed_jobs() -> None:
    """Agent, program, or all at once: lost or failed, and mended by the next command."""
    tally = trials(KILLED, 17, range(3))
    assert tally.failures == []
    assert {word.split()[0] for word in tally.met} == {"agent", "child", "all"}


def test_what_outlives_its_agent_is_seen(place: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the job's session, and a lock that is held."""
    monkeypatch.setattr(aftermath, "FREE_S", 0.2)
    (job,) = place.folders("good")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as orphan:
        with pytest.raises(Broken, match="there are orphans"):
            aftermath.freed(place, job, orphan.pid)
        orphan.kill()
    aftermath.freed(place, job, orphan.pid)
    with (job.folder / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for wait in (lambda: aftermath.freed(place, job, orphan.pid), lambda: aftermath.unlocked(place)):
            with pytest.raises(Broken, match=r"run\.lock is held"):
                wait()
    aftermath.unlocked(place)


def test_a_run_that_the_record_lacks_is_seen(place: Box) -> None:
    """One that the agent noted, one that was measured again, and cells that were not measured."""
    aftermath.measured(place, "good", CELLS)
    with pytest.raises(Broken, match="7 cells should have a value each"):
        aftermath.measured(place, "good", CELLS + 1)
    (job,) = place.folders("good")
    whole = job.journal.read_bytes()
    with job.journal.open("a") as journal:
        journal.write(json.dumps({"event": "run"}) + "\n")
    with pytest.raises(Broken, match="noted 4 runs, 3 are stored"):
        aftermath.measured(place, "good", CELLS)
    job.journal.write_bytes(whole)
    place.run("run", "good.yaml", "--host", "box", "--again")
    with pytest.raises(Broken, match="1 at most"):
        aftermath.measured(place, "good", CELLS)


def test_a_wrong_word_about_a_job_is_seen(place: Box) -> None:
    """A command that says that all went well, or that it was lost, where record and host say another thing."""
    place.run("run", place.spec("said", bench=BENCH), "--host", "box")
    _told(place, "said", Ran(0, "", ""))
    with pytest.raises(Broken, match="the command ended with 12, the job is done"):
        _told(place, "said", Ran(12, "", ""))
