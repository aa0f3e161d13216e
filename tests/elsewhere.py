"""A file of some tool's output, which no journal fills."""

import hashlib
import zlib
from typing import Any

from dgxlab.store import Store


def an_import(content: bytes = b"n=1: 2.5 us\n", *, name: str = "log.txt", at: float = 5.0) -> dict[str, Any]:
    sha256 = hashlib.sha256(content).hexdigest()
    of_content = {"import_id": sha256[:16], "sha256": sha256, "size": len(content), "content": zlib.compress(content)}
    fields = {"tool": "harness", "format": "jsonl", "provenance": "{}", "notes": "[]"}
    return {**of_content, **fields, "name": name, "at": at}


def from_elsewhere(store: Store, *, name: str = "log.txt", at: float = 5.0) -> None:
    """Put a row into every table that no journal fills."""
    store.put("imports", an_import(name=name, at=at))
