"""Rows of an imported file, handed on with the columns that the tool printed and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dgxlab.errors import UsageError
from dgxlab.exported.rows import Exported, plain
from dgxlab.imported.llama_bench import TEXTS
from dgxlab.imported.tables import Line, csv_rows, json_array, json_lines, sql
from dgxlab.imported.text import decoded
from dgxlab.report.imports import find_import
from dgxlab.store import Store

READERS: Mapping[tuple[str, str], Callable[[str], Iterable[Line]]] = {
    ("llama-bench", "json"): json_array,
    ("llama-bench", "jsonl"): json_lines,
    ("llama-bench", "sql"): lambda text: sql(text, "llama_bench"),
    ("llama-bench", "csv"): lambda text: csv_rows(text, "build_commit"),
    ("test-backend-ops", "sql"): lambda text: sql(text, "test_backend_ops"),
}
"""By tool and format, those whose rows hold all that the tool knows; the others are abridged for people."""

TYPED = ("json", "jsonl")
"""Formats that tell numbers from texts."""

WORDS = (*TEXTS, "tensor_split", "test_time", "backend_name", "op_name", "op_params", "test_mode", "error_message")
"""Columns that stay texts, whatever their digits."""


def collect_imported(store: Store, name: str) -> Exported:
    """Return the rows of one imported file, in its order; each says the file and its sha256.

    Args:
        name: Of the file, or the beginning of its id.

    Raises:
        UsageError: if there is no such file, or its rows are abridged.
    """
    file = find_import(store, name)
    reader = READERS.get((file["tool"], file["format"]))
    if reader is None:
        kinds = ", ".join(f"{tool} ({kind})" for tool, kind in READERS)
        raise UsageError(
            f"{file['name']} is output of {file['tool']} ({file['format']}), whose rows lack columns that {kinds} have",
            next="dgxlab report --form imported",
        )
    content = store.rows("SELECT content FROM imports WHERE import_id = ?", (file["import_id"],))[0]["content"]
    origin = {"imported": file["name"], "sha256": file["sha256"]}
    lines = reader(decoded(content.encode()))
    typed = (lambda _, said: plain(said)) if file["format"] in TYPED else _typed
    rows = tuple({**{key: typed(key, said) for key, said in line.columns.items()}, **origin} for line in lines)
    commits = dict.fromkeys(str(row.get("build_commit", "")) for row in rows)
    return Exported(file["tool"], rows, dict.fromkeys(commits, (file["name"],)))


def _typed(name: str, said: str) -> Any:
    """Return a value as JSON would hold it: SQL and csv print numbers as texts."""
    if name in WORDS:
        return said
    for kind in (int, float):
        try:
            return kind(said)
        except ValueError:
            continue
    return said
