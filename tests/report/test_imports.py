"""Imported files in tables of their own, from real captures."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab import imported
from dgxlab.errors import UsageError
from dgxlab.model import to_json
from dgxlab.report import Number, page, query, render_page
from dgxlab.store import Store
from tests.report.worlds import GOLDEN as CAPTURES
from tests.report.worlds import agrees, whole

GOLDEN = Path(__file__).resolve().parent / "golden" / "imported"
FILES = {
    "llama-bench": "llama-bench-q4_k.jsonl",
    "llama-bench-md": "llama-bench-q4_k.md",
    "test-backend-ops": "tbo-perf-mul_mat.sql",
    "parity": "tbo-test-SSM_CONV.txt",
    "llama-batched-bench": "batched-bench-q4_k.txt",
    "llama-perplexity": "perplexity-kld.txt",
    "harness": "harness.jsonl",
}
"""By golden file, the capture that it shows."""

HARNESS = (
    '{"kernel": "w4a16", "n": 512, "time_us": [310.5, 311.5, 309.0], "passed": true}\n'
    '{"kernel": "swizzle|x", "n": 512, "time_us": [200.0], "passed": false}\n'
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("imports")
    (folder / "harness.jsonl").write_text(HARNESS)
    folders = (folder, CAPTURES, CAPTURES.parent / "cpu")
    with Store.open(folder / "results.db") as store:
        whole(store)
        for name in FILES.values():
            path = next(path / name for path in folders if (path / name).exists())
            imported.record(store, imported.open_file(path, "", ""))
        yield store


def shown(store: Store, **words: str) -> str:
    text = render_page(page(store, query({"form": "imported", **words})))
    return re.sub(r"\d{4}-\d\d-\d\d(?![\dT])", "2025-11-20", text)


def refused(store: Store, **words: str) -> str:
    with pytest.raises(UsageError) as error:
        page(store, query({"form": "imported", **words}))
    return error.value.message.replace(str(store.path), "DB")


@pytest.mark.parametrize("name", FILES)
def test_golden(store: Store, name: str) -> None:
    text = shown(store, file=FILES[name])
    assert agrees(text, GOLDEN / f"{name}.md")
    assert "**imported**" in text


def test_golden_of_all_files(store: Store) -> None:
    assert agrees(shown(store), GOLDEN / "files.md")


def test_a_mean_has_the_spread_and_the_count_of_its_file(store: Store) -> None:
    (rows, abridged) = (table.rows for table in page(store, query({"form": "imported", "file": BOTH})).tables)
    assert rows[0]["avg_ts"] == Number("avg_ts", "t/s", 5, pytest.approx(2555.63088), value=36503.901762)
    assert abridged[0]["avg_ts"] == Number("avg_ts", "t/s", None, 2486.79, value=36563.16)
    (harness,) = page(store, query({"form": "imported", "file": "harness.jsonl"})).tables
    assert harness.rows[0]["time_us"] == Number("time_us", "us", 3, pytest.approx(1.4826), median=310.5, of="values")
    assert "time_us" not in harness.rows[1]  # it did not pass


BOTH = "llama-bench-q4_k.jsonl, llama-bench-q4_k.md"


def test_a_file_is_found_by_the_beginning_of_its_sha256(store: Store) -> None:
    (table,) = page(store, query({"form": "imported", "file": "d48c8e67", "cells": "tg32"})).tables
    twin = json.loads(json.dumps(to_json(table)))
    assert (twin["file"], twin["tool"].partition(",")[0]) == ("llama-bench-q4_k.jsonl", "llama-bench (jsonl)")
    assert twin["sha256"].startswith("d48c8e6786cf5847")
    assert [row["row"] for row in table.rows] == ["tg32"]


def test_blanks_in_a_name_are_alike(tmp_path: Path) -> None:
    path = tmp_path / "a  |b\n.jsonl"
    path.write_text(HARNESS)
    with Store.open(tmp_path / "results.db") as store:
        imported.record(store, imported.open_file(path, "", ""))
        (table,) = page(store, query({"form": "imported", "file": path.name})).tables
        assert [row["row"] for row in table.rows] == ["kernel=w4a16 n=512", "kernel=swizzle|x n=512"]
        assert "\n" not in refused(store, file="nosuch")


def test_what_was_not_imported(store: Store, tmp_path: Path) -> None:
    assert refused(store, file="nosuch").startswith(
        "DB has no imported file 'nosuch'; there are 'llama-bench-q4_k.jsonl' (d4"
    )
    assert refused(store, file="nosuch").endswith(") and 4 more")
    assert refused(store, file="llama-bench-q4_k.md", cells="pp9") == "no row of llama-bench-q4_k.md has all of 'pp9'"
    assert refused(store, cells="pp512") == "cells are of a file"
    with Store.open(tmp_path / "results.db") as empty:
        assert refused(empty) == "DB has no imported file"
        assert refused(empty, file="x") == "DB has no imported file 'x'"
