"""A killed client leaves nothing that the next command does not find; the checker would see it if it did."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.store.schema import add_functions
from faults.campaign import trials
from faults.fault import Broken
from faults.host import CELLS, Box, box
from faults.kinds.client import CLIENT_KILLED
from faults.ledger import once, read

pytestmark = pytest.mark.slow
TRIALS = 3


def test_killed_clients() -> None:
    """A few trials of the campaign's: all of them end well, and the fault met a run."""
    tally = trials(CLIENT_KILLED, seed=1, numbers=range(TRIALS))
    assert tally.failures == []
    assert tally.met.total() == TRIALS
    assert tally.met["after"] < TRIALS


@pytest.fixture(scope="module")
def measured() -> Iterator[Box]:
    """One experiment, measured without a fault."""
    with box() as made:
        assert made.run("run", made.spec("mine"), "--host", "box").rc == 0
        assert len(made.check("mine", jobs=1, cells=CELLS)) == 2
        yield made


def change(measured: Box, sql: str) -> None:
    """Change the record behind the program's back, and the rules that forbid it."""
    with sqlite3.connect(measured.database) as record:
        add_functions(record)
        for (name,) in record.execute("SELECT name FROM sqlite_schema WHERE type = 'trigger'").fetchall():
            record.execute(f"DROP TRIGGER {name}")
        record.executescript(sql)
    record.close()


@pytest.fixture
def record(measured: Box) -> Iterator[Box]:
    """A record that may be damaged."""
    kept = measured.database.read_bytes()
    yield measured
    for beside in measured.database.parent.glob("results.db-*"):
        beside.unlink()
    measured.database.write_bytes(kept)


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
def test_checker_sees_damage(record: Box, sql: str, what: str) -> None:
    """Whatever is changed, missing or made up in the record is named."""
    change(record, sql)
    with pytest.raises(Broken, match=what):
        record.check("mine", jobs=1, cells=CELLS)


def test_checker_sees_a_job_that_the_record_does_not_know(measured: Box, tmp_path: Path) -> None:
    """One that is on the host alone is lost."""
    assert measured.run("run", measured.spec("other"), "--host", "box", "--db", tmp_path / "other.db").rc == 0
    with pytest.raises(Broken, match="lost: the record does not know"):
        measured.check("other")


def test_checker_sees_a_second_launch(measured: Box) -> None:
    """What was measured again is run twice."""
    spec = measured.spec("again")
    assert measured.run("run", spec, "--host", "box").rc == 0
    assert measured.run("run", spec, "--host", "box", "--again").rc == 0
    with pytest.raises(Broken, match=r"run twice: .*llama-bench"):
        measured.check("again", jobs=2, cells=CELLS)


def test_launches_print_values_of_their_own(measured: Box) -> None:
    """No two launches can be taken for one another, but for the gates, of which all print the same."""
    launches = [launch for launch in read(measured.ledger) if "llama-bench" in launch.argv]
    assert len({launch.sha256 for launch in launches}) == len(launches) >= 2
    once([launch for launch in launches if launch.job_id.split("-")[2] == "mine"])
