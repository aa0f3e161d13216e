"""test-backend-ops perf: kernel times of built-in cases. Its gate is in `parity`, its files in `backend_ops_files`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgxlab.model import BackendOpsBench, Cell, CellResult, Measurement, Param
from dgxlab.tools.backend_ops_files import FORMATS, OPTIONAL, TABLE
from dgxlab.tools.parity import PROGRAM
from dgxlab.tools.reading import statement_columns
from dgxlab.tools.rows import Parsed, PrintedRow, Refused, case_params, equal, match_rows, number, positive
from dgxlab.tools.tool import Benchmark, Keep, Key, Launch, Samples, Tool, excluded, settings, text_of

KEYS = {
    "op": Key("Op", "The operation, as MUL_MAT."),
    "backend": Key("Name", "The backend by its exact name, as CUDA0 or CPU."),
    "where": Key(
        "Annotated[dict[Column, Many[Param]], Field(min_length=1)]",
        "Parameters of the cases by test-backend-ops' names; lists expand to a matrix.",
    ),
}

ALTERNATIVES = 200
"""Up to this many cells a selection that is no full product is spelled out; above, more shapes run than asked."""

# The statements are read, never executed.
INSERT = f"INSERT INTO {TABLE} ("


# -- launches ---------------------------------------------------------------------------------------------------------


def launches(entry: BackendOpsBench, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
    """Yield one launch for all cells."""
    cells = []
    for case in settings(entry.where):
        if not excluded(case, entry.exclude):
            label = f"{entry.op} " + " ".join(f"{k}={v}" for k, v in case.items())
            params = {"op_name": entry.op, "backend_name": entry.backend, **case}
            cells.append((case, Cell("backend-ops", label, params)))
    if not cells:
        return
    left = [(case, cell) for case, cell in cells if keep("", cell)]
    # an ECMAScript regex; lookaheads, because the order of the parameters in the tool's text is the test case's own
    axes = {k: list(dict.fromkeys(case[k] for case, _ in left)) for k in entry.where}
    if math.prod(map(len, axes.values())) == len(left) or len(left) > ALTERNATIVES:
        regex = "^" + "".join(_lookahead(k, values) for k, values in axes.items())
    else:
        each = ("".join(_lookahead(k, [v]) for k, v in case.items()) for case, _ in left)
        regex = f"^({'|'.join(each)})"
    argv = (f"{{bin}}/{PROGRAM}", "perf", "-o", entry.op, "-b", entry.backend, "-p", regex, "--output", "sql")
    yield Launch("backend-ops", tuple(cell for _, cell in left), argv, "", env, entry.limit_s)


def _lookahead(key: str, values: Sequence[Param]) -> str:
    name, *texts = (
        "".join(f"\\{c}" if c in r".^$|()[]{}*+?\/" else c for c in text_of(text)) for text in (key, *values)
    )
    return f"(?=(.*,)?{name}=({'|'.join(texts)})(,|$))"


# -- the output of a launch -------------------------------------------------------------------------------------------


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Read time_us (us), flops (FLOPS) and bandwidth_gb_s (GiB/s) of each cell, one sample each.

    Args:
        stdout: As printed; a diagnostic may precede a statement on its line.
        cells: With params op_name, backend_name and any of the case's own, e.g. type_a, m, n, k.
    """
    rows: list[PrintedRow] = []
    problems: list[str] = []
    before, *statements = stdout.split(INSERT)
    line = before.count("\n") + 1
    for statement in statements:
        printed = statement_columns(statement.partition("\n")[0])
        if printed:
            rows.append(PrintedRow(printed, {**case_params(printed.get("op_params", "")), **printed}))
        else:
            problems.append(f"line {line} of test-backend-ops's output is a broken row")
        line += statement.count("\n")
    return match_rows(cells, rows, _read, problems)


def _read(cell: Cell, row: PrintedRow) -> CellResult:
    if not equal("supported", 1, row.printed.get("supported", "1")):
        raise Refused(f"{row.printed.get('backend_name', 'the backend')} does not support it")
    if not equal("passed", 1, row.printed.get("passed", "1")):
        raise Refused(f"it did not pass ({row.printed.get('error_message') or 'no reason given'})")
    values = [("time_us", "us", positive(row, "time_us"))]
    for column, unit in OPTIONAL:
        amount = number(row, column) if column in row.printed else 0.0
        if amount < 0:
            raise Refused(f"{column} is {amount:g}, below 0")
        values += [(column, unit, amount)] if amount > 0 else []
    measurements = tuple(Measurement(cell.key, metric, unit, (amount,)) for metric, unit, amount in values)
    return CellResult(cell.key, measurements, row.printed)


def printed(raw: str) -> str:
    """Return the statement that printed a recorded row."""
    columns = json.loads(raw)
    values = "', '".join(columns.values())
    return f"{INSERT}{', '.join(columns)}) VALUES ('{values}');"


def exported(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
    """Return a row with numbers for texts, and 0 for a metric that the case does not have, as the tool prints it."""
    row = dict(raw)
    for name in {"supported", "passed", "memory_kb", "n_runs"} & raw.keys():
        row[name] = int(raw[name])
    for name in {"time_us", "flops", "bandwidth_gb_s"} & raw.keys():
        values = samples.get(name) or [0.0]
        row[name] = math.fsum(values) / len(values)
    return row


TOOL = Tool(
    PROGRAM,
    bench=Benchmark(
        "backend-ops",
        "test-backend-ops perf on the built-in shapes that where selects.",
        BackendOpsBench,
        KEYS,
        launches,
        parse,
        compared={"time_us": ""},
        exported=exported,
        printed=printed,
        one_device=True,
    ),
    formats=FORMATS,
)
