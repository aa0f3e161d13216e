"""Raw files come along when a job ends, are what was recorded, and are kept; no other user can read private data."""

import dataclasses
import gzip
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dgxlab.errors import CheckFailed, JobLost
from dgxlab.lab import raw
from dgxlab.lab.jobs import conclude, follow
from dgxlab.lab.raw import describe, listing
from dgxlab.model import HostEntry
from dgxlab.store import Job
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.lab.conftest import ToyLab, notes, quiet


def folder(lab: ToyLab, job_id: str) -> Path:
    return lab.root / "jobs" / job_id


def archive(lab: ToyLab, job_id: str) -> Path:
    return lab.folder / "raw" / f"{job_id}.tar.gz"


def measured(lab: ToyLab) -> Job:
    outcome, _ = lab.run_well(lab.experiment(bench=(toy.llama_bench(n_prompt=(16,)),)))
    return lab.lab.store.job(outcome.job_id)


def forgotten(lab: ToyLab) -> Job:
    job = measured(lab)
    archive(lab, job.job_id).unlink()
    return job


def test_kept_as_the_host_has_them(toy_lab: ToyLab) -> None:
    outcome, events = toy_lab.run()
    there = folder(toy_lab, outcome.job_id)
    files = listing(archive(toy_lab, outcome.job_id))
    names = {
        "rc",
        "plan.json",
        "journal.jsonl",
        "agent.err",
        *(f"raw/{path.name}" for path in (there / "raw").iterdir()),
    }
    assert set(files) - {"build-toy.log"} == names
    for name, file in files.items():
        content = (there / name).read_bytes()
        assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert notes(events, "raw files") == []
    job = toy_lab.lab.store.job(outcome.job_id)
    assert {name: describe(job, name) for name in ("raw/run-1.err", "raw/gate-0.out", "raw/probe-llama-bench.out")} == {
        "raw/run-1.err": "run:1 llama-bench stderr",
        "raw/gate-0.out": "gate:0 MUL_MAT on CPU stdout",
        "raw/probe-llama-bench.out": "probe:llama-bench stdout",
    }
    assert {name: describe(job, name) for name in ("rc", "build-toy.log", "raw/other.txt")} == {
        "rc": "the final status",
        "build-toy.log": "build:toy output",
        "raw/other.txt": "",
    }


def test_one_round_trip_and_none_once_kept(toy_lab: ToyLab) -> None:
    job = forgotten(toy_lab)
    calls = toy_lab.host.calls
    path, files = raw.archive(toy_lab.lab, job, None, quiet)
    assert toy_lab.host.calls - calls == 1
    assert raw.archive(toy_lab.lab, job, None, quiet) == (path, files)
    conclude(toy_lab.lab, toy_lab.host, toy_lab.host.status(job.job_id), quiet)
    assert toy_lab.host.calls - calls == 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_changed_file_is_named(toy_lab: ToyLab) -> None:
    job = forgotten(toy_lab)
    recorded = ("raw/run-0.out", "raw/gate-0.err", "plan.json")
    sealed = ("journal.jsonl", "raw/telemetry-host.jsonl", "raw/probe-llama-bench.out", "rc")
    for name in (*recorded, *sealed):
        changed = folder(toy_lab, job.job_id) / name
        content = changed.read_bytes()
        changed.write_bytes(content.replace(b"0", b"1", 1) + b"\n")
        with pytest.raises(CheckFailed, match=f"^{name} of job {job.job_id} ") as caught:
            raw.archive(toy_lab.lab, job, None, quiet)
        assert caught.value.next == f"ls -lR {toy_lab.root}/jobs/{job.job_id}"
        assert list(archive(toy_lab, job.job_id).parent.iterdir()) == []
        changed.write_bytes(content)


def test_a_missing_file_is_named(toy_lab: ToyLab) -> None:
    job = forgotten(toy_lab)
    output = folder(toy_lab, job.job_id) / "raw" / "run-0.out"
    output.rename(output.with_suffix(".away"))
    output.symlink_to(output.with_suffix(".away"))
    with pytest.raises(CheckFailed, match=r"raw/run-0\.out of .* its sha256 is missing"):
        raw.archive(toy_lab.lab, job, None, quiet)


def test_a_kept_file_that_was_changed_is_found(toy_lab: ToyLab) -> None:
    job, other = measured(toy_lab), measured_again(toy_lab)
    path = archive(toy_lab, job.job_id)
    shutil.copyfile(archive(toy_lab, other.job_id), path)
    with pytest.raises(CheckFailed, match="what was recorded") as caught:
        raw.archive(toy_lab.lab, job, None, quiet)
    assert caught.value.next.startswith(f"rm {path}")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckFailed, match="is damaged"):
        raw.archive(toy_lab.lab, job, None, quiet)


def measured_again(lab: ToyLab) -> Job:
    outcome, _ = lab.run(lab.experiment(bench=(toy.llama_bench(n_prompt=(32,)),)), again=True)
    return lab.lab.store.job(outcome.job_id)


def test_what_goes_wrong_is_a_note(toy_lab: ToyLab) -> None:

    def tamper(event: dict[str, Any]) -> None:
        if event["event"] == "run":
            (job,) = toy_lab.lab.store.jobs()
            (folder(toy_lab, job.job_id) / "raw" / "run-0.out").write_text("better numbers")

    outcome, events = toy_lab.run(toy_lab.experiment(bench=(toy.llama_bench(),)), react=tamper)
    (note,) = notes(events, "raw files")
    assert outcome.error is None
    assert f" {outcome.job_id} stay on local (raw/run-0.out " in note
    assert note.endswith(f"; to fetch them: dgxlab logs {outcome.job_id}")


def test_large_ones_wait_until_they_are_asked_for(toy_lab: ToyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "AT_ONCE", 2000)
    outcome, events = toy_lab.run()
    (note,) = notes(events, "raw files")
    assert "KiB); to fetch them: dgxlab logs " in note
    assert list((toy_lab.folder / "raw").iterdir()) == []
    sent: list[bytes] = []
    assert toy_lab.host.raw(outcome.job_id, 2000, sent.append).size > 2000
    assert b"".join(sent) == b""
    job = toy_lab.lab.store.job(outcome.job_id)
    assert "raw/run-0.out" in raw.archive(toy_lab.lab, job, None, quiet)[1]


def test_ctrl_c_while_fetching_leaves_them_there(toy_lab: ToyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(self: Host, job_id: str, limit: int, write: Callable[[bytes], object]) -> object:
        write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(Host, "raw", impatient)
    outcome, events = toy_lab.run_well()
    (note,) = notes(events, "raw files")
    assert f" {outcome.job_id} stay on local (interrupted); " in note
    assert list((toy_lab.folder / "raw").iterdir()) == []


def test_a_journal_that_was_changed_before_it_was_read(toy_lab: ToyLab, make_toy_lab: Callable[..., ToyLab]) -> None:
    job = measured(toy_lab)
    journal = folder(toy_lab, job.job_id) / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b'"samples":[', b'"samples":[9'))
    other = make_toy_lab("other")
    other.lab.store.intend(job.plan, "local", "0.1.0", staged=job.plan_json)
    with pytest.raises(JobLost, match="journal is not"):
        follow(other.lab, other.host, job.job_id, quiet)
    assert other.lab.store.job(job.job_id).state == "lost"
    assert other.lab.store.rows("SELECT * FROM runs") == []


SECRET = "hf_0f3c9a-never-to-be-seen"  # noqa: S105 - made up


@pytest.fixture
def secretive(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> ToyLab:
    new = make_toy_lab(root=tmp_path / "root")
    host = Host(LocalTransport(str(new.root)), HostEntry("local", env={"HF_TOKEN": SECRET}))
    return dataclasses.replace(new, host=host, lab=dataclasses.replace(new.lab, connect=lambda name: host))


def files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def test_a_token_of_a_host_is_recorded_nowhere_and_what_is_kept_is_closed_to_others(secretive: ToyLab) -> None:
    before = os.umask(0)
    try:
        secretive.run_well()
    finally:
        os.umask(before)
    present = list(files(secretive.root, secretive.folder))
    assert {"journal.jsonl", "plan.json", "rc", "results.db", "CMakeCache.txt"} <= {path.name for path in present}
    assert len([path for path in present if path.suffix == ".gz"]) == 1
    assert [path for path in present if SECRET.encode() in content(path)] == []
    folders, kept = (secretive.root, secretive.lab.raw), (secretive.lab.store.path, *secretive.lab.raw.iterdir())
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700] * 2
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600] * 2
