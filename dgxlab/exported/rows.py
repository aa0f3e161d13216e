"""The record's rows as llama.cpp's tools would have printed them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dgxlab.model import digest
from dgxlab.store import UNCOUNTED, Store

COMMIT_DIGITS = 8
"""Of every build_commit, the same for all: compare-llama-bench.py cuts them to the shortest."""

WHOLE = ("supported", "passed", "memory_kb", "n_runs")
REAL = ("time_us", "flops", "bandwidth_gb_s")
"""Columns of test-backend-ops that are numbers; it prints every value as a text."""

# a run of the burn-in is a warm-up, and no table shows it
ROWS = f"""
    SELECT rows.raw, rows.cell, run_id, runs.job_id, runs.arm, runs.build_id, device_id, runs.env_digest, runs.env,
           arms.commit_id, arms.pin, arms.tree, arms.series, arms.dirty
    FROM rows JOIN runs USING (run_id) JOIN arms USING (job_id, arm)
    LEFT JOIN chain_runs USING (run_id)
    WHERE runs.status = 'valid' AND runs.tool = :tool AND coalesce(role, '') <> 'burn-in'
    AND runs.job_id NOT IN ({UNCOUNTED})
    AND (:job IS NULL OR runs.job_id = :job)
    AND (:name IS NULL OR runs.job_id IN (SELECT job_id FROM jobs WHERE jobs.name = :name))
    AND EXISTS (SELECT 1 FROM samples AS s
                WHERE s.run_id = rows.run_id AND s.cell = rows.cell AND s.discarded IS NULL)
    ORDER BY runs.started, run_id, rows.rowid"""  # noqa: S608 - a constant of ours

COUNTED = """SELECT metric, value FROM samples
    WHERE run_id = ? AND cell = ? AND discarded IS NULL ORDER BY metric, ordinal"""

Samples = Mapping[str, Sequence[float]]
"""The samples of a row that count, by metric."""


@dataclass(frozen=True)
class Exported:
    """The rows of one tool.

    Attributes:
        tool: Its name.
        rows: Each with llama.cpp's columns first, then ours.
        builds: For each build_commit the arms that it stands for.
    """

    tool: str
    rows: tuple[Mapping[str, Any], ...]
    builds: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Table:
    """How the rows of a tool are handed on.

    Attributes:
        name: Of the table, as the tool's own SQL calls it.
        ours: The tool in the record.
        values: Turns a raw row into what the tool would print of the samples that count.
    """

    name: str
    ours: str
    values: Callable[[dict[str, Any], Samples], dict[str, Any]]


def collect(store: Store, tool: str, *, job: str | None = None, name: str | None = None) -> Exported:
    """Return what valid runs of a tool measured, oldest first; what a chain still measures is not shown.

    Args:
        tool: A key of TABLES.
        job: Only this job's.
        name: Only jobs of this name.
    """
    table = TABLES[tool]
    found = store.rows(ROWS, {"tool": table.ours, "job": job, "name": name})
    commits = _commits({(row["commit_id"], row["build_id"], row["env_digest"]) for row in found})
    rows: list[dict[str, Any]] = []
    builds: dict[str, dict[str, None]] = {}
    for row in found:
        commit = commits[row["commit_id"], row["build_id"], row["env_digest"]]
        builds.setdefault(commit, {})[row["arm"]] = None
        values = table.values(json.loads(row["raw"]), _counted(store, row))
        rows.append({**{k: plain(v) for k, v in values.items()}, "build_commit": commit, **_origin(row)})
    return Exported(tool, tuple(rows), {commit: tuple(arms) for commit, arms in builds.items()})


def _commits(identities: Iterable[tuple[str, str, str]]) -> dict[tuple[str, str, str], str]:
    """Name each build and environment: by its commit where that tells them apart, else by a digest of both."""
    known = sorted(identities)
    short = [commit[:COMMIT_DIGITS] for commit, _, _ in known]
    return {
        identity: digest(identity[1:], COMMIT_DIGITS) if short.count(commit) > 1 else commit
        for identity, commit in zip(known, short, strict=True)
    }


def _origin(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a row comes from, in the record's own words."""
    names = ("job_id", "run_id", "arm", "build_id", "pin", "tree", "series", "dirty", "env", "device_id")
    return {name: row[name] for name in names}


def plain(value: Any) -> Any:
    """Return a value as all three encodings hold it: a truth is 1 or 0."""
    return int(value) if isinstance(value, bool) else value


def _counted(store: Store, row: Mapping[str, Any]) -> Samples:
    found: dict[str, list[float]] = {}
    for sample in store.rows(COUNTED, (row["run_id"], row["cell"])):
        found.setdefault(sample["metric"], []).append(sample["value"])
    return found


def _llama_bench(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
    """Compute mean and spread again: the tool's own count the cold repetition."""
    speeds = samples["avg_ts"]
    times = [(raw["n_prompt"] + raw["n_gen"]) / speed * 1e9 for speed in speeds]
    return {
        **raw,
        "avg_ns": round(statistics.fmean(times)),
        "stddev_ns": round(_spread(times)),
        "avg_ts": statistics.fmean(speeds),
        "stddev_ts": _spread(speeds),
        "samples_ns": [round(time) for time in times],
        "samples_ts": list(speeds),
    }


def _backend_ops(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
    """Make numbers of what the tool prints as texts; a metric that a case has not is 0, as the tool has it."""
    whole = {name: int(raw[name]) for name in WHOLE if name in raw}
    return {**raw, **whole, **{name: statistics.fmean(samples.get(name) or [0.0]) for name in REAL if name in raw}}


def _batched_bench(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
    return {**raw, **{name: statistics.fmean(values) for name, values in samples.items()}}


def _spread(values: Sequence[float]) -> float:
    """Return what llama.cpp calls stddev, 0 for a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


TABLES: Mapping[str, Table] = {
    "llama-bench": Table("llama_bench", "llama-bench", _llama_bench),
    "test-backend-ops": Table("test_backend_ops", "backend-ops", _backend_ops),
    "llama-batched-bench": Table("llama_batched_bench", "batched-bench", _batched_bench),
}
"""By the tool's name."""
