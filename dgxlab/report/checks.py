"""Gates beside test-backend-ops as rows of a table, and in words where they failed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dgxlab.model import Check, about, check_from_json, limits
from dgxlab.report.numbers import Value
from dgxlab.report.records import Column, Failure
from dgxlab.tools import shown

TITLE = "Gates on models and kernels"

CHECK_COLUMNS = (
    Column("gate", "gate"),
    Column("env", "env"),
    Column("against", "against"),
    Column("sizes", "tokens"),
    Column("found", "found"),
    Column("asked", "must hold"),
    Column("status", "status"),
)


def gate_of(row: Mapping[str, Any]) -> Check:
    """Return the gate that a row of the record is about."""
    return check_from_json(json.loads(row["gate"]))


def check_row(gate: Check, env: Mapping[str, str], row: Mapping[str, Any] | None) -> dict[str, Value]:
    """Return a gate's row; one that was not run has one too, and it says so."""
    readings = json.loads(row["readings"]) if row else {}
    return {
        "gate": about(gate),
        "env": _text(env),
        "against": _text(gate.against),
        "sizes": _sizes(gate),
        "found": "; ".join(shown(gate, readings)),
        "asked": "; ".join(limits(gate)),
        "status": row["status"] if row else "not run",
        **{f"{role}_{name}": value for role, said in readings.items() for name, value in said.items()},
    }


def used_columns(rows: Iterable[Mapping[str, Value]]) -> tuple[Column, ...]:
    """Return the columns that say something in some row."""
    rows = list(rows)
    return tuple(column for column in CHECK_COLUMNS if any(row.get(column.key) for row in rows))


def failed_check(gate: Check, row: Mapping[str, Any], whose: str = "", *, again: bool = False) -> Failure:
    """Say why a gate failed, given its row; the arguments are those of `failures.failed_gate`."""
    return Failure(row["job_id"], f"gate {about(gate)}{whose}", "failed", "; ".join(json.loads(row["reasons"])), again)


def _sizes(gate: Check) -> str:
    sizes = {name: getattr(gate, name, None) for name in ("n_prompt", "n_gen", "n_ctx", "chunks", "n_ubatch")}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)


def _text(env: Mapping[str, str | None]) -> str:
    """Write variables as a shell would take them, one that is not set with a minus before it."""
    return " ".join(f"-{name}" if value is None else f"{name}={value}" for name, value in sorted(env.items()))
