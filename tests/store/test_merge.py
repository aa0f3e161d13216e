"""Merging: the union of two databases, the same from both sides, or a refusal that changes nothing."""

import contextlib
import json
import shutil
import sqlite3
import tempfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgxlab import judgement
from dgxlab.errors import CheckFailed, SpecError
from dgxlab.ingest import ingest
from dgxlab.model import Expectation
from dgxlab.model.events import HOST
from dgxlab.store import ROOFLINE, Store, check, merging, migrations
from dgxlab.store.merge import PROGRESS, TABLES, merge_jobs
from dgxlab.store.seals import seal_all
from tests.elsewhere import from_elsewhere
from tests.journals import (
    CAPPED,
    CLOCK,
    FROM_ELSEWHERE,
    Journal,
    arm,
    compared,
    dump,
    facts,
    intend,
    plan,
    source,
    whole,
)
from tests.journals import TABLES as JOURNALLED
from tests.store.conftest import measured


def known() -> list[Journal]:
    """Return journals of four jobs on two hosts that share builds, models, cells and an experiment."""
    again = Journal(plan("job-2"), facts(hostname="renamed"), t=2e9).job().build(reused=True, seconds=0.5)
    again.model(path="/other/tiny.gguf", seconds=0.0).gate(expect=Expectation(1103, 1103))
    again.run({512: [9.0], 1024: [7.0]}).add("error", exit_code=4, message="it crashed", next="", details="")
    dirty = arm("patched", source(["w4a16"], dirty=True))
    third = Journal(plan("job-3", [arm(), dirty]), facts("host-b", "spark"), t=1e9).job().build().build("patched")
    third.model().gate().check().run().run({2048: [3.25, 3.5]}, arm="patched")
    return [whole("job-1"), again.end("failed", 4), third.end(), compared("job-4")]


JOURNALS = known()
OF_A_RUN = ("runs", "rows", "telemetry", "flags")

Share = tuple[tuple[int, int, bool], ...]
"""For each journal: lines that a database has read (-1: it does not know the job), who intended it, marked lost."""

SHARES = st.tuples(
    *(st.tuples(st.integers(-1, len(journal.events)), st.integers(0, 2), st.booleans()) for journal in JOURNALS)
)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database to copy: migrating one for every example would take most of the time."""
    path = tmp_path_factory.mktemp("empty") / "results.db"
    Store.open(path).close()
    return path


def fill(store: Store, share: Share) -> None:
    """Give a store its share of the journals."""
    for journal, (lines, client, lost) in zip(JOURNALS, share, strict=True):
        if lines < 0:
            continue
        job_id = journal.plan.job_id
        store.intend(journal.plan, ("dgx", "box", "spark")[client], f"0.{client}.0")
        known = {} if client else {"experiment": None}  # the first client is of a version whose plans had no specs
        store.update_job(job_id, intent_at=1000.0 + client, **known)
        ingest(store, job_id, journal.lines()[:lines])
        if lost:
            store.set_state(job_id, "lost", error="its lock is free")
            judgement.record(store, job_id)


def merge(into: Store, other: Path) -> dict[str, int]:
    """Merge as `audit.merge` does, without the plans that these journals do not follow."""
    with merging(into, other) as counts:
        for job in into.jobs():
            judgement.record(into, job.job_id)
    return counts


def merged(into: Path, other: Path, *, times: int = 1) -> dict[str, list[dict[str, Any]]]:
    """Return what a copy of one database holds after another was merged into it."""
    before = other.read_bytes()
    with tempfile.TemporaryDirectory() as name, Store.open(Path(shutil.copy(into, name))) as store:
        for _ in range(times):
            counts = merge(store, other)
        assert times == 1 or not any(counts.values())
        assert check(store) == judgement.check(store) == []
        rows = dump(store)
    assert other.read_bytes() == before
    return rows


@settings(max_examples=25, deadline=None)
@given(first=SHARES, second=SHARES)
def test_merging_commutes_and_is_idempotent(empty: Path, first: Share, second: Share) -> None:
    with tempfile.TemporaryDirectory() as name:
        paths = Path(name, "a.db"), Path(name, "b.db")
        for path, share in zip(paths, (first, second), strict=True):
            shutil.copyfile(empty, path)
            with Store.open(path) as store, store.transaction():
                fill(store, share)
        both = merged(*paths)
        assert merged(*paths[::-1]) == both
        assert merged(*paths, times=2) == both
    read = {
        journal.plan.job_id: max(a[0], b[0])
        for journal, a, b in zip(JOURNALS, first, second, strict=True)
        if max(a[0], b[0]) >= 0
    }
    assert {row["job_id"]: row["journal_seq"] for row in both["jobs"]} == read
    events = [event for journal in JOURNALS for event in journal.events[: read.get(journal.plan.job_id, 0)]]
    assert len(both["runs"]) == sum(event["event"] == "run" for event in events)


def test_every_table_is_merged() -> None:
    filled = [name for name in (*JOURNALLED, *FROM_ELSEWHERE) if name != "verdicts"]
    others = {"rejections", "notes", "tries", "try_sessions", "try_ends", "fleets"}
    assert {table.name for table in TABLES} == {*filled, *others}


def test_counts_and_continuing(folder: Path) -> None:
    lines = JOURNALS[0].lines()
    with Store.open(folder / "a.db") as a, Store.open(folder / "b.db") as b:
        for store, end in ((a, 5), (b, 6)):
            intend(store, JOURNALS[0])
            ingest(store, "job-1", lines[:end])
        counts = merge(a, folder / "b.db")
        assert {name: n for name, n in counts.items() if n} == dict.fromkeys(OF_A_RUN, 1) | {"samples": 4}
        assert a.job("job-1").journal_bytes == sum(map(len, lines[:6]))
        assert [event.event for event in ingest(a, "job-1", lines[6:])] == ["end"]
        assert a.job("job-1").state == "done"


def conflicting(folder: Path, *journals: Journal) -> list[Path]:
    paths = [folder / f"{number}.db" for number, _ in enumerate(journals)]
    for path, journal in zip(paths, journals, strict=True):
        with Store.open(path) as store:
            measured(store, journal)
    return paths


def begun(**build: Any) -> Journal:
    return Journal(plan("job-1")).job().build(**build).model()


def conditions(*flags: dict[str, Any], clock: int = 0) -> Journal:
    """Return a journal whose run has these flags, and telemetry of so many samples."""
    return begun().run(flags=list(flags), telemetry=[{**CLOCK, "n": clock}] if clock else [])


CLOCK_KEY = "telemetry run_id job-1/3, device GPU-1, name clocks.sm"
FLAG_KEY = "flags run_id job-1/3, .*sw_power"


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        (begun().run([1.0]), begun().run([2.0]), "rows run_id job-1/3, cell [0-9a-f]{16}"),
        (begun().run([1.0, 2.0]), begun().run([1.0]), "samples run_id job-1/3, cell .*, metric avg_ts, ordinal 2"),
        (begun().run({512: [1.0]}), begun().run({512: [1.0], 1024: [1.0]}), "rows run_id job-1/3"),
        (begun().run(), begun().run(seconds=9.0), "runs run_id job-1/3"),
        (conditions(clock=3), conditions(clock=4), CLOCK_KEY),
        (conditions(clock=3), conditions(), CLOCK_KEY),
        (conditions(CAPPED), conditions({**CAPPED, "hard": True}), FLAG_KEY),
        (conditions(CAPPED), conditions({**CAPPED, "reason": "SW power cap for 413 ms"}), FLAG_KEY),
        (conditions(CAPPED), conditions(), FLAG_KEY),
        (begun(), Journal(plan("job-1"), facts(hostname="other")).job().build().model(), "jobs job_id job-1"),
        (begun().end(), begun().end("failed", 4), "jobs job_id job-1"),
        (begun().gate(), begun().run(), "gates gate_id job-1/3"),
        (begun().add("x"), Journal(plan("job-1")).job().build().add("x").add("x"), "inputs job_id job-1, model_id"),
        (begun().gate(), begun().gate(1102), "gates gate_id job-1/3"),
        (begun(), begun(seconds=1.0), "arms job_id job-1, arm toy"),
        (begun(), Journal(plan("job-1")).job().build().model(size=1), "inputs job_id job-1, model_id synthetic-"),
        (begun(), Journal(plan("job-1", [arm(made_from=source(["x"]))])), "jobs job_id job-1"),
    ],
)
def test_a_contradiction_is_refused(folder: Path, ours: Journal, theirs: Journal, sentence: str) -> None:
    paths = conflicting(folder, ours, theirs)
    for into, other in (paths, paths[::-1]):
        with Store.open(into) as store:
            before = dump(store)
            with pytest.raises(CheckFailed, match=f"disagree on {sentence}.*: nothing was merged") as caught:
                merge(store, other)
            assert caught.value.exit_code == 11
            assert dump(store) == before
            assert check(store) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict", "reason"),
    [
        ((15, True), (15, False), "invalid", "the job was lost"),
        ((15, True), (17, True), "invalid", "the job was lost"),
        ((15, True), (17, False), None, ""),
        ((15, True), (None, False), "faster", "the 99 % interval lies above 0"),
        ((None, False), (None, True), "faster", "the 99 % interval lies above 0"),
    ],
)
def test_verdicts_come_from_the_side_that_read_more(
    folder: Path, ours: tuple[int | None, bool], theirs: tuple[int | None, bool], verdict: str | None, reason: str
) -> None:
    journal = JOURNALS[3]
    paths = folder / "a.db", folder / "b.db"
    for path, (lines, lost) in zip(paths, (ours, theirs), strict=True):
        with Store.open(path) as store:
            fill(store, ((-1, 0, False),) * 3 + ((lines or len(journal.events), 1, lost),))
    both = merged(*paths)
    assert both == merged(*paths[::-1]) == merged(*paths, times=2)
    told = [(row["verdict"], json.loads(row["reasons"])[-1]) for row in both["verdicts"]]
    assert [word for word, _ in told] == ([verdict] if verdict else [])
    assert all(sentence.startswith(reason) for _, sentence in told)


def test_of_two_versions_words_on_an_impossible_number_one_is_kept(folder: Path) -> None:
    reasons = ("4.1 times the 4800 GB/s", "more than four times what its memory gives")
    flags = [{"device": HOST, "kind": ROOFLINE, "hard": False, "reason": words} for words in reasons]
    paths = conflicting(folder, *(conditions(flag) for flag in flags))
    both = merged(*paths)
    assert both == merged(*paths[::-1])
    assert [row["reason"] for row in both["flags"]] == [reasons[0]]


def test_an_import_of_both_is_one(folder: Path) -> None:
    paths = folder / "a.db", folder / "b.db"
    for path, name, at in zip(paths, ("mine.txt", "theirs.txt"), (5.0, 4.0), strict=True):
        with Store.open(path) as store:
            from_elsewhere(store, name=name, at=at)
    both = merged(*paths)
    assert both == merged(*paths[::-1]) == merged(*paths, times=2)
    assert [(row["name"], row["at"]) for row in both["imports"]] == [("theirs.txt", 4.0)]
    with contextlib.closing(sqlite3.connect(paths[1])) as connection, connection:
        connection.execute("DROP TRIGGER imports_no_update")
        connection.execute("UPDATE imports SET tool = 'another'")
        seal_all(connection)
    for into, other in (paths, paths[::-1]):
        with Store.open(into) as store, pytest.raises(CheckFailed, match="imports import_id"):
            merge(store, other)


def test_another_zlib_makes_no_difference(folder: Path) -> None:
    paths = conflicting(folder, JOURNALS[0], JOURNALS[0])
    with Store.open(paths[1]) as store:
        (row,) = store.rows("SELECT plan, intent_at FROM jobs")
        store.connection.execute("UPDATE jobs SET plan = ?", (zlib.compress(row["plan"].encode(), 1),))
        seal_all(store.connection)
    with Store.open(paths[0]) as store:
        assert not any(merge(store, paths[1]).values())


def test_what_was_edited_is_refused(folder: Path) -> None:
    paths = conflicting(folder, *JOURNALS[:2])
    with contextlib.closing(sqlite3.connect(paths[1])) as connection, connection:
        connection.execute("UPDATE jobs SET host = 'other'")
    for into, other in (paths, paths[::-1]):
        with Store.open(into) as store:
            before = dump(store)
            with pytest.raises(CheckFailed, match=f"{paths[1]}: job job-2 is not") as caught:
                merge(store, other)
            assert caught.value.next == f"dgxlab db check {paths[1]}"
            assert dump(store) == before


def test_an_older_database_is_merged_and_left_alone(folder: Path) -> None:
    old = folder / "old.db"
    connection = sqlite3.connect(old, isolation_level=None)
    migrations.upgrade(connection, old, stop_before="m002_evidence")
    connection.execute("INSERT INTO experiments VALUES ('e', 'old', '', '{}')")
    connection.close()
    before = old.read_bytes()
    with Store.open(folder / "results.db") as store:
        assert merge(store, old)["experiments"] == 1
        assert store.rows("SELECT name FROM experiments") == [{"name": "old"}]
    assert old.read_bytes() == before
    assert sorted(path.name for path in folder.iterdir()) == ["old.db", "results.db"]


def test_what_is_no_database_is_refused(folder: Path, store: Store) -> None:
    (folder / "empty.db").touch()
    (folder / "text.db").write_text("no database\n" * 100)
    for name, sentence in (("absent", "there is no"), ("empty", "empty file"), ("text", "not an SQLite database")):
        with pytest.raises(SpecError, match=sentence):
            merge(store, folder / f"{name}.db")
    assert store.jobs() == []


def test_merge_jobs_takes_progress_whole() -> None:
    base: dict[str, Any] = dict.fromkeys(PROGRESS) | {"journal_lines": 0}
    lost = {**base, "state": "lost", "journal_seq": 3, "error": "gone", "experiment": None}
    running = {**base, "state": "running", "journal_seq": 4, "error": "", "experiment": "e"}
    lost |= {"intent_at": 1.0, "host": "dgx", "dgxlab_version": "0.1.0"}
    running |= {"intent_at": 2.0, "host": "spark", "dgxlab_version": "0.2.0"}
    result = merge_jobs(lost, running)
    assert result == merge_jobs(running, lost)
    assert (result["state"], result["error"], result["experiment"]) == ("running", "", "e")
    assert (result["host"], result["dgxlab_version"]) == ("dgx", "0.1.0")
    assert merge_jobs(lost, {**running, "journal_seq": 3})["state"] == "lost"
