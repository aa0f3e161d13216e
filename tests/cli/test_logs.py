"""`dgxlab logs`: what the programs printed, from this machine or from the host, as it was recorded."""

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
    (job,) = measured.json("report")["tables"][0]["rows"]
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
    return tmp_path / "data" / "dgxlab" / "raw" / f"{session}.tar.gz"


def on_host(project: Project, session: str) -> Path:
    return project.machine.home / ".dgxlab" / "jobs" / session


def test_lists_what_there_is(measured: Project, session: str) -> None:
    ran = measured.run("logs", session[:-3])
    assert (ran.rc, ran.err) == (0, "")
    header, *lines = ran.out.splitlines()
    assert header.split() == ["file", "size", "what"]
    described = {line.split()[0]: line.split(maxsplit=3)[3] for line in lines}
    assert described["raw/run-1.out"] == "run:1 llama-bench stdout"
    assert described["raw/gate-0.err"] == "gate:0 MUL_MAT on CPU stderr"
    assert described["journal.jsonl"] == "every event"
    rows = {row["path"]: row for row in measured.json("logs", session)}
    assert set(rows) == set(described)
    assert set(rows["rc"]) == {"path", "size", "sha256", "what"}


def test_prints_one_as_it_is(measured: Project, session: str, tmp_path: Path) -> None:
    there = (on_host(measured, session) / "raw" / "run-1.out").read_bytes()
    for name in ("raw/run-1.out", "run-1.out"):
        with (tmp_path / "printed").open("wb") as printed:
            child = measured.spawn("logs", session, name, stdout=printed)
            _, err = child.communicate(timeout=60)
        assert (child.returncode, (tmp_path / "printed").read_bytes(), err) == (0, there, "")
    told = measured.json("logs", session, "run-1.out")
    assert (told["path"], told["text"]) == ("raw/run-1.out", there.decode())
    unknown = measured.run("logs", session, "run-9.out")
    assert (unknown.rc, unknown.out, unknown.next) == (2, "", f"dgxlab logs {session}")


def test_terminal_gets_no_control_sequences(measured: Project, session: str) -> None:
    assert b"\x1b[1;32mOK" in (on_host(measured, session) / "raw" / "gate-0.out").read_bytes()
    terminal, end = pty.openpty()
    child = measured.spawn("logs", session, "gate-0.out", stdout=end)
    os.close(end)
    seen = shown_on(terminal)
    child.communicate(timeout=60)
    assert (b"Backend CPU: OK" in seen, b"\x1b" in seen) == (True, False)


def test_unpacks_into_a_new_folder(measured: Project, session: str, tmp_path: Path) -> None:
    out, there = tmp_path / "out", on_host(measured, session)
    ran = measured.ok("logs", session, "--out", out)
    unpacked = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file()}
    assert set(unpacked) == {line.split()[0] for line in ran.out.splitlines()[1:]}
    assert ran.err.endswith(f"{len(unpacked)} files unpacked into {out}\n")
    assert all(path.read_bytes() == (there / name).read_bytes() for name, path in unpacked.items())
    again = measured.run("logs", session, "--out", out)
    assert (again.rc, again.out, "cannot unpack into" in again.error) == (2, "", True)


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
    shutil.rmtree(on_host(measured, session))
    assert measured.run("logs", session).rc == 0  # what was kept before needs no host
    kept(tmp_path, session).unlink()
    ran = measured.run("logs", session)
    assert (ran.rc, ran.out, ran.next) == (12, "", f"dgxlab report {session}")
    measured.ok("report", session)


def test_report_takes_enough_of_a_sessions_id(measured: Project, session: str) -> None:
    """Or its alias; an experiment's name goes first; a beginning that several have is refused, with their ids."""
    whole = measured.run("report", session).out
    assert whole.startswith(f"# Session {session}\n")
    assert measured.run("report", session[:-1]).out == measured.run("report", session[-6:]).out == whole
    assert measured.run("logs", session[-6:]).out == measured.run("logs", session).out
    measured.ok("run", "experiments/toy.yaml", "--again", "-q")
    assert measured.run("report", "toy").out.startswith("# Experiment toy\n")
    for command, lists in (("report", "dgxlab sessions"), ("logs", "dgxlab jobs")):
        ambiguous = measured.run(command, session[:2])
        assert (ambiguous.rc, ambiguous.error, ambiguous.next) == (2, f"{session[:2]!r} fits 2 jobs", lists)
        assert f"\n  {session}\n" in ambiguous.err
    unknown = measured.run("report", "toys")
    assert (unknown.rc, unknown.out, unknown.next) == (2, "", "dgxlab report toy")
