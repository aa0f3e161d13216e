"""What was read into the record, with the file itself; once, however often and by whomever."""

from __future__ import annotations

import time

from dgxlab.errors import UsageError
from dgxlab.imported.file import Imported
from dgxlab.imported.text import packed
from dgxlab.model import canonical
from dgxlab.store import Store


def record(store: Store, found: Imported) -> bool:
    """Keep a file and its values, in one transaction.

    Returns:
        Whether it is new; of a file that is there already, under whatever name, nothing changes.

    Raises:
        UsageError: if the same file is there as the output of another tool or in another format.
    """
    import_id, sha256 = found.import_id, found.sha256
    with store.transaction():
        known = store.rows("SELECT tool, format, name FROM imports WHERE import_id = ?", (import_id,))
        if known:
            _same(found, known[0]["tool"], known[0]["format"], known[0]["name"])
            return False
        row = {
            "import_id": import_id,
            "sha256": sha256,
            "size": len(found.content),
            "tool": found.tool,
            "format": found.format,
            "provenance": canonical(found.reading.provenance),
            "notes": canonical(found.reading.notes),
            "content": packed(found.content),
            "name": found.name,
            "at": time.time(),
        }
        store.put("imports", row)
        rows = enumerate(found.reading.rows)
        store.put_many(
            "imported_rows",
            ("import_id", "position", "label", "params"),
            ((import_id, position, row.label, canonical(row.params)) for position, row in rows),
        )
        store.put_many(
            "imported",
            ("import_id", "position", "metric", "ordinal", "value", "unit", "discarded"),
            (
                (import_id, position, each.metric, ordinal, value, each.unit, each.discarded or None)
                for position, row in enumerate(found.reading.rows)
                for each in row.values
                for ordinal, value in enumerate(each.values)
            ),
        )
        return True


def _same(found: Imported, tool: str, format: str, name: str) -> None:
    if (found.tool, found.format) != (tool, format):
        raise UsageError(
            f"{found.name} was imported before, as {name}: output of {tool} ({format}), not of {found.tool} "
            f"({found.format})"
        )
