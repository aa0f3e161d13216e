"""Cleaning a host: nothing that runs goes, and nothing measured that is not safe in the record."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from dgxlab.audit import merge
from dgxlab.lab import raw
from dgxlab.lab.clean import RECENT, Candidate, Cleaned, clean, survey
from dgxlab.lab.jobs import adopt, follow
from dgxlab.replies import Item
from dgxlab.transport.host import Host
from tests.lab.conftest import ToyLab
from tests.lab.test_detached import quiet, slow, submit, wait_for
from tests.machines import age

EVERYTHING = ("builds", "models", "work", "jobs", "tools", "agents", "leftovers")


def look(lab: ToyLab, kinds: Collection[str] = EVERYTHING, days: float = 30) -> dict[str, Candidate]:
    """Return what becomes of each thing, by kind; of several jobs the last one."""
    listed = survey(lab.lab, lab.host, kinds, days)
    return {candidate.item.kind: candidate for candidate in listed}


def clean_all(lab: ToyLab, days: float = 30) -> Cleaned:
    """Remove all that may go."""
    return clean(lab.lab, lab.host, survey(lab.lab, lab.host, EVERYTHING, days), quiet)


def kinds(done: Cleaned) -> set[str]:
    """Return the kinds of what is gone."""
    return {item.kind for item in done.removed}


def test_what_is_old_goes_and_is_made_again(own: ToyLab) -> None:
    """Fresh things stay; old ones go, the results stay in the record, and the next measurement builds anew."""
    job, _ = own.run()
    fresh = look(own)
    assert {kind: each.kept for kind, each in fresh.items()} == {
        "agents": "this dgxlab's own agent",
        **dict.fromkeys(("builds", "work", "jobs"), f"{RECENT} 30 days"),
        "sources": "never removed",
    }
    assert clean_all(own).removed == ()
    age(own.root, 31)
    done = clean_all(own)
    assert (kinds(done), done.kept) == ({"builds", "work", "jobs"}, ())
    assert min(item.bytes for item in done.removed) > 0
    assert [list((own.root / name).iterdir()) for name in ("builds", "work", "jobs", "trash")] == [[]] * 4
    assert raw.path_of(own.lab.raw, job.job_id).exists()
    assert len(own.values()) == 8
    again, events = own.run(again=True)
    assert again.error is None
    assert [event["reused"] for event in events if event["event"] == "build"] == [False]
    age(own.root, 31)
    own.run(again=True)  # reuse is use: a build from long ago that a job ran from today stays
    assert (look(own)["builds"].kept, look(own)["work"].kept) == (f"{RECENT} 30 days", "")


def test_nothing_is_taken_from_a_running_job(own: ToyLab) -> None:
    """Neither when it is seen to run, nor when it starts between the look and the removal."""
    own.run(own.experiment(bench=(), models={}))
    age(own.root, 31)
    before = survey(own.lab, own.host, EVERYTHING, 30)
    job = submit(own, slow(own))
    wait_for(own, job.job_id, '"event":"build"')
    done = clean(own.lab, own.host, before, quiet)
    assert kinds(done) == {"jobs"}
    assert {candidate.kept for candidate in done.kept} == {"a job runs"}
    seen = look(own, days=0)
    assert seen["builds"].kept == seen["work"].kept == f"job {job.job_id} runs"
    assert seen["jobs"].kept == "it runs"
    outcome, _ = own.run(slow(own))
    assert (outcome.error, outcome.job_id) == (None, job.job_id)


def test_a_job_that_only_another_record_knows_stays(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> None:
    """The sentence says how this record gets it; without any record the same."""
    theirs, mine = (make_toy_lab(name, root=tmp_path / "root") for name in ("theirs", "mine"))
    job, _ = theirs.run()
    age(theirs.root, 31)
    listed = look(mine)["jobs"]
    sentence = f"this record does not know it; first: dgxlab attach {job.job_id} --host local"
    assert listed.kept == sentence
    without = {each.item.kind: each for each in survey(None, mine.host, EVERYTHING, 30)}
    assert (without["jobs"].kept, without["work"].kept) == (sentence, "")
    assert "jobs" not in kinds(clean(None, mine.host, list(without.values()), quiet))
    assert (mine.root / "jobs" / job.job_id).exists()


def test_what_nobody_read_is_read_first(own: ToyLab) -> None:
    """A job whose client died before its first line: its numbers are in the record before its folder goes."""
    job = submit(own, own.experiment())
    wait_for(own, job.job_id, '"event":"end"')
    while own.host.status(job.job_id).state == "running":
        time.sleep(0.02)
    age(own.root, 31)
    assert own.values() == {}
    assert "jobs" in kinds(clean_all(own))
    assert own.lab.store.job(job.job_id).state == "done"
    assert len(own.values()) == 8
    assert "raw/run-0.out" in raw.listing(raw.path_of(own.lab.raw, job.job_id))


def test_a_lost_job_goes_once_what_it_left_is_here(own: ToyLab) -> None:
    """Its agent was killed; what it measured before is kept."""
    job = submit(own, slow(own))
    wait_for(own, job.job_id, '"event":"run"')
    os.kill(json.loads((own.root / "jobs" / job.job_id / "started").read_text())["pid"], signal.SIGKILL)
    while own.host.status(job.job_id).state == "running":
        time.sleep(0.02)
    age(own.root, 31)
    done = clean_all(own)
    assert [item.name for item in done.removed if item.kind == "jobs"] == [job.job_id]
    assert own.lab.store.job(job.job_id).state == "lost"
    assert len(own.values()) == 2
    files = raw.listing(raw.path_of(own.lab.raw, job.job_id))
    assert ("raw/run-0.out" in files, "rc" in files) == (True, False)


def test_raw_files_that_are_not_what_was_recorded_stay(own: ToyLab) -> None:
    """They are evidence: the folder is kept with the reason, and everything else goes."""
    job, _ = own.run()
    raw.path_of(own.lab.raw, job.job_id).unlink()
    (own.root / "jobs" / job.job_id / "raw" / "run-0.out").write_text("another number\n")
    age(own.root, 31)
    done = clean_all(own)
    (kept,) = done.kept
    assert kept.item.name == job.job_id
    assert f"raw/run-0.out of job {job.job_id} is not " in kept.kept
    assert kinds(done) == {"builds", "work"}
    assert (own.root / "jobs" / job.job_id).exists()


def test_a_job_that_starts_while_something_is_removed_waits_for_it(own: ToyLab) -> None:
    """What jobs share is removed under a lock; a job that begins then builds anew what is gone, and ends well."""
    own.run(own.experiment(bench=(), models={}))
    with (own.root / "in-use.lock").open() as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        job = submit(own, own.experiment())
        time.sleep(0.5)
        assert own.host.status(job.job_id).state == "running"
        assert not (own.root / "jobs" / job.job_id / "journal.jsonl").exists()
        (build,) = (own.root / "builds").iterdir()
        shutil.rmtree(build)
    assert follow(own.lab, own.host, job.job_id, quiet) is None
    assert (build.exists(), len(own.values())) == (True, 8)


def test_a_job_that_another_laptop_kept_and_removed_is_not_started_again(
    make_toy_lab: Callable[..., ToyLab], tmp_path: Path
) -> None:
    """The laptop that started it died before it heard a word: it runs at most once, and the next run has a new job."""
    mine, theirs = (make_toy_lab(name, root=tmp_path / "root") for name in ("mine", "theirs"))
    job = submit(mine, mine.experiment())
    adopt(theirs.lab, theirs.host, job.job_id, quiet)
    assert follow(theirs.lab, theirs.host, job.job_id, quiet) is None
    age(theirs.root, 31)
    assert job.job_id in {item.name for item in clean_all(theirs).removed}
    assert mine.lab.store.job(job.job_id).state == "intended"
    outcome, events = mine.run()
    assert outcome.error is None
    assert outcome.job_id != job.job_id
    assert [path.name for path in (mine.root / "jobs").iterdir()] == [outcome.job_id]
    assert mine.lab.store.job(job.job_id).state == "lost"
    assert [e["note"] for e in events if "has no job" in e.get("note", "")]
    assert sum(merge(mine.lab.store, theirs.lab.store.path).values()) > 0
    assert mine.lab.store.job(job.job_id).state == "done"


def test_ages_are_by_the_clock_of_the_host() -> None:
    """A client whose clock is a year ahead removes nothing that was used today."""
    today, long_ago = (
        Item("builds", name, time.time() - 365 * 86400, age_s) for name, age_s in (("a", 60.0), ("b", 1e8))
    )
    host = cast("Host", SimpleNamespace(inventory=lambda: [today, long_ago]))
    listed = survey(None, host, EVERYTHING, 30)
    assert [each.kept for each in listed] == [f"{RECENT} 30 days", ""]
