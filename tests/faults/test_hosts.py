"""The campaign's hosts: clocks, disks and machines do what their faults need, and wrong records of jobs are seen."""

import fcntl
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dgxlab.agent.boot import settle
from dgxlab.store.schema import add_functions
from dgxlab.store.seals import seal_all
from faults import aftermath
from faults.clock import Clock
from faults.fault import Broken, seeded, wait_while
from faults.host import CELLS, Box, Ran, box
from faults.kinds import agent, clock, disk, leftover, reboot, replaced, trust
from faults.kinds.clock import HOUR_S
from faults.kinds.power import POWER
from faults.ledger import once, read
from tests.sshd import Sshd, descendants

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.fixture(scope="module")
def place() -> Iterator[Box]:
    """A host with experiments that were measured without a fault."""
    with box() as here:
        assert here.run("run", here.spec("good", bench=agent.BENCH), "--host", "box").rc == 0
        assert here.run("run", here.spec("mine"), "--host", "box").rc == 0
        # a gate and a benchmark; a run that shared the processors is repeated
        assert len({launch.argv for launch in here.check("mine", jobs=1, cells=CELLS)}) == 2
        yield here


def test_processes_and_locks_that_outlive_an_agent(place: Box, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_runs_that_are_missing_or_measured_again(place: Box) -> None:
    aftermath.measured(place, "good", agent.CELLS)
    with pytest.raises(Broken, match=r"^7 cells "):
        aftermath.measured(place, "good", agent.CELLS + 1)
    (job,) = place.folders("good")
    whole = job.journal.read_bytes()
    runs = whole.count(b'"event":"run"')
    with job.journal.open("a") as journal:
        journal.write(json.dumps({"event": "run"}) + "\n")
    with pytest.raises(Broken, match=f"noted {runs + 1} runs, {runs} are stored"):
        aftermath.measured(place, "good", agent.CELLS)
    job.journal.write_bytes(whole)
    place.run("run", "good.yaml", "--host", "box", "--again")
    with pytest.raises(Broken, match="1 at most"):
        aftermath.measured(place, "good", agent.CELLS)


def test_an_exit_code_that_is_not_how_the_job_ended(place: Box) -> None:
    place.run("run", place.spec("said", bench=agent.BENCH), "--host", "box")
    agent._told(place, "said", Ran(0, "", ""))
    with pytest.raises(Broken, match="ended with 12"):
        agent._told(place, "said", Ran(12, "", ""))


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("UPDATE samples SET value = value * 1.0000001 WHERE ordinal = 2", "wrong: .* was printed"),
        ("DELETE FROM samples WHERE ordinal = 5", "wrong: .* has samples"),
        (
            "DELETE FROM readings; DELETE FROM flags; DELETE FROM samples; DELETE FROM rows; DELETE FROM runs",
            "lost: raw/run-0.out .* is not in the store",
        ),
        ("DELETE FROM gates WHERE job_id LIKE '%mine%'", "lost: raw/gate"),
        ("UPDATE jobs SET state = 'lost' WHERE name = 'mine'", "there are not 1 good jobs"),
        ("UPDATE runs SET raw = deflated(replace(inflated(raw), 'run-0.out', 'run-7.out'))", "lost: raw/run-0.out"),
        ('UPDATE gates SET raw = replace(raw, \'"sha256":"\', \'"sha256":"0\')', "another sha256"),
        ("UPDATE rows SET raw = deflated(replace(inflated(raw), '\"n_gen\":4', '\"n_gen\":5'))", "was not printed"),
        ("UPDATE runs SET status = 'discarded', reason = 'a stranger'", "lost: 0 values of 3 cells"),
    ],
)
def test_a_record_that_was_changed(place: Box, sql: str, what: str) -> None:
    kept = place.database.read_bytes()
    with sqlite3.connect(place.database) as record:
        add_functions(record)
        for (name,) in record.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            record.execute(f"DROP TRIGGER {name}")
        record.executescript(sql)
    record.close()
    with pytest.raises(Broken, match=what):
        place.check("mine", jobs=1, cells=CELLS)
    for beside in place.database.parent.glob("results.db-*"):
        beside.unlink()
    place.database.write_bytes(kept)


def test_a_job_that_the_record_does_not_know(place: Box, tmp_path: Path) -> None:
    assert place.run("run", place.spec("other"), "--host", "box", "--db", tmp_path / "other.db").rc == 0
    with pytest.raises(Broken, match=r"^lost: .* not know"):
        place.check("other")


def test_a_second_launch(place: Box) -> None:
    spec = place.spec("again")
    assert place.run("run", spec, "--host", "box").rc == 0
    assert place.run("run", spec, "--host", "box", "--again").rc == 0
    with pytest.raises(Broken, match=r"run twice: .*llama-bench"):
        place.check("again", jobs=2, cells=CELLS)


def test_launches_print_values_of_their_own(place: Box) -> None:
    launches = [launch for launch in read(place.ledger) if "llama-bench" in launch.argv]
    assert len({launch.sha256 for launch in launches}) == len(launches) >= 2
    once([launch for launch in launches if launch.job_id.split("-")[2] == "mine"])


ASK = "import time; print(time.time(), time.monotonic())"


def test_a_clock_that_is_set(tmp_path: Path) -> None:
    """The time of day moves, also for a program that was started before, and for its own kind; no other clock does."""
    here = Clock.make(tmp_path)
    here.set(-HOUR_S)
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-ES', '-c', {ASK!r}])"
    for code in (ASK, nested):
        ran = subprocess.run([here.python, "-ES", "-c", code], capture_output=True, text=True, check=True)
        now, monotonic = map(float, ran.stdout.split())
        assert now == pytest.approx(time.time() - HOUR_S, abs=60)
        assert monotonic == pytest.approx(time.monotonic(), abs=60)
    code = f"{ASK}; input(); {ASK}"
    with subprocess.Popen(["python3", "-u", "-c", code], env={**os.environ, **here.env}, text=True, **PIPES) as child:
        before = float(child.stdout.readline().split()[0])
        here.set(HOUR_S)
        after = float(child.communicate("\n")[0].split()[0])
    assert after - before == pytest.approx(2 * HOUR_S, abs=60)


def test_a_duration_by_the_wrong_clock() -> None:
    with clock._clocks() as place:
        assert place.run("run", place.spec("timed", bench=clock.BENCH), "--host", "box").rc == 0
        clock._durations(place, "timed")
        for seconds in (HOUR_S, -2 * HOUR_S):
            with place.store() as store:
                (guard,) = store.rows("SELECT name, sql FROM sqlite_schema WHERE sql LIKE '%BEFORE UPDATE ON runs %'")
                store.connection.execute(f"DROP TRIGGER {guard['name']}")
                store.connection.execute("UPDATE runs SET seconds = seconds + ?", (seconds,))
                store.connection.execute(guard["sql"])
                seal_all(store.connection)
            with pytest.raises(Broken, match=r"to have taken|is not within"):
                clock._durations(place, "timed")


def test_wherever_the_room_on_a_disk_ends() -> None:
    """A page more each time: not sent, ended early, asked for flags; each time only the disk is blamed."""
    met = set()
    with disk.HOST.place() as place:
        for pages in range(2, 6):
            spec = place.spec(f"level-{pages}", bench=disk.BENCH)
            place.disk.fill(disk.just_enough(place, pages))
            met.add(disk._told(place.run("run", spec, "--host", "box")))
            place.disk.clear()
        assert list(place.root.glob("jobs/.in-*")) == []
    assert {"submit failed", "the job failed"} <= met
    assert any("which flags" in word for word in met)


@pytest.mark.skipif(bool(POWER.lacks()), reason=POWER.lacks())
def test_power_losses() -> None:
    """What was renamed without a sync is empty after one; the next run needs no help."""

    def lost() -> bool:
        part = place.root / "part"
        for name, rename in (("synced", settle), ("not", lambda old, new: old.rename(new))):
            part.write_bytes(bytes(5000))
            rename(part, place.root / name)
        time.sleep(1.5)
        place.lose_power()
        synced, not_synced = ((place.root / name).stat().st_size for name in ("synced", "not"))
        assert synced == 5000
        return not_synced == 0

    with POWER.place() as place:
        place.insert("empty")
        assert any(lost() for _ in range(5))  # on a busy machine the kernel may write it before
        assert POWER.trial(place, seeded(3, "power", 1)).startswith("empty")


def test_replaced_programs_and_leftover_processes() -> None:
    with replaced._built() as place:
        assert replaced._trial(place, seeded(5, "replaced", 90)) == "wrapped program"
        ended = leftover._trial(place.there, seeded(5, "leftover", 8))
        assert ended.split(", ") == ["ends", *leftover.HOW.values()]


def test_a_process_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftover, "FREE_S", 0.1)
    leftover._gone("name")
    with subprocess.Popen(["sleep", "60"], env={"TOY_NAME": "name"}) as living:
        environ = Path(f"/proc/{living.pid}/environ")
        wait_while(lambda: not environ.read_bytes(), 10.0)  # empty until the program is loaded
        with pytest.raises(Broken, match=f"\\[{living.pid}\\]"):
            leftover._gone("name")
        living.kill()


def test_a_machine_that_loses_power() -> None:
    """Its processes end and its boot id changes; an sshd that ends alone ends no job."""

    def on(command: str) -> str:
        """Return what a shell on the machine prints, once there is one."""
        ask, deadline = ["ssh", "-F", place.there.config, "box", command], time.monotonic() + 60
        while (ran := subprocess.run(ask, capture_output=True, text=True, check=False)).returncode == 255:
            assert time.monotonic() < deadline, ran.stderr
            time.sleep(0.1)
        return ran.stdout.strip()

    boot, running = "cat /proc/sys/kernel/random/boot_id", "pidof tail || echo none"
    with reboot._machine() as place:
        first = on(boot)
        assert first == place.boot_id.read_text().strip()
        on("setsid -f tail -f /dev/null >/dev/null 2>&1")
        pids = on(running)
        place.restart_sshd()
        assert on(running) == pids != "none"
        place.lose_power()
        assert on(running) == "none"
        assert on(boot) not in (first, Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def test_a_client_that_trusts_a_wrong_key() -> None:
    """The check that a command was refused fails with a key that is right, and where the host then turned it away."""
    with trust.way() as place:
        for jump in (False, True):
            place.configure(jump=jump, lenient="", known=trust._right(place))
            with pytest.raises(Broken, match=r"^jobs --host box ended with 0 "):
                trust._refused(place, "box", ["jobs", "--host", "box"], "none")
        place.configure(jump=False, lenient="", known=trust._right(place))
        (place.home / ".ssh" / "id_ed25519").unlink()
        with pytest.raises(Broken, match=r"^let in: jobs "):
            trust._refused(place, "box", ["jobs", "--host", "box"], "none")


def test_a_server_that_logs_late_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    late = f"(until [ -e {tmp_path}/left ]; do sleep 0.1; done; sleep 1; echo Accepted key >>{tmp_path}/log) & wait"
    with subprocess.Popen(["sh", "-c", late]) as child:
        server = Sshd(tmp_path, 0, child.pid)

        def run(*args: str) -> Ran:
            wait_while(lambda: not descendants(server.pid), 10.0)
            (tmp_path / "left").touch()
            return Ran(trust.NOT_TRUSTED, "", "\nnext: x")

        place = SimpleNamespace(jump=server, box=SimpleNamespace(server=server, run=run, folders=list, jobs=list))
        with pytest.raises(Broken, match=r"^let in: jobs "):
            trust._refused(cast(trust.Way, place), "box", ["jobs"], "")
