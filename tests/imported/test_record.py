"""What was read, in the record: once, whole, with the file itself."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.errors import UsageError
from dgxlab.imported import open_file, record
from dgxlab.store import Store, check
from tests.journals import dump

GOLDEN = Path(__file__).parents[1] / "golden"
LOG = GOLDEN / "h200" / "tbo-perf-gdn.txt"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty record."""
    with Store.open(tmp_path / "results.db") as opened:
        yield opened


def test_everything_that_was_read_is_kept(store: Store) -> None:
    """Rows in order, values with units, provenance, and the file byte for byte."""
    found = open_file(LOG)
    assert record(store, found)
    (kept,) = store.rows("SELECT * FROM imports")
    assert (kept["import_id"], kept["tool"], kept["format"], kept["name"]) == (
        *(found.import_id, "test-backend-ops", "console"),
        "tbo-perf-gdn.txt",
    )
    assert zlib.decompress(kept["content"]) == LOG.read_bytes()
    assert json.loads(kept["provenance"]) == {"device_description": "NVIDIA H200"}
    rows = store.rows("SELECT label, params FROM imported_rows ORDER BY position")
    assert [(row["label"], json.loads(row["params"])) for row in rows] == [
        (row.label, row.params) for row in found.reading.rows
    ]
    values = store.rows("SELECT position, metric, ordinal, value, unit, discarded FROM imported WHERE position = 3")
    assert {(row["metric"], row["value"], row["unit"]) for row in values} == {
        ("time_us", 37.57, "us"),
        ("n_runs", 28623.0, "runs"),
        ("memory_kb", 8208.0, "kB"),
        ("bandwidth_gb_s", 208.4, "GiB/s"),
    }
    assert check(store) == []


def test_the_same_content_is_imported_once(store: Store, tmp_path: Path) -> None:
    """Under another name, packed, again: nothing is added and nothing changes."""
    assert record(store, open_file(LOG))
    before = dump(store)
    packed = tmp_path / "another.gz"
    packed.write_bytes(gzip.compress(LOG.read_bytes()))
    assert not record(store, open_file(packed))
    assert dump(store) == before


def test_the_same_content_is_of_one_tool(store: Store, tmp_path: Path) -> None:
    """What was adopted as one tool's output is not another's too."""
    both = tmp_path / "both"
    parts = [(GOLDEN / "h200" / f"llama-bench-q4_k.{suffix}").read_text() for suffix in ("sql", "md")]
    both.write_text("".join(parts))
    assert record(store, open_file(both, format="sql"))
    with pytest.raises(
        UsageError, match=r"imported before, as both: output of llama-bench \(sql\), not of llama-bench \(md\)"
    ):
        record(store, open_file(both, format="md"))


def test_all_captures_make_a_sound_record(store: Store) -> None:
    """Each tool and format, side by side; samples stay in their order."""
    for name in ("json", "jsonl", "sql", "csv", "md"):
        assert record(store, open_file(GOLDEN / "h200" / f"llama-bench-q4_k.{name}"))
    for name in ("tbo-perf-mul_mat.sql", "tbo-test-mul_mat.txt", "batched-bench-q4_k.txt", "batched-bench-q4_k.jsonl"):
        assert record(store, open_file(GOLDEN / "h200" / name))
    assert check(store) == []
    samples = store.rows(
        """SELECT value FROM imported JOIN imports USING (import_id)
           WHERE format = 'json' AND position = 0 AND metric = 'samples_ns' ORDER BY ordinal"""
    )
    assert [row["value"] for row in samples] == [15924028, 13906936, 13571540, 13597312, 13640221]
