"""What is known of the tables of results.db beside their SQL, which is in sql/, a file a migration.

Keys are natural texts, so that two databases can be merged. What one job saw is keyed by that job: the same build or
model identity may be found by two jobs with other binaries, another path or other series names, and both are true.
JSON columns hold `model.canonical` text: equal values are equal texts. Times are unix seconds, `seconds` durations.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

APPLICATION_ID = 0x6467786C
"""`dgxl` in the file's header: tells this database from any other SQLite file."""

VERSION = 12
"""PRAGMA user_version of a database to which every migration was applied."""

SCHEMA = "3d0433d161a656f1"
"""`connect.schema_digest` of such a database: its tables, indexes, views and triggers."""

ROOFLINE = "roofline"
"""The one kind of flag that no host gives: ingest judges a run by what it knows of its GPU, in its own words."""

VIEWS: Mapping[str, tuple[str, ...]] = {"telemetry": ("run_id", "device", "name")}
"""Views that take rows as tables do, with their keys."""

BEHIND_VIEWS = ("readings", "run_numbers", "sensors")
"""The tables that hold their rows, by numbers that differ between databases: all but SQLite looks at the views."""

DEFLATED: Mapping[str, tuple[str, ...]] = {
    "case_lists": ("lines",),
    "jobs": ("plan",),
    "rows": ("raw",),
    "runs": ("argv", "before", "after", "raw"),
}
"""By table, its columns of long JSON texts that resemble each other: deflated, with a dictionary of typical ones.

`Store` takes and gives texts; SQL writes `inflated(raw)`.
"""

UPSERT = {
    "devices": "ON CONFLICT (device_id) DO NOTHING",
    "case_lists": "ON CONFLICT (cases) DO NOTHING",
    "experiments": "ON CONFLICT (digest) DO NOTHING",
    # two clients may reject a job, each with its words: the first one's stay
    "rejections": """ON CONFLICT (job_id) DO UPDATE SET reason = excluded.reason, at = excluded.at
        WHERE (excluded.at, excluded.reason) < (rejections.at, rejections.reason)""",
    # a label is no part of a cell's identity: of two, one is kept by a rule that does not depend on the order
    "cells": """ON CONFLICT (cell) DO UPDATE SET label = excluded.label WHERE excluded.label < cells.label""",
    "inputs": "ON CONFLICT (job_id, model_id) DO NOTHING",
    # who imported it first; with it goes the copy, which another zlib may have packed into other bytes
    "imports": """ON CONFLICT (import_id) DO UPDATE
        SET name = excluded.name, at = excluded.at, content = excluded.content
        WHERE (excluded.at, excluded.name, excluded.content) < (imports.at, imports.name, imports.content)""",
}
"""What to do with a key that is there already; a table that is not named here must not be given one."""


@cache
def _dictionary() -> bytes:
    """Return typical texts; never edited: what was deflated with them would be unreadable."""
    return Path(__file__).with_name("dictionary.txt").read_bytes()


def deflated(text: str) -> bytes:
    """Return a text as the record holds it."""
    packer = zlib.compressobj(9, zdict=_dictionary())
    return packer.compress(text.encode()) + packer.flush()


def inflated(content: bytes | str) -> str:
    """Return a text that the record holds, deflated with the dictionary, without one or not at all.

    Raises:
        ValueError: if it is damaged.
    """
    if isinstance(content, str):
        return content
    try:
        unpacker = zlib.decompressobj(zdict=_dictionary())
        text = unpacker.decompress(content) + unpacker.flush()
    except zlib.error as error:
        raise ValueError(f"a deflated text is damaged: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError("a deflated text is cut short or has something behind it")
    return text.decode()


def add_functions(connection: sqlite3.Connection) -> None:
    """Give SQL the functions `inflated` and `deflated`.

    A damaged text is NULL: what SQL asks of it is then unknown, and `check` names it.
    """

    def text_or_null(content: bytes | str | None) -> str | None:
        with contextlib.suppress(ValueError):
            return None if content is None else inflated(content)
        return None

    connection.create_function("inflated", 1, text_or_null, deterministic=True)
    connection.create_function("deflated", 1, deflated, deterministic=True)
