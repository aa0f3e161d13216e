"""`llama-bench -o jsonl`: prompt and generation speed, a row a test with every repetition's time."""

from __future__ import annotations

from collections.abc import Sequence

from dgxlab.agent.parse.lines import json_rows
from dgxlab.agent.parse.parsed import Parsed, Row, RowError, agree, finite, match_rows, number, speed
from dgxlab.model import Cell, CellResult, Measurement


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Read avg_ts (t/s) of each cell: a sample a repetition, the first of them discarded because it is cold.

    Args:
        stdout: As printed; lines that do not start with `{` are ignored.
        cells: With params by llama-bench's column names and fixed["repetitions"], the counted ones.
    """
    rows, problems = json_rows(stdout, "llama-bench")
    return match_rows(cells, [Row(row, row) for row in rows if row is not None], _read, problems)


def _read(cell: Cell, row: Row) -> CellResult:
    # From samples_ns: samples_ts has six digits, avg_ts counts the cold repetition, stddev_ns overflows.
    tokens = number(row, "n_prompt") + number(row, "n_gen")
    times = _samples(cell, row, "samples_ns")
    speeds = [speed(tokens, ns / 1e9) for ns in times]
    if "samples_ts" in row.printed:
        printed = _samples(cell, row, "samples_ts")
        speeds = [agree("a sample in samples_ts", value, said) for value, said in zip(speeds, printed, strict=True)]
    measurement = Measurement(cell.key, "avg_ts", "t/s", tuple(speeds[1:]), tuple(speeds[:1]))
    return CellResult(cell.key, (measurement,), row.printed)


def _samples(cell: Cell, row: Row, column: str) -> list[float]:
    samples = row.printed.get(column)
    if not isinstance(samples, list):
        raise RowError(f"its row has no {column}")
    counted = finite(cell.fixed.get("repetitions"), "the number of repetitions")
    if counted < 1 or len(samples) != counted + 1:
        raise RowError(f"it has {len(samples)} samples, not {counted:g} and a first one to throw away")
    return [finite(sample, f"a sample in {column}") for sample in samples]
