"""A record made again from the jobs' folders on a host, or from their raw files here, equals the one that was lost."""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgxlab import plan as planning
from dgxlab.agent.job import Job
from dgxlab.audit import check
from dgxlab.errors import RemoteError
from dgxlab.lab import Lab
from dgxlab.lab.jobs import settle
from dgxlab.lab.raw import path_of
from dgxlab.lab.rebuild import Rebuilt, mend, rebuild
from dgxlab.lab.request import source_of
from dgxlab.model import canonical, to_json
from dgxlab.store import Store
from dgxlab.transport.host import Host
from tests import toy
from tests.journals import dump
from tests.lab.conftest import ToyLab, quiet
from tests.lab.test_chain import arm


def cut_short(lab: ToyLab, end: Callable[[str], object]) -> str:
    """Start a job that measures something new and then takes its time, and end it."""
    entry = toy.backend_ops(env={"TOY_NOTE": str(time.time())})
    held = lab.slow()
    job = lab.submit(dataclasses.replace(held, bench=(entry, held.bench[1])))
    lab.wait_for(job.job_id, '"event":"run"')
    end(job.job_id)
    lab.wait_end(job.job_id)
    settle(lab.lab, lab.host, None, quiet)
    return job.job_id


def everything(lab: Lab) -> dict[str, list[dict[str, Any]]]:
    assert check(lab.store) == []
    return dump(lab.store, intent_times=False)


def again(lab: ToyLab, folder: Path, hosts: list[Host], raw: Path) -> tuple[Rebuilt, Lab]:
    folder.mkdir()
    new = dataclasses.replace(lab.lab, store=Store.open(folder / "results.db"), raw=raw)
    return rebuild(new, hosts, quiet), new


def test_a_rebuilt_record_equals_the_original(own: ToyLab, tmp_path: Path) -> None:
    own.run()
    own.run(own.experiment(name="wrong", gates=(toy.parity(env={"TOY": "wrong"}),)))
    own.run(arm(own, "second", {"TOY": "half"}), "ab", baseline=arm(own, "first"))
    cancelled, lost = cut_short(own, own.host.cancel), cut_short(own, own.kill)
    original = everything(own.lab)
    assert [own.lab.store.job(job_id).state for job_id in (cancelled, lost)] == ["cancelled", "lost"]
    ids = sorted(job["job_id"] for job in original["jobs"])
    assert len(ids) == 5
    assert [row["verdict"] for row in original["verdicts"]]
    from_host, first = again(own, tmp_path / "first", [own.host], tmp_path / "no-raw")
    from_here, second = again(own, tmp_path / "second", [], own.lab.raw)
    for done, new in ((from_host, first), (from_here, second)):
        assert (sorted(done.added), done.left) == (ids, ())
        assert everything(new) == original
        assert rebuild(new, [own.host], quiet) == Rebuilt((), ())
        new.store.close()


def test_what_is_damaged_is_left_out_and_named(own: ToyLab, tmp_path: Path) -> None:
    good, half = own.run()[0].job_id, own.run(again=True)[0].job_id
    path = path_of(own.lab.raw, half)
    path.write_bytes(path.read_bytes()[:-100])
    shutil.copyfile(path_of(own.lab.raw, good), path_of(own.lab.raw, "20260101-000000-toy-abcdef"))
    done, new = again(own, tmp_path / "new", [], own.lab.raw)
    assert done.added == (good,)
    assert [job_id for job_id, _ in done.left] == ["20260101-000000-toy-abcdef", half]
    assert "of job" in done.left[0][1]
    assert "is damaged" in done.left[1][1]
    assert [job.job_id for job in new.store.jobs()] == [good]
    assert rebuild(new, [own.host], quiet).added == (half,)  # the host still has it
    new.store.close()


def test_what_was_kept_here_counts_before_what_a_host_has(own: ToyLab, tmp_path: Path) -> None:
    own.run()
    original = everything(own.lab)
    (job,) = original["jobs"]
    with (own.root / "jobs" / job["job_id"] / "journal.jsonl").open("a") as journal:
        journal.write("{}\n")
    done, new = again(own, tmp_path / "new", [own.host], own.lab.raw)
    assert (done.added, done.left) == ((job["job_id"],), ())
    assert everything(new) == original
    new.store.close()


def test_a_job_that_runs_is_known_and_not_waited_for(own: ToyLab, tmp_path: Path) -> None:
    job = own.submit(own.slow())
    done, new = again(own, tmp_path / "new", [own.host], tmp_path / "raw")
    assert (done.added, new.store.job(job.job_id).state) == ((job.job_id,), "running")
    own.host.cancel(job.job_id)
    settle(new, own.host, None, quiet)
    assert new.store.job(job.job_id).state == "cancelled"
    new.store.close()


def older(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in plan.items() if name not in ("baseline", "specs")}


def test_an_older_plan_is_kept_as_it_was_staged(own: ToyLab, tmp_path: Path) -> None:
    own.run(own.experiment(bench=(), models={}))
    experiment = own.experiment()
    made_now = planning.make(
        experiment, source_of(own.lab.cache, experiment, None, quiet), job_id=planning.new_job_id("toy")
    )
    job, text = made_now.job_id, canonical(older(to_json(made_now)))
    shutil.rmtree(own.root / "jobs")
    Job.stage(own.root / "jobs", job, text.encode(), *(own.root / "agent").iterdir())
    own.host.submit(made_now)
    own.host.follow(job, 0, len)
    done, new = again(own, tmp_path / "new", [own.host], tmp_path / "raw")
    assert done == Rebuilt((job,), ())
    assert new.store.job(job).plan_json == text
    assert new.store.job(job).experiment is None
    assert path_of(tmp_path / "raw", job).exists()
    done, third = again(own, tmp_path / "third", [], tmp_path / "raw")
    assert (done, third.store.job(job).host) == (Rebuilt((job,), ()), os.uname().nodename)
    assert check(new.store) == check(third.store) == []
    new.store.close()
    third.store.close()


@pytest.mark.parametrize("spec", [{"name": "another"}, None])
def test_a_plan_with_a_spec_that_is_not_its_own_is_refused(own: ToyLab, tmp_path: Path, spec: Any) -> None:
    job = own.run()[0].job_id
    path = own.root / "jobs" / job / "plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "specs": [spec and {**plan["specs"][0], **spec}]}))
    with pytest.raises(RemoteError, match="cannot be read"):
        own.host.plan(job)
    done, new = again(own, tmp_path / "new", [own.host], tmp_path / "raw")
    assert (done.added, [job_id for job_id, _ in done.left], new.store.jobs()) == ((), [job], [])
    new.store.close()


def test_a_damaged_record_is_set_aside_and_begins_with_a_sound_copy(own: ToyLab) -> None:
    own.run()
    original, path, notes = everything(own.lab), own.folder / "results.db", []
    own.lab.store.back_up()
    own.lab.store.close()
    mend(path, notes.append)
    assert notes == []
    (copy,) = (own.folder / "results.db.backups").iterdir()
    (copy.parent / copy.name.replace("20", "30", 1)).write_bytes(copy.read_bytes()[:8192])
    path.write_bytes(path.read_bytes()[:8192])
    mend(path, notes.append)
    assert [path.name in note for note in notes] == [True, True]
    (aside,) = own.folder.glob("results.db.damaged-*")
    assert aside.stat().st_size == 8192
    with Store.open(path) as store:
        assert everything(dataclasses.replace(own.lab, store=store)) == original
    shutil.rmtree(copy.parent)
    path.write_bytes(path.read_bytes()[:4000])
    mend(path, notes.append)
    assert not path.exists()
    with Store.open(path) as store:
        new = dataclasses.replace(own.lab, store=store)
        assert len(rebuild(new, [], quiet).added) == 1
        assert everything(new) == original
