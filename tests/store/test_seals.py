"""Seals: what is written is sealed, and what another program did stays visible whatever is written afterwards."""

import pytest

from dgxlab.errors import RemoteError
from dgxlab.ingest import ingest
from dgxlab.store import Store
from dgxlab.store.seals import broken
from tests.elsewhere import from_elsewhere
from tests.journals import compared, dump, intend, whole
from tests.store.conftest import measured


def told(store: Store) -> list[str]:
    return list(broken(store.connection))


def test_every_write_is_sealed(store: Store) -> None:
    from_elsewhere(store)
    journal = compared("job-1")
    intend(store, journal)
    for line in journal.lines():
        ingest(store, "job-1", [line])
        assert told(store) == []
    store.set_state("job-1", "lost")
    units = [row["unit"] for row in store.rows("SELECT unit FROM seals")]
    assert [unit for unit in units if unit.startswith("job/")] == ["job/job-1"]
    assert told(store) == []


def test_what_is_rolled_back_is_not_sealed(store: Store) -> None:
    measured(store, whole("job-1"))
    before = dump(store)
    journal = whole("job-2")
    intend(store, journal)
    with pytest.raises(RemoteError):
        ingest(store, "job-2", [*journal.lines()[:4], b"{}\n"])
    assert told(store) == []
    assert dump(store)["runs"] == before["runs"]
    ingest(store, "job-2", journal.lines())
    assert told(store) == []


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        ("UPDATE jobs SET host = 'other' WHERE job_id = 'job-2'", "job job-2 is not what was sealed"),
        ("UPDATE jobs SET host = 'other' WHERE job_id = 'job-3'", "job job-3 is not what was sealed"),
        ("DELETE FROM seals WHERE unit = 'job/job-2'", "job job-2 is not what was sealed"),
        ("DELETE FROM seals WHERE unit = 'job/job-2'", "the seal of job/job-3 does not follow"),
        ("DELETE FROM verdicts", "job job-4 is not what was sealed"),
        ("UPDATE seals SET content = seal WHERE unit = 'job/job-2'", "the seal of job/job-2 does not follow"),
        ("UPDATE seals SET seal = content WHERE unit = 'job/job-2'", "the seal of job/job-3 does not follow"),
        ("DELETE FROM seals WHERE unit = 'table/case_lists'", "table case_lists has rows and no seal"),
        ("UPDATE cells SET label = 'other'", "table cells is not what was sealed"),
    ],
)
def test_later_writes_hide_nothing(store: Store, edit: str, sentence: str) -> None:
    measured(store, *map(whole, ("job-1", "job-2", "job-3")), compared("job-4"))
    store.connection.execute("SAVEPOINT edit")
    store.connection.execute(edit)
    for number in (1, 2, 3, 4):
        store.update_job(f"job-{number}", next=f"dgxlab jobs {number}")
        store.seal()
    measured(store, *map(whole, ("job-0", "job-22", "job-5")))
    store.seal()
    assert any(problem.startswith(sentence) for problem in told(store))
    store.connection.execute("ROLLBACK TO edit")
    store.connection.execute("RELEASE edit")
    assert told(store) == []
