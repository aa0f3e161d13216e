"""Rows that no journal fills: figures of documents, and a file of some tool's output."""

import hashlib
import zlib
from typing import Any

from dgxlab.store import Store, figure_digest

FIGURE: dict[str, Any] = {
    **dict.fromkeys(("host", "engine", "pin", "model", "quant", "tool", "notes"), "x"),
    "source_doc": "000",
    "test": "n=1",
    "metric": "throughput",
    "value": 817.0,
    "unit": "GFLOPS",
    "stddev": None,
}


def figure(line: int = 7, **changed: Any) -> dict[str, Any]:
    """Return the row of a published figure."""
    row = {**FIGURE, **changed}
    return {"figure": figure_digest(row), **row, "line": line}


def an_import(content: bytes = b"n=1: 2.5 us\n", *, name: str = "log.txt", at: float = 5.0) -> dict[str, Any]:
    """Return the row of an imported file."""
    sha256 = hashlib.sha256(content).hexdigest()
    of_content = {"import_id": sha256[:16], "sha256": sha256, "size": len(content), "content": zlib.compress(content)}
    said = {"tool": "harness", "format": "jsonl", "provenance": "{}", "notes": "[]"}
    return {**of_content, **said, "name": name, "at": at}


def from_elsewhere(store: Store, value: float = 2.5, *, line: int = 7, name: str = "log.txt", at: float = 5.0) -> None:
    """Put a row into every table that no journal fills."""
    store.put("published", figure(line))
    store.put("published_gates", figure(line, value="5951a5b4"))
    imported = an_import(name=name, at=at)
    store.put("imports", imported)
    of_row = {"import_id": imported["import_id"], "position": 0}
    store.put("imported_rows", {**of_row, "label": "n=1", "params": '{"n":1}'})
    measured = {"metric": "time_us", "ordinal": 0, "value": value, "unit": "us", "discarded": None}
    store.put("imported", {**of_row, **measured})
