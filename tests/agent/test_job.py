"""A job's folder: staging, starting once, liveness by lock, the final word."""

import contextlib
import errno
import fcntl
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dgxlab.agent.boot import me
from dgxlab.agent.job import Job, sha256
from dgxlab.agent.lock import lock
from dgxlab.errors import JobLost, RemoteError, UsageError
from tests.agent.test_child import alive, wait_for_text, wait_until

PROJECT = Path(__file__).resolve().parents[2]

AGENT = """
import fcntl, os, sys, time, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from pathlib import Path
from dgxlab.agent.job import Job
job = Job(Path(sys.argv[2]))
fd = job.begin()
if fd is None:
    sys.exit(0)
with (job.folder / "executed").open("a") as file:
    file.write("x")
while (job.folder / "hold").exists():
    time.sleep(0.01)
job.journal.write_text("{}\\n")
job.finish(exit_code=0, status="done")
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """An agent that only takes its lock, counts its executions, and ends when `hold` is removed."""
    path = tmp_path / "agent.pyz"
    with zipfile.ZipFile(path, "w") as archive:
        # a real one carries the package and looks nowhere else
        archive.writestr("__main__.py", f"import sys\nsys.path.append({str(PROJECT)!r})\n{AGENT}")
    return path


@pytest.fixture
def job(tmp_path: Path, agent: Path) -> Job:
    staged = Job.stage(tmp_path / "jobs", "20260101-000000-x-abc123", b'{"a": 1}', agent)
    (staged.folder / "hold").touch()
    return staged


def wait_for(job: Job, state: str) -> None:
    wait_until(lambda: job.status().state == state)


def test_absent_then_staged(tmp_path: Path, agent: Path) -> None:
    assert Job(tmp_path / "jobs" / "none").status().state == "absent"
    job = Job.stage(tmp_path / "jobs", "one", b"plan", agent)
    assert job.status().state == "staged"
    manifest = json.loads((job.folder / "MANIFEST").read_text())
    assert manifest == {name: sha256(job.folder / name) for name in ("plan.json", "agent.pyz")}
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["one"]
    assert Job.stage(tmp_path / "jobs", "one", b"second", agent).plan.read_bytes() == b"plan"


def pid_of(job: Job) -> int:
    return int(json.loads((job.folder / "started").read_text())["pid"])


def test_runs_at_most_once(job: Job) -> None:
    assert job.start().state == "running"
    assert job.start().state == "running"
    subprocess.run([sys.executable, str(job.folder / "agent.pyz"), "work", str(job.folder)], check=True)
    (job.folder / "hold").unlink()
    wait_for(job, "done")
    assert job.start().state == "done"
    assert (job.folder / "executed").read_text() == "x"


def test_killed_agent_is_lost_and_not_started_again(job: Job) -> None:
    job.start()
    assert wait_for_text(job.folder / "executed") == "x"
    os.kill(pid_of(job), 9)
    wait_for(job, "lost")
    assert job.start().state == "lost"
    assert (job.folder / "executed").read_text() == "x"


def test_cancel_ends_a_deaf_agent(job: Job) -> None:
    job.start()
    assert job.cancel(patience_s=1.0).state == "lost"
    with (job.folder / "run.lock").open() as file:
        assert lock(file.fileno())


def leave_running(job: Job) -> int:
    environ = Path(f"/proc/{pid_of(job)}/environ").read_bytes()
    env = dict(word.split("=", 1) for word in environ.decode().strip("\0").split("\0"))
    subprocess.run(["setsid", "-f", "sh", "-c", f"echo $$ >{job.folder}/left; exec sleep 60"], env=env, check=True)
    return int(wait_for_text(job.folder / "left"))


def test_cancel_ends_what_a_dead_agent_left_running(job: Job) -> None:
    job.start()
    left = leave_running(job)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        os.kill(pid_of(job), 9)
        wait_for(job, "lost")
        assert Path(f"/proc/{left}/comm").read_text() == "sleep\n"
        assert job.cancel().state == "lost"
        assert not alive(left)
        assert other.poll() is None
        other.kill()


def test_cancel_ends_what_forks_on_and_on(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is another process by the time of a look, on a host with many, and holds a lock for as long as it lives."""
    forks_on = "import os, time\nwhile True:\n    time.sleep(0.01)\n    if os.fork():\n        os._exit(0)\n"
    job.start()
    (job.folder / "hold").unlink()
    wait_for(job, "done")
    with (job.folder / "held").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        argv, env = [sys.executable, "-c", forks_on], {**os.environ, "DGXLAB_JOB": job.job_id}
        child = subprocess.Popen(argv, env=env, start_new_session=True, pass_fds=(held.fileno(),))
    child.wait()  # the first of them
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: time.sleep(0.002) or read(path))
    try:
        assert job.cancel().state == "done"
        with (job.folder / "held").open() as again:
            assert lock(again.fileno())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, 9)


def test_cancel_names_what_it_cannot_end(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.start()
    left = leave_running(job)
    (job.folder / "hold").unlink()
    wait_for(job, "done")
    with monkeypatch.context() as deaf:
        deaf.setattr(os, "killpg", lambda group, number: None)
        with pytest.raises(RemoteError, match=rf"pid {left} \(sleep\) of job {job.job_id} cannot be ended") as caught:
            job.cancel(patience_s=0.3)
    assert caught.value.next == f"dgxlab cancel {job.job_id}"
    assert job.cancel().state == "done"


def test_asking_does_not_disturb_the_start(job: Job) -> None:
    ask = (
        "import sys; from pathlib import Path; from dgxlab.agent.job import Job\n"
        f"job = Job(Path({str(job.folder)!r}))\n"
        "seen = {job.status().state for _ in range(3000)}\n"
        "sys.exit(bool(seen - {'staged', 'running'}))"
    )
    askers = [subprocess.Popen([sys.executable, "-c", ask]) for _ in range(2)]
    assert job.start().state == "running"
    assert [asker.wait() for asker in askers] == [0, 0]
    (job.folder / "hold").unlink()
    wait_for(job, "done")


@pytest.mark.parametrize("length", [1, 1000])
def test_the_words_of_a_full_disk_have_their_room(job: Job, length: int) -> None:
    before = {name: (job.folder / f"{name}.reserved").stat() for name in ("started", "rc")}
    lock = job.begin()
    assert lock is not None
    message = "not equal: \N{GREEK SMALL LETTER PI}" * length
    job.finish(exit_code=4, status="failed", message=message, next="")
    os.close(lock)
    for name, reserved in before.items():
        after = (job.folder / name).stat()
        assert (after.st_ino, after.st_size) == (reserved.st_ino, reserved.st_size)
    status = job.status()
    assert status.rc is not None
    assert (status.state, status.rc["exit_code"]) == ("done", 4)
    assert message.startswith(status.rc["message"])
    assert (status.rc["message"] == message) == (length == 1)


@pytest.fixture
def finished(job: Job) -> Job:
    job.start()
    (job.folder / "hold").unlink()
    wait_for(job, "done")
    return job


@pytest.mark.parametrize(
    "change", [lambda text: text + "{}\n", lambda text: text[:-1], lambda text: "", lambda text: f"y{text}"]
)
def test_a_job_with_a_changed_journal_is_lost(finished: Job, change: Callable[[str], str]) -> None:
    finished.journal.write_text(change(finished.journal.read_text()))
    status = finished.status()
    assert (status.state, status.rc, status.cause) == ("lost", None, "its journal is not what its agent wrote")


@pytest.mark.parametrize(
    "change", [("done", "gone"), ('"exit_code": 0', '"exit_code": 5'), ("{", ""), ('"sha256"', '"SHA256"')]
)
def test_a_job_with_a_changed_final_status_is_lost(finished: Job, change: tuple[str, str]) -> None:
    rc, sealed = finished.status().rc or {}, finished.rc.read_text()
    finished.rc.write_text(json.dumps({name: value for name, value in rc.items() if name != "sha256"}))
    assert finished.status().state == "done"  # an older agent's has no digest of its own
    finished.rc.write_text(sealed.replace(*change, 1))
    assert (finished.status().state, finished.status().cause) == ("lost", "its final status was damaged")


def test_staging_without_room_leaves_nothing(tmp_path: Path, agent: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path; from dgxlab.agent.job import Job\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        f"Job.stage(Path({str(tmp_path / 'jobs')!r}), 'one', b'{{}}', Path({str(agent)!r}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert "File too large" in ran.stderr
    assert list((tmp_path / "jobs").iterdir()) == []
    assert Job.stage(tmp_path / "jobs", "one", b"{}", agent).status().state == "staged"


@pytest.mark.parametrize("name", ["plan.json", "agent.pyz", "MANIFEST"])
def test_a_job_damaged_before_it_began_is_replaced(job: Job, agent: Path, name: str) -> None:
    """A power loss leaves a file's name alone; the next client that stages the job puts a whole one there."""
    (job.folder / name).write_bytes(b"")
    assert job.torn
    again = Job.stage(job.folder.parent, job.job_id, b'{"a": 1}', agent)
    assert not again.torn
    assert again.start().state in ("running", "done")
    wait_for(again, "done")
    assert (job.folder / "executed").read_text() == "x"
    assert [path.name for path in job.folder.parent.glob(".*")] == [f".broken-{job.job_id}-{me()}"]


def test_a_job_that_began_is_never_replaced(job: Job, agent: Path) -> None:
    fd = job.begin()
    assert fd is not None
    job.plan.write_bytes(b"")
    assert not job.set_aside()
    os.close(fd)
    assert Job.stage(job.folder.parent, job.job_id, b"{}", agent).status().state == "lost"


def test_a_staged_job_is_ended_by_cancel(job: Job) -> None:
    status = job.cancel()
    assert status.rc is not None
    assert (status.state, status.rc["status"], status.rc["exit_code"]) == ("done", "cancelled", 130)
    assert job.start() == status
    subprocess.run([sys.executable, str(job.folder / "agent.pyz"), "work", str(job.folder)], check=True)
    assert not (job.folder / "executed").exists()


TERMED = """
import os, signal, sys
from pathlib import Path
from dgxlab.agent import work
from dgxlab.agent.job import Job

def then_term(call):
    return lambda *args: (call(*args), os.kill(os.getpid(), signal.SIGTERM))[0]

Job.begin, work._terminated = then_term(Job.begin), then_term(work._terminated)
work.work(Path(sys.argv[1]))
"""


def test_an_agent_that_is_cancelled_as_soon_as_it_has_begun(job: Job) -> None:
    """And once more while it ends, as Slurm may do."""
    subprocess.run([sys.executable, "-c", TERMED, str(job.folder)], check=True)
    status = job.status()
    assert status.rc
    assert (status.state, status.rc["status"], status.rc["exit_code"]) == ("done", "cancelled", 130)


def test_a_damaged_job_is_not_started_and_gone_after_cancel(job: Job) -> None:
    (job.folder / "agent.pyz").write_bytes(b"")
    with pytest.raises(RemoteError, match="is damaged"):
        job.start()
    assert job.cancel().state == "absent"


def test_where_there_are_no_locks_nothing_waits(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for ask in (job.status, job.begin, job.start, job.cancel):
        with pytest.raises(RemoteError, match=r"run\.lock cannot be locked: No locks available; the host's root: must"):
            ask()


@pytest.fixture
def ended(tmp_path: Path) -> Job:
    folder = tmp_path / "jobs" / "job-1"
    (folder / "raw" / "deeper").mkdir(parents=True)
    texts = {"plan.json": "{}", "journal.jsonl": '{"seq":0}\n', "rc": "{}", "agent.err": "", "build-toy.log": "cc\n"}
    for name, text in {**texts, "agent.pyz": "PK", "run.lock": "", "raw/run-0.out": "tokens\n"}.items():
        (folder / name).write_text(text)
    (folder / "raw" / "link.out").symlink_to("/etc/passwd")
    return Job(folder)


def test_sent_whole(ended: Job) -> None:
    first, second = io.BytesIO(), io.BytesIO()
    ended.send(1 << 20, first)
    ended.send(1 << 20, second)
    assert first.getvalue() == second.getvalue()
    line, _, packed = first.getvalue().partition(b"\n")
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        names = archive.getnames()
        contents = {name: archive.extractfile(name).read() for name in names}  # type: ignore[union-attr]
    assert names == ["rc", "plan.json", "journal.jsonl", "agent.err", "build-toy.log", "raw/run-0.out"]
    assert contents["raw/run-0.out"] == b"tokens\n"
    assert json.loads(line) == {"size": 24, "files": 6}
    assert sum(map(len, contents.values())) == 24


def test_only_the_size_where_they_are_larger(ended: Job) -> None:
    exactly, larger = io.BytesIO(), io.BytesIO()
    ended.send(24, exactly)
    ended.send(23, larger)
    assert exactly.getvalue().startswith(larger.getvalue())
    assert larger.getvalue() == b'{"size": 24, "files": 6}\n'


def test_neither_of_a_job_that_is_not_there_nor_of_one_that_has_not_ended(ended: Job) -> None:
    out = io.BytesIO()
    (ended.folder / "rc").unlink()
    with pytest.raises(UsageError, match="job job-1 has not ended"):
        ended.send(1 << 20, out)
    ended.plan.unlink()
    with pytest.raises(JobLost, match="the host has no job job-1"):
        ended.send(1 << 20, out)
    assert out.getvalue() == b""
