"""Constants of the tables of results.db; their SQL is in sql/, one file per migration.

Keys are natural texts, so that two databases can be merged. Observations of a job are keyed by that job: two jobs may
see the same build or model with different binaries, paths or series names.
JSON columns hold `model.canonical` text: equal values are equal texts. Times are unix seconds, `seconds` durations.
"""

from __future__ import annotations

import contextlib
import sqlite3
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

APPLICATION_ID = 0x6467786C  # `dgxl` in the file's header: tells this database from any other SQLite file
VERSION = 18  # PRAGMA user_version of a database to which every migration was applied
SCHEMA = "8cede16c04f8027d"  # `connect.schema_digest` of such a database
ROOFLINE = "roofline"  # kind of the flag that ingest adds to a run that exceeds the peaks of its GPU

VIEWS: Mapping[str, tuple[str, ...]] = {"telemetry": ("run_id", "device", "name")}
"""Views into which rows can be inserted, with their keys."""

BEHIND_VIEWS = ("readings", "run_numbers", "sensors")
"""The tables behind these views; their numeric keys differ between databases."""

DEFLATED: Mapping[str, tuple[str, ...]] = {
    "case_lists": ("lines",),
    "jobs": ("plan",),
    "rows": ("raw",),
    "runs": ("argv", "before", "after", "raw"),
    "tries": ("diff", "change"),
}
"""By table, the columns of deflated texts. `Store` takes and returns plain text; in SQL, use `inflated(raw)`."""

UPSERT = {
    "devices": "ON CONFLICT (device_id) DO NOTHING",
    "case_lists": "ON CONFLICT (cases) DO NOTHING",
    "experiments": "ON CONFLICT (digest) DO NOTHING",
    # two clients may reject a job, each with its words: the first one's stay
    "rejections": """ON CONFLICT (job_id) DO UPDATE SET reason = excluded.reason, at = excluded.at
        WHERE (excluded.at, excluded.reason) < (rejections.at, rejections.reason)""",
    # a label is no part of a cell's identity: of two, one is kept by a rule that does not depend on the order
    "cells": """ON CONFLICT (cell) DO UPDATE SET label = excluded.label WHERE excluded.label < cells.label""",
    "fleets": "ON CONFLICT (fleet_id) DO NOTHING",
    "inputs": "ON CONFLICT (job_id, model_id) DO NOTHING",
    # the first import stays, with its copy, which another zlib may have packed into other bytes
    "imports": """ON CONFLICT (import_id) DO UPDATE
        SET name = excluded.name, at = excluded.at, content = excluded.content
        WHERE (excluded.at, excluded.name, excluded.content) < (imports.at, imports.name, imports.content)""",
}
"""By table, what an INSERT does if the key exists. In other tables that is an error."""


@cache
def _dictionary() -> bytes:
    """Return the zlib dictionary; never edit it: existing deflated texts would become unreadable."""
    return Path(__file__).with_name("dictionary.txt").read_bytes()


def deflated(text: str) -> bytes:
    """Compress a text as the record stores it: zlib with a dictionary."""
    packer = zlib.compressobj(9, zdict=_dictionary())
    return packer.compress(text.encode()) + packer.flush()


def inflated(content: bytes | str) -> str:
    """Return the text of a stored value, which may be deflated, with or without the dictionary, or plain text.

    Raises ValueError if it is damaged.
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
    """Add the SQL functions `inflated`, which returns NULL for a damaged value, and `deflated` to a connection."""

    def text_or_null(content: bytes | str | None) -> str | None:
        with contextlib.suppress(ValueError):
            return None if content is None else inflated(content)
        return None

    connection.create_function("inflated", 1, text_or_null, deterministic=True)
    connection.create_function("deflated", 1, deflated, deterministic=True)
