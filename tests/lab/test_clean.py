"""Cleaning a host: nothing that runs goes, and nothing measured that is not safe in the record."""

import fcntl
import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from dgxlab.audit import merge
from dgxlab.lab import raw
from dgxlab.lab.clean import Candidate, Cleaned, clean, survey
from dgxlab.lab.jobs import adopt, follow
from dgxlab.replies import Item
from dgxlab.transport.host import Host
from tests.lab.conftest import ToyLab, quiet
from tests.machines import age

EVERYTHING = ("builds", "models", "work", "jobs", "tools", "agents", "leftovers")


def look(lab: ToyLab, kinds: Collection[str] = EVERYTHING, days: float = 30) -> dict[str, Candidate]:
    listed = survey(lab.lab, lab.host, kinds, days)
    return {candidate.item.kind: candidate for candidate in listed}


def clean_all(lab: ToyLab, days: float = 30) -> Cleaned:
    return clean(lab.lab, lab.host, survey(lab.lab, lab.host, EVERYTHING, days), quiet)


def kinds(done: Cleaned) -> set[str]:
    return {item.kind for item in done.removed}


def test_what_is_old_goes_and_is_made_again(own: ToyLab) -> None:
    job, _ = own.run()
    fresh = look(own)
    assert {kind: each.kept for kind, each in fresh.items()} == {
        "agents": "this dgxlab's own agent",
        **dict.fromkeys(("builds", "work", "jobs"), "used in the last 30 days"),
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
    assert (look(own)["builds"].kept, look(own)["work"].kept) == ("used in the last 30 days", "")


def test_nothing_is_taken_from_a_running_job(own: ToyLab) -> None:
    own.run(own.experiment(bench=(), models={}))
    age(own.root, 31)
    before = survey(own.lab, own.host, EVERYTHING, 30)
    job = own.submit(own.slow())
    own.wait_for(job.job_id, '"event":"build"')
    done = clean(own.lab, own.host, before, quiet)
    assert kinds(done) == {"jobs"}
    assert {candidate.kept for candidate in done.kept} == {"a job runs"}
    seen = look(own, days=0)
    assert seen["builds"].kept == seen["work"].kept == f"job {job.job_id} runs"
    assert seen["jobs"].kept == "it runs"
    outcome, _ = own.run(own.slow(), react=own.release)
    assert (outcome.error, outcome.job_id) == (None, job.job_id)


def test_a_job_that_only_another_record_knows_stays(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> None:
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
    job = own.submit(own.experiment())
    own.wait_for(job.job_id, '"event":"end"')
    own.wait_end(job.job_id)
    age(own.root, 31)
    assert own.values() == {}
    assert "jobs" in kinds(clean_all(own))
    assert own.lab.store.job(job.job_id).state == "done"
    assert len(own.values()) == 8
    assert "raw/run-0.out" in raw.listing(raw.path_of(own.lab.raw, job.job_id))


def test_a_lost_job_goes_once_what_it_left_is_here(own: ToyLab) -> None:
    job = own.submit(own.slow())
    own.wait_for(job.job_id, '"event":"run"')
    own.kill(job.job_id)
    own.wait_end(job.job_id)
    age(own.root, 31)
    done = clean_all(own)
    assert [item.name for item in done.removed if item.kind == "jobs"] == [job.job_id]
    assert own.lab.store.job(job.job_id).state == "lost"
    assert len(own.values()) == 2
    files = raw.listing(raw.path_of(own.lab.raw, job.job_id))
    assert ("raw/run-0.out" in files, "rc" in files) == (True, False)


def test_raw_files_that_are_not_what_was_recorded_stay(own: ToyLab) -> None:
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
    own.run(own.experiment(bench=(), models={}))
    with (own.root / "in-use.lock").open() as removing:
        fcntl.flock(removing, fcntl.LOCK_EX)
        job = own.submit(own.experiment())
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
    mine, theirs = (make_toy_lab(name, root=tmp_path / "root") for name in ("mine", "theirs"))
    job = mine.submit(mine.experiment())
    adopt(theirs.lab, theirs.host, job.job_id, quiet)
    assert follow(theirs.lab, theirs.host, job.job_id, quiet) is None
    age(theirs.root, 31)
    assert job.job_id in {item.name for item in clean_all(theirs).removed}
    assert mine.lab.store.job(job.job_id).state == "intended"
    outcome, events = mine.run_well()
    assert outcome.job_id != job.job_id
    assert [path.name for path in (mine.root / "jobs").iterdir()] == [outcome.job_id]
    assert mine.lab.store.job(job.job_id).state == "lost"
    assert [e["note"] for e in events if "has no job" in e.get("note", "")]
    assert sum(merge(mine.lab.store, theirs.lab.store.path).values()) > 0
    assert mine.lab.store.job(job.job_id).state == "done"


def test_ages_are_by_the_clock_of_the_host() -> None:
    today, long_ago = (
        Item("builds", name, time.time() - 365 * 86400, age_s) for name, age_s in (("a", 60.0), ("b", 1e8))
    )
    host = cast("Host", SimpleNamespace(inventory=lambda: [today, long_ago]))
    listed = survey(None, host, EVERYTHING, 30)
    assert [each.kept for each in listed] == ["used in the last 30 days", ""]
