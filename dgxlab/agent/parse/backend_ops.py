"""`test-backend-ops perf --output sql`: kernel times, one INSERT a case."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dgxlab.agent.parse.parsed import Parsed, Row, RowError, equal, match_rows, number, positive
from dgxlab.model import Cell, CellResult, Measurement

# The statements are read, never executed: values are quoted, but a quote inside a value is not escaped.
INSERT = "INSERT INTO test_backend_ops ("
STATEMENT = re.compile(r"([a-z0-9_, ]+)\) VALUES \('(.*)'\);\s*")
PARAM = re.compile(r"(?:^|,)(\w+)=(\[[^\]]*\]|[^,]*)")

OPTIONAL = (("flops", "FLOPS"), ("bandwidth_gb_s", "GiB/s"))
"""A case has one of the two; the other is printed as 0 and means that there is none."""


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Read time_us (us), flops (FLOPS) and bandwidth_gb_s (GiB/s) of each cell, one sample each.

    Args:
        stdout: As printed; diagnostics may stand before a statement on its line.
        cells: With params op_name, backend_name and any of the case's own, e.g. type_a, m, n, k.
    """
    rows: list[Row] = []
    problems: list[str] = []
    before, *statements = stdout.split(INSERT)
    line = before.count("\n") + 1
    for statement in statements:
        printed = columns(statement.partition("\n")[0])
        if printed:
            rows.append(Row(printed, {**case_params(printed.get("op_params", "")), **printed}))
        else:
            problems.append(f"line {line} of test-backend-ops's output is a broken row")
        line += statement.count("\n")
    return match_rows(cells, rows, _read, problems)


def case_params(op_params: str) -> dict[str, str]:
    """Split `type_a=q4_0,m=16,bs=[1,1]` at the commas outside brackets; a word without `=` says nothing."""
    return dict(PARAM.findall(op_params))


def columns(statement: str) -> dict[str, str] | None:
    """Return the columns of a statement, given from its list of names on; None where it is not whole."""
    match = STATEMENT.fullmatch(statement)
    if not match:
        return None
    names, values = match[1].split(", "), match[2].split("', '")
    if len(names) != len(values) or len(set(names)) != len(names):
        return None
    return dict(zip(names, values, strict=True))


def _read(cell: Cell, row: Row) -> CellResult:
    if not equal("supported", 1, row.printed.get("supported", "1")):
        raise RowError(f"{row.printed.get('backend_name', 'the backend')} does not support it")
    if not equal("passed", 1, row.printed.get("passed", "1")):
        raise RowError(f"it did not pass ({row.printed.get('error_message') or 'no reason given'})")
    values = [("time_us", "us", positive(row, "time_us"))]
    for column, unit in OPTIONAL:
        value = number(row, column) if column in row.printed else 0.0
        if value < 0:
            raise RowError(f"{column} is {value:g}, below 0")
        values += [(column, unit, value)] if value > 0 else []
    measurements = tuple(Measurement(cell.key, metric, unit, (value,)) for metric, unit, value in values)
    return CellResult(cell.key, measurements, row.printed)
