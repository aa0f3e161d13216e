"""Tables out of evidence: gates, operations by shape, single stream, concurrency."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dgxlab import units
from dgxlab.errors import command
from dgxlab.model import (
    CHANGED,
    Arm,
    Cell,
    Check,
    DerivedModel,
    Device,
    Model,
    Param,
    ParityGate,
    SyntheticModel,
    about,
    gpu_backends,
    limits,
)
from dgxlab.report.ask import ArmAsk, CellAsk, label, op_params
from dgxlab.report.evidence import Evidence, Measured, range_of
from dgxlab.report.records import Column, Flag, Number, Provenance, Table, Value, columns
from dgxlab.tools import shown

Values = Mapping[str, Value]

UNSTEADY = 0.05
"""A cell whose MAD is a larger share of its median gets a flag."""

STREAM = ("n_prompt", "n_gen", "n_depth")
"""What makes a llama-bench test's name."""


@dataclass(frozen=True)
class Form:
    """How the cells of one tool become rows.

    Attributes:
        name: Table.form.
        title: Of the table that a cell belongs into.
        lead: The columns that tell rows apart, from a cell.
        order: What rows are sorted by; the order of a matrix is lost where its spec was kept as JSON.
        hidden: Parameters that `lead` or the title says already.
        metrics: In the order of the columns.
    """

    name: str
    title: Callable[[CellAsk], str]
    lead: Callable[[CellAsk], Values]
    order: Callable[[CellAsk], Sequence[Value]]
    hidden: tuple[str, ...]
    metrics: tuple[str, ...]


def _concurrency_lead(ask: CellAsk) -> Values:
    return {name: ask.cell.params.get(key) for name, key in (("PP", "pp"), ("TG", "tg"), ("B", "pl"))}


def _stream_order(ask: CellAsk) -> tuple[Value, ...]:
    params = ask.cell.params
    return (ask.model, not params.get("n_prompt"), *(params.get(key, 0) for key in STREAM))


OPS = Form(
    "ops",
    lambda ask: f"{ask.cell.params.get('op_name')} on {ask.cell.params.get('backend_name')}",
    lambda ask: {**op_params(ask.cell)},
    lambda ask: tuple(op_params(ask.cell).values()),
    ("op_name", "backend_name"),
    ("time_us", "flops", "bandwidth_gb_s"),
)
SINGLE_STREAM = Form(
    "single-stream",
    lambda ask: "Single stream",
    lambda ask: {"model": ask.model, "test": stream_test(ask.cell.params)},
    _stream_order,
    (*STREAM, "repetitions"),
    ("avg_ts",),
)
CONCURRENCY = Form(
    "concurrency",
    lambda ask: f"Concurrency: {ask.model}",
    _concurrency_lead,
    lambda ask: tuple(_concurrency_lead(ask).values()),
    ("pp", "tg", "pl"),
    ("speed_pp", "speed_tg", "speed"),
)
FORMS: Mapping[str, Form] = {"backend-ops": OPS, "llama-bench": SINGLE_STREAM, "batched-bench": CONCURRENCY}
"""By tool."""


def tables(name: str, arm: ArmAsk, evidence: Evidence) -> list[Table]:
    """Return every table that an arm has something for; `name` is the experiment that it belongs to."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for tool, form in FORMS.items():
        for cell in evidence.measured:
            if cell.ask.cell.tool == tool:
                groups.setdefault((tool, form.title(cell.ask)), []).append(cell)
    return [
        *gate_tables(name, arm, evidence),
        *(
            _measured_table(FORMS[tool], title, cells, provenance(name, arm, evidence, cells), evidence.host_name)
            for (tool, title), cells in groups.items()
        ),
    ]


def stream_test(params: Mapping[str, Param]) -> str:
    """Name a llama-bench test as llama-bench does: `pp512`, `tg128`, `pp512+tg128`, `tg128 @ d4096`."""
    parts = [f"{word}{params[key]}" for word, key in (("pp", "n_prompt"), ("tg", "n_gen")) if params.get(key)]
    depth = f" @ d{params['n_depth']}" if params.get("n_depth") else ""
    return "+".join(parts) + depth


# -- provenance -------------------------------------------------------------------------------------------------------


def origin(
    arm: Arm,
    sessions: Iterable[str],
    build_id: str | None,
    host: str,
    device: Device | None,
    *,
    name: str = "",
    cells: Iterable[Cell] = (),
    synthetic: Iterable[str] = (),
) -> Provenance:
    """Return where what an arm measured comes from.

    Args:
        sessions: That measured it, in any order.
        name: Of the experiment, where it is not the arm's.
        cells: That were measured; without any the backend is what the build computes on.
        synthetic: Which models of theirs were made from a recipe.
    """
    source = arm.source
    return Provenance(
        name or arm.name,
        tuple(sorted(set(sessions))),
        source.pin,
        source.series,
        source.tree,
        build_id,
        host,
        source.dirty,
        tuple(sorted(set(synthetic))),
        device,
        _backend_of(arm.cmake, cells),
    )


def provenance(name: str, arm: ArmAsk, evidence: Evidence, cells: Sequence[Measured]) -> Provenance:
    """Return where cells come from; all have one build and host, see `evidence`."""
    jobs = (str(cell.run["job_id"]) for cell in cells)
    models = (cell.ask.model for cell in cells)
    return _of_evidence(name, arm, evidence, jobs, models, [cell.ask.cell for cell in cells])


def _of_evidence(
    name: str,
    arm: ArmAsk,
    evidence: Evidence,
    jobs: Iterable[str],
    models: Iterable[str] = (),
    cells: Sequence[Cell] = (),
) -> Provenance:
    made = [model for model in models if synthetic(arm.models.get(model))]
    build, host, device = evidence.build_id, evidence.host, evidence.device
    return origin(arm.arm, jobs, build, host, device, name=name, cells=cells, synthetic=made)


def synthetic(model: Model | None) -> bool:
    """Tell whether a model was made from a recipe."""
    return isinstance(model, (SyntheticModel, DerivedModel))


def _backend_of(cmake: Mapping[str, str], cells: Iterable[Cell]) -> str:
    """Say what computed cells.

    With no layer on it a GPU still multiplies long prompts, whose weights it fetches.
    """
    built = " and ".join(gpu_backends(cmake)) or "CPU"
    both = built if built == "CPU" else f"CPU and {built}"
    backends = {
        _kind(str(cell.params["backend_name"]))
        if cell.tool == "backend-ops"
        else (both if {**cell.params, **cell.fixed}.get("n_gpu_layers") == 0 else built)
        for cell in cells
    }
    return ", ".join(sorted(backends)) or built


def _kind(backend: str) -> str:
    """Return what a backend is one of: CUDA of CUDA0."""
    return backend.rstrip("0123456789")


# -- gates ------------------------------------------------------------------------------------------------------------

MODEL_GATES = "Gates on models and kernels"

PARITY_COLUMNS = columns(
    "op backend env count unsupported expected status flaky",
    "count unsupported expected",
    count="passed/total",
    flaky="flaky cases",
)
CHECK_COLUMNS = columns("gate env against sizes found asked status", sizes="tokens", asked="must hold")


def gate_tables(name: str, arm: ArmAsk, evidence: Evidence) -> list[Table]:
    """Return the tables of the gates that an arm has."""
    made = []
    if asks := arm.parity:
        rows = [parity_row(ask.gate, evidence.gates.get(ask.digest)) for ask in asks]
        backends = ", ".join(sorted({_kind(ask.gate.backend) for ask in asks}))
        jobs = [row["job_id"] for ask in asks if (row := evidence.gates.get(ask.digest))]
        source = replace(_of_evidence(name, arm, evidence, jobs), backend=backends)
        made.append(Table("gates", "Gates", parity_columns(rows), tuple(rows), source))
    if checks := arm.checks:
        rows = [check_row(ask.gate, ask.env, evidence.gates.get(ask.digest)) for ask in checks]
        jobs = [row["job_id"] for ask in checks if (row := evidence.gates.get(ask.digest))]
        source = _of_evidence(name, arm, evidence, jobs, (ask.gate.model for ask in checks))
        made.append(Table("gates", MODEL_GATES, check_columns(rows), tuple(rows), source))
    return made


def parity_columns(rows: Iterable[Values]) -> tuple[Column, ...]:
    """Return the columns of parity gates; that of environments only where there are some."""
    envs = any(row.get("env") for row in rows)
    return tuple(column for column in PARITY_COLUMNS if column.key != "env" or envs)


def check_columns(rows: Iterable[Values]) -> tuple[Column, ...]:
    """Return the columns of other gates that say something in some row."""
    rows = list(rows)
    return tuple(column for column in CHECK_COLUMNS if any(row.get(column.key) for row in rows))


def status_of(gate: Mapping[str, Any]) -> str:
    """Return the status of a gate, given its row, and whether the command line said what it must reach."""
    return f"{gate['status']}{CHANGED if gate['overridden'] else ''}"


def parity_row(asked: ParityGate, gate: Mapping[str, Any] | None) -> dict[str, Value]:
    """Return a gate's row; one that was not run has one too, and everything else is missing in it."""
    row: dict[str, Value] = {"op": asked.op, "backend": asked.backend, "status": "not run"}
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
        "status": status_of(gate),
        "flaky": ", ".join(json.loads(gate["flaky"])),
    }


def check_row(gate: Check, env: Mapping[str, str], row: Mapping[str, Any] | None) -> dict[str, Value]:
    """Return the row of a gate on a model; one that was not run has one too."""
    readings = json.loads(row["readings"]) if row else {}
    sizes = {name: getattr(gate, name, None) for name in ("n_prompt", "n_gen", "n_ctx", "chunks", "n_ubatch")}
    return {
        "gate": about(gate),
        "env": env_text(env),
        "against": env_text(gate.against),
        "sizes": ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None),
        "found": "; ".join(shown(gate, readings)),
        "asked": "; ".join(limits(gate)),
        "status": row["status"] if row else "not run",
        **{f"{role}_{name}": value for role, told in readings.items() for name, value in told.items()},
    }


def env_text(env: Mapping[str, str | None]) -> str:
    """Write variables as a shell would take them, one that is not set with a minus before it."""
    return " ".join(f"-{name}" if value is None else f"{name}={value}" for name, value in sorted(env.items()))


# -- measured cells ---------------------------------------------------------------------------------------------------


def _measured_table(form: Form, title: str, cells: Sequence[Measured], source: Provenance, host: str) -> Table:
    cells = in_rank(form, cells)
    leads = [form.lead(cell.ask) for cell in cells]
    others = [others_of(form, cell.ask) for cell in cells]
    varying = varying_of(others)
    metrics = [metric for metric in form.metrics if any(metric in cell.quantities for cell in cells)]
    rows = [
        {**lead, **{key: other.get(key) for key in varying}, **{m: cell.quantities.get(m) for m in metrics}}
        for cell, lead, other in zip(cells, leads, others, strict=True)
    ]
    shown = leading(rows, [*_keys(leads), *varying])
    shown += [Column(metric, units.metric(metric).label, metric) for metric in metrics]
    settings = {key: value for key, value in others[0].items() if key not in varying}
    told = flags(cells, source.experiment, host)
    return Table(form.name, title, tuple(shown), tuple(rows), source, settings, conditions(cells), told)


def conditions(cells: Iterable[Measured]) -> dict[str, tuple[float, float]]:
    """Return `Table.conditions` of these cells."""
    return range_of(cell.conditions for cell in cells)


def flags(cells: Sequence[Measured], experiment: str, host: str) -> tuple[Flag, ...]:
    """Return the flags of the runs of these cells, the hard ones first, and which cells are unsteady.

    Args:
        experiment: That measured all of them.
        host: Where, in the user's words.
    """
    groups: dict[tuple[bool, str], list[str]] = {}
    for cell in cells:
        for flag in cell.flags:
            groups.setdefault((bool(flag["hard"]), flag["reason"]), []).append(label(cell.ask.cell))
    noises = [(label(cell.ask.cell), max(map(_noise, cell.quantities.values()))) for cell in cells]
    wild = [(name, noise) for name, noise in noises if noise > UNSTEADY]
    hard_first = sorted(groups.items(), key=lambda group: not group[0][0])
    if wild:
        again = command("dgxlab", "run", experiment, *(("--host", host) if host != "local" else ()), "--again")
        most = 100 * max(noise for _, noise in wild)
        reason = f"the MAD is above {100 * UNSTEADY:g} % of the median, {most:.0f} % at most; {again} measures it again"
        hard_first.append(((False, reason), [name for name, _ in wild]))
    return tuple(
        Flag(() if len(labels) == len(cells) else tuple(labels), hard, reason) for (hard, reason), labels in hard_first
    )


def _noise(quantity: Number) -> float:
    return (quantity.spread or 0.0) / quantity.middle


def rank(form: Form, ask: CellAsk) -> list[tuple[int, float, str]]:
    """Return what rows are sorted by: the form's order, then whatever else tells them apart; numbers before texts."""
    values = (*form.order(ask), *others_of(form, ask).values())
    return [(0, float(v), "") if isinstance(v, (int, float)) else (1, 0.0, str(v)) for v in values]


def in_rank(form: Form, cells: Iterable[Measured]) -> list[Measured]:
    """Return cells in the order of their rows."""
    return sorted(cells, key=lambda cell: rank(form, cell.ask))


def others_of(form: Form, ask: CellAsk) -> dict[str, Value]:
    """Return what shapes a number and has no leading column: further parameters, fixed settings, environment."""
    lead = form.lead(ask)
    every = {**ask.cell.params, **ask.cell.fixed, "env": env_text(ask.env)}
    return {k: v for k, v in every.items() if k not in form.hidden and k not in lead and v != ""}


def varying_of(others: Sequence[Mapping[str, object]]) -> list[str]:
    """Return what of `others_of` differs between rows, and so needs a column."""
    return [key for key in _keys(others) if len({repr(other.get(key)) for other in others}) > 1]


def leading(rows: Sequence[Values], keys: Iterable[str]) -> list[Column]:
    """Return the columns that tell rows apart."""
    leads = []
    for key in keys:
        values = [row[key] for row in rows if row.get(key) is not None]
        numbers = [isinstance(v, (int, float, Number)) and not isinstance(v, bool) for v in values]
        leads.append(Column(key, key, numeric=bool(values) and all(numbers)))
    return leads


def of_arms(name: str, baseline: Value, candidate: Value) -> str:
    """Say how a setting differs between two arms: `baseline GGML_CUDA_W4A16=0, candidate unset`."""
    sides = {"baseline": baseline, "candidate": candidate}
    return ", ".join(f"{arm} {'unset' if value is None else f'{name}={value}'}" for arm, value in sides.items())


def _keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))
