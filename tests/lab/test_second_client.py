"""Two laptops and one host: what one started the other lists, follows, records and ends."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from dgxlab import audit
from dgxlab.errors import Interrupted, JobLost, RemoteError
from dgxlab.lab.jobs import adopt, follow, join
from dgxlab.lab.provision import probe_for
from dgxlab.model import Experiment, Plan
from dgxlab.transport.host import HostJob
from tests.lab.conftest import ToyLab, leave_at_a_run, notes, quiet

EVIDENCE = ("jobs", "devices", "arms", "inputs", "cells", "gates", "expectations", "runs", "rows", "samples")


@pytest.fixture
def mine(make_toy_lab: Callable[..., ToyLab]) -> ToyLab:
    return make_toy_lab("mine")


@pytest.fixture
def theirs(make_toy_lab: Callable[..., ToyLab]) -> ToyLab:
    return make_toy_lab("theirs")


@pytest.fixture
def slow(mine: ToyLab) -> Experiment:
    return mine.slow()


@pytest.fixture
def running(mine: ToyLab, slow: Experiment) -> Iterator[Plan]:
    job = mine.submit(slow)
    yield job
    mine.host.cancel(job.job_id)


def rows(lab: ToyLab) -> dict[str, list[dict[str, Any]]]:
    """Return all that a record holds but for when its client intended a job."""
    everything = {table: lab.lab.store.rows(f"SELECT * FROM {table}") for table in EVIDENCE}  # noqa: S608 - from above
    for row in everything["jobs"]:
        del row["intent_at"]
    return everything


@contextmanager
def copied(lab: ToyLab, job: Plan, name: str, **changes: Any) -> Iterator[None]:
    """Have a job's folder twice on the host, the copy under another name and with a changed plan."""
    folder = lab.root / "jobs" / name
    shutil.copytree(lab.root / "jobs" / job.job_id, folder)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "job_id": name, **changes}))
    yield
    shutil.rmtree(folder)


def attach(lab: ToyLab, job_id: str, watch: Callable[[Mapping[str, Any]], None] = quiet) -> object:
    adopt(lab.lab, lab.host, job_id, watch)
    return follow(lab.lab, lab.host, job_id, watch)


def test_both_hold_the_same_rows_and_merge_to_one(mine: ToyLab, theirs: ToyLab, running: Plan) -> None:
    with pytest.raises(Interrupted):
        attach(theirs, running.job_id, leave_at_a_run)
    partly = theirs.lab.store.job(running.job_id)
    assert partly.journal_seq > 0
    mine.release()
    assert follow(mine.lab, mine.host, running.job_id, quiet) is None
    assert attach(theirs, running.job_id) is None
    assert rows(mine) == rows(theirs)
    assert len(theirs.lab.store.rows("SELECT DISTINCT tool FROM runs")) == 2
    assert partly.experiment == mine.lab.store.job(running.job_id).experiment == running.experiment
    before = rows(mine)
    for receiver, other in ((theirs, mine), (mine, theirs)):
        assert sum(audit.merge(receiver.lab.store, other.lab.store.path).values()) == 0
    assert rows(mine) == rows(theirs) == before
    for lab in (mine, theirs):
        assert lab.lab.store.job(running.job_id).experiment == running.experiment
        assert audit.check(lab.lab.store) == []


def test_listed_with_what_it_is_and_how_old(mine: ToyLab, theirs: ToyLab, running: Plan) -> None:
    odd = [theirs.root / "jobs" / name for name in ("odd name", "empty")]
    for folder in odd:
        folder.mkdir()
    try:
        (listed,) = [job for job in theirs.host.jobs() if job.job_id == running.job_id]
        (empty,) = [job for job in theirs.host.jobs() if job.job_id == "empty"]
        assert "odd name" not in {job.job_id for job in theirs.host.jobs()}
    finally:
        for folder in odd:
            folder.rmdir()
    assert (listed.state, listed.name, listed.shown_kind) == ("running", "toy", "run")
    assert 0 <= (listed.age_s or 0) < 60
    assert empty == HostJob("empty", "absent")


def test_run_follows_what_another_laptop_started(mine: ToyLab, theirs: ToyLab, running: Plan, slow: Experiment) -> None:
    outcome, events = theirs.run(slow, react=mine.release)
    assert (outcome.error, outcome.job_id, outcome.planned, outcome.reused) == (None, running.job_id, 4, 4)
    (note,) = notes(events, "elsewhere")
    assert running.job_id in note
    assert theirs.lab.store.job(running.job_id).experiment == slow.digest
    assert [job.job_id for job in theirs.lab.store.jobs()] == [running.job_id]
    assert len(theirs.values()) == 4


def test_run_with_nothing_to_do_waits_for_nobody(mine: ToyLab, theirs: ToyLab, running: Plan, slow: Experiment) -> None:
    mine.release()
    attach(theirs, running.job_id)
    mine.hold.touch()
    again = mine.submit(slow)  # its record never heard of the first one's end
    try:
        calls = theirs.host.calls
        outcome, events = theirs.run(slow)
        assert (outcome.job_id, outcome.reused, events) == ("", 4, [])
        assert theirs.host.calls - calls == 1
        assert theirs.host.status(again.job_id).state == "running"
    finally:
        mine.host.cancel(again.job_id)


def test_another_tree_is_not_joined(mine: ToyLab, theirs: ToyLab, running: Plan, slow: Experiment) -> None:
    side = theirs.side(slow)
    probe = probe_for(theirs.host, side)
    assert probe.running[running.job_id] == slow.digest
    elsewhere = replace(side, source=replace(side.source, tree="0" * 40))
    assert join(theirs.lab, theirs.host, slow.digest, [elsewhere], probe, quiet) == ""
    other = theirs.experiment(hypothesis="another")
    assert join(theirs.lab, theirs.host, other.digest, [replace(side, experiment=other)], probe, quiet) == ""
    assert theirs.lab.store.jobs() == []


@pytest.mark.parametrize(
    ("stamp", "at"), [("20260102-030405", 1767323045.0), ("21000101-000000", None), ("of-another-maker", None)]
)
def test_an_adopted_job_is_as_old_as_its_id(
    theirs: ToyLab, running: Plan, slow: Experiment, stamp: str, at: float | None
) -> None:
    theirs.lab.store.intend(replace(running, job_id="20260601-000000-toy-000000"), "local", "0")
    theirs.lab.store.update_job("20260601-000000-toy-000000", intent_at=1780272000.0)
    job_id = f"{stamp}-toy-abcdef"
    with copied(theirs, running, job_id):
        adopt(theirs.lab, theirs.host, job_id, quiet)
    adopted = theirs.lab.store.job(job_id)
    assert adopted.experiment == slow.digest  # an earlier job of it is recorded
    assert adopted.intent_at == at if at else abs(adopted.intent_at - time.time()) < 60
    newest, *_ = theirs.lab.store.jobs()
    assert (newest.job_id == job_id) == (at is None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"job_id": "20260101-000000-toy-000001"}, "gave the plan of '20260101-000000-toy-000001' for job"),
        ({"later_field": 1}, "cannot be read, .*: Plan has no field 'later_field'"),
    ],
)
def test_a_plan_that_is_not_this_jobs_is_refused(
    theirs: ToyLab, running: Plan, change: dict[str, Any], words: str
) -> None:
    job_id = "20260101-000000-toy-abcdef"
    with pytest.raises(JobLost, match=f"no job {job_id}"):
        adopt(theirs.lab, theirs.host, job_id, quiet)
    with copied(theirs, running, job_id, **change), pytest.raises(RemoteError, match=words):
        adopt(theirs.lab, theirs.host, job_id, quiet)
    assert theirs.lab.store.jobs() == []


def test_a_deleted_folder_is_a_lost_job_until_its_end_is_recorded(mine: ToyLab, theirs: ToyLab, running: Plan) -> None:
    adopt(theirs.lab, theirs.host, running.job_id, quiet)
    mine.release()
    assert follow(mine.lab, mine.host, running.job_id, quiet) is None
    shutil.rmtree(mine.root / "jobs" / running.job_id)
    with pytest.raises(JobLost, match="was deleted before"):
        follow(theirs.lab, theirs.host, running.job_id, quiet)
    calls = mine.host.calls
    assert follow(mine.lab, mine.host, running.job_id, quiet) is None
    assert mine.host.calls == calls
