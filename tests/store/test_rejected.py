"""A session that was set aside: all of it stays in the record, and nothing of it counts."""

from pathlib import Path

import pytest

from dgxlab import audit, judgement, report
from dgxlab.errors import UsageError
from dgxlab.model import ParityGate, model_id
from dgxlab.store import Store, check, gate_digest, merging
from tests.journals import TINY, cell, compared, device, env_digest, intend, source, whole
from tests.store.conftest import measured

ENV = env_digest({"GGML_NO_BACKTRACE": "1"})
GATE = ParityGate("MUL_MAT", "CPU")


def known(store: Store, build: str) -> list[bool]:
    """Return what of a job is known already: its cell, its gate, and the count that the gate recorded."""
    digest = gate_digest(GATE, {})
    wanted = (cell().key, model_id(TINY), ENV)
    recorded = store.expectation(source().pin, source().tree, digest, "")
    return [
        bool(store.up_to_date(build, device(), [wanted])),
        store.gate_passed(build, device(), digest, GATE),
        recorded is not None,
    ]


def test_nothing_of_it_is_up_to_date(store: Store) -> None:
    build = measured(store, whole("job-1")).build_id()
    kept = ("SELECT * FROM runs", "SELECT * FROM gates", "SELECT * FROM samples")
    before = [store.rows(sql) for sql in kept]
    assert known(store, build) == [True, True, True]
    judgement.reject(store, "job-1", "the GPU was shared")
    assert known(store, build) == [False, False, False]
    assert [store.rows(sql) for sql in kept] == before
    assert check(store) == []
    measured(store, whole("job-2"))
    assert known(store, build) == [True, True, True]


def test_reports_say_so(store: Store) -> None:
    measured(store, whole("job-1"))
    judgement.reject(store, "job-1", "the GPU was shared")
    line = "- **session job-1** rejected: the GPU was shared\n"
    assert line in report.render(report.collect_job(store, "job-1"))
    assert "rejected: the GPU was shared" in report.render_overview(report.overview(store))
    measured(store, whole("job-2"))
    toy = report.collect(store, "toy")
    assert line in report.render(toy)
    assert {name for table in toy.tables for name in table.provenance.sessions} == {"job-2"}


def test_it_has_no_verdict(store: Store) -> None:
    measured(store, compared("job-1"))
    assert store.verdicts("job-1")
    judgement.reject(store, "job-1", "the GPU was shared")
    assert store.verdicts("job-1") == []
    assert judgement.check(store) == check(store) == []
    assert "rejected" in report.render(report.collect_job(store, "job-1"))


def test_one_that_cannot_be_read_is_asked_for_no_more(store: Store) -> None:
    intend(store, whole("job-1"))
    (job,) = store.unfinished(store.job("job-1").host)
    judgement.reject(store, job.job_id, "its journal cannot be used")
    assert store.unfinished(job.host) == []


def test_once_and_for_good(store: Store, tmp_path: Path) -> None:
    intend(store, whole("job-1"))
    with Store.open(tmp_path / "other.db") as other:
        intend(other, whole("job-1"))
        judgement.reject(other, "job-1", "first")
    judgement.reject(store, "job-1", "second")
    with pytest.raises(UsageError, match="was rejected before: second"):
        judgement.reject(store, "job-1", "third")
    with merging(store, tmp_path / "other.db"):
        pass
    assert store.job("job-1").rejected == "first"
    assert check(store) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [("facts", '{"host_id":"host-a"}'), ("facts", '{"boot_id":"b","details":{"gpus":3},"host_id":"h","hostname":"x"}')],
)
def test_a_field_that_no_report_could_show_is_found(store: Store, column: str, value: str) -> None:
    measured(store, whole("job-1"))
    store.update_job("job-1", **{column: value})
    assert any(column in sentence for sentence in audit.check(store))
