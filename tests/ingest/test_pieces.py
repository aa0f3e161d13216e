"""However a journal is cut, repeated and resumed, the store ends up the same."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgxlab.ingest import ingest
from dgxlab.model import events
from dgxlab.store import Store
from tests.journals import Journal, compared, dump, intend, whole

JOURNAL = whole("job-1", runs=4, samples=2)
SESSION = compared("job-2")

Fresh = Callable[[Path], Store]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    template = tmp_path_factory.mktemp("template") / "results.db"
    with Store.open(template) as store:
        intend(store, JOURNAL)
        intend(store, SESSION)

    def make(folder: Path) -> Store:
        shutil.copyfile(template, folder / "results.db")
        return Store.open(folder / "results.db")

    return make


@settings(max_examples=40, deadline=None)
@given(
    journal=st.sampled_from([JOURNAL, SESSION]),
    cuts=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 20_000)), max_size=8),
)
def test_any_cut_and_overlap(fresh: Fresh, journal: Journal, cuts: list[tuple[int, int]]) -> None:
    with (
        tempfile.TemporaryDirectory() as first,
        tempfile.TemporaryDirectory() as second,
        fresh(Path(first)) as whole_at_once,
        fresh(Path(second)) as piecewise,
    ):
        text, job_id = journal.text(), journal.plan.job_id
        expected = ingest(whole_at_once, job_id, text.splitlines(keepends=True))
        new = []
        for back, length in [*cuts, (0, len(text)), (len(text), len(text))]:
            offset = piecewise.job(job_id).journal_bytes
            begin = text.rfind(b"\n", 0, max(0, offset - back)) + 1
            new += ingest(piecewise, job_id, text[begin : begin + length].splitlines(keepends=True))
        assert new == expected == [events.read(event) for event in journal.events]
        assert dump(piecewise) == dump(whole_at_once)
        assert piecewise.job(job_id).journal_bytes == len(text)


def test_a_slow_source_does_not_hold_the_database(fresh: Fresh, tmp_path: Path) -> None:
    with fresh(tmp_path) as store, Store.open(tmp_path / "results.db") as other:

        def arriving() -> "list[bytes]":
            other.set_state("job-1", "running")
            return JOURNAL.lines()

        assert len(ingest(store, "job-1", (line for line in arriving()))) == len(JOURNAL.events)
