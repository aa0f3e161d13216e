"""Tables of one arm: gates, operations by shape, single stream, concurrency, servers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from dgxlab import roofline, units
from dgxlab.errors import command
from dgxlab.judgement.names import CellAsk, assigned, keys_of, varying_of
from dgxlab.model import CHANGED, Cell, Check, LaunchedGate, ParityGate, SyntheticModel, about, gpu_backends, root_of
from dgxlab.model.events import COPY
from dgxlab.report.ask import AskedGate, label, op_params
from dgxlab.report.evidence import Evidence, Measured, doubts, engaged_rows
from dgxlab.report.records import Column, Number, Provenance, Row, ShownFlag, Table, Value, columns, grouped, labels_of
from dgxlab.report.runs import range_of
from dgxlab.tools import BENCHES, BY_FORM
from dgxlab.tools.llama_bench import name_of_test

if TYPE_CHECKING:
    from dgxlab.model.parts import Contents

_Setting = TypeVar("_Setting")

UNSTEADY = 0.05  # a cell whose MAD is a larger share of its median gets a flag
STREAM = ("n_prompt", "n_gen", "n_depth")  # parameters that a test's name has, as `pp512` or `tg128 @ d4096`


@dataclass(frozen=True)
class Form:
    """How the cells of one tool become rows: leading columns name the cell, then settings that vary, then metrics."""

    name: str
    title: Callable[[CellAsk], str]  # of a cell's table
    lead: Callable[[CellAsk], Row]  # the columns that distinguish rows
    order: Callable[[CellAsk], Sequence[Value]]  # sort key of rows
    hidden: tuple[str, ...]  # parameters that `lead` or the title already shows
    metrics: tuple[str, ...]


OPS = Form(
    "ops",
    lambda ask: f"{ask.cell.params.get('op_name')} on {ask.cell.params.get('backend_name')}",
    lambda ask: {**op_params(ask.cell.params)},
    lambda ask: tuple(op_params(ask.cell.params).values()),
    ("op_name", "backend_name"),
    ("time_us", "flops", "bandwidth_gb_s"),
)
SINGLE_STREAM = Form(
    "single-stream",
    lambda ask: "Single stream",
    lambda ask: {"model": ask.model, "test": name_of_test(ask.cell.params)},
    lambda ask: (ask.model, not ask.cell.params.get("n_prompt"), *(ask.cell.params.get(key, 0) for key in STREAM)),
    (*STREAM, "repetitions"),
    ("avg_ts",),
)
CONCURRENCY = Form(
    "concurrency",
    lambda ask: f"Concurrency: {ask.model}",
    lambda ask: {name: ask.cell.params.get(key) for name, key in (("PP", "pp"), ("TG", "tg"), ("B", "pl"))},
    lambda ask: tuple(ask.cell.params.get(key) for key in ("pp", "tg", "pl")),
    ("pp", "tg", "pl"),
    ("speed_pp", "speed_tg", "speed"),
)
SERVING = replace(
    CONCURRENCY,
    lead=lambda ask: {
        **{name: ask.cell.params.get(key) for name, key in (("PP", "pp"), ("TG", "tg"))},
        **({"requests/s": ask.cell.params["rate"]} if "rate" in ask.cell.params else {"B": ask.cell.params["pl"]}),
    },
    order=lambda ask: tuple(ask.cell.params.get(key, 0) for key in ("pp", "tg", "rate", "pl")),
    name="serving",
    title=lambda ask: f"Serving{', arrivals at random times' * ('rate' in ask.cell.params)}: {ask.model}",
    hidden=(*CONCURRENCY.hidden, "rate", "repetitions"),
    metrics=(
        *("speed_tg", "host_gap_ms", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p99_ms"),
        *("speed_pp", "speed_out"),
    ),
)
FORMS: Mapping[str, Form] = {BY_FORM[form.name]: form for form in (OPS, SINGLE_STREAM, CONCURRENCY, SERVING)}
"""By tool, its form."""


def tables(evidence: Evidence) -> list[Table]:
    """Return the tables of an arm: the gates that it should have passed, then what was measured."""
    evidence = with_host_gap(evidence)
    groups = grouped(
        ((tool, form.title(cell.ask)), cell)
        for tool, form in FORMS.items()
        for cell in evidence.measured
        if cell.ask.cell.tool == tool
    )
    measured = [_measured_table(FORMS[tool], title, cells, evidence) for (tool, title), cells in groups.items()]
    return [*gate_tables(evidence), *measured]


def with_host_gap(evidence: Evidence) -> Evidence:
    """Add to servers' cells how much longer a step is than llama-batched-bench's of the same arm, model and sizes."""

    def size(ask: CellAsk) -> tuple[Value, ...]:
        return (ask.model, *CONCURRENCY.order(ask))

    steps = grouped(
        (size(cell.ask), cell) for cell in evidence.measured if FORMS.get(cell.ask.cell.tool) is CONCURRENCY
    )
    measured = []
    for cell in evidence.measured:
        beside = steps.get(size(cell.ask), []) if FORMS.get(cell.ask.cell.tool) is SERVING else []
        speeds = [each.quantities["speed_tg"].middle for each in (cell, *beside) if "speed_tg" in each.quantities]
        if len(speeds) == 2:
            own, other = (1e3 * float(cell.ask.cell.params["pl"]) / speed for speed in speeds)
            gap = Number("host_gap_ms", "ms", None, value=own - other)
            cell = replace(cell, quantities={**cell.quantities, "host_gap_ms": gap})  # noqa: PLW2901
        measured.append(cell)
    return replace(evidence, measured=tuple(measured))


def provenance(
    evidence: Evidence, jobs: Iterable[str], models: Iterable[str] = (), cells: Iterable[Cell] = ()
) -> Provenance:
    """Return where the results come from that an arm's `jobs` measured with these models.

    `cells` decide the backend; without them, it is the build's.
    """
    source, cmake, jobs = evidence.ask.arm.source, evidence.ask.arm.cmake, sorted(set(jobs))
    asked = {name: evidence.ask.models[name] for name in models if name in evidence.ask.models}
    recipes = [name for name, model in asked.items() if isinstance(root_of(model), SyntheticModel)]
    texts = {name: contents_text(text) for name, text in evidence.contents.items() if name in asked}
    built = " and ".join(gpu_backends(cmake)) or "CPU"
    # with -ngl 0 a GPU still multiplies long prompts, and fetches the weights
    both = built if built == "CPU" else f"CPU and {built}"
    backends = set()
    for cell in cells:
        if BENCHES[cell.tool].one_device:
            backends.add(_kind(str(cell.params["backend_name"])))
        else:
            backends.add(both if {**cell.params, **cell.fixed}.get("n_gpu_layers") == 0 else built)
    return Provenance(
        evidence.experiment,
        tuple(jobs),
        source.pin,
        source.series,
        source.tree,
        evidence.build_id,
        " and ".join(dict.fromkeys(evidence.hosts[job] for job in jobs)) or evidence.host,
        source.dirty,
        tuple(sorted(recipes)),
        evidence.device,
        ", ".join(sorted(backends)) or built,
        tuple(sorted(f"{name}: {text}" for name, text in texts.items() if text)),
    )


def contents_text(contents: str) -> str:
    """Return a model's architecture, size and type in words, given `inputs.contents`; "" for a file without tensors."""
    model: Contents = json.loads(contents)
    if not (count := model["parameters"]):
        return ""
    size = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
    again = ", quantised twice: not for quality" if model["requantised"] else ""
    return f"{model['architecture']}, {size} weights, {model['type']}, {model['bits']:.2f} bits a weight{again}"


def fidelity_text(contents: str) -> Iterator[str]:
    """Yield for each class of a model's tensors how near its weights are to their source, given `inputs.contents`."""
    model: Contents = json.loads(contents)
    for name, each in sorted(model["fidelity"].items()):
        if each["nmse"] is None:
            yield f"{name} {each['types']} no SQNR"
        else:
            near = "exact" if each["sqnr_db"] is None else f"SQNR {each['sqnr_db']:.1f} dB (NMSE {each['nmse']:.2g})"
            yield f"{name} {each['types']} {near} over {each['sampled']:,} of {each['weights']:,} weights"


def origin_of(evidence: Evidence, cells: Sequence[Measured]) -> Provenance:
    """Return where the results of these cells of an arm come from."""
    asks, jobs = [cell.ask for cell in cells], [cell.run["job_id"] for cell in cells]
    return provenance(evidence, jobs, [ask.model for ask in asks], [ask.cell for ask in asks])


def _kind(backend: str) -> str:
    return backend.rstrip("0123456789")  # CUDA for CUDA0


MODEL_GATES = "Gates on models and kernels"

PARITY_COLUMNS = columns(
    "op backend env engaged count unsupported expected status flaky",
    "count unsupported expected",
    engaged="must hold",
    count="passed/total",
    flaky="flaky cases",
)
CHECK_COLUMNS = columns("gate env against sizes found asked status", sizes="tokens", asked="must hold")


def gate_tables(evidence: Evidence) -> list[Table]:
    """Return the tables of the gates that an arm should have passed."""
    gates = [(gate, evidence.gates.get(digest)) for digest, gate in evidence.ask.gates.items()]
    ran = {run["tool"]: run["job_id"] for run in evidence.runs}
    results = []
    for title, asked, shown, rows in gate_rows(gates, engaged=engaged_rows(evidence.ask, evidence.runs)):
        jobs = [row["job_id"] for (gate, _), row in gates if row and gate in asked]
        jobs += [ran[tool] for tool in evidence.ask.markers if tool in ran and title == MODEL_GATES]
        source = provenance(evidence, jobs, [gate.model for gate in asked if not isinstance(gate, ParityGate)])
        if backends := {_kind(gate.backend) for gate in asked if isinstance(gate, ParityGate)}:
            source = replace(source, backend=", ".join(sorted(backends)))
        results.append(Table("gates", title, shown, tuple(rows), source))
    return results


def gate_rows(
    gates: Sequence[tuple[AskedGate, Mapping[str, Any] | None]], leads: Sequence[Row] = (), engaged: Sequence[Row] = ()
) -> Iterator[tuple[str, list[LaunchedGate], tuple[Column, ...], list[Row]]]:
    """Yield title, gates, columns and rows of up to two tables: parity gates; all others, those `engaged` too.

    Each gate has its row in the record, None if it was not run, and in `leads` the first values of its row here.
    """
    parity: list[tuple[LaunchedGate | None, Row]] = []
    checks: list[tuple[LaunchedGate | None, Row]] = [(None, row) for row in engaged]
    for ((gate, env), row), lead in zip(gates, leads or [{}] * len(gates), strict=True):
        if isinstance(gate, ParityGate):
            parity.append((gate, {**_parity_row(gate, env, row), **lead}))
        else:
            checks.append((gate, {**_check_row(gate, env, row), **lead}))
    for title, every, shown in (("Gates", PARITY_COLUMNS, parity), (MODEL_GATES, CHECK_COLUMNS, checks)):
        rows = [row for _, row in shown]
        # optional columns such as environments only if some row has a value
        optional = ("env", "engaged", "flaky") if every is PARITY_COLUMNS else [column.key for column in every]
        kept = [each for each in every if each.key not in optional or any(row.get(each.key) for row in rows)]
        if rows:
            yield title, [gate for gate, _ in shown if gate], tuple(kept), rows


def status_of(gate: Mapping[str, Any]) -> str:
    """Return the status of a gate, given its row in the record, with a mark if the command line changed its limits."""
    return f"{gate['status']}{CHANGED if gate['overridden'] else ''}"


def _parity_row(asked: ParityGate, env: Mapping[str, str], gate: Mapping[str, Any] | None) -> Row:
    row: dict[str, Value] = {"op": asked.what, "backend": asked.backend, "env": env_text(env), "status": "not run"}
    if asked.engaged:
        verb = "was" if gate and gate["status"] in ("passed", "flaky") else "must be"
        row["engaged"] = f"{asked.engaged!r} {verb} on stderr"
    if gate is None:
        return row
    counts = [units.MISSING if gate[key] is None else str(gate[key]) for key in ("passed", "total")]
    expected = gate["expected"]
    if expected is None and gate["recorded_by"] == gate["job_id"]:
        expected = f"{gate['total']}, recorded here"
    return {
        **row,
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
        "asked": "; ".join(gate.limits()),
        "status": row["status"] if row else "not run",
        **{f"{role}_{name}": value for role, values in readings.items() for name, value in values.items()},
    }


def env_text(env: Mapping[str, str | None]) -> str:
    """Return environment variables in shell syntax: `A=1 B="" -C`; a minus marks a variable that is unset."""
    return " ".join(f"-{name}" if value is None else assigned(name, value) for name, value in sorted(env.items()))


def _measured_table(form: Form, title: str, cells: Sequence[Measured], evidence: Evidence) -> Table:
    cells = sorted(cells, key=lambda cell: sort_key(form, cell.ask))
    leads = [form.lead(cell.ask) for cell in cells]
    others = [settings_of(form, cell.ask) for cell in cells]
    varying = varying_of(others)
    metrics = [metric for metric in form.metrics if any(metric in cell.quantities for cell in cells)]
    rows = [
        {**lead, **{key: other.get(key) for key in varying}, **{m: cell.quantities.get(m) for m in metrics}}
        for cell, lead, other in zip(cells, leads, others, strict=True)
    ]
    shown = leading(rows, [*keys_of(leads), *varying])
    shown += [Column(metric, units.metric(metric).label, metric) for metric in metrics]
    if form is SINGLE_STREAM and any(shares := [ceiling_share(evidence, cell) for cell in cells]):
        shown.append(Column("of_ceiling", CEILING, numeric=True))
        rows = [{**row, "of_ceiling": share} for row, share in zip(rows, shares, strict=True)]
    source, conditions = origin_of(evidence, cells), range_of(cell.conditions for cell in cells)
    about = (source, common(others), conditions, flags(evidence, cells))
    notes = doubts({"": replace(evidence, measured=tuple(cells))})
    return Table(form.name, title, tuple(shown), tuple(rows), *about, notes=notes)


CEILING = "% of ceiling"  # label of a column: the speed of generation as a share of what the memory bandwidth allows


def ceiling_share(evidence: Evidence, cell: Measured) -> str | None:
    """Return the measured tokens a second in percent of the ceiling, as text: `68.1`.

    The ceiling is the bandwidth that was measured with a copy before the session, else the documented one, divided by
    the bytes of weights that a token reads. None for prompts, or if one of both is unknown.
    """
    params = {**cell.ask.cell.params, **cell.ask.cell.fixed}
    peaks = roofline.together(evidence.device.names) if evidence.device else None
    per_token = json.loads(cell.run["contents"] or "{}").get("per_token")
    if params.get("n_prompt") or params.get("n_gpu_layers") == 0 or not (peaks and per_token):
        return None
    slowest, _ = cell.conditions.get(COPY, (0.0, 0.0))
    bandwidth = slowest * 1e9 * len(evidence.device.names) if evidence.device and slowest else peaks.bandwidth
    return f"{100 * cell.quantities['avg_ts'].middle * per_token / bandwidth:.1f}"


def flags(evidence: Evidence, cells: Sequence[Measured]) -> tuple[ShownFlag, ...]:
    """Return the flags of the runs of these cells, the hard ones first, and a flag on unsteady cells."""
    groups = grouped(((bool(flag["hard"]), flag["reason"]), cell) for cell in cells for flag in cell.flags)
    spreads = [[each.spread / each.middle for each in cell.quantities.values() if each.spread] for cell in cells]
    noises = [max(of_cell, default=0.0) for of_cell in spreads]
    if (most := max(noises, default=0.0)) > UNSTEADY:
        host = ("--host", evidence.ask.host) if evidence.ask.host != "local" else ()
        again = command("dgxlab", "run", evidence.experiment, *host, "--again")
        limit = f"{100 * UNSTEADY:g} % of the median, {100 * most:.0f} % at most"
        wild = [cell for cell, noise in zip(cells, noises, strict=True) if noise > UNSTEADY]
        groups[False, f"the MAD is above {limit}; {again} measures all again"] = wild
    shown = []
    for key, of in sorted(groups.items(), key=lambda group: not group[0][0]):
        # the session of a chain shows the flags of its runs, not that their values spread
        own = [cell.run for cell in of if cell.run["role"] is None or key[1] in {flag["reason"] for flag in cell.flags}]
        labels = labels_of([label(cell.ask.cell) for cell in of], len(cells))
        sessions = tuple(dict.fromkeys(run["job_id"] for run in own))
        shown.append(ShownFlag(labels, *key, plain=len(own) < len(of), sessions=sessions))
    return tuple(shown)


def sort_key(form: Form, ask: CellAsk) -> list[tuple[int, float, str]]:
    """Return the sort key of a cell's row: the form's order, then the other settings, numbers before texts."""
    values = (*form.order(ask), *settings_of(form, ask).values())
    return [(0, float(v), "") if isinstance(v, (int, float)) else (1, 0.0, str(v)) for v in values]


def settings_of(form: Form, ask: CellAsk) -> dict[str, Value]:
    """Return a cell's settings that are in no leading column: further parameters, fixed settings, environment."""
    lead = form.lead(ask)
    every = {**ask.cell.params, **ask.cell.fixed, "env": env_text(ask.env)}
    return {k: v for k, v in every.items() if k not in form.hidden and k not in lead and v != ""}


def common(others: Sequence[Mapping[str, _Setting]]) -> dict[str, _Setting]:
    """Return the settings that have the same value in all rows, given each row's settings."""
    varying = varying_of(others)
    return {key: value for key, value in (others[0] if others else {}).items() if key not in varying}


def leading(rows: Sequence[Row], keys: Iterable[str]) -> list[Column]:
    """Return a column for each of these keys; it is numeric if all its values in `rows` are."""
    leads = []
    for key in keys:
        values = [row[key] for row in rows if row.get(key) is not None]
        numbers = [isinstance(v, (int, float, Number)) and not isinstance(v, bool) for v in values]
        leads.append(Column(key, key, numeric=bool(values) and all(numbers)))
    return leads


def of_arms(name: str, baseline: Value, candidate: Value) -> str:
    """Return a setting's values in both arms in words: `baseline GGML_X=0, candidate GGML_X unset`."""
    sides = {"baseline": baseline, "candidate": candidate}
    return ", ".join(
        f"{arm} {f'{name} unset' if value is None else assigned(name, value)}" for arm, value in sides.items()
    )
