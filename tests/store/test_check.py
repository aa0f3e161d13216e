"""`db check`: a sound database says nothing; each kind of damage is named."""

from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.ingest import ingest
from dgxlab.store import Store, check
from tests.elsewhere import figure, from_elsewhere
from tests.journals import Journal, cell, compared, intend, plan, whole


@pytest.fixture
def damaged(store: Store) -> Store:
    """A sound store with every guard taken off, as if somebody had edited it with another program."""
    journal = whole("job-1", runs=1, samples=2).check()
    intend(store, journal)
    ingest(store, "job-1", journal.lines())
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
        ("DELETE FROM rows", f"sample job-1/4 {cell().key} avg_ts belongs to no row of a run"),
        ("DELETE FROM devices", "rows of arms refer to devices that are not there"),
        ("DELETE FROM samples WHERE discarded IS NULL", "run job-1/4 is valid and has no counted sample"),
        ("INSERT INTO rows VALUES ('job-1/4', 'other', '{}')", "cell other of run job-1/4 has a row in a valid run"),
        ("UPDATE samples SET value = 9e999 WHERE ordinal = 1", "avg_ts 1 is not a finite number"),
        ("UPDATE samples SET value = -9e999 WHERE ordinal = 1", "avg_ts 1 is not a finite number"),
        ("UPDATE samples SET unit = 'us' WHERE ordinal = 1", "avg_ts have different units"),
        ("DELETE FROM samples WHERE ordinal = 1", "avg_ts are not numbered from 0 without a gap"),
        ("UPDATE cells SET params = '{\"n_prompt\":513}'", f"cell {cell().key} is not the digest of its parameters"),
        ("UPDATE experiments SET spec = '{}'", "is not the digest of its spec"),
        ("UPDATE jobs SET plan = '{}'", "the plan of job job-1 is not what its digest says"),
        ("UPDATE telemetry SET median = 9", "telemetry job-1/4 GPU-1 clocks.sm is no range around its median"),
        ("UPDATE telemetry SET n = 0", "telemetry job-1/4 GPU-1 clocks.sm is no range around its median"),
        ("UPDATE flags SET run_id = 'job-9/4'", "1 rows of flags refer to runs that are not there"),
        ("UPDATE jobs SET exit_code = NULL", "job job-1 is done and has no exit code"),
        ("UPDATE gates SET total = 0, passed = 0", "gate job-1/3 passed without passing all of a positive number"),
        ("UPDATE gates SET expected = 1104", "gate job-1/3 passed without passing all of a positive number"),
        ("UPDATE gates SET passed = NULL", "gate job-1/3 passed without passing all of a positive number"),
        ("UPDATE checks SET reasons = '[\"why\"]'", "gate job-1/6 is not what its readings say"),
        (
            "UPDATE checks SET readings = replace(readings, '0.004', '0.001')",
            "gate job-1/6 is not what its readings say",
        ),
        ("UPDATE checks SET build_id = 'B'", "1 rows of checks refer to arms that are not there"),
        ("UPDATE published SET value = 818", f"figure {figure()['figure']} of published is not the digest"),
        ("UPDATE published SET value = 9e999", f"published figure {figure()['figure']} is not a finite number"),
        ("UPDATE published_gates SET unit = 'md5'", "of published_gates is not the digest of what it says"),
        ("UPDATE imports SET content = zeroblob(9)", "cannot be unpacked"),
        ("UPDATE imports SET size = size + 1", "is not the file that was imported"),
        ("DELETE FROM imported", "has no value"),
        ("UPDATE imported_rows SET position = 1", "are not numbered from 0 without a gap"),
        ("UPDATE imported SET ordinal = 1", "are not numbered from 0 without a gap"),
        ("UPDATE imported SET value = 9e999", "time_us 0 is not a finite number"),
        (
            "INSERT INTO imported SELECT import_id, 0, 'time_us', 1, 3, 'ms', NULL FROM imports",
            "0 time_us have different units",
        ),
        (
            "INSERT INTO arms SELECT job_id, 'b', build_id, device_id, pin, 'other', commit_id, series, dirty, cmake,"
            " toolchain, binaries, libraries, cmake_cache, log, seconds, reused FROM arms",
            "was made from different trees or cmake definitions",
        ),
    ],
)
def test_damage_is_named(damaged: Store, sql: str, sentence: str) -> None:
    """Each wrong row gives a sentence that says which and why."""
    damaged.connection.execute(sql)
    assert [found for found in check(damaged) if sentence in found]


@pytest.mark.parametrize(
    "sql", ["UPDATE chain_runs SET chain = 'chain:9'", "UPDATE chain_runs SET role = 'candidate' WHERE cycle = 0"]
)
def test_a_place_that_the_plan_does_not_have_is_named(damaged: Store, sql: str) -> None:
    """Another chain, or the other arm's place."""
    journal = compared("job-2")
    intend(damaged, journal)
    ingest(damaged, "job-2", journal.lines())
    assert check(damaged) == []
    damaged.connection.execute(sql)
    assert [found for found in check(damaged) if "has a place in a chain that its job's plan does not have" in found]


def test_a_broken_page_is_found(folder: Path) -> None:
    """Bytes that the disk lost are found, by a sentence or an error with the cause, never a traceback."""
    path = folder / "results.db"
    with Store.open(path) as store:
        journal = whole("job-1", runs=20, samples=50)
        intend(store, journal)
        ingest(store, "job-1", journal.lines())
    content = bytearray(path.read_bytes())
    content[-40_000:-20_000] = b"\x5a" * 20_000
    path.write_bytes(content)
    try:
        with Store.open(path) as store:
            found = check(store)
    except SpecError as error:
        found = [error.message]
    assert found
    assert "results.db" in found[0]


def test_failed_and_discarded_runs_are_sound(store: Store) -> None:
    """A run without values is only wrong if it says that it is valid."""
    journal = Journal(plan("job-1")).job().build().model().run({})
    journal.events[-1] |= {"status": "failed", "reason": "killed by signal 9", "rc": None, "signal": 9}
    intend(store, journal)
    ingest(store, "job-1", journal.lines())
    assert check(store) == []
