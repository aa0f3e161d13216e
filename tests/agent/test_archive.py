"""Raw files on their way: a line that says how large they are, then no more and no less than that."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from dgxlab.agent.archive import send
from dgxlab.agent.job import Job
from dgxlab.errors import JobLost, UsageError


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job that has ended, with a few files and a few that are none of ours."""
    folder = tmp_path / "jobs" / "job-1"
    (folder / "raw" / "deeper").mkdir(parents=True)
    texts = {"plan.json": "{}", "journal.jsonl": '{"seq":0}\n', "rc": "{}", "agent.err": "", "build-toy.log": "cc\n"}
    for name, text in {**texts, "agent.pyz": "PK", "run.lock": "", "raw/run-0.out": "tokens\n"}.items():
        (folder / name).write_text(text)
    (folder / "raw" / "link.out").symlink_to("/etc/passwd")
    return Job(folder)


def test_sent_whole(job: Job) -> None:
    """The final status first; no link, no folder, nothing that is not output; the same files, the same bytes."""
    first, second = io.BytesIO(), io.BytesIO()
    send(job, 1 << 20, first)
    send(job, 1 << 20, second)
    assert first.getvalue() == second.getvalue()
    line, _, packed = first.getvalue().partition(b"\n")
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        names = archive.getnames()
        contents = {name: archive.extractfile(name).read() for name in names}  # type: ignore[union-attr]
    assert names == ["rc", "plan.json", "journal.jsonl", "agent.err", "build-toy.log", "raw/run-0.out"]
    assert contents["raw/run-0.out"] == b"tokens\n"
    assert json.loads(line) == {"size": sum(map(len, contents.values())), "files": 6}


def test_only_the_size_where_they_are_larger(job: Job) -> None:
    """At the limit they are sent, above it they are not."""
    size = 24
    for limit, alone in ((size, False), (size - 1, True)):
        out = io.BytesIO()
        send(job, limit, out)
        line, _, packed = out.getvalue().partition(b"\n")
        assert json.loads(line)["size"] == size
        assert (packed == b"") is alone


def test_neither_of_a_job_that_is_not_there_nor_of_one_that_has_not_ended(job: Job) -> None:
    """Both are errors with their own exit codes, before a byte is sent."""
    out = io.BytesIO()
    (job.folder / "rc").unlink()
    with pytest.raises(UsageError, match="job job-1 has not ended"):
        send(job, 1 << 20, out)
    job.plan.unlink()
    with pytest.raises(JobLost, match="the host has no job job-1"):
        send(job, 1 << 20, out)
    assert out.getvalue() == b""
