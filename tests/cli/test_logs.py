"""`dgxlab logs`: what the programs printed, from this machine or from the host, as it was recorded."""

from __future__ import annotations

import json
import os
import pty
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Project, shown_on


@pytest.fixture
def session(measured: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of the session that was run here, with its raw files in a folder of the test's own."""
    (job,) = json.loads(measured.run("report", "--format", "json").out)["tables"][0]["rows"]
    session = str(job["session"])
    kept(tmp_path, session).parent.mkdir(parents=True)
    home = measured.machine.home
    shutil.copyfile(home / ".local" / "share" / "dgxlab" / "raw" / f"{session}.tar.gz", kept(tmp_path, session))
    shutil.copytree(on_host(measured, session), tmp_path / "job")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    yield session
    shutil.rmtree(on_host(measured, session), ignore_errors=True)  # a test may have changed it
    shutil.copytree(tmp_path / "job", on_host(measured, session))


def kept(tmp_path: Path, session: str) -> Path:
    """Return where the raw files are kept."""
    return tmp_path / "data" / "dgxlab" / "raw" / f"{session}.tar.gz"


def on_host(project: Project, session: str) -> Path:
    """Return the job's folder."""
    return project.machine.home / ".dgxlab" / "jobs" / session


def test_lists_what_there_is(measured: Project, session: str) -> None:
    """Each file with its size and what it is, from an abbreviated id; nothing on stderr once they are here."""
    ran = measured.run("logs", session[:-3])
    assert (ran.rc, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0].split() == ["file", "size", "what"]
    described = {line.split()[0]: line.split(maxsplit=3)[3] for line in lines[1:]}
    assert described["raw/run-1.out"] == "run:1 llama-bench stdout"
    assert described["raw/gate-0.err"] == "gate:0 MUL_MAT CPU stderr"
    assert described["journal.jsonl"] == "every event"
    rows = {row["path"]: row for row in json.loads(measured.run("logs", session, "--format", "json").out)}
    assert set(rows) == set(described)
    assert set(rows["rc"]) == {"path", "size", "sha256", "what"}


def test_prints_one_as_it_is(measured: Project, session: str, tmp_path: Path) -> None:
    """By its path or its name, byte for byte; in JSON it is text."""
    there = (on_host(measured, session) / "raw" / "run-1.out").read_bytes()
    for name in ("raw/run-1.out", "run-1.out"):
        with (tmp_path / "printed").open("wb") as printed:
            child = measured.spawn("logs", session, name, stdout=printed)
            _, err = child.communicate(timeout=60)
        assert (child.returncode, (tmp_path / "printed").read_bytes(), err) == (0, there, "")
    told = json.loads(measured.run("logs", session, "run-1.out", "--format", "json").out)
    assert (told["path"], told["text"]) == ("raw/run-1.out", there.decode())
    unknown = measured.run("logs", session, "run-9.out")
    assert (unknown.rc, unknown.out, unknown.next) == (2, "", f"dgxlab logs {session}")


def test_reader_that_leaves_early_is_no_error(measured: Project, session: str) -> None:
    """`dgxlab logs SESSION NAME | head -0`."""
    child = measured.spawn("logs", session, "run-0.out")
    assert child.stdout
    assert child.stderr
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert (child.wait(timeout=60), err) == (0, "")


def test_terminal_gets_no_control_sequences(measured: Project, session: str) -> None:
    """The gate prints colours; a terminal gets the words."""
    assert b"\x1b[1;32mOK" in (on_host(measured, session) / "raw" / "gate-0.out").read_bytes()
    terminal, end = pty.openpty()
    child = measured.spawn("logs", session, "gate-0.out", stdout=end)
    os.close(end)
    seen = shown_on(terminal)
    child.communicate(timeout=60)
    assert b"Backend CPU: OK" in seen
    assert b"\x1b" not in seen


def test_unpacks_into_a_new_folder(measured: Project, session: str, tmp_path: Path) -> None:
    """The files as they were; never into one that has something in it."""
    ran = measured.run("logs", session, "--out", tmp_path / "out")
    assert ran.rc == 0
    there = on_host(measured, session)
    unpacked = {
        str(path.relative_to(tmp_path / "out")): path for path in (tmp_path / "out").rglob("*") if path.is_file()
    }
    assert set(unpacked) == {line.split()[0] for line in ran.out.splitlines()[1:]}
    assert all(path.read_bytes() == (there / name).read_bytes() for name, path in unpacked.items())
    again = measured.run("logs", session, "--out", tmp_path / "out")
    assert (again.rc, again.out) == (2, "")
    assert "cannot unpack into" in again.error


def test_fetched_when_not_here(measured: Project, session: str, tmp_path: Path) -> None:
    """From the host that the record names, or the one that is named; kept for the next time."""
    there = measured.run("logs", session).out
    kept(tmp_path, session).unlink()
    measured.hosts.write_text("mybox: {local: true}\n")
    ran = measured.run("logs", session, "--host", "mybox")
    assert (ran.rc, ran.out) == (0, there)
    assert ran.err.endswith(f" {session} from mybox\n")
    assert measured.run("logs", session).err == ""
    kept(tmp_path, session).unlink()
    assert measured.run("logs", session, "--host", "nowhere").rc == 9
    assert measured.run("logs", session, "-q").err == ""


def test_deleted_job_folder(measured: Project, session: str, tmp_path: Path) -> None:
    """Exit code 12 and what is left; what was kept before needs no host."""
    shutil.rmtree(on_host(measured, session))
    assert measured.run("logs", session).rc == 0
    kept(tmp_path, session).unlink()
    ran = measured.run("logs", session)
    assert (ran.rc, ran.out) == (12, "")
    assert ran.next == f"dgxlab report {session}"
    assert measured.run("report", session).rc == 0


def test_report_takes_enough_of_a_sessions_id(measured: Project, session: str) -> None:
    """Or its alias; an experiment's name goes first; a beginning that several have is refused, with their ids."""
    whole = measured.run("report", session).out
    assert whole.startswith(f"# Session {session}\n")
    assert measured.run("report", session[:-1]).out == measured.run("report", session[-6:]).out == whole
    assert measured.run("logs", session[-6:]).out == measured.run("logs", session).out
    assert measured.run("run", "experiments/toy.yaml", "--again", "-q").rc == 0
    assert measured.run("report", "toy").out.startswith("# Experiment toy\n")
    for command in ("report", "logs"):
        ambiguous = measured.run(command, session[:2])
        assert (ambiguous.rc, ambiguous.error) == (2, f"{session[:2]!r} fits 2 jobs")
        assert f"\n  {session}\n" in ambiguous.err
    unknown = measured.run("report", "toys")
    assert (unknown.rc, unknown.out, unknown.next) == (2, "", "dgxlab report toy")
