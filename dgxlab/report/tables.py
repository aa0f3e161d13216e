"""Tables from the evidence on one arm: gates, operations by shape, single stream, concurrency."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
from dgxlab.report.ask import CellAsk, GateAsk, label, op_params
from dgxlab.report.evidence import Evidence, Measured, machine, range_of
from dgxlab.report.records import Column, Flag, Number, Provenance, Row, Table, Value, columns
from dgxlab.tools import BENCHES, BY_FORM

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

UNSTEADY = 0.05
"""A cell whose MAD is a larger share of its median gets a flag."""

STREAM = ("n_prompt", "n_gen", "n_depth")
"""Parameters that name a test of one stream."""


@dataclass(frozen=True)
class Form:
    """How the cells of one tool become rows."""

    name: str
    title: Callable[[CellAsk], str]  # of a cell's table
    lead: Callable[[CellAsk], Row]  # the columns that distinguish rows
    order: Callable[[CellAsk], Sequence[Value]]  # sort key of rows
    hidden: tuple[str, ...]  # parameters that `lead` or the title already shows
    metrics: tuple[str, ...]


def _concurrency_lead(ask: CellAsk) -> Row:
    return {name: ask.cell.params.get(key) for name, key in (("PP", "pp"), ("TG", "tg"), ("B", "pl"))}


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
    lambda ask: (ask.model, not ask.cell.params.get("n_prompt"), *(ask.cell.params.get(key, 0) for key in STREAM)),
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
FORMS: Mapping[str, Form] = {BY_FORM[form.name]: form for form in (OPS, SINGLE_STREAM, CONCURRENCY)}
"""By tool."""


def tables(evidence: Evidence) -> list[Table]:
    """Return every table for which an arm has evidence."""
    groups: dict[tuple[str, str], list[Measured]] = {}
    for tool, form in FORMS.items():
        for cell in evidence.measured:
            if cell.ask.cell.tool == tool:
                groups.setdefault((tool, form.title(cell.ask)), []).append(cell)
    measured = [_measured_table(FORMS[tool], title, cells, evidence) for (tool, title), cells in groups.items()]
    return [*gate_tables(evidence), *measured]


def stream_test(params: Mapping[str, Param]) -> str:
    """Return llama-bench's name of a test of one stream: `pp512`, `tg128`, `pp512+tg128`, `tg128 @ d4096`."""
    parts = [f"{word}{params[key]}" for word, key in (("pp", "n_prompt"), ("tg", "n_gen")) if params.get(key)]
    depth = f" @ d{params['n_depth']}" if params.get("n_depth") else ""
    return "+".join(parts) + depth


def origin(
    arm: Arm,
    sessions: Iterable[str],
    build_id: str | None,
    host: str,
    device: Device | None,
    *,
    cells: Iterable[Cell] = (),
    synthetic: Iterable[str] = (),
) -> Provenance:
    """Return the provenance of an arm's results.

    Args:
        cells: Measured cells, for the backend; without cells, the build's backend.
        synthetic: Names of their synthetic models.
    """
    source = arm.source
    built = " and ".join(gpu_backends(arm.cmake)) or "CPU"
    # with -ngl 0 a GPU still multiplies long prompts, and fetches the weights
    both = built if built == "CPU" else f"CPU and {built}"
    backends = set()
    for cell in cells:
        if BENCHES[cell.tool].one_device:
            backends.add(_kind(str(cell.params["backend_name"])))
        else:
            backends.add(both if {**cell.params, **cell.fixed}.get("n_gpu_layers") == 0 else built)
    return Provenance(
        arm.name,
        tuple(sorted(set(sessions))),
        source.pin,
        source.series,
        source.tree,
        build_id,
        host,
        source.dirty,
        tuple(sorted(set(synthetic))),
        device,
        ", ".join(sorted(backends)) or built,
    )


def origin_of_job(
    store: Store, job: Job, arm: Arm, *, cells: Iterable[Cell] = (), synthetic: Iterable[str] = ()
) -> Provenance:
    """Return the provenance of an arm's results in one session; without a build the id is None."""
    built = store.rows("SELECT build_id FROM arms WHERE job_id = ? AND arm = ?", (job.job_id, arm.name))
    build, device = built[0]["build_id"] if built else None, store.devices(job.job_id).get(arm.name)
    return origin(arm, [job.job_id], build, machine(job, device), device, cells=cells, synthetic=synthetic)


def provenance(evidence: Evidence, cells: Sequence[Measured]) -> Provenance:
    """Return the provenance of cells of one build and host."""
    jobs = [str(cell.run["job_id"]) for cell in cells]
    return _of_evidence(evidence, jobs, [cell.ask.model for cell in cells], [cell.ask.cell for cell in cells])


def _of_evidence(
    evidence: Evidence, jobs: Iterable[str], models: Iterable[str], cells: Sequence[Cell] = ()
) -> Provenance:
    recipes = [model for model in models if synthetic(evidence.ask.models.get(model))]
    build, host, device = evidence.build_id, evidence.host, evidence.device
    return origin(evidence.ask.arm, jobs, build, host, device, cells=cells, synthetic=recipes)


def synthetic(model: Model | None) -> bool:
    """Return whether a model is synthetic."""
    return isinstance(model, (SyntheticModel, DerivedModel))


def _kind(backend: str) -> str:
    """Return a backend's kind: CUDA for CUDA0."""
    return backend.rstrip("0123456789")


MODEL_GATES = "Gates on models and kernels"

PARITY_COLUMNS = columns(
    "op backend env count unsupported expected status flaky",
    "count unsupported expected",
    count="passed/total",
    flaky="flaky cases",
)
CHECK_COLUMNS = columns("gate env against sizes found asked status", sizes="tokens", asked="must hold")


def gate_tables(evidence: Evidence) -> list[Table]:
    """Return the tables of the gates that an arm has."""
    results = []
    for title, asks, rows in gate_rows([(ask, evidence.gates.get(ask.digest)) for ask in evidence.ask.gates]):
        jobs = [row["job_id"] for ask in asks if (row := evidence.gates.get(ask.digest))]
        models = [ask.gate.model for ask in asks if not isinstance(ask.gate, ParityGate)]
        source = _of_evidence(evidence, jobs, models)
        if backends := {_kind(ask.gate.backend) for ask in asks if isinstance(ask.gate, ParityGate)}:
            source = replace(source, backend=", ".join(sorted(backends)))
        results.append(Table("gates", title, gate_columns(rows), tuple(rows), source))
    return results


def gate_rows(
    gates: Sequence[tuple[GateAsk, Mapping[str, Any] | None]], leads: Sequence[Row] = ()
) -> list[tuple[str, list[GateAsk], list[Row]]]:
    """Return title, gates and rows of parity gates and of other gates, without empty groups.

    Args:
        gates: Each with its row of the record, None where it was not run.
        leads: Leading values of each row.
    """
    results: dict[str, tuple[str, list[GateAsk], list[Row]]] = {
        "parity": ("Gates", [], []),
        "check": (MODEL_GATES, [], []),
    }
    for (ask, row), lead in zip(gates, leads or [{}] * len(gates), strict=True):
        if isinstance(ask.gate, ParityGate):
            kind, shown = "parity", _parity_row(ask.gate, row)
        else:
            kind, shown = "check", _check_row(ask.gate, ask.env, row)
        results[kind][1].append(ask)
        results[kind][2].append({**lead, **shown})
    return [table for table in results.values() if table[1]]


def gate_columns(rows: Sequence[Row]) -> tuple[Column, ...]:
    """Return the columns of gates; optional columns such as environments only if some row has a value."""
    if "op" in rows[0]:
        return tuple(each for each in PARITY_COLUMNS if each.key != "env" or any(row.get("env") for row in rows))
    return tuple(column for column in CHECK_COLUMNS if any(row.get(column.key) for row in rows))


def status_of(gate: Mapping[str, Any]) -> str:
    """Return the status of a gate, given its row, with a mark if the command line changed its limits."""
    return f"{gate['status']}{CHANGED if gate['overridden'] else ''}"


def _parity_row(asked: ParityGate, gate: Mapping[str, Any] | None) -> Row:
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


def _check_row(gate: Check, env: Mapping[str, str], row: Mapping[str, Any] | None) -> Row:
    readings = json.loads(row["readings"]) if row else {}
    sizes = {name: getattr(gate, name, None) for name in ("n_prompt", "n_gen", "n_ctx", "chunks", "n_ubatch")}
    return {
        "gate": about(gate),
        "env": env_text(env),
        "against": env_text(gate.against),
        "sizes": ", ".join(f"{name} {size}" for name, size in sizes.items() if size is not None),
        "found": "; ".join(gate.shown(readings)),
        "asked": "; ".join(limits(gate)),
        "status": row["status"] if row else "not run",
        **{f"{role}_{name}": value for role, told in readings.items() for name, value in told.items()},
    }


def env_text(env: Mapping[str, str | None]) -> str:
    """Return variables in shell syntax; an unset variable has a minus before it."""
    return " ".join(f"-{name}" if value is None else f"{name}={value}" for name, value in sorted(env.items()))


def _measured_table(form: Form, title: str, cells: Sequence[Measured], evidence: Evidence) -> Table:
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
    return Table(
        form.name,
        title,
        tuple(shown),
        tuple(rows),
        provenance(evidence, cells),
        settings,
        range_of(cell.conditions for cell in cells),
        flags(evidence, cells),
    )


def flags(evidence: Evidence, cells: Sequence[Measured]) -> tuple[Flag, ...]:
    """Return the flags of the runs of these cells, the hard ones first, and which cells are unsteady."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for cell in cells:
        for flag in cell.flags:
            groups.setdefault((bool(flag["hard"]), flag["reason"]), []).append(label(cell.ask.cell))
    groups = dict(sorted(groups.items(), key=lambda group: not group[0][0]))
    noises = [max((each.spread or 0.0) / each.middle for each in cell.quantities.values()) for cell in cells]
    if (most := max(noises, default=0.0)) > UNSTEADY:
        host = ("--host", evidence.ask.host) if evidence.ask.host != "local" else ()
        again = command("dgxlab", "run", evidence.experiment, *host, "--again")
        limit = f"{100 * UNSTEADY:g} % of the median, {100 * most:.0f} % at most"
        wild = [label(cell.ask.cell) for cell, noise in zip(cells, noises, strict=True) if noise > UNSTEADY]
        groups[False, f"the MAD is above {limit}; {again} measures it again"] = wild
    return tuple(
        Flag(() if len(labels) == len(cells) else tuple(labels), hard, reason)
        for (hard, reason), labels in groups.items()
    )


def rank(form: Form, ask: CellAsk) -> list[tuple[int, float, str]]:
    """Return the sort key of rows: the form's order, then the other settings; numbers before texts."""
    values = (*form.order(ask), *others_of(form, ask).values())
    return [(0, float(v), "") if isinstance(v, (int, float)) else (1, 0.0, str(v)) for v in values]


def in_rank(form: Form, cells: Iterable[Measured]) -> list[Measured]:
    """Return cells in the order of their rows."""
    return sorted(cells, key=lambda cell: rank(form, cell.ask))


def others_of(form: Form, ask: CellAsk) -> dict[str, Value]:
    """Return a number's settings without a leading column: further parameters, fixed settings, environment."""
    lead = form.lead(ask)
    every = {**ask.cell.params, **ask.cell.fixed, "env": env_text(ask.env)}
    return {k: v for k, v in every.items() if k not in form.hidden and k not in lead and v != ""}


def varying_of(others: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the keys of `others_of` that differ between rows and so need a column."""
    return [key for key in _keys(others) if len({repr(other.get(key)) for other in others}) > 1]


def leading(rows: Sequence[Row], keys: Iterable[str]) -> list[Column]:
    """Return the leading columns, which distinguish rows."""
    leads = []
    for key in keys:
        values = [row[key] for row in rows if row.get(key) is not None]
        numbers = [isinstance(v, (int, float, Number)) and not isinstance(v, bool) for v in values]
        leads.append(Column(key, key, numeric=bool(values) and all(numbers)))
    return leads


def of_arms(name: str, baseline: Value, candidate: Value) -> str:
    """Return a setting's values in both arms: `baseline GGML_CUDA_W4A16=0, candidate unset`."""
    sides = {"baseline": baseline, "candidate": candidate}
    return ", ".join(f"{arm} {'unset' if value is None else f'{name}={value}'}" for arm, value in sides.items())


def _keys(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))
