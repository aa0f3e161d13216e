"""The record in results.db: added once, asked for by what its rows say."""

# ruff: noqa: S608 - names of tables and columns are our own, values are always bound

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from importlib import resources
from typing import Any

from dgxlab.published.figure import Figure, GateResult, Published
from dgxlab.published.guard import implausible
from dgxlab.published.read import COLUMNS, read_figures, read_gates
from dgxlab.store import Store

Condition = float | str | Collection[float | str]
"""What a column must say, or all that it may say."""

STORED = ("figure", *COLUMNS, "line")


def load(store: Store) -> dict[str, int]:
    """Add the published record to a database; what is there already stays.

    Returns:
        How many rows were added, by table.
    """
    folder = resources.files("dgxlab.published")
    name, gate_name = "published.csv", "published_gates.csv"
    found: dict[str, Sequence[Published]] = {
        "published": read_figures(folder.joinpath(name).read_bytes(), name),
        "published_gates": read_gates(folder.joinpath(gate_name).read_bytes(), gate_name),
    }
    with store.transaction():
        return {table: _add(store, table, rows) for table, rows in found.items()}


def figures(store: Store, **where: Condition) -> list[Figure]:
    """Return the figures whose columns say what is asked for, in the order of the file.

    Args:
        store: An open database.
        **where: By column, e.g. `metric=("S_PP", "S_TG")`.

    Raises:
        ValueError: if there is no such column.
    """
    found = [Figure(**row) for row in _asked(store, "published", where)]
    return [dataclasses.replace(figure, excess=implausible(figure)) for figure in found]


def gates(store: Store, **where: Condition) -> list[GateResult]:
    """Return the gates whose columns say what is asked for, as `figures` does."""
    return [GateResult(**row) for row in _asked(store, "published_gates", where)]


def _add(store: Store, table: str, rows: Sequence[Published]) -> int:
    before = _count(store, table)
    store.put_many(table, STORED, [tuple(getattr(row, column) for column in STORED) for row in rows])
    return _count(store, table) - before


def _count(store: Store, table: str) -> int:
    return int(store.rows(f"SELECT count(*) AS n FROM {table}")[0]["n"])


def _asked(store: Store, table: str, where: dict[str, Condition]) -> list[dict[str, Any]]:
    if unknown := set(where).difference(STORED):
        raise ValueError(f"a published figure has no {', '.join(sorted(unknown))}: it has {', '.join(STORED)}")
    options = [[wanted] if isinstance(wanted, str | float | int) else list(wanted) for wanted in where.values()]
    conditions = ["1", *(f"{name} IN ({','.join('?' * len(o))})" for name, o in zip(where, options, strict=True))]
    sql = f"SELECT {', '.join(STORED)} FROM {table} WHERE {' AND '.join(conditions)} ORDER BY line, figure"
    return store.rows(sql, [value for one_of in options for value in one_of])
