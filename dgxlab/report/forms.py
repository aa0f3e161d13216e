"""The table forms that documents and `dgxlab report --form` can request, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from dgxlab import published as figures
from dgxlab import roofline, units
from dgxlab.errors import UsageError
from dgxlab.model import SESSIONS, Arm, Param
from dgxlab.report import ask as asking
from dgxlab.report import published
from dgxlab.report.arms import concurrency, find_arms, of_tools, single_stream
from dgxlab.report.ask import Query
from dgxlab.report.beside import columns_beside, fitting, label, op_lead, rows_beside, selected, sources
from dgxlab.report.evidence import Measured, machine
from dgxlab.report.imports import imports
from dgxlab.report.ledger import experiments, steps
from dgxlab.report.records import Beside, Column, Number, Origin, Page, Row, Table, Value
from dgxlab.report.session import WORDS, ChainSession
from dgxlab.report.tables import OPS, gate_tables, in_rank, origin_of_job, tables
from dgxlab.report.verdicts import verdicts
from dgxlab.roofline import Peaks
from dgxlab.store import alias, the_one
from dgxlab.tools import BY_FORM

if TYPE_CHECKING:
    from dgxlab.store import Job, Store


def page(store: Store, wanted: Query) -> Page:
    """Return the tables of a query.

    Raises:
        UsageError: if the record has no matching data, or a session's name is unknown or ambiguous.
    """
    sessions = tuple(the_one(store.job_ids(text), text, next="dgxlab jobs") for text in wanted.session)
    return FORMS[wanted.form](store, replace(wanted, session=sessions))


def _single_stream(store: Store, wanted: Query) -> Page:
    table = single_stream(of_tools(find_arms(store, wanted), (BY_FORM["single-stream"],), wanted))
    tests = {column.key for column in table.columns if column.metric}
    beside = rows_beside(wanted, table, lambda cell: test if (test := str(cell[0])) in tests else None)
    return Page(wanted.form, (beside,))


def _concurrency(store: Store, wanted: Query) -> Page:
    table = concurrency(of_tools(find_arms(store, wanted), (BY_FORM["concurrency"],), wanted))
    series = selected(wanted.form, wanted.published)
    beside = columns_beside(series, table, lambda cell: dict(zip(("PP", "TG", "B"), cell, strict=True)))
    return Page(wanted.form, (beside,))


def _ops(store: Store, wanted: Query) -> Page:
    arms = of_tools(find_arms(store, wanted), (BY_FORM["ops"],), wanted)
    series = selected(wanted.form, wanted.published)
    results: list[Table] = []
    for arm in arms:
        for table in tables(arm):
            if table.form == "ops":
                cells = [cell for cell in arm.measured if OPS.title(cell.ask) == table.title]
                lead_of = partial(op_lead, cells[0].ask.cell.params.get("op_name"))
                beside = columns_beside(series, _with_roof(table, cells), lead_of)
                results.append(replace(beside, title=f"{arm.name}: {table.title}") if len(arms) > 1 else beside)
    return Page(wanted.form, tuple(results))


def _gates(store: Store, wanted: Query) -> Page:
    results: list[Table] = []
    for session in wanted.session:
        job = store.job(session)
        if job.kind in SESSIONS:
            compared = ChainSession(store, job, asking.plan_of(job))
            results += [replace(table, title=compared.what) for table in compared.gate_tables()]
        else:
            results += _gates_alone(store, replace(wanted, session=(session,)))
    if wanted.experiment:
        results += _gates_alone(store, wanted)
    if not results:
        raise UsageError("no gate was asked for there", next="dgxlab report")
    return Page(wanted.form, (_gates_beside(wanted, results[0]), *results[1:]))


def _gates_alone(store: Store, wanted: Query) -> list[Table]:
    arms = find_arms(store, wanted)
    return [replace(table, title=f"{arm.name}: {table.title}") for arm in arms for table in gate_tables(arm)]


def _gates_beside(wanted: Query, table: Table) -> Table:
    """Return a table of gates with additional rows for gates in documents."""
    if not wanted.published:
        return table
    every = {entry.line: entry for pattern in wanted.published for entry in fitting(figures.gates(), pattern, "gate")}
    tests = [entry for entry in every.values() if entry.metric == "tests_passed"]
    rows: list[Row] = [
        {"op": entry.test, "count": entry.value, "status": f"{label(entry)}, pin {entry.pin}", "published": True}
        for entry in tests
    ]
    left = f"{len(every) - len(tests)} of the published gates are md5s of greedy tokens: "
    left += "form=published table=gates has them"
    beside = Beside(sources(tests), left=(left,) if len(tests) < len(every) else ())
    return replace(table, rows=(*table.rows, *rows), beside=beside)


def _verdicts(store: Store, wanted: Query) -> Page:
    jobs = [store.job(session) for session in wanted.session]
    jobs += [_newest_of_two(store, name, wanted) for name in wanted.experiment]
    results: list[Table] = []
    summaries: list[str] = []
    for job in jobs:
        if job.kind not in SESSIONS:
            raise UsageError(f"session {job.job_id} compares nothing", next=f"dgxlab report {job.job_id}")
        report = verdicts(store, job)
        if not report.ended:
            raise UsageError(f"session {job.job_id} has not ended and shows nothing before", next="dgxlab jobs")
        what = f"{ChainSession(store, job, asking.plan_of(job)).what}: " if len(jobs) > 1 else ""
        summaries.append(what + report.summary)
        results += [table for table in report.tables if table.form == "verdicts"]
    if not results:
        raise UsageError(f"session {jobs[0].job_id} has no verdict", next=f"dgxlab report {jobs[0].job_id}")
    return Page(wanted.form, tuple(results), " · ".join(summaries))


def _newest_of_two(store: Store, name: str, wanted: Query) -> Job:
    """Return the newest session of that name, or the newest with that experiment as its candidate."""
    rows = store.rows(
        """SELECT DISTINCT job_id FROM verdict_list
           WHERE (session = :name OR candidate_arm = :name) AND (:baseline = '' OR baseline_arm = :baseline)
             AND (:host = '' OR host = :host)
           ORDER BY baseline_arm = candidate_arm, intent_at DESC, job_id DESC LIMIT 1""",
        {"name": name, "baseline": wanted.baseline, "host": wanted.host},
    )
    if not rows:
        against = f" against {wanted.baseline!r}" if wanted.baseline else ""
        there = f" on {wanted.host!r}" if wanted.host else ""
        raise UsageError(f"{store.path} has no verdict on {name!r}{against}{there}", next="dgxlab report")
    return store.job(rows[0]["job_id"])


def _published(_: Store, wanted: Query) -> Page:
    for name in wanted.table:
        if name not in published.TABLES:
            known = ", ".join(published.TABLES)
            message = f"there is no published table {name!r}; there are {known}"
            raise UsageError(message, next="dgxlab report --form published")
    results = [published.TABLES[name]() for name in wanted.table]
    return Page(wanted.form, (*results, *(published.series(pattern) for pattern in wanted.source)))


TOOLS = ("cc", "cxx", "cmake", "nvcc", "machine")
"""Fields of a toolchain to show, in this order."""


def _provenance(store: Store, wanted: Query) -> Page:
    """Return a column for each experiment, from its newest session or the named sessions."""
    jobs = [(asking.job_of_arm(store, name, wanted.host), name) for name in wanted.experiment]
    jobs += [(store.job(session), "") for session in wanted.session]
    arms: list[tuple[Job, Mapping[str, Any]]] = []
    for job, name in jobs:
        built = store.rows(
            "SELECT * FROM arms WHERE job_id = ? AND (? = '' OR arm = ?) ORDER BY arm", (job.job_id, name, name)
        )
        if not built:
            raise UsageError(f"session {job.job_id} has built nothing", next=f"dgxlab report {job.job_id}")
        arms += [(job, row) for row in built]
    names = [row["arm"] for _, row in arms]
    origins, columns = [], [Column("what", "what")]
    rows: dict[str, dict[str, Value]] = {}
    for number, (job, row) in enumerate(arms):
        name = row["arm"] if names.count(row["arm"]) == 1 else f"{row['arm']} in {alias(job.job_id)}"
        arm = asking.plan_of(job).arm(row["arm"])
        origins.append(Origin(name, origin_of_job(store, job, arm)))
        columns.append(Column(f"arm.{number}", name))
        for what, value in _facts(store, job, arm, row):
            rows.setdefault(what, {"what": what})[f"arm.{number}"] = value
    shown = tuple(row for row in rows.values() if any(value for key, value in row.items() if key != "what"))
    first = origins[0].provenance
    table = Table("provenance", "Provenance", tuple(columns), shown, first, kind="arms", origins=tuple(origins))
    return Page(wanted.form, (table,))


def _facts(store: Store, job: Job, arm: Arm, row: Mapping[str, Any]) -> Iterable[tuple[str, Value]]:
    """Yield the facts with their values, an empty value for unknown ones."""
    cmake, tools = json.loads(row["cmake"]), json.loads(row["toolchain"])
    details: Mapping[str, Any] = (job.facts or {}).get("details", {})
    driver, memory = details.get("driver", {}), details.get("memory_mib")
    gpus = [f"{gpu['name']} (sm {gpu.get('compute_cap')})" for gpu in details.get("gpus", []) if gpu.get("name")]
    yield "session", job.job_id
    yield "kind", WORDS[job.kind] if job.kind in SESSIONS else job.kind
    yield "ended", job.state
    yield "pin", row["pin"]
    yield "tree", row["tree"]
    yield "commit", row["commit_id"]
    yield "series", ", ".join(f"{ref.name}@{ref.digest}" for ref in arm.source.series) or "none"
    yield "dirty", "yes, a checkout with changes" if row["dirty"] else "no"
    yield "build", row["build_id"]
    yield "cmake definitions", " ".join(f"{name}={value}" for name, value in sorted(cmake.items()))
    yield from ((tool, tools.get(tool, "")) for tool in TOOLS)
    yield from ((f"sha256 of {program}", digest) for program, digest in sorted(json.loads(row["binaries"]).items()))
    yield "host", machine(job, store.devices(job.job_id).get(row["arm"]))
    yield "os", ", ".join(filter(None, (details.get("os"), details.get("kernel"))))
    yield "processor", details.get("cpu")
    yield "memory", None if memory is None else units.size(memory << 20)
    yield "GPU", ", ".join(gpus)
    yield "driver", ", CUDA ".join(filter(None, (driver.get("version"), driver.get("cuda"))))
    for model in store.rows("SELECT * FROM inputs WHERE job_id = ? ORDER BY name, model_id", (job.job_id,)):
        how = "synthetic, recipe" if model["recipe"] else "file"
        yield f"model {model['name']}", f"{how} {model['model_id']}, {units.size(model['size'])}, {model['digest']}"
    yield "dgxlab", job.dgxlab_version
    yield "agent", job.agent_version
    yield "protocol", job.protocol


# The kernel, not the weights' type, decides the compute path: a W4A16 kernel converts 4-bit weights to bf16, MMQ uses
# int8. No row has the path, so every row is compared with the bf16 peak, which all kernels could use. Shares of two
# kernels then compare like their times, and more than 100 % is the gain of a faster path. If reading the operands once
# takes longer than the FLOPS at that peak, the row also has its share of the bandwidth (above 100 % from a cache).

_TYPES = {
    32: "f32",
    16: "f16 bf16",
    8.5: "q8_0",
    6.5625: "q6_K",
    6: "q5_1",
    5.5: "q5_0 q5_K",
    5: "q4_1",
    4.5: "q4_0 q4_K iq4_nl nvfp4",
    4.25: "iq4_xs mxfp4",
    3.4375: "q3_K",
    2.625: "q2_K",
}
BITS: Mapping[str, float] = {name: bits for bits, names in _TYPES.items() for name in names.split()}
"""Bits per weight in ggml's blocks, scales included."""

PLAIN: Mapping[str, Param] = {"bs": "[1,1]", "nr": "[1,1]"}
"""Parameters of a matrix multiplication without batches, and their defaults."""

PATH = "bf16"
"""The compute path whose peak is the reference of all rows."""

ROOF_COLUMNS = (
    Column("rate", "", "rate"),
    Column("of_flops", f"% of {PATH} peak", numeric=True),
    Column("of_bandwidth", "% of bandwidth", numeric=True),
)


def _with_roof(table: Table, cells: Sequence[Measured]) -> Table:
    """Return a table of operations with their bandwidth and their shares of the GPU's peaks.

    Columns without any value are left out.

    Args:
        cells: The cells of the table.
    """
    device = table.provenance.device
    peaks = roofline.together(device.names, alone=True) if device else None
    added = [_roof_row(cell, peaks) for cell in in_rank(OPS, cells)]
    rows = tuple({**row, **more} for row, more in zip(table.rows, added, strict=True))
    columns = tuple(column for column in ROOF_COLUMNS if any(row.get(column.key) for row in added))
    keys = {column.key for column in columns}
    settings = dict(table.settings)
    if peaks is not None and "of_flops" in keys:
        bandwidth = f" and {peaks.bandwidth / 1e9:.4g} GB/s" if "of_bandwidth" in keys else ""
        settings["peaks"] = f"{peaks.gpu}'s {peaks.flops[PATH] / 1e12:.4g} TFLOPS {PATH}{bandwidth}"
    if "rate" in keys:
        settings["GB/s"] = "of every operand once, as if none came from a cache"
    return replace(table, columns=(*table.columns, *columns), rows=rows, settings=settings)


def _roof_row(cell: Measured, peaks: Peaks | None) -> dict[str, Value]:
    """Return a row's bandwidth, and its shares as text and as numbers."""
    time, shape = cell.quantities.get("time_us"), _shape(cell.ask.cell.params)
    if time is None or shape is None:
        return {}
    flops, moved = (amount / (time.middle / 1e6) for amount in shape)
    rate = moved / 1e9
    spread = None if time.spread is None else rate * time.spread / time.middle
    median, mean = (None if average is None else rate for average in (time.median, time.mean))
    row: dict[str, Value] = {"rate": Number("rate", "GB/s", time.n, spread, median, mean, of=time.of)}
    if peaks is not None:
        of_flops, of_bandwidth = 100 * flops / peaks.flops[PATH], 100 * moved / peaks.bandwidth
        row |= {"of_flops": f"{of_flops:.1f}", "of_flops_pct": of_flops}
        if of_bandwidth >= of_flops:
            row |= {"of_bandwidth": f"{of_bandwidth:.1f}", "of_bandwidth_pct": of_bandwidth}
    return row


def _shape(params: Mapping[str, Param]) -> tuple[float, float] | None:
    """Return operations and bytes, of operands and result, of a plain matrix multiplication; None for anything else."""
    weights, other = (BITS.get(str(params.get(name))) for name in ("type_a", "type_b"))
    plain = all(params.get(name, default) == default for name, default in PLAIN.items())
    sizes = [size for name in ("m", "n", "k") if isinstance(size := params.get(name), int)]
    if params.get("op_name") != "MUL_MAT" or weights is None or other is None or not plain or len(sizes) < 3:
        return None
    m, n, k = sizes
    return 2.0 * m * n * k, (m * k * weights + n * k * other + m * n * BITS["f32"]) / 8


FORMS: Mapping[str, Callable[[Store, Query], Page]] = {
    "steps": lambda store, wanted: Page(wanted.form, (steps(store, wanted),)),
    "single-stream": _single_stream,
    "concurrency": _concurrency,
    "ops": _ops,
    "gates": _gates,
    "verdicts": _verdicts,
    "levers": lambda store, wanted: Page(wanted.form, (experiments(store, wanted),)),
    "provenance": _provenance,
    "published": _published,
    "imported": lambda store, wanted: Page(wanted.form, imports(store, wanted)),
}
"""Functions that make each form of `ask.KEYS`, by name."""
