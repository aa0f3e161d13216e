"""What a run measured, read again from the tool's own rows by the tool's own parser."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from dgxlab.agent.measure import PARSERS
from dgxlab.agent.parse.backend_ops import INSERT
from dgxlab.ingest import SAMPLE, samples_of
from dgxlab.model import Cell, to_json

Row = Mapping[str, Any]


def row_problems(run: Row, rows: Sequence[Row], samples: Sequence[Row], cells: Mapping[str, Cell]) -> Iterator[str]:
    """Yield a sentence where a run's rows are not of its plan's cells, or do not give its samples.

    Args:
        run: Its row.
        rows: Its rows of `rows`.
        samples: Its rows of `samples`.
        cells: The cells of its step by their keys.
    """
    results = []
    cold: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        if sample["discarded"]:
            cold[sample["cell"], sample["metric"]].append(sample["value"])
    for row in rows:
        if row["cell"] not in cells:
            yield f"run {run['run_id']} has a row of cell {row['cell']}, which its plan does not have"
            return
        parsed = PARSERS[run["tool"]](_printed(run["tool"], row["raw"]), [cells[row["cell"]]])
        if parsed.problems:
            yield f"a row of run {run['run_id']} cannot be read again: {parsed.problems[0]}"
            return
        measurements = to_json(parsed.results[0].measurements)
        if run["tool"] == "batched-bench":  # its warm row alone is kept
            measurements = [{**one, "discarded": cold[row["cell"], one["metric"]]} for one in measurements]
        results.append({"cell": row["cell"], "measurements": measurements})
    if set(map(itemgetter(*SAMPLE), samples)) != set(samples_of(run["run_id"], results)):
        yield f"the samples of run {run['run_id']} are not what the tool's rows give"


def _printed(tool: str, raw: str) -> str:
    """Return a tool's row as it printed it; batched-bench prints each twice."""
    if tool != "backend-ops":
        return f"{raw}\n{raw}" if tool == "batched-bench" else raw
    columns = json.loads(raw)
    values = "', '".join(columns.values())
    return f"{INSERT}{', '.join(columns)}) VALUES ('{values}');"
