"""Check a database by itself: the file, schema, references, seals, and every identity, recomputed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from dgxlab.model import case_digest, digest, plan_digest
from dgxlab.store.connect import damaged, named_errors, schema_problems
from dgxlab.store.records import device_from, device_row, experiment_row
from dgxlab.store.seals import broken
from dgxlab.store.store import Store

Row = dict[str, Any]


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
    "imports": (
        "the copy of imported file {import_id} is not the file that was imported",
        lambda row: (
            row["sha256"] == hashlib.sha256(content := row["content"].encode()).hexdigest()
            and row["size"] == len(content)
        ),
    ),
}
"""By table: the sentence about a row that does not match its key or digest, and the test whether a row matches."""


def check(store: Store) -> list[str]:
    """Return a sentence for each problem within the file: pages, schema, foreign keys, seals, and rows' own digests.

    Raises Damaged if the file cannot be read.
    """
    with named_errors(store.path):
        schema = schema_problems(store.connection)
        for problem in schema:
            if problem.startswith(("table", "view")) and problem.endswith(("missing", "changed")):
                raise damaged(store.path, f"its {problem}")
        pages = [row["integrity_check"] for row in store.rows("PRAGMA integrity_check")]
        references = store.rows(
            """SELECT "table", parent, count(*) AS n FROM pragma_foreign_key_check GROUP BY 1, 2 ORDER BY 1, 2"""
        )
        problems = [
            *(f"{store.path}: {problem}" for problem in (*pages, *schema) if problem != "ok"),
            *(f"{row['n']} rows of {row['table']} refer to {row['parent']} that are not there" for row in references),
            *broken(store.connection),
        ]
        for table, (sentence, holds) in IDENTITIES.items():
            for row in store.rows(f"SELECT * FROM {table} ORDER BY 1"):  # noqa: S608 - names of our own
                try:
                    sound = holds(row)
                except (LookupError, TypeError, ValueError, AttributeError):
                    sound = False
                if not sound:
                    problems.append(sentence.format(**row))
        return problems
