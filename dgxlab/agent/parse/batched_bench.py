"""`llama-batched-bench --output-format jsonl`: speed with many sequences at once, one sample a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dgxlab.agent.parse.lines import json_rows
from dgxlab.agent.parse.parsed import Parsed, Row, agree, equal, match_rows, number, positive, speed
from dgxlab.model import Cell, CellResult, Measurement

TOOL = "llama-batched-bench"


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Read speed_pp, speed_tg and speed (t/s) of each cell, one sample each and a discarded one.

    The plan asks for all rows twice: those of the first half are cold. It asks for the last row once more, because the
    tool's logger can lose what was printed just before it exits; that spare row may be there or not. With any other
    number of rows nothing is read: a row that does not fit the context is left out with status 0.

    Args:
        stdout: As printed; lines that do not start with `{` are ignored.
        cells: With params pp, tg, pl.
    """
    rows, problems = json_rows(stdout, TOOL)
    if len(rows) == 2 * len(cells) + 1 and _same_sizes(rows[-2:]) and rows.pop() is None:
        problems.pop()  # half a spare row is as good as none
    if len(rows) != 2 * len(cells):
        wanted = f"{2 * len(cells)}: {len(cells)} twice, to throw the first half away"
        return Parsed(problems=(*problems, f"{TOOL} printed {len(rows)} rows, not {wanted}"))
    half = len(cells)
    cold, warm = ([Row(row, row) for row in part if row is not None] for part in (rows[:half], rows[half:]))
    first = match_rows(cells, cold, _read)
    return _with_cold(match_rows(cells, warm, _read, (*problems, *first.problems)), first)


def _with_cold(warm: Parsed, cold: Parsed) -> Parsed:
    """Put what a cell's first call reached beside what counts; a cell needs both."""
    before = {result.cell: result for result in cold.results}
    results = []
    for result in warm.results:
        if result.cell in before:
            pairs = zip(result.measurements, before[result.cell].measurements, strict=True)
            both = tuple(replace(counted, discarded=first.samples) for counted, first in pairs)
            results.append(replace(result, measurements=both))
    return Parsed(tuple(results), warm.problems)


def _same_sizes(rows: Sequence[Mapping[str, Any] | None]) -> bool:
    """Tell whether the whole ones of some rows are of one size."""
    sizes = [[row.get(name) for name in ("pp", "tg", "pl")] for row in rows if row is not None]
    return all(size == sizes[0] for size in sizes)


def _read(cell: Cell, row: Row) -> CellResult:
    # The times are whole microseconds as printed, so they carry the measured value; the speeds are rounded from them.
    pl = number(row, "pl")
    shared = not equal("is_pp_shared", 0, row.printed.get("is_pp_shared", 0))
    prompt, generated = number(row, "pp") * (1 if shared else pl), number(row, "tg") * pl
    speeds = (("speed_pp", "t_pp", prompt), ("speed_tg", "t_tg", generated), ("speed", "t", prompt + generated))
    measurements = []
    for metric, time, tokens in speeds:
        value = agree(metric, speed(tokens, positive(row, time)), positive(row, metric))
        measurements.append(Measurement(cell.key, metric, "t/s", (value,)))
    return CellResult(cell.key, tuple(measurements), row.printed)
