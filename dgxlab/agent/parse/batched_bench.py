"""`llama-batched-bench --output-format jsonl`: speed with many sequences at once, one sample a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dgxlab.agent.parse.lines import json_rows
from dgxlab.agent.parse.parsed import Parsed, Row, agree, equal, match_rows, number, positive, speed
from dgxlab.model import Cell, CellResult, Measurement

TOOL = "llama-batched-bench"


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Read speed_pp, speed_tg and speed (t/s) of each cell, one sample each.

    The first row is the cold one: it must be there and belongs to no cell. The plan asks for the last row once more,
    because the tool's logger can lose what was printed just before it exits; that spare row may be there or not. With
    any other number of rows nothing is read: a row that does not fit the context is left out with status 0.

    Args:
        stdout: As printed; lines that do not start with `{` are ignored.
        cells: With params pp, tg, pl.
    """
    rows, problems = json_rows(stdout, TOOL)
    if len(rows) == len(cells) + 2 and _same_sizes(rows[-2:]) and rows.pop() is None:
        problems.pop()  # half a spare row is as good as none
    if len(rows) != len(cells) + 1:
        wanted = f"{len(cells) + 1}: {len(cells)} and a first one to throw away"
        return Parsed(problems=(*problems, f"{TOOL} printed {len(rows)} rows, not {wanted}"))
    return match_rows(cells, [Row(row, row) for row in rows[1:] if row is not None], _read, problems)


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
