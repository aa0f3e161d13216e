"""What the record has on runs: their values, flags and conditions, and the mean of those of a chain that count."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dgxlab import judgement, stats, units
from dgxlab.judgement import Judged
from dgxlab.report.records import Conditions, Number, grouped

if TYPE_CHECKING:
    from dgxlab.store import Store

RecordRow = Mapping[str, Any]

VALUES = "SELECT * FROM measurements WHERE run_id IN ({}) ORDER BY run_id, cell, metric"

FLAGS = """SELECT run_id, kind, hard, reason FROM flags
           WHERE run_id IN ({}) ORDER BY run_id, hard DESC, device, kind"""

TELEMETRY = """SELECT name, min(median) AS low, max(median) AS high FROM telemetry
               WHERE run_id IN (SELECT value FROM json_each(?)) GROUP BY name"""

PARAMETERS = 1000  # of one SQL statement; SQLite takes some more

Medians = Mapping[tuple[str, str, str, str], Mapping[int, float]]
"""The median of each run of chains: by chain, role, Cell.key and metric, then by cycle."""


def by_run(store: Store, sql: str, runs: Iterable[str]) -> dict[str, list[RecordRow]]:
    """Return the rows of a query, VALUES or FLAGS, by run; a run without rows has an empty list."""
    runs, rows = list(runs), []
    for start in range(0, len(runs), PARAMETERS):
        some = runs[start : start + PARAMETERS]
        # a parameter each: for the ids of a subquery, SQLite would first group the samples of all runs
        rows += store.rows(sql.format(",".join("?" * len(some))), some)
    by_id: dict[str, list[RecordRow]] = grouped((row["run_id"], row) for row in rows)
    return {run: by_id.get(run, []) for run in runs}


def medians_of(rows: Iterable[RecordRow]) -> Medians:
    """Return the medians of runs of chains, as `Medians`, given their rows of VALUES."""
    pairs = grouped(
        ((row["chain"], row["role"], row["cell"], row["metric"]), (row["cycle"], row["value"])) for row in rows
    )
    return {key: dict(by_cycle) for key, by_cycle in pairs.items()}


def conditions_of(store: Store, runs: Iterable[str]) -> Conditions:
    """Return the lowest and highest median of each sampled quantity, over these runs."""
    rows = store.rows(TELEMETRY, (json.dumps(list(runs)),))
    return {row["name"]: (row["low"], row["high"]) for row in rows}


def range_of(ranges: Iterable[Conditions]) -> dict[str, tuple[float, float]]:
    """Return the lowest and highest value of each quantity over several ranges."""
    return units.ranges((name, end) for each in ranges for name, both in each.items() for end in both)


def by_kind(flags: Iterable[RecordRow]) -> Iterator[tuple[list[RecordRow], str]]:
    """Group flags by kind, hard ones apart; yield each group, and its first reason with the number of the others."""
    for of_kind in grouped(((flag["hard"], flag["kind"]), flag) for flag in flags).values():
        first, *others = dict.fromkeys(str(flag["reason"]) for flag in of_kind)
        yield of_kind, f"{first}, and {len(others)} like it" if others else first


def mean_of(judged: Judged, role: str, metric: str, medians: Mapping[int, float]) -> Number:
    """Return the geometric mean of a metric over an arm's runs that count; `medians` has each run's median by cycle."""
    cycles = judgement.counted(judged.verdict, role)
    runs = [medians[cycle] for cycle in sorted(set(cycles))]
    mean = statistics.geometric_mean(medians[cycle] for cycle in cycles)
    spread = stats.mad(runs) if len(runs) > 1 else None
    return Number(metric, units.metric(metric).unit, len(runs), spread, mean=mean)
