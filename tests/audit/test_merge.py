"""Two records that overlap make one that is sound, the same from both sides, or nothing is changed."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dgxlab.audit import check, merge
from dgxlab.errors import CheckFailed
from dgxlab.store import Store
from dgxlab.store.seals import seal_all
from tests.audit.conftest import JOBS, cut, disarm
from tests.conftest import PROJECT
from tests.journals import dump


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two pieces of the shipped record that share a job."""
    folder = tmp_path_factory.mktemp("sides")
    pieces: dict[str, Sequence[str]] = {"a.db": JOBS[:2], "b.db": JOBS[1:]}
    first, second = (
        cut(Path(shutil.copy(PROJECT / "results.db", folder / name)), jobs) for name, jobs in pieces.items()
    )
    return first, second


def copies(sides: tuple[Path, Path], folder: Path, edit: str = "") -> tuple[Path, Path]:
    first, second = (Path(shutil.copy(path, folder)) for path in sides)
    with Store.open(second) as store:
        if edit:
            guards = disarm(store)
            for statement in (edit, *guards):
                store.connection.execute(statement)
            seal_all(store.connection)
    return first, second


@pytest.mark.parametrize("edit", ["", "DELETE FROM verdicts", "UPDATE verdicts SET reasons = '[\"in other words\"]'"])
def test_the_union_is_sound_and_the_same_from_both_sides(sides: tuple[Path, Path], tmp_path: Path, edit: str) -> None:
    merged = []
    for number in (0, 1):
        (tmp_path / str(number)).mkdir()
        into, other = copies(sides, tmp_path / str(number), edit)[:: 1 - 2 * number]
        with Store.open(into) as store:
            merge(store, other)
            assert check(store) == []
            assert not any(merge(store, other).values())
            merged.append(dump(store))
    assert merged[0] == merged[1]
    assert {row["job_id"][:15] for row in merged[0]["verdicts"]} == set(JOBS[2:])
    assert {row["job_id"][:15] for row in merged[0]["jobs"]} == set(JOBS)
    assert '["in other words"]' not in {row["reasons"] for row in merged[0]["verdicts"]}


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            "UPDATE samples SET value = value * 2 WHERE run_id LIKE '20261122-1104%'",
            "the samples of run .* are not what the tool's rows give",
        ),
        ("UPDATE gates SET rc = 1 WHERE gate_id LIKE '20261122-1104%'", "gate .* is passed, which is not what"),
        ("DELETE FROM readings", "disagree on telemetry"),
    ],
)
def test_what_is_not_sound_is_not_merged(sides: tuple[Path, Path], tmp_path: Path, edit: str, sentence: str) -> None:
    into, other = copies(sides, tmp_path, edit)
    with Store.open(into) as store:
        before = dump(store)
        with pytest.raises(CheckFailed, match=sentence) as refused:
            merge(store, other)
        assert "nothing was merged" in refused.value.message
        assert refused.value.next == f"dgxlab db check {other}"
        assert dump(store) == before
