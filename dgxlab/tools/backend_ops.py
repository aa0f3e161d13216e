"""test-backend-ops perf: kernel times of built-in cases.

Its gate is in `parity`, the import of its output in `ops_files`.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from dgxlab.model import Cell, CellResult, Measurement, Param
from dgxlab.tools import reading
from dgxlab.tools.ops_files import OPTIONAL, console, failure, is_set, measured, rows_of_columns
from dgxlab.tools.parity import PROGRAM, selecting
from dgxlab.tools.reading import Format
from dgxlab.tools.rows import Columns, Parsed, Refused, case_params, match_rows
from dgxlab.tools.tool import Benchmark, Keep, Launch, Samples, Tool, excluded, key, settings

_ALTERNATIVES = 200
"""Up to this many cells, a selection that is not a full product is listed; above, extra shapes run too."""

TABLE = "test_backend_ops"
INSERT = f"INSERT INTO {TABLE} ("  # the statements are read, never executed


# -- the output of a launch -------------------------------------------------------------------------------------------


def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
    """Parse time_us (us) of each cell, and its flops (FLOPS) or bandwidth_gb_s (GiB/s), one sample each."""
    rows: list[Columns] = []
    problems: list[str] = []
    before, *statements = stdout.split(INSERT)
    line = before.count("\n") + 1
    for statement in statements:
        if row := reading.statement_columns(statement.partition("\n")[0]):
            rows.append(row)
        else:
            problems.append(f"line {line} of test-backend-ops's output is a broken row")
        line += statement.count("\n")
    return match_rows(cells, rows, _read, problems, lambda row: {**case_params(row.get("op_params", "")), **row})


def _read(cell: Cell, row: Columns) -> CellResult:
    if not is_set(row, "supported"):
        raise Refused(f"{row.get('backend_name', 'the backend')} does not support it")
    if why := failure(row):
        raise Refused(why)
    values = measured(row, OPTIONAL)
    return CellResult(cell.key, tuple(Measurement(cell.key, v.metric, v.unit, v.values) for v in values), row)


def printed(raw: str) -> str:
    """Return a recorded row, given as JSON, as the SQL statement that the program printed."""
    columns = json.loads(raw)
    values = "', '".join(columns.values())
    return f"{INSERT}{', '.join(columns)}) VALUES ('{values}');"


def exported(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
    """Return a recorded row with numbers in place of texts and the means of `samples`.

    A metric that the case does not have is 0, as the program prints it.
    """
    row = dict(raw)
    for name in {"supported", "passed", "memory_kb", "n_runs"} & raw.keys():
        row[name] = int(raw[name])
    for name in {"time_us", "flops", "bandwidth_gb_s"} & raw.keys():
        values = samples.get(name) or [0.0]
        row[name] = math.fsum(values) / len(values)
    return row


# -- launches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BackendOpsBench(Benchmark):
    """test-backend-ops perf on the built-in shapes that `where` selects."""

    name = "backend-ops"
    compared: ClassVar = {"time_us": ""}
    one_device = True
    form = "ops"
    parse = staticmethod(parse)
    exported = staticmethod(exported)
    printed = staticmethod(printed)

    op: str = key("Op", "The operation, as MUL_MAT.")
    backend: str = key("Name", "The backend by its exact name, as CUDA0 or CPU.")
    where: Mapping[str, tuple[Param, ...]] = key(
        "Annotated[dict[Column, Many[Param]], Field(min_length=1)]",
        "Parameters of the cases by test-backend-ops' names; lists expand to a matrix.",
    )
    _: KW_ONLY
    limit_s: float = 600.0

    def launches(self, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
        """Yield the one launch of all cells that `keep` selects."""
        cells = []
        for case in settings(self.where):
            if not excluded(case, self.exclude):
                label = f"{self.op} " + " ".join(f"{k}={v}" for k, v in case.items())
                params = {"op_name": self.op, "backend_name": self.backend, **case}
                cells.append((case, Cell(self.name, label, params)))
        if not cells:
            return
        left = [(case, cell) for case, cell in cells if keep("", cell)]
        axes = {k: list(dict.fromkeys(case[k] for case, _ in left)) for k in self.where}
        if math.prod(map(len, axes.values())) == len(left) or len(left) > _ALTERNATIVES:
            regex = f"^{selecting(axes)}"
        else:
            regex = f"^({'|'.join(selecting({k: [v] for k, v in case.items()}) for case, _ in left)})"
        argv = (f"{{bin}}/{PROGRAM}", "perf", "-o", self.op, "-b", self.backend, "-p", regex, "--output", "sql")
        yield Launch(self.name, tuple(cell for _, cell in left), argv, "", env, self.limit_s)


TOOL = Tool(
    PROGRAM,
    bench=BackendOpsBench,
    formats={
        "console": Format(console, "", r"^Backend \d+/\d+: |us/run - | tests passed$"),
        "sql": Format(
            rows_of_columns,
            TABLE,
            r"INSERT INTO test_backend_ops |CREATE TABLE .*test_backend_ops",
            rows=lambda text: reading.sql(text, TABLE),
            texts=(
                *("build_commit", "test_time", "backend_name", "op_name", "op_params", "test_mode", "error_message"),
                *("device_description", "backend_reg_name"),
            ),
        ),
        # as `dgxlab export` writes it: the same columns, and where each row comes from
        "jsonl": Format(
            rows_of_columns, '"op_name"', r'^\{(?=.*"op_name"\s*:)(?=.*"test_mode"\s*:)', rows=reading.json_lines
        ),
    },
)
