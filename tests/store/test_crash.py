"""Real processes on one database: killed at any moment, and many at once."""

import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dgxlab.ingest import ingest
from dgxlab.store import Store, check, connect
from tests.journals import dump, intend
from tests.store.writer import ENDLESS, SAMPLES, journal, killed, start

KILLS = 20


def test_sigkill_leaves_no_partial_run(folder: Path) -> None:
    path = folder / "results.db"
    after_s = [random.Random(n).uniform(0, 0.06) for n in range(KILLS)]  # noqa: S311
    acknowledged = {f"job-{n}": killed(path, f"job-{n}", n, after_s[n], least=n) for n in range(KILLS)}
    with Store.open(path) as store:
        assert check(store) == []
        partial = store.rows("SELECT run_id FROM samples GROUP BY run_id HAVING count(*) <> ?", (SAMPLES + 1,))
        assert partial == []
        for job_id, position in acknowledged.items():
            job = store.job(job_id)
            assert job.journal_seq >= position
            (runs,) = store.rows("SELECT count(*) AS n FROM runs WHERE job_id = ?", (job_id,))
            assert runs["n"] == max(0, job.journal_seq - 4)
        (recorded,) = store.rows("SELECT count(*) AS n FROM runs")
    assert recorded["n"] > 5  # before a kill


def test_a_killed_ingest_is_finished_by_the_next(folder: Path) -> None:
    written = journal("job-1", ENDLESS)
    killed(folder / "cut.db", "job-1", seed=7, after_s=0.03)
    with Store.open(folder / "cut.db") as cut, Store.open(folder / "whole.db") as uncut:
        before = cut.job("job-1").journal_seq
        intend(uncut, written)
        lines = written.lines()[: before + 10]
        assert len(ingest(cut, "job-1", lines)) == 10
        assert len(ingest(uncut, "job-1", lines)) == before + 10
        assert dump(cut, intent_times=False) == dump(uncut, intent_times=False)


def test_four_writers_at_once(folder: Path) -> None:
    names = [f"job-{n}" for n in range(4)]
    children = [start(folder / "results.db", name, 60, seed) for seed, name in enumerate(names)]
    for child in children:
        _, errors = child.communicate(timeout=60)
        assert (child.returncode, errors) == (0, "")
    assert [path.name for path in folder.iterdir()] == ["results.db"]
    with Store.open(folder / "results.db") as shared, Store.open(folder / "alone.db") as alone:
        for name in names:
            written = journal(name, 60)
            intend(alone, written)
            ingest(alone, name, written.lines())
        assert check(shared) == []
        assert dump(shared, intent_times=False) == dump(alone, intent_times=False)


class Interrupted(sqlite3.Connection):
    """Ctrl-C while SQLite begins a transaction: Python raises it once SQLite has returned."""

    def execute(self, sql: str, *params: Any) -> sqlite3.Cursor:
        cursor = super().execute(sql, *params)
        if sql.startswith("BEGIN"):
            raise KeyboardInterrupt
        return cursor


def test_ctrl_c_leaves_no_transaction_that_nobody_commits(folder: Path) -> None:
    """What the record is told after it, as the end of a cancelled job, would be part of that and be lost."""
    path = folder / "results.db"
    with closing(sqlite3.connect(path, isolation_level=None, factory=Interrupted)) as connection:
        with pytest.raises(KeyboardInterrupt), connect.transaction(connection, path):
            pass
        assert not connection.in_transaction
