"""`db check`: a sound database says nothing; each kind of damage is named."""

import sys
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.store import Damaged, Store, check
from tests.elsewhere import from_elsewhere
from tests.journals import Journal, cell, plan, whole
from tests.store.conftest import measured


@pytest.fixture
def damaged(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A sound store with every guard taken off, which is not told, as if another program had edited it."""
    monkeypatch.setattr(sys.modules["dgxlab.store.check"], "schema_problems", lambda connection: [])
    measured(store, whole("job-1", runs=1, samples=2).check())
    from_elsewhere(store)
    assert check(store) == []
    store.connection.execute("PRAGMA foreign_keys = OFF")
    store.connection.execute("PRAGMA ignore_check_constraints = ON")
    for row in store.rows("SELECT name FROM sqlite_schema WHERE type = 'trigger'"):
        store.connection.execute(f"DROP TRIGGER {row['name']}")
    return store


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("DELETE FROM rows", "rows of samples refer to rows that are not there"),
        ("DELETE FROM devices", "rows of arms refer to devices that are not there"),
        ("UPDATE flags SET run_id = 'job-9/4'", "1 rows of flags refer to runs that are not there"),
        ("UPDATE checks SET build_id = 'B'", "1 rows of checks refer to arms that are not there"),
        ("UPDATE cells SET params = '{\"n_prompt\":513}'", f"cell {cell().key} is not the digest of its parameters"),
        ("UPDATE experiments SET spec = '{}'", "is not what its spec says"),
        ("UPDATE experiments SET hypothesis = 'x'", "is not what its spec says"),
        ("UPDATE devices SET names = '5'", "is not the digest of what it is"),
        ("INSERT INTO case_lists VALUES ('x', deflated('[]'))", "case list x is not the digest of its lines"),
        ("UPDATE jobs SET plan = deflated('{}')", "the plan of job job-1 is not what its digest says"),
        ("UPDATE imports SET content = deflated('x')", "is not the file that was imported"),
        ("UPDATE imports SET size = size + 1", "is not the file that was imported"),
    ],
)
def test_damage_is_named(damaged: Store, sql: str, sentence: str) -> None:
    damaged.connection.execute(sql)
    assert [problem for problem in check(damaged) if sentence in problem]


@pytest.mark.parametrize("content", ["zeroblob(9)", "substr(plan, 1, 200)", "plan || x'00'"])
def test_a_damaged_text_is_damage(damaged: Store, content: str) -> None:
    damaged.connection.execute(f"UPDATE jobs SET plan = CAST({content} AS BLOB)")  # noqa: S608
    with pytest.raises(Damaged, match=r"results\.db is damaged: a deflated text"):
        check(damaged)


def test_a_broken_page_is_found(folder: Path) -> None:
    """By a sentence or an error with the cause."""
    path = folder / "results.db"
    with Store.open(path) as store:
        measured(store, whole("job-1", runs=20, samples=50))
    content = bytearray(path.read_bytes())
    content[-40_000:-20_000] = b"\x5a" * 20_000
    path.write_bytes(content)
    try:
        with Store.open(path) as store:
            problems = check(store)
    except SpecError as error:
        problems = [error.message]
    assert "results.db" in problems[0]


def test_failed_and_discarded_runs_are_sound(store: Store) -> None:
    journal = Journal(plan("job-1")).job().build().model().run({})
    journal.events[-1] |= {"status": "failed", "reason": "killed by signal 9", "rc": None, "signal": 9}
    measured(store, journal)
    assert check(store) == []
