"""The benchmark lock."""

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from dgxlab.agent.lock import BenchLock, OwnerFile, Signature, measuring, moment
from dgxlab.errors import RemoteError
from dgxlab.units import held
from tests.sshd import ORDINARY_UID

ALICE = Signature("J1", "alice")
BOB = Signature("J2", "bob")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dgxlab-two-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def as_ordinary() -> Iterator[None]:
    os.seteuid(ORDINARY_UID)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[BenchLock, BenchLock]]:
    locks = BenchLock("cpu", (tmp_path,)), BenchLock("cpu", (tmp_path,))
    yield locks
    for lock in locks:
        lock.release()


def test_excludes_and_names_the_holder(pair: tuple[BenchLock, BenchLock]) -> None:
    first, second = pair
    assert first.take(ALICE)
    assert not second.take(BOB)
    assert second.owner().startswith("job J1 of alice, since 2")
    first.release()
    assert second.take(BOB)
    assert json.loads(second.path.read_text())["job"] == "J2"


def test_removed_file_is_locked_anew(pair: tuple[BenchLock, BenchLock]) -> None:
    lock, other = pair
    assert lock.take(ALICE)
    lock.path.unlink()
    assert lock.take(ALICE)
    assert json.loads(lock.path.read_text())["job"] == "J1"
    assert not other.take(BOB)
    # two can hold two files of one name; the one that looks again finds out
    lock.path.unlink()
    assert other.take(BOB)
    assert not lock.take(ALICE)
    assert lock.owner().startswith("job J2 of bob, since ")
    other.release()
    assert lock.take(ALICE)


def test_child_that_inherits_it_keeps_it(pair: tuple[BenchLock, BenchLock]) -> None:
    lock, other = pair
    assert lock.take(ALICE)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=lock.fds)
    lock.release()
    assert not other.take(BOB)
    child.communicate()
    assert other.take(BOB)


def test_file_is_writable_by_all_whatever_the_umask(pair: tuple[BenchLock, BenchLock]) -> None:
    old = os.umask(0o077)
    try:
        pair[0].take(ALICE)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(old)
    assert stat.S_IMODE(pair[0].path.stat().st_mode) == 0o666


def test_nowhere_to_lock_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match=r"no benchmark lock can be made: .*/a or .*/b must be writable"):
        BenchLock("cpu", (tmp_path / "a", tmp_path / "b")).take(ALICE)


@pytest.mark.parametrize("closed_to", ["first", "second"])
def test_who_cannot_use_every_folder_is_excluded_too(tmp_path: Path, closed_to: str) -> None:
    """One may write in both folders, the other only in the second: the first has it alone."""
    both, second_only = (tmp_path / "var", tmp_path), (tmp_path / "closed", tmp_path)
    (tmp_path / "var").mkdir()
    folders = (second_only, both) if closed_to == "first" else (both, second_only)
    first, second = (BenchLock("cpu", each) for each in folders)
    assert first.take(ALICE)
    assert not second.take(BOB)
    assert second.owner().startswith("job J1 of alice, since ")
    assert second.fds == []
    assert first.take(ALICE)
    first.release()
    assert second.take(BOB)
    assert not first.take(ALICE)
    second.release()


@pytest.mark.skipif(os.getuid() != 0, reason="the other user is root")
@pytest.mark.parametrize("first", ["root", "ordinary"])
def test_folder_that_is_closed_to_a_user(open_folder: Path, first: str) -> None:
    """As where /var/lock is root's: a user who is there first locks the other folder, and then the file of root too."""
    closed, public = open_folder / "closed", open_folder / "public"
    closed.mkdir(mode=0o755)
    public.mkdir()
    public.chmod(0o1777)
    roots, users = (BenchLock("cpu", (closed, public)) for _ in range(2))
    with as_ordinary() if first == "ordinary" else nullcontext():
        assert (users if first == "ordinary" else roots).take(ALICE)
    with as_ordinary() if first == "root" else nullcontext():
        assert not (users if first == "root" else roots).take(BOB)
    roots.release()
    with as_ordinary():
        assert users.take(ALICE)
        assert users.path == closed / "dgxlab-cpu"
    assert len(users.fds) == 2
    assert not roots.take(BOB)
    users.release()


def test_file_that_appears_in_a_better_folder_is_locked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    better = tmp_path / "var"
    mine, other = BenchLock("cpu", (better, tmp_path)), BenchLock("cpu", (better,))
    assert mine.take(ALICE)
    better.mkdir()
    assert other.take(BOB)
    monkeypatch.setattr("dgxlab.agent.lock.PAUSE_S", 1.0)
    released = threading.Timer(0.1, other.release)
    released.start()
    assert mine.take(ALICE)
    released.join()
    monkeypatch.undo()
    assert not other.take(BOB)
    assert other.owner().startswith("job J1 of alice, since ")
    mine.release()


WAITS = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from dgxlab.agent import lock as module
    folder, name, pause_s, module.PATIENCE_S = *sys.argv[1:4], float(sys.argv[4])
    lock = module.BenchLock("cpu", (Path(folder),))
    while not lock.take(module.Signature(name, "x")):
        print("waits", flush=True)
        time.sleep(float(pause_s))
    print("took", time.monotonic_ns(), flush=True)
    """
)


def waiting_for(lock: BenchLock, name: str, pause_s: float, patience_s: float = 60.0) -> subprocess.Popen[str]:
    """Start a program that asks for a lock, which another has, every `pause_s`."""
    argv = [sys.executable, "-c", WAITS, str(lock.path.parent), name, str(pause_s), str(patience_s)]
    program = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert program.stdout
    assert program.stdout.readline() == "waits\n"
    return program


def test_who_asked_first_is_served_first(pair: tuple[BenchLock, BenchLock]) -> None:
    """Also where the others look more often; the dead are not waited for."""
    lock, late = pair
    assert lock.take(ALICE)
    asked = (("killed", 60.0), ("first", 1.0), ("second", 0.3), ("third", 0.01))
    waiting = [waiting_for(lock, name, pause_s) for name, pause_s in asked]
    killed, *waiting = waiting
    lock.release()
    time.sleep(0.2)
    assert not late.take(BOB)
    assert held("x", late.owner()) == "x is kept for a job that asked earlier"
    killed.kill()
    killed.communicate()
    at = [int(child.communicate(timeout=30)[0].split()[-1]) for child in waiting]
    assert at == sorted(at)
    assert late.take(BOB)


def test_a_stopped_job_keeps_a_free_device_from_none(pair: tuple[BenchLock, BenchLock]) -> None:
    lock, _ = pair
    assert lock.take(ALICE)
    stopped = waiting_for(lock, "stopped", 60.0)
    later = waiting_for(lock, "later", 0.05, patience_s=0.3)
    lock.release()
    free = time.monotonic_ns()
    assert int(later.communicate(timeout=30)[0].split()[-1]) - free > 0.25e9
    stopped.kill()
    stopped.communicate()


def test_who_passed_a_stopped_job_waits_for_it_anew(
    pair: tuple[BenchLock, BenchLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dgxlab.agent.lock.PATIENCE_S", 0.2)
    lock, later = pair
    assert lock.take(ALICE)
    stopped = waiting_for(lock, "stopped", 60.0)
    lock.release()
    assert not later.take(BOB)
    time.sleep(0.3)
    assert later.take(BOB)
    later.release()
    assert not later.take(BOB)
    stopped.kill()
    stopped.communicate()


def test_of_many_only_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    code = textwrap.dedent(
        """
        import os, sys, time
        from pathlib import Path
        from dgxlab.agent.lock import BenchLock, Signature
        here, *folders = map(Path, sys.argv[1:])
        lock = BenchLock("cpu", folders)
        for _ in range(20):
            while not lock.take(Signature(str(os.getpid()), "x")):
                time.sleep(0.001)
            alone = os.open(here / "alone", os.O_CREAT | os.O_EXCL)
            time.sleep(0.002)
            os.close(alone)
            os.unlink(here / "alone")
            lock.release()
        """
    )
    several = [("var", "."), ("missing", "."), ("var", "."), ("var", "missing", ".")]
    started = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path, *(tmp_path / name for name in names)])
        for names in several
    ]
    assert [child.wait() for child in started] == [0] * len(several)


def test_who_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGXLAB_LOCKS", f"{tmp_path / 'missing'}:{tmp_path}")
    mine, other, dead = (BenchLock(device) for device in ("cpu", "GPU-1", "GPU-2"))
    assert mine.take(ALICE)
    assert other.take(BOB)
    assert dead.take(Signature("J3", "bob"))
    dead.release()
    (tmp_path / "dgxlab-folder").mkdir()
    (tmp_path / "dgxlab-text").write_text("x")
    (tmp_path / "dgxlab-link").symlink_to(mine.path)
    os.mkfifo(tmp_path / "dgxlab-fifo")
    assert [str(job) for job in measuring(but="J1").values()] == [f"job J2 of bob, since {moment(other.since or 0)}"]
    assert set(measuring(but="")) == {"J1", "J2"}
    mine.release()
    other.release()


@pytest.mark.parametrize("planted", ["link", "folder"])
def test_what_is_no_lock_is_refused(tmp_path: Path, planted: str) -> None:
    """A link in a public folder does not make us write somewhere else, nor lock another folder's file."""
    victim, elsewhere, path = tmp_path / "victim", tmp_path / "elsewhere", tmp_path / "dgxlab-cpu"
    elsewhere.mkdir()
    victim.write_text("precious")
    if planted == "link":
        path.symlink_to(victim)
    else:
        path.mkdir()
    with pytest.raises(RemoteError, match=r"dgxlab-cpu cannot be opened: (Too many levels|Is a directory)") as refused:
        BenchLock("cpu", (tmp_path, elsewhere)).take(ALICE)
    assert refused.value.next.startswith(f"ls -l {path}")
    assert victim.read_text() == "precious"
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("text", ["not json", "[]", '{"job": 1}', '{"job": "J", "user": "u", "since": 1e999}', ""])
def test_unreadable_signature_is_an_unknown_holder(pair: tuple[BenchLock, BenchLock], text: str) -> None:
    lock, other = pair
    assert lock.take(ALICE)
    lock.path.write_text(text)
    assert not other.take(BOB)
    assert other.owner() == "an unknown user"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "owner"


def owner(path: Path, job: str = "J1") -> OwnerFile:
    return OwnerFile(path, Signature(job, "alice"))


@pytest.mark.parametrize(
    ("text", "claim"),
    [
        *((text, "") for text in ("", "\n \n", "FREE", "FREE since 12:00 (bob)\n", "FREE: bob\n")),
        ("dgxlab job J0 of bob, since 2026\n", ""),  # a job that holds no lock of this device
        *((text, f'another user: "{text}"') for text in ("FREEMAN measures until 5", "FREEÉ", "free", "not FREE")),
        ("bob:\tvllm\x1b[2J sweep\n" + "x" * 500, f'another user: "bob: vllm\\u001b[2J sweep {"x" * 94}…"'),
    ],
)
def test_claim_of_the_owner_file(path: Path, text: str, claim: str) -> None:
    path.write_text(text)
    assert owner(path).claimed_by() == claim


def test_owner_file_that_cannot_be_read(path: Path) -> None:
    """Missing, and a pipe without a writer, which is not waited for: free. Anything else may be a claim."""
    assert owner(path).claimed_by() == owner(path / "deeper").claimed_by() == ""
    os.mkfifo(path)
    file = owner(path)
    assert file.claimed_by() == ""
    file.sign()
    file.free()
    path.unlink()
    path.mkdir()
    assert file.claimed_by() == "an unknown user (Is a directory)"


def test_signed_and_set_free(path: Path) -> None:
    path.write_text("FREE since a time whose text is longer than the signature, so that some could be left over" + "\n")
    path.chmod(0o640)
    file = owner(path)
    file.sign()
    assert path.read_text().startswith("dgxlab job J1 of alice, since 2")
    assert path.read_text().count("\n") == 1
    file.free()
    assert path.read_text() == "FREE\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    for text in ("bob: mine now\n", "dgxlab job J2 of alice, since 2026-11-20 12:00:00\n"):
        file.sign()
        path.write_text(text)
        file.free()
        assert path.read_text() == text


def test_file_is_made_but_not_its_folder(tmp_path: Path) -> None:
    here, nowhere = owner(tmp_path / "owner"), owner(tmp_path / "none" / "owner")
    for file in (here, nowhere):
        file.sign()
    nowhere.free()
    assert here.path.read_text().startswith("dgxlab job J1 of alice, since 2")
    assert (here.watched, nowhere.watched, nowhere.path.parent.exists()) == (True, False, False)


Start = Callable[[str], tuple[BenchLock, OwnerFile]]


@pytest.fixture
def signed(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start jobs of alice, each with a device of its own, that share the file."""
    monkeypatch.setenv("DGXLAB_LOCKS", str(tmp_path))
    held = []

    def start(name: str) -> tuple[BenchLock, OwnerFile]:
        held.append(BenchLock(f"GPU-{name}"))
        assert held[-1].take(Signature(name, "alice"))
        file = owner(path, name)
        file.sign()
        return held[-1], file

    yield start
    for lock in held:
        lock.release()


def test_file_is_handed_on_to_a_job_that_measures(path: Path, signed: Start) -> None:
    jobs = {name: signed(name) for name in ("J1", "J2", "J3")}
    assert path.read_text().startswith("dgxlab job J1 of alice, since 2")
    for name, after in (("J2", "dgxlab job J1 "), ("J1", "dgxlab job J3 of alice, since 2"), ("J3", "FREE\n")):
        lock, file = jobs[name]
        file.sign()
        file.free()
        lock.release()
        assert path.read_text().startswith(after)


def test_dead_jobs_word_is_replaced(path: Path, signed: Start) -> None:
    dead, _ = signed("J1")
    _, living = signed("J2")
    dead.release()
    living.sign()
    assert path.read_text().startswith("dgxlab job J2 ")


def test_file_that_a_person_keeps_locked_is_signed(path: Path) -> None:
    with path.open("w") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        owner(path).sign()
    assert path.read_text().startswith("dgxlab job J1 ")
