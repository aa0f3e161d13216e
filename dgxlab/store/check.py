"""A database by itself: the file, its schema, the references, the seals, and every identity computed again."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dgxlab.model import case_digest, digest, plan_digest
from dgxlab.store.connect import damaged, named_errors, schema_problems
from dgxlab.store.records import device_from, device_row, experiment_row, figure_digest
from dgxlab.store.schema import PUBLISHED
from dgxlab.store.seals import broken
from dgxlab.store.store import Store

Row = dict[str, Any]


def _file(row: Row) -> bool:
    content = zlib.decompress(row["content"])
    return (len(content), hashlib.sha256(content).hexdigest()) == (row["size"], row["sha256"])


IDENTITIES: Mapping[str, tuple[str, Callable[[Row], bool]]] = {
    "cells": (
        "cell {cell} is not the digest of its parameters",
        lambda row: row["cell"] == digest([row["tool"], json.loads(row["params"]), json.loads(row["fixed"])], 16),
    ),
    "experiments": (
        "experiment {digest} is not what its spec says",
        lambda row: row == experiment_row(json.loads(row["spec"])),
    ),
    "devices": ("device {device_id} is not the digest of what it is", lambda row: row == device_row(device_from(row))),
    "case_lists": (
        "case list {cases} is not the digest of its lines",
        lambda row: bool(row["cases"] == case_digest(json.loads(row["lines"]))),
    ),
    "jobs": (
        "the plan of job {job_id} is not what its digest says",
        lambda row: row["plan_digest"] == plan_digest(json.loads(row["plan"])),
    ),
    **{
        table: (
            f"figure {{figure}} of {table} is not the digest of what it says",
            lambda row: row["figure"] == figure_digest(row),
        )
        for table in PUBLISHED
    },
    "imports": ("the copy of imported file {import_id} is not the file that was imported", _file),
}
"""By table, what is said of a row that is not what its key or its digest says."""


def check(store: Store) -> list[str]:
    """Return a sentence for each page, trigger, reference, seal and identity that is wrong; see `audit.check` too.

    Raises:
        Damaged: if the file is too damaged to be asked.
    """
    with named_errors(store.path):
        schema = schema_problems(store.connection)
        for problem in schema:
            if problem.startswith(("table", "view")) and problem.endswith(("missing", "changed")):
                raise damaged(store.path, f"its {problem}")
        return [
            *_pages(store),
            *(f"{store.path}: {each}" for each in schema),
            *_references(store),
            *broken(store.connection),
            *_identities(store),
        ]


def _pages(store: Store) -> list[str]:
    found = store.rows("PRAGMA integrity_check")
    return [f"{store.path}: {row['integrity_check']}" for row in found if row["integrity_check"] != "ok"]


def _references(store: Store) -> list[str]:
    found = store.rows(
        """SELECT "table", parent, count(*) AS broken FROM pragma_foreign_key_check GROUP BY 1, 2 ORDER BY 1, 2"""
    )
    return [f"{row['broken']} rows of {row['table']} refer to {row['parent']} that are not there" for row in found]


def _identities(store: Store) -> Iterator[str]:
    for table, (sentence, holds) in IDENTITIES.items():
        for row in store.rows(f"SELECT * FROM {table} ORDER BY 1"):  # noqa: S608 - names of our own
            try:
                sound = holds(row)
            except (LookupError, TypeError, ValueError, AttributeError, zlib.error):
                sound = False
            if not sound:
                yield sentence.format(**row)
