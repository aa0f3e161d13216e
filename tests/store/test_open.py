"""Opening: new files, old schemas, files that are not ours, disks and locks that fail."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgxlab import judgement
from dgxlab.errors import HostBusy, SpecError
from dgxlab.ingest import ingest
from dgxlab.model import Device, canonical, to_json
from dgxlab.store import Store, check, connect, migrations, seals
from dgxlab.store.schema import SCHEMA, VERSION
from tests.journals import compared, dump, facts, intend, plan, whole
from tests.store.conftest import measured


def filled(path: Path) -> Path:
    with Store.open(path) as store:
        measured(store, whole("job-1"))
    return path


def edited(path: Path, *statements: str) -> Path:
    """Change a database as another program could."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(";".join(statements))
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
    path = folder / "results.db"
    with Store.open(path) as store:
        assert path.stat().st_mode & 0o777 == 0o600
        pragmas = ("journal_mode", "synchronous", "foreign_keys", "recursive_triggers", "busy_timeout", "user_version")
        values = [store.connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]
        assert values == ["wal", 2, 1, 1, 10_000, VERSION]
        # a new migration needs a new digest, else each opening would compare the whole schema
        assert connect.schema_digest(connect.schema_of(store.connection)) == SCHEMA
    assert list(folder.iterdir()) == [path]


def test_the_file_alone_is_the_whole_database(folder: Path) -> None:
    path = filled(folder / "results.db")
    assert sorted(folder.iterdir()) == [path]
    shutil.copyfile(path, folder / "copy.db")
    with Store.open(path) as store, Store.open(folder / "copy.db") as copy:
        assert dump(copy) == dump(store)
        assert len(dump(copy)["samples"]) == 8
        assert check(store) == []
    assert path.read_bytes() == (folder / "copy.db").read_bytes()  # a report must not make it look changed


def test_the_fast_path_does_not_import_sqlite_utils(folder: Path) -> None:
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
    path = older(folder / "results.db", stop_before)
    with Store.open(path) as store:
        assert store.rows("PRAGMA user_version") == [{"user_version": VERSION}]
        assert store.rows("SELECT host, host_id FROM jobs") == [{"host": "dgx", "host_id": "host-a"}]
        built = {"toy": Device.of(to_json(facts()), {})} if stop_before > "m002_evidence" else {}
        assert store.devices("job-0") == built
        assert store.rows("PRAGMA foreign_keys") == [{"foreign_keys": 1}]
        assert check(store) == []
        measured(store, compared("job-1"), whole("job-2").check())
        assert [row["verdict"] for row in store.verdicts("job-1")] == ["faster"]
        assert check(store) == judgement.check(store) == []
    (backup,) = (folder / "results.db.backups").iterdir()
    assert backup.stat().st_mode & 0o777 == 0o600
    assert backup.parent.stat().st_mode & 0o777 == 0o700
    with contextlib.closing(sqlite3.connect(backup)) as old:
        saved = old.execute("SELECT user_version, host FROM pragma_user_version, jobs").fetchone()
    assert saved == (int(stop_before[1:4]) - 1, "dgx")


@pytest.mark.parametrize("stop_before", ["m010_own_noise", "m011_small"])
def test_a_migration_hides_no_edit(folder: Path, stop_before: str) -> None:
    path = older(folder / "results.db", stop_before)
    sql = """INSERT INTO verdicts (job_id, chain, cell, metric, position, baseline_arm, candidate_arm, candidate_cell,
                                   screen, better, verdict, promoted, confidence, cycles, valid_cycles, flaws, reasons)
             VALUES ('job-0', 'c', 'x', 'm', 0, 'a', 'b', 'x', 0, 'higher', 'invalid', 0, 0.99, 0, 0, '{}', '[]')"""
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)
        seals.seal_all(connection)
    changed, cut = (Path(shutil.copy(path, folder / name)) for name in ("changed.db", "cut.db"))
    edited(changed, "UPDATE verdicts SET metric = 'other'")
    edited(cut, "DELETE FROM seals WHERE unit > 'k'")
    with Store.open(cut) as store:
        assert any("table cells" in problem for problem in seals.broken(store.connection))
    for file, problems in ((path, 0), (changed, 1)):
        with Store.open(file) as store:
            assert len(list(seals.broken(store.connection))) == problems
            assert store.verdicts("job-0")[0]["noise"] is None


def test_older_tries_have_their_changes_over_the_pin_alone(folder: Path) -> None:
    path = older(folder / "results.db", "m018_changes")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("INSERT INTO tries VALUES ('a', 'b', 'h', 1, 'x', 'p', 't', 'd', x'00', 3, NULL)")
        seals.seal_all(connection)
    changed = Path(shutil.copy(path, folder / "changed.db"))
    edited(changed, "DROP TRIGGER tries_no_update", "UPDATE tries SET lines = 2")
    for file, problems in ((path, []), (changed, ["try a"])):
        with Store.open(file) as store:
            listed = store.rows("SELECT number, diff_over, change FROM try_list JOIN tries USING (try_id)")
            assert listed == [{"number": 1, "diff_over": "pin", "change": None}]
            assert [problem[:5] for problem in seals.broken(store.connection)] == problems


def test_seven_backups_are_kept(folder: Path) -> None:
    path = filled(folder / "results.db")
    copies = folder / "results.db.backups"
    copies.mkdir()
    (copies / "mine.db").write_text("keep")
    with Store.open(path) as store:
        written = [connect.backup(store.connection, path) for _ in range(9)]
    assert sorted(copies.iterdir()) == sorted([*written[2:], copies / "mine.db"])


def test_a_failing_migration_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = older(folder / "results.db", "m002_evidence")

    def broken(db: Any) -> None:
        db.execute("CREATE TABLE half (a)")
        raise RuntimeError("stop")

    with monkeypatch.context() as patch:
        patch.setattr(migrations.MIGRATIONS._migrations[2], "fn", broken)
        with pytest.raises(RuntimeError, match="stop"):
            Store.open(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
        assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert {"runs", "half"}.isdisjoint(names)
    Store.open(path).close()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: edited(filled(path), f"PRAGMA user_version = {VERSION + 1}"), f"newer .* {VERSION + 1}, "),
        (lambda path: edited(path, "CREATE TABLE places (url)"), "not one of dgxlab"),
        (lambda path: path.write_bytes(b"name: toy\n" * 100), "is not an SQLite database: it is text"),
        (lambda path: path.write_text("größer\n" * 200), "is not an SQLite database: it is text"),
        (lambda path: path.write_bytes(bytes(range(1, 256)) * 8), "is not an SQLite database: file is"),
        (lambda path: path.write_bytes(b"SQLite format 3\x00" + b"\xff" * 4000), "is (damaged|not an SQLite database)"),
    ],
)
def test_what_is_not_ours_is_left_as_it_is(folder: Path, make: Callable[[Path], object], sentence: str) -> None:
    path = folder / "results.db"
    make(path)
    before = path.read_bytes()
    with pytest.raises(SpecError, match=sentence):
        Store.open(path)
    assert path.read_bytes() == before


def test_missing_files(folder: Path) -> None:
    with pytest.raises(SpecError, match="no database"):
        Store.open(folder / "results.db", create=False)
    with pytest.raises(SpecError, match=r"nowhere.*No such file"):
        Store.open(folder / "nowhere" / "results.db")
    assert list(folder.iterdir()) == []
    with pytest.raises(SpecError, match="cannot be opened"):
        Store.open(folder)


def test_a_full_disk_keeps_what_was_there(folder: Path) -> None:
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


def test_a_damaged_file_is_sent_to_where_it_is_mended(folder: Path) -> None:
    """Cut in the middle, emptied, or with a header of no sense; an empty file with copies is not begun anew."""
    path = filled(folder / "results.db")
    for cut in (path.stat().st_size // 2, 0):
        with path.open("r+b") as file:
            file.truncate(cut)
        with pytest.raises(connect.Damaged, match="is damaged: ") as caught, Store.open(path, create=False) as store:
            check(store)
        assert caught.value.next == f"dgxlab db rebuild {path}"
    edited(filled(folder / "other.db"), "PRAGMA user_version = -1").rename(path)
    with pytest.raises(connect.Damaged, match="version -1"):
        Store.open(path)
    path.unlink()
    with Store.open(filled(path)) as store:
        store.back_up()
    path.write_bytes(b"")
    with pytest.raises(connect.Damaged, match="it is empty"):
        Store.open(path)


@pytest.mark.parametrize("pages", [0, 3])
def test_a_full_disk_during_a_migration(folder: Path, monkeypatch: pytest.MonkeyPatch, pages: int) -> None:
    path, original = older(folder / "results.db", "m003_append_only"), connect.open_existing

    def small(path: Path) -> sqlite3.Connection:
        connection = original(path)
        connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0] + pages}")
        return connection

    with monkeypatch.context() as patch:
        patch.setattr(connect, "open_existing", small)
        with pytest.raises(SpecError, match="is full"):
            Store.open(path)
    with contextlib.closing(original(path)) as connection:
        assert connect.version(connection, path) == 2
        assert connect.schema_problems(connection) == []
    with Store.open(path) as store:
        assert check(store) == []


def test_a_migration_without_a_copy_is_none(folder: Path) -> None:
    path = older(folder / "results.db", "m005_chains")
    (folder / "results.db.backups").write_text("a file")
    with pytest.raises(SpecError, match=r"copied to .*\.backups: "):
        Store.open(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connect.version(connection, path) == 4


def test_a_record_is_copied_once_a_day(folder: Path) -> None:
    path = folder / "results.db"
    with Store.open(path) as store:
        store.back_up()
        assert connect.copies(path) == []
    filled(path)
    with Store.open(path) as store:
        store.back_up()
        store.back_up()
        (copy,) = connect.copies(path)
        os.utime(copy, (time.time() - 90_000,) * 2)
        store.back_up()
        assert connect.copies(path)[0] == copy
        assert len(connect.copies(path)) == 2
        with Store.open(copy) as opened:
            assert dump(opened) == dump(store)


def test_a_read_only_medium_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(folder / "results.db")
    before = path.read_bytes()
    monkeypatch.setattr(connect, "on_read_only", lambda path: True)
    with Store.open(path, create=False) as store:
        assert check(store) == []
        with pytest.raises(SpecError, match="cannot be written"):
            store.update_job("job-1", next="x")
        assert list(folder.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_trigger_of_another_program_is_refused(folder: Path) -> None:
    rewrite = "BEGIN UPDATE samples SET value = 2 * value; END"
    for place, drop in (("AFTER UPDATE ON jobs", ""), ("BEFORE UPDATE ON samples", "DROP TRIGGER samples_no_update")):
        name = "samples_no_update" if drop else "x"
        path = edited(filled(folder / f"{name}.db"), drop, f"CREATE TRIGGER {name} {place} {rewrite}")
        with Store.open(path) as store:
            before = dump(store)
            with pytest.raises(SpecError, match="is not written: its trigger"):
                store.update_job("job-1", next="x")
            assert dump(store) == before
            assert any("trigger" in problem for problem in check(store))
    old = older(folder / "old.db", "m005_chains")
    edited(old, f"CREATE TRIGGER y AFTER INSERT ON _sqlite_migrations {rewrite}")
    with pytest.raises(SpecError, match="trigger y is none"):
        Store.open(old)


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("DROP TRIGGER samples_no_update", "trigger samples_no_update is missing"),
        ("DROP INDEX jobs_host", "index jobs_host is missing"),
        ("CREATE TABLE more (a)", "table more is none of dgxlab"),
    ],
)
def test_a_changed_schema_is_told(folder: Path, sql: str, sentence: str) -> None:
    path = edited(filled(folder / "results.db"), sql)
    with Store.open(path) as store:
        assert check(store) == [f"{path}: {sentence}"]
        store.update_job("job-1", next="x")
        assert store.job("job-1").next == "x"


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("DROP VIEW expectations; CREATE VIEW expectations AS SELECT 1", "its view expectations is changed"),
        (
            "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = replace(sql, '_valid', '_val')",
            "its table arms is changed",
        ),
        ("PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = 'x', name = CAST(x'c7ff' AS TEXT)", "is no text"),
        ("PRAGMA writable_schema = ON; UPDATE jobs SET facts = CAST(x'ff' AS TEXT)", "decode"),
    ],
)
def test_a_schema_or_a_text_that_cannot_be_read_is_damage(folder: Path, sql: str, sentence: str) -> None:
    path = edited(filled(folder / "results.db"), "PRAGMA ignore_check_constraints = ON", sql)
    with pytest.raises(connect.Damaged, match=sentence), Store.open(path, create=False) as store:
        check(store)


def test_a_locked_database_is_busy_and_a_writer_that_waits_tells_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, told = filled(folder / "results.db"), []
    monkeypatch.setattr(connect, "BUSY_S", 0.02)
    with Store.open(path) as first, Store.open(path) as second:
        first.connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(HostBusy, match="is locked"):
            second.set_state("job-1", "lost")
        assert second.job("job-1").state == "done"

        def tell(sentence: str) -> None:
            told.append(sentence)
            if len(told) == 2:
                first.connection.execute("COMMIT")

        with second.waiting(tell):
            second.update_job("job-1", next="x")
        assert [str(path) in sentence for sentence in told] == [True, True]
        assert second.job("job-1").next == "x"


def test_a_backup_that_was_killed_is_none(folder: Path) -> None:
    path = older(folder / "results.db", "m005_chains")
    copies = folder / "results.db.backups"
    copies.mkdir()
    for name, age_s in (("old.part", 4000), ("new.part", 10)):
        (copies / name).write_bytes(b"half")
        os.utime(copies / name, (time.time() - age_s,) * 2)
    Store.open(path).close()
    assert sorted(file.suffix for file in copies.iterdir()) == [".db", ".part"]
    assert (copies / "new.part").exists()
