"""What a run measured, read again from the tool's own rows by the tool's own parser."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from dgxlab.ingest import SAMPLE, samples_of
from dgxlab.model import Cell, to_json
from dgxlab.tools import BENCHES

Row = Mapping[str, Any]


def row_problems(run: Row, rows: Sequence[Row], samples: Sequence[Row], cells: Mapping[str, Cell]) -> Iterator[str]:
    """Yield a sentence where a run's rows are not of its plan's cells, or do not give its samples.

    Args:
        run: Its row.
        rows: Its rows of `rows`.
        samples: Its rows of `samples`.
        cells: The cells of its step by their keys.
    """
    bench, results = BENCHES[run["tool"]], []
    cold: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        if sample["discarded"]:
            cold[sample["cell"], sample["metric"]].append(sample["value"])
    for row in rows:
        if row["cell"] not in cells:
            yield f"run {run['run_id']} has a row of cell {row['cell']}, which its plan does not have"
            return
        parsed = bench.parse("\n".join([bench.printed(row["raw"])] * bench.rounds), [cells[row["cell"]]])
        if parsed.problems:
            yield f"a row of run {run['run_id']} cannot be read again: {parsed.problems[0]}"
            return
        measurements = to_json(parsed.results[0].measurements)
        if bench.rounds > 1:  # only the row of the last round is kept
            measurements = [{**one, "discarded": cold[row["cell"], one["metric"]]} for one in measurements]
        results.append({"cell": row["cell"], "measurements": measurements})
    if set(map(itemgetter(*SAMPLE), samples)) != set(samples_of(run["run_id"], results)):
        yield f"the samples of run {run['run_id']} are not what the tool's rows give"
