"""Under which conditions runs took place, and what speaks against them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgxlab.store import Store

BATCH = 500
"""Parameters in one statement; SQLite's own limit is far higher, but was 999 for long."""

Row = Mapping[str, Any]

TELEMETRY = """SELECT run_id, name, min(median) AS low, max(median) AS high FROM telemetry
               WHERE run_id IN ({marks}) GROUP BY run_id, name"""

FLAGS = (
    "SELECT run_id, kind, hard, reason FROM flags WHERE run_id IN ({marks}) ORDER BY run_id, hard DESC, device, kind"
)


def rows_of(store: Store, sql: str, values: Sequence[str]) -> list[dict[str, Any]]:
    """Run a query with `IN ({marks})` over any number of values."""
    found: list[dict[str, Any]] = []
    for start in range(0, len(values), BATCH):
        batch = values[start : start + BATCH]
        found += store.rows(sql.format(marks=",".join("?" * len(batch))), batch)
    return found


def conditions_of(store: Store, runs: Sequence[str]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return Measured.conditions of each run."""
    found: dict[str, dict[str, tuple[float, float]]] = {run: {} for run in runs}
    for row in rows_of(store, TELEMETRY, runs):
        found[row["run_id"]][row["name"]] = (row["low"], row["high"])
    return found


def range_of(seen: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest of several ranges, by name."""
    found: dict[str, tuple[float, float]] = {}
    for one in seen:
        for name, (low, high) in one.items():
            before = found.get(name, (low, high))
            found[name] = (min(before[0], low), max(before[1], high))
    return found


def together(runs: Sequence[Sequence[Row]]) -> Iterator[Row]:
    """Yield what speaks against runs; of several what is alike once: each says how long, and so none says the same."""
    if len(runs) == 1:
        yield from runs[0]
        return
    kinds: dict[tuple[bool, str], list[Row]] = {}
    for flag in (flag for run in runs for flag in run):
        kinds.setdefault((bool(flag["hard"]), flag["kind"]), []).append(flag)
    for flags in kinds.values():
        concerned = len({flag["run_id"] for flag in flags})
        reasons = list(dict.fromkeys(flag["reason"] for flag in flags))
        more = f", and {len(reasons) - 1} like it" if len(reasons) > 1 else ""
        yield {**flags[0], "reason": f"in {concerned} of {len(runs)} runs {reasons[0]}{more}"}


def flags_of(store: Store, runs: Sequence[str]) -> dict[str, list[Row]]:
    """Return what speaks against each run."""
    found: dict[str, list[Row]] = {run: [] for run in runs}
    for row in rows_of(store, FLAGS, runs):
        found[row["run_id"]].append(row)
    return found
