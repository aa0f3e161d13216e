"""What was read, in the record: once, whole, with the file itself."""

import gzip
import json
from pathlib import Path

import pytest

from dgxlab.errors import SpecError, UsageError
from dgxlab.imported import open_file, record, rows_of
from dgxlab.store import Store, check
from tests.elsewhere import an_import
from tests.journals import dump

GOLDEN = Path(__file__).parents[1] / "golden"
LOG = GOLDEN / "h200" / "tbo-perf-gdn.txt"


def test_everything_that_was_read_is_kept(store: Store) -> None:
    file = open_file(LOG)
    assert record(store, file)
    (kept,) = store.rows("SELECT * FROM imports")
    assert (kept["import_id"], kept["tool"], kept["format"], kept["name"]) == (
        *(file.import_id, "test-backend-ops", "console"),
        "tbo-perf-gdn.txt",
    )
    assert kept["content"].encode() == LOG.read_bytes()
    assert json.loads(kept["provenance"]) == {"device_description": "NVIDIA H200"}
    assert rows_of(store, file.import_id) == file.reading.rows
    assert check(store) == []


def test_the_same_content_is_imported_once(store: Store, tmp_path: Path) -> None:
    assert record(store, open_file(LOG))
    before = dump(store)
    packed = tmp_path / "another.gz"
    packed.write_bytes(gzip.compress(LOG.read_bytes()))
    assert not record(store, open_file(packed))
    assert dump(store) == before


def test_the_same_content_is_of_one_tool(store: Store, tmp_path: Path) -> None:
    both = tmp_path / "both"
    parts = [(GOLDEN / "h200" / f"llama-bench-q4_k.{suffix}").read_text() for suffix in ("sql", "md")]
    both.write_text("".join(parts))
    assert record(store, open_file(both, format="sql"))
    with pytest.raises(
        UsageError, match=r"imported before, as both: output of llama-bench \(sql\), not of llama-bench \(md\)"
    ):
        record(store, open_file(both, format="md"))


def test_all_captures_make_a_sound_record(store: Store) -> None:
    names = [f"llama-bench-q4_k.{suffix}" for suffix in ("json", "jsonl", "sql", "csv", "md")]
    names += ["tbo-perf-mul_mat.sql", "tbo-test-mul_mat.txt", "batched-bench-q4_k.txt", "batched-bench-q4_k.jsonl"]
    for name in names:
        file = open_file(GOLDEN / "h200" / name)
        assert record(store, file)
        assert rows_of(store, file.import_id) == file.reading.rows
    assert check(store) == []


def test_a_copy_that_cannot_be_read_any_more_is_named(store: Store) -> None:
    row = an_import(b'{"kernel": 1\n', name="old.log")
    store.put("imports", row)
    with pytest.raises(SpecError, match=r"old\.log in .* cannot be read any more: "):
        rows_of(store, row["import_id"])
