"""Tables out of evidence: gates, operations by shape, single stream, concurrency."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgxlab import units
from dgxlab.errors import command
from dgxlab.model import CHANGED, Cell, DerivedModel, Model, Param, SyntheticModel, gpu_backends
from dgxlab.report.ask import ArmAsk, CellAsk, label, op_params
from dgxlab.report.checks import TITLE, check_row, used_columns
from dgxlab.report.conditions import range_of
from dgxlab.report.evidence import Evidence, Measured
from dgxlab.report.numbers import Mean, Quantity, Value
from dgxlab.report.records import Column, Flag, Provenance, Table

UNSTEADY = 0.05
"""Of its median: a cell whose MAD is larger says so."""

Lead = Callable[[CellAsk], dict[str, Value]]


@dataclass(frozen=True)
class Form:
    """How the cells of one tool become rows.

    Attributes:
        name: Table.form.
        lead: The columns that tell rows apart, from a cell.
        order: What rows are sorted by; the order of a matrix is lost where its spec was kept as JSON.
        hidden: Parameters that `lead` or the title says already.
        metrics: In the order of the columns.
    """

    name: str
    lead: Lead
    order: Callable[[CellAsk], Sequence[Value]]
    hidden: frozenset[str]
    metrics: tuple[str, ...]


STREAM = ("n_prompt", "n_gen", "n_depth")
"""What makes a llama-bench test's name."""


def _op_lead(ask: CellAsk) -> dict[str, Value]:
    return {**op_params(ask.cell)}


def _stream_lead(ask: CellAsk) -> dict[str, Value]:
    return {"model": ask.model, "test": stream_test(ask.cell.params)}


def _concurrency_lead(ask: CellAsk) -> dict[str, Value]:
    params = ask.cell.params
    return {"PP": params.get("pp"), "TG": params.get("tg"), "B": params.get("pl")}


def _stream_order(ask: CellAsk) -> tuple[Value, ...]:
    params = ask.cell.params
    return (ask.model, not params.get("n_prompt"), *(params.get(key, 0) for key in STREAM))


OPS = Form(
    "ops",
    _op_lead,
    lambda ask: tuple(_op_lead(ask).values()),
    frozenset({"op_name", "backend_name"}),
    ("time_us", "flops", "bandwidth_gb_s"),
)
SINGLE_STREAM = Form("single-stream", _stream_lead, _stream_order, frozenset({*STREAM, "repetitions"}), ("avg_ts",))
CONCURRENCY = Form(
    "concurrency",
    _concurrency_lead,
    lambda ask: tuple(_concurrency_lead(ask).values()),
    frozenset({"pp", "tg", "pl"}),
    ("speed_pp", "speed_tg", "speed"),
)


def tables(name: str, arm: ArmAsk, evidence: Evidence) -> tuple[Table, ...]:
    """Return every table that an arm has something for; `name` is the experiment that it belongs to."""
    found = [_gates(name, arm, evidence)] if arm.gates else []
    found += [_checks(name, arm, evidence)] if arm.checks else []
    by_tool = {tool: [m for m in evidence.measured if m.ask.cell.tool == tool] for tool in FORMS}
    for tool, (form, title) in FORMS.items():
        for heading, cells in _grouped(by_tool[tool], title).items():
            found.append(_measured_table(form, heading, cells, provenance(name, arm, evidence, cells)))
    return tuple(found)


def provenance(name: str, arm: ArmAsk, evidence: Evidence, cells: Sequence[Measured]) -> Provenance:
    """Return where cells come from; all have one build and host, see `evidence`."""
    models = {cell.ask.model for cell in cells if synthetic(arm.models.get(cell.ask.model))}
    origin = origin_of(name, arm, evidence, (str(cell.run["job_id"]) for cell in cells), tuple(sorted(models)))
    return replace(origin, backend=backend_of(arm.arm.cmake, [cell.ask.cell for cell in cells]))


def backend_of(cmake: Mapping[str, str], cells: Iterable[Cell]) -> str:
    """Say what computed cells; without any, what a build computes on.

    With no layer on it a GPU still multiplies long prompts, whose weights it fetches.
    """
    built = " and ".join(gpu_backends(cmake)) or "CPU"
    both = built if built == "CPU" else f"CPU and {built}"
    found = {
        str(cell.params["backend_name"]).rstrip("0123456789")
        if cell.tool == "backend-ops"
        else (both if {**cell.params, **cell.fixed}.get("n_gpu_layers") == 0 else built)
        for cell in cells
    }
    return ", ".join(sorted(found)) or built


def stream_test(params: Mapping[str, Param]) -> str:
    """Name a llama-bench test as llama-bench does: `pp512`, `tg128`, `pp512+tg128`, `tg128 @ d4096`."""
    parts = [f"{word}{params[key]}" for word, key in (("pp", "n_prompt"), ("tg", "n_gen")) if params.get(key)]
    depth = f" @ d{params['n_depth']}" if params.get("n_depth") else ""
    return "+".join(parts) + depth


# -- gates ------------------------------------------------------------------------------------------------------------

GATE_COLUMNS = (
    Column("op", "op"),
    Column("backend", "backend"),
    Column("count", "passed/total", numeric=True),
    Column("unsupported", "unsupported", numeric=True),
    Column("expected", "expected", numeric=True),
    Column("status", "status"),
    Column("flaky", "flaky cases"),
)


def _gates(name: str, arm: ArmAsk, evidence: Evidence) -> Table:
    found = [evidence.gates.get(ask.digest) for ask in arm.gates]
    rows = [gate_row(ask.gate.op, ask.gate.backend, row) for ask, row in zip(arm.gates, found, strict=True)]
    columns = list(GATE_COLUMNS)
    if any(row.get("env") for row in rows):
        columns.insert(2, Column("env", "env"))
    jobs = (str(row["job_id"]) for row in found if row is not None)
    backends = ", ".join(sorted({ask.gate.backend.rstrip("0123456789") for ask in arm.gates}))
    origin = replace(origin_of(name, arm, evidence, jobs), backend=backends)
    return Table("gates", "Gates", tuple(columns), tuple(rows), origin)


def _checks(name: str, arm: ArmAsk, evidence: Evidence) -> Table:
    found = [evidence.checks.get(ask.digest) for ask in arm.checks]
    rows = [check_row(ask.gate, ask.env, row) for ask, row in zip(arm.checks, found, strict=True)]
    jobs = (str(row["job_id"]) for row in found if row is not None)
    models = tuple(sorted({ask.gate.model for ask in arm.checks if synthetic(arm.models.get(ask.gate.model))}))
    return Table("gates", TITLE, used_columns(rows), tuple(rows), origin_of(name, arm, evidence, jobs, models))


def synthetic(model: Model | None) -> bool:
    """Tell whether a model was made from a recipe."""
    return isinstance(model, (SyntheticModel, DerivedModel))


def standing(gate: Mapping[str, Any]) -> str:
    """Return the status of a gate, given its row, and whether the command line said what it must reach."""
    return f"{gate['status']}{CHANGED if gate['overridden'] else ''}"


def gate_row(op: str, backend: str, gate: Mapping[str, Any] | None) -> dict[str, Value]:
    """A gate that was not run has a row too: it says so, and everything else is missing."""
    row: dict[str, Value] = {"op": op, "backend": backend, "status": "not run"}
    if gate is None:
        return row
    counts = [units.MISSING if gate[key] is None else str(gate[key]) for key in ("passed", "total")]
    expected = gate["expected"]
    if expected is None and gate["recorded_by"] == gate["job_id"]:
        expected = f"{gate['total']}, recorded here"
    return {
        **row,
        "env": env_text(json.loads(gate["env"])),
        "count": "/".join(counts),
        "passed": gate["passed"],
        "total": gate["total"],
        "unsupported": gate["unsupported"],
        "expected": expected,
        "status": standing(gate),
        "flaky": ", ".join(json.loads(gate["flaky"])),
    }


# -- measured cells ---------------------------------------------------------------------------------------------------


def _measured_table(form: Form, title: str, found: Sequence[Measured], origin: Provenance) -> Table:
    cells = sorted(found, key=lambda cell: rank(form, cell.ask))
    leads = [form.lead(cell.ask) for cell in cells]
    others = [others_of(form, cell.ask) for cell in cells]
    varying = varying_of(others)
    metrics = [metric for metric in form.metrics if any(metric in cell.quantities for cell in cells)]
    rows = []
    for cell, lead, other in zip(cells, leads, others, strict=True):
        extra = {key: other.get(key) for key in varying}
        rows.append({**lead, **extra, **{m: cell.quantities.get(m) for m in metrics}})
    columns = leading(rows, [*_keys(leads), *varying])
    columns += [Column(metric, units.metric(metric).label, metric) for metric in metrics]
    settings = {key: value for key, value in others[0].items() if key not in varying}
    told = (*flags(cells), *unsteady(cells, origin))
    return Table(form.name, title, tuple(columns), tuple(rows), origin, settings, conditions(cells), told)


def conditions(cells: Sequence[Measured]) -> dict[str, tuple[float, float]]:
    """Return `Table.conditions` of these cells."""
    return range_of(cell.conditions for cell in cells)


def flags(cells: Sequence[Measured]) -> tuple[Flag, ...]:
    """Return what speaks against the runs of these cells, the hard ones first."""
    found: dict[tuple[bool, str], list[str]] = {}
    for cell in cells:
        for flag in cell.flags:
            found.setdefault((bool(flag["hard"]), flag["reason"]), []).append(label(cell.ask.cell))
    made = [Flag(_whose(labels, cells), hard, reason) for (hard, reason), labels in found.items()]
    return tuple(sorted(made, key=lambda flag: not flag.hard))


def unsteady(cells: Sequence[Measured], origin: Provenance) -> tuple[Flag, ...]:
    """Return which of these cells of one origin have a spread that leaves their number uncertain."""
    noises = [(label(cell.ask.cell), max(map(_noise, cell.quantities.values()))) for cell in cells]
    wild = [(name, noise) for name, noise in noises if noise > UNSTEADY]
    if not wild:
        return ()
    host = origin.host.partition(" (")[0]
    again = command("dgxlab", "run", origin.experiment, *(("--host", host) if host != "local" else ()), "--again")
    most = 100 * max(noise for _, noise in wild)
    reason = f"the MAD is above {100 * UNSTEADY:g} % of the median, {most:.0f} % at most; {again} measures it again"
    return (Flag(_whose([name for name, _ in wild], cells), False, reason),)


def _noise(quantity: Quantity | Mean) -> float:
    return (quantity.spread or 0.0) / quantity.middle


def _whose(labels: Sequence[str], cells: Sequence[Measured]) -> tuple[str, ...]:
    return () if len(labels) == len(cells) else tuple(labels)


def rank(form: Form, ask: CellAsk) -> list[tuple[int, float, str]]:
    """Return what rows are sorted by: the form's order, then whatever else tells them apart."""
    return _sortable((*form.order(ask), *others_of(form, ask).values()))


def of_arms(name: str, baseline: Value, candidate: Value) -> str:
    """Say how a setting differs between two arms: `baseline GGML_CUDA_W4A16=0, candidate unset`."""
    sides = {"baseline": baseline, "candidate": candidate}
    return ", ".join(f"{arm} {'unset' if value is None else f'{name}={value}'}" for arm, value in sides.items())


def varying_of(others: Sequence[Mapping[str, object]]) -> list[str]:
    """Return what of `others_of` differs between rows, and so needs a column."""
    return [key for key in _keys(others) if len({repr(other.get(key)) for other in others}) > 1]


def leading(rows: Sequence[Mapping[str, Value]], keys: Iterable[str]) -> list[Column]:
    """Return the columns that tell rows apart."""
    return [Column(key, key, numeric=_numeric(rows, key)) for key in keys]


def others_of(form: Form, ask: CellAsk) -> dict[str, Value]:
    """Return what shapes a number and has no leading column: further parameters, fixed settings, environment."""
    lead = form.lead(ask)
    every = {**ask.cell.params, **ask.cell.fixed, "env": env_text(ask.env)}
    return {k: v for k, v in every.items() if k not in form.hidden and k not in lead and v != ""}


def _grouped(cells: Sequence[Measured], title: Callable[[CellAsk], str]) -> dict[str, list[Measured]]:
    groups: dict[str, list[Measured]] = {}
    for cell in cells:
        groups.setdefault(title(cell.ask), []).append(cell)
    return groups


def _keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _sortable(values: Iterable[Value]) -> list[tuple[int, float, str]]:
    """Sort numbers by size and before texts."""
    return [(0, float(v), "") if isinstance(v, (int, float)) else (1, 0.0, str(v)) for v in values]


def _numeric(rows: Sequence[Mapping[str, Value]], key: str) -> bool:
    values = [row[key] for row in rows if row.get(key) is not None]
    return bool(values) and all(isinstance(v, (int, float, Quantity)) and not isinstance(v, bool) for v in values)


def env_text(env: Mapping[str, str]) -> str:
    """Write an environment as a shell would take it."""
    return " ".join(f"{name}={value}" for name, value in sorted(env.items()))


def origin_of(
    name: str, arm: ArmAsk, evidence: Evidence, jobs: Iterable[str], synthetic: tuple[str, ...] = ()
) -> Provenance:
    """Return where what these jobs measured for an arm comes from."""
    source = arm.arm.source
    return Provenance(
        experiment=name,
        sessions=tuple(sorted(set(jobs))),
        pin=source.pin,
        series=source.series,
        tree=source.tree,
        build_id=evidence.build_id,
        host=evidence.host,
        dirty=source.dirty,
        synthetic=synthetic,
        device=evidence.device,
        backend=backend_of(arm.arm.cmake, ()),
    )


FORMS: Mapping[str, tuple[Form, Callable[[CellAsk], str]]] = {
    "backend-ops": (OPS, lambda ask: f"{ask.cell.params.get('op_name')} on {ask.cell.params.get('backend_name')}"),
    "llama-bench": (SINGLE_STREAM, lambda ask: "Single stream"),
    "batched-bench": (CONCURRENCY, lambda ask: f"Concurrency: {ask.model}"),
}
"""By tool: its form, and the title under which a cell's row stands."""
