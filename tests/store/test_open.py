"""Opening: new files, old schemas, files that are not ours, disks and locks that fail."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dgxlab import judgement
from dgxlab.errors import HostBusy, SpecError
from dgxlab.ingest import ingest
from dgxlab.model import Device, canonical, to_json
from dgxlab.store import Store, check, connect, migrations
from dgxlab.store.schema import VERSION
from tests.conftest import PROJECT
from tests.journals import compared, dump, facts, intend, plan, whole


def filled(path: Path) -> Path:
    """Make a database with one job in it."""
    with Store.open(path) as store:
        journal = whole("job-1")
        intend(store, journal)
        ingest(store, "job-1", journal.lines())
    return path


def older(path: Path, stop_before: str) -> Path:
    """Make a database as a dgxlab of an older schema left it."""
    connection = sqlite3.connect(path, isolation_level=None)
    migrations.upgrade(connection, path, stop_before=min(stop_before, "m008_devices"))
    begun = json.dumps(to_json(facts()))
    connection.execute("INSERT INTO hosts VALUES ('host-a', 'dgx', 'box', ?, 1.5)", (begun,))
    connection.execute(
        """INSERT INTO jobs (job_id, kind, name, host, host_id, plan, plan_digest, intent_at, state, protocol,
                             dgxlab_version, facts)
           VALUES ('job-0', 'run', 'toy', 'dgx', 'host-a', ?, ?, 1.5, 'running', 1, '0.1.0', ?)""",
        (canonical(plan("job-0")), plan("job-0").digest, begun),
    )
    if stop_before > "m002_evidence":
        arm = ("build-a", "p", "t", "c", "[]", 0, '{"GGML_CUDA":"OFF"}', "{}", "{}", "{}", "", "", 1.0, 0)
        connection.execute(f"INSERT INTO arms VALUES ('job-0', 'toy', {','.join('?' * len(arm))})", arm)  # noqa: S608
    if stop_before > "m008_devices":
        migrations.upgrade(connection, path, stop_before=stop_before)
        shutil.rmtree(path.with_name(f"{path.name}.backups"))
    connection.close()
    return path


def test_new_database(folder: Path) -> None:
    """A new file is private, durable, and alone once closed."""
    path = folder / "results.db"
    with Store.open(path) as store:
        assert path.stat().st_mode & 0o777 == 0o600
        pragmas = ("journal_mode", "synchronous", "foreign_keys", "recursive_triggers", "busy_timeout", "user_version")
        found = {name: store.rows(f"PRAGMA {name}")[0] for name in pragmas}
        assert [value for row in found.values() for value in row.values()] == ["wal", 2, 1, 1, 10_000, VERSION]
    assert list(folder.iterdir()) == [path]


def test_the_file_alone_is_the_whole_database(folder: Path) -> None:
    """What was committed is in the one file after closing: git tracks nothing else."""
    path = filled(folder / "results.db")
    assert sorted(folder.iterdir()) == [path]
    shutil.copyfile(path, folder / "copy.db")
    with Store.open(path) as store, Store.open(folder / "copy.db") as copy:
        assert dump(copy) == dump(store)
        assert len(dump(copy)["samples"]) == 8


def test_reading_leaves_the_bytes_alone(folder: Path) -> None:
    """A report must not make a tracked file look changed."""
    path = filled(folder / "results.db")
    before = path.read_bytes()
    with Store.open(path) as store:
        assert dump(store)["runs"]
        assert check(store) == []
    assert path.read_bytes() == before


def test_the_fast_path_does_not_import_sqlite_utils(folder: Path) -> None:
    """Opening a current database leaves out what only migrations need."""
    path = filled(folder / "results.db")
    code = (
        "import sys; from pathlib import Path; from dgxlab.store import Store\n"
        f"Store.open(Path({str(path)!r})).close()\n"
        "print('sqlite_utils' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "False\n"


@pytest.mark.parametrize("stop_before", [m.name for m in migrations.MIGRATIONS._migrations[1:]])
def test_migrates_from_every_version(folder: Path, stop_before: str) -> None:
    """An older database keeps its rows, becomes current, and leaves a private, sound backup."""
    path = older(folder / "results.db", stop_before)
    with Store.open(path) as store:
        assert store.rows("PRAGMA user_version") == [{"user_version": VERSION}]
        assert store.rows("SELECT host, host_id FROM jobs") == [{"host": "dgx", "host_id": "host-a"}]
        built = {"toy": Device.of(to_json(facts()), {})} if stop_before > "m002_evidence" else {}
        assert store.devices("job-0") == built
        assert store.rows("PRAGMA foreign_keys") == [{"foreign_keys": 1}]
        assert check(store) == []
    (backup,) = (folder / "results.db.backups").iterdir()
    assert backup.stat().st_mode & 0o777 == 0o600
    assert backup.parent.stat().st_mode & 0o777 == 0o700
    old = sqlite3.connect(backup)
    assert old.execute("SELECT user_version, host FROM pragma_user_version, jobs").fetchone() == (
        int(stop_before[1:4]) - 1,
        "dgx",
    )
    old.close()


def test_the_record_of_this_repository_opens(folder: Path) -> None:
    """A copy of what was measured here before there was telemetry: nothing is lost, and nothing was invented."""
    path = Path(shutil.copy(PROJECT / "results.db", folder))
    old = sqlite3.connect(f"file:{PROJECT / 'results.db'}?immutable=1", uri=True)
    runs = old.execute("SELECT count(*) FROM runs").fetchone()
    old.close()
    with Store.open(path) as store:
        assert tuple(store.rows("SELECT count(*) AS n FROM runs")[0].values()) == runs
        assert check(store) == judgement.check(store) == []


def test_a_session_goes_into_a_database_of_version_4(folder: Path) -> None:
    """What an older dgxlab left is brought forward, and takes chains and verdicts."""
    path = older(folder / "results.db", "m005_chains")
    journal = compared("job-1")
    with Store.open(path) as store:
        intend(store, journal)
        ingest(store, "job-1", journal.lines())
        assert [row["verdict"] for row in store.verdicts("job-1")] == ["faster"]
        assert check(store) == judgement.check(store) == []


def test_a_gate_on_a_model_goes_into_a_database_of_version_6(folder: Path) -> None:
    """What was recorded before there were such gates stays, and takes one."""
    path = older(folder / "results.db", "m007_checks")
    journal = whole("job-1").check().check(0.003)
    with Store.open(path) as store:
        intend(store, journal)
        ingest(store, "job-1", journal.lines())
        assert [row["status"] for row in store.rows("SELECT status FROM checks ORDER BY at")] == ["passed", "failed"]
        assert check(store) == []


def test_seven_backups_are_kept(folder: Path) -> None:
    """The newest seven stay; files that are not ours are never touched."""
    path = filled(folder / "results.db")
    backups = folder / "results.db.backups"
    backups.mkdir()
    (backups / "mine.db").write_text("keep")
    with Store.open(path) as store:
        made = [migrations.backup(store.connection, path) for _ in range(9)]
    assert sorted(backups.iterdir()) == sorted([*made[2:], backups / "mine.db"])


def test_a_failing_migration_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All migrations that are due are one transaction: the second fails, the first is undone."""
    path = older(folder / "results.db", "m002_evidence")

    def broken(db: Any) -> None:
        db.execute("CREATE TABLE half (a)")
        raise RuntimeError("stop")

    with monkeypatch.context() as patch:
        patch.setattr(migrations.MIGRATIONS._migrations[2], "fn", broken)
        with pytest.raises(RuntimeError, match="stop"):
            Store.open(path)
    connection = sqlite3.connect(path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    connection.close()
    assert {"runs", "half"}.isdisjoint(names)
    Store.open(path).close()


def test_refuses_a_newer_database(folder: Path) -> None:
    """A database of a newer dgxlab is left as it is."""
    path = filled(folder / "results.db")
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SpecError, match=f"newer dgxlab .schema {VERSION + 1}, this one knows {VERSION}"):
        Store.open(path)
    assert path.read_bytes() == before


def test_refuses_somebody_elses_database(folder: Path) -> None:
    """Another program's SQLite file is neither migrated nor switched to WAL."""
    path = folder / "places.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE places (url)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SpecError, match="not one of dgxlab"):
        Store.open(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"name: toy\n" * 100, b"SQLite format 3\x00" + b"\xff" * 4000])
def test_refuses_what_is_no_database(folder: Path, content: bytes) -> None:
    """Any other file is refused in one sentence and left as it is."""
    path = folder / "results.db"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=r"results\.db is (not an SQLite database|damaged)"):
        Store.open(path)
    assert path.read_bytes() == content


def test_missing_files(folder: Path) -> None:
    """Without `create` nothing is made, and a folder that is not there is named."""
    with pytest.raises(SpecError, match="there is no database"):
        Store.open(folder / "results.db", create=False)
    with pytest.raises(SpecError, match=r"cannot make the database .*nowhere.*No such file"):
        Store.open(folder / "nowhere" / "results.db")
    assert list(folder.iterdir()) == []


def test_a_folder_is_no_database(folder: Path) -> None:
    """A path that is a folder ends in a sentence, not in a traceback."""
    with pytest.raises(SpecError, match="cannot be opened"):
        Store.open(folder)


def test_a_locked_database_is_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that does not let go ends the wait with who to look for, and nothing is written."""
    path = filled(folder / "results.db")
    monkeypatch.setattr(connect, "BUSY_S", 0.05)
    with Store.open(path) as one, Store.open(path) as two, one.transaction():
        with pytest.raises(HostBusy, match="was locked by another program"):
            two.set_state("job-1", "lost")
        assert two.job("job-1").state == "done"


def test_a_full_disk_keeps_what_was_there(folder: Path) -> None:
    """A write that does not fit is undone and named; the database is sound and goes on once there is room."""
    with Store.open(folder / "results.db") as store:
        journal = whole("job-1", runs=1, samples=2000)
        intend(store, journal)
        ingest(store, "job-1", journal.lines()[:4])
        (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
        store.connection.execute(f"PRAGMA max_page_count = {pages + 2}")
        with pytest.raises(SpecError, match="is full") as caught:
            ingest(store, "job-1", journal.lines())
        assert caught.value.next == f"df {folder}"
        assert store.rows("SELECT count(*) AS n FROM runs") == [{"n": 0}]
        assert check(store) == []
        store.connection.execute("PRAGMA max_page_count = 1000000")
        assert len(ingest(store, "job-1", journal.lines())) == 2
        assert store.rows("SELECT count(*) AS n FROM samples") == [{"n": 2001}]


def test_a_truncated_file_is_damaged_and_copies_are_named_where_there_are_any(folder: Path) -> None:
    """Nobody is sent to a folder that is not there."""
    path = folder / "results.db"
    Store.open(path, create=True).close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    for said in (r"is damaged: ", r"is damaged, copies are in results\.db\.backups: "):
        with pytest.raises(SpecError, match=said), Store.open(path) as store:
            store.rows("SELECT * FROM jobs JOIN runs USING (job_id) JOIN published")
        (folder / "results.db.backups").mkdir(exist_ok=True)


def test_a_backup_that_was_killed_is_none(folder: Path) -> None:
    """What is not whole has another name, and goes once it is an hour old."""
    path = older(folder / "results.db", "m005_chains")
    copies = folder / "results.db.backups"
    copies.mkdir()
    for name, age_s in (("old.part", 4000), ("new.part", 10)):
        (copies / name).write_bytes(b"half")
        os.utime(copies / name, (time.time() - age_s,) * 2)
    Store.open(path).close()
    assert sorted(file.suffix for file in copies.iterdir()) == [".db", ".part"]
    assert (copies / "new.part").exists()
