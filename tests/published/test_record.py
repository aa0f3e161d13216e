"""The record in a database: added once, and asked for."""

import csv
from pathlib import Path

import pytest

from dgxlab import published
from dgxlab.audit import check, merge
from dgxlab.store import Store

DATA = Path(published.__file__).parent


def test_all_of_it_is_added_and_only_once(tmp_path: Path) -> None:
    """Every row of both files has a row of its own; a second time adds nothing."""
    with Store.open(tmp_path / "results.db") as store:
        assert published.load(store) == {"published": 1072, "published_gates": 26}
        assert published.load(store) == {"published": 0, "published_gates": 0}
        assert check(store) == []


def test_two_databases_with_it_merge(store: Store, tmp_path: Path) -> None:
    """The record is the same everywhere."""
    with Store.open(tmp_path / "other.db") as other:
        published.load(other)
    assert sum(merge(store, tmp_path / "other.db").values()) == 0


def test_what_comes_out_is_what_the_file_says(store: Store) -> None:
    """Each figure equals its line of the file, read by the csv module alone."""
    with (DATA / "published.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = published.figures(store)
    assert [figure.line for figure in found] == list(range(2, len(rows) + 2))
    for figure, row in zip(found, rows, strict=True):
        told = {name: getattr(figure, name) for name in row}
        stddev = float(row["stddev"]) if row["stddev"] else None
        assert told == {**row, "value": float(row["value"]), "stddev": stddev}


def test_figures_are_found_by_what_their_columns_say(store: Store) -> None:
    """Conditions hold together; several values are alternatives."""
    own = {"source_doc": "seed004:DGX_BLACKWELL_PLAN.md", "engine": "vLLM 0.23.0"}
    found = published.figures(store, **own, metric=("S_PP", "S_TG"), test=["B=1", "B=64"])
    assert [(f.test, f.metric, f.value) for f in found] == [
        ("B=1", "S_PP", 9644),
        ("B=1", "S_TG", 48),
        ("B=64", "S_PP", 151990),
        ("B=64", "S_TG", 2064),
    ]
    assert [f.value for f in published.figures(store, value=24444)] == [24444]
    assert published.figures(store, metric=()) == []
    assert published.figures(store, host="nowhere") == []


def test_gates_are_found_too(store: Store) -> None:
    """A gate is no figure, and has a table of its own."""
    assert [gate.value for gate in published.gates(store, test="MUL_MAT", pin="pr24423 7a6ddc5")] == ["1103/1103"]


def test_a_column_that_there_is_not_is_a_bug(store: Store) -> None:
    """Nothing but the names of columns becomes SQL."""
    with pytest.raises(ValueError, match="has no metrics: it has figure, source_doc"):
        published.figures(store, metrics="S_PP")


def test_a_number_is_written_with_the_digits_that_were_published(store: Store) -> None:
    """Nothing is rounded, and no digit is invented; an approximate one says so."""
    assert [f.text for f in published.figures(store, line=(2, 4, 15, 118, 121, 186))] == [
        *("817", "5.77", "~2", "2215 ± 15", "700 ± 24", "7.5e-08"),
    ]
