"""The things under a root, and what a removal takes away and leaves alone."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dgxlab.agent.environment import Root
from dgxlab.agent.inventory import hold, inventory, remove, unfit
from dgxlab.agent.job import Job, sha256
from faults import spaces
from tests.conftest import PROJECT
from tests.machines import age

DAY = 86400.0


@pytest.fixture
def full(root: Root) -> Root:
    """A root with one of everything, forty days old."""
    for folder in (root.builds / "b1", root.work / "w1", root.tools / "cmake-1", root.jobs / "job1", root.objects):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "program").write_bytes(bytes(9000))
    for name in ("plan.json", "started", "journal.jsonl", "rc.reserved"):
        (root.jobs / "job1" / name).write_text("{}")
    Job(root.jobs / "job1").finish(exit_code=0, status="done", message="", next="")
    (root.agents / "a1.pyz").write_bytes(b"PK")
    ours = ("synthetic-1.gguf", "synthetic-1.json", "synthetic-2-f16.gguf", "derived-1.gguf", "derived-1.json")
    for name in (*ours, "mine.gguf", "old.json", "old.gguf"):
        (root.models / name).write_bytes(bytes(5000))
    age(root.path, 40)
    return root


def staged(folder: Path) -> None:
    (folder / "agent.pyz").write_bytes(b"PK")
    (folder / "MANIFEST").write_text(json.dumps({name: sha256(folder / name) for name in ("plan.json", "agent.pyz")}))


def named(root: Root, *wanted: str) -> list[tuple[str, str, float]]:
    items = [item for item in inventory(root) if not wanted or item.name in wanted]
    return [(item.kind, item.name, item.used) for item in items]


def leftovers(root: Root) -> list[str]:
    return sorted(item.name for item in inventory(root) if item.kind == "leftovers")


def test_everything_is_listed_with_its_size_and_last_use(full: Root) -> None:
    listed = {item.name: item for item in inventory(full)}
    models = ["derived-1", "synthetic-1", "synthetic-2-f16"]
    assert sorted(listed) == sorted(["a1", "b1", "cmake-1", "job1", "llama.cpp.git", *models, "w1"])
    assert (listed["b1"].kind, listed["synthetic-1"].kind) == ("builds", "models")
    assert listed["b1"].bytes >= 9000
    assert listed["synthetic-1"].bytes >= 10000
    assert (listed["job1"].state, listed["job1"].journal_bytes) == ("done", 2)
    assert all(39 * DAY < time.time() - item.used < 41 * DAY for item in listed.values())


def test_what_was_used_after_the_listing_stays(full: Root) -> None:
    """A build whose stamp was touched, a model whose record was."""
    wanted = named(full, "b1", "w1")
    for touched in (full.builds / "b1" / "stamp.json", full.models / "synthetic-1.json"):
        touched.touch()
    assert {item.name for item in inventory(full) if time.time() - item.used < DAY} == {"b1", "synthetic-1"}
    done = remove(full, wanted)
    assert done.removed == (("work", "w1"),)
    assert [kept[:2] for kept in done.kept] == [("builds", "b1")]


def test_only_sources_and_the_users_own_files_survive_a_removal_of_all(full: Root) -> None:
    done = remove(full, named(full))
    assert [kept[:2] for kept in done.kept] == [("sources", "llama.cpp.git")]
    assert [item.name for item in inventory(full)] == ["llama.cpp.git"]
    assert [path.name for path in full.models.iterdir()] == ["mine.gguf", "old.gguf", "old.json"]
    assert list((full.path / "trash").iterdir()) == []


REMOVE = """import sys
from pathlib import Path
from dgxlab.agent.inventory import inventory, remove
from dgxlab.agent.environment import Root
root = Root(Path(sys.argv[1]))
jobs = [(item.kind, item.name, item.used) for item in inventory(root) if item.kind == "jobs"]
print(len(remove(root, jobs).removed), len(list(root.jobs.iterdir())))
"""


def test_a_full_disk_can_be_cleaned(full: Root, tmp_path: Path) -> None:
    (full.jobs / "job1" / "agent.pyz").write_bytes(bytes(5000))  # makes room for the note of the removed job
    with spaces.disk(tmp_path / "disk") as small:
        small.mount(1 << 20, full.path)
        small.fill()
        argv = [*small.within(PROJECT), sys.executable, "-c", REMOVE, str(full.path)]
        ran = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("1 0\n", "")


def test_what_jobs_share_stays_while_a_descriptor_is_held(full: Root) -> None:
    fd = hold(full)
    child = os.dup(fd)
    os.close(fd)
    done = remove(full, named(full))
    assert done.removed == (("jobs", "job1"),)
    assert {reason for kind, _, reason in done.kept if kind != "sources"} == {"a job runs"}
    os.close(child)
    remove(full, named(full))
    assert [item.name for item in inventory(full)] == ["llama.cpp.git"]


def test_what_jobs_share_stays_while_a_job_of_an_older_agent_runs(full: Root) -> None:
    """It holds its own lock and no other."""
    folder = full.jobs / "job2"
    folder.mkdir()
    for name in ("plan.json", "started"):
        (folder / name).write_text("{}")
    with (folder / "run.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = remove(full, named(full))
    assert ("jobs", "job2", "it is running") in done.kept
    assert folder.exists()
    assert (full.builds / "b1").exists()


def test_a_staged_job_and_names_that_are_not_listed_stay(full: Root, tmp_path: Path) -> None:
    for name in ("started", "rc"):
        (full.jobs / "job1" / name).unlink()
    staged(full.jobs / "job1")
    assert ("jobs", "job1", "it is staged") in remove(full, named(full, "job1")).kept
    outside = tmp_path / "precious"
    outside.mkdir()
    wanted = [("builds", "../../precious", time.time()), ("builds", str(outside), time.time()), ("x", "b1", 0.0)]
    assert remove(full, wanted).removed == ()
    assert outside.exists()


def test_links_are_not_followed(full: Root, tmp_path: Path) -> None:
    """Neither one in the place of a build, nor a whole folder that is one, nor one inside of what goes."""
    outside = tmp_path / "elsewhere"
    (outside / "b3" / "bin").mkdir(parents=True)
    (outside / "b3" / "bin" / "program").write_bytes(bytes(100_000))
    (full.builds / "b2").symlink_to(outside / "b3")
    (full.builds / "b1" / "bin" / "link").symlink_to(outside)
    age(full.builds / "b1", 40)
    (full.tools / "cmake-1").rename(outside / "cmake-1")
    full.tools.rmdir()
    full.tools.symlink_to(outside)
    listed = {item.name: item for item in inventory(full)}
    assert not {"b2", "b3", "cmake-1"} & set(listed)
    assert listed["b1"].bytes < 100_000
    remove(full, named(full))
    assert not (full.builds / "b1").exists()
    assert (outside / "b3" / "bin" / "program").stat().st_size == 100_000
    assert (outside / "cmake-1" / "bin" / "program").exists()


def test_leftovers_are_listed_after_a_day(full: Root) -> None:
    left = ["agent/a1.pyz.4711", "builds/.in-b1-77", "builds/.old-b1-77", "jobs/.in-job9-77"]
    for name in left:
        (full.path / name).mkdir()
        age(full.path / name, 1.5)
    (full.builds / ".in-b1-78").mkdir()  # its command may still be at work
    assert leftovers(full) == left
    assert len(remove(full, named(full, *left)).removed) == 4
    assert [path.name for path in full.builds.glob(".*")] == [".in-b1-78"]


def test_an_interrupted_removal_is_finished_by_the_next(full: Root) -> None:
    (full.path / "trash").mkdir()
    (full.builds / "b1").rename(full.path / "trash" / "123-b1")
    assert "b1" not in {item.name for item in inventory(full)}
    assert remove(full, []).removed == ()
    assert list((full.path / "trash").iterdir()) == []


def test_broken_things_go_at_once(full: Root) -> None:
    """A job that a power loss damaged before it began, and what was set aside: no command is at work on either."""
    job, aside = full.jobs / "job3", full.objects.parent / ".broken-1"
    for folder in (job, aside):
        folder.mkdir()
    staged(job)
    assert named(full, "job3")[0][:2] == ("jobs", "job3")
    (job / "agent.pyz").write_bytes(b"")
    assert leftovers(full) == ["jobs/job3", "src/.broken-1"]
    assert len(remove(full, named(full, *leftovers(full))).removed) == 2
    assert not job.exists()
    assert not aside.exists()


def test_why_no_job_can_run(root: Root, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(unfit(root)) == []

    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        ((key, why),) = unfit(root)
    assert key == "root"
    assert why.startswith(f"{root.path}/in-use.lock")
    assert "No locks available" in why
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [key for key, _ in unfit(root)] == ["root", "setsid"]
