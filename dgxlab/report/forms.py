"""The forms of tables that documents and `dgxlab report --form` can request, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dgxlab import published as figures
from dgxlab import roofline, units
from dgxlab.errors import UsageError
from dgxlab.gguf_header import TYPES
from dgxlab.model import SESSIONS, Param, type_of
from dgxlab.report import ask as asking
from dgxlab.report import published
from dgxlab.report.arms import concurrency, find_arms, of_forms, single_stream
from dgxlab.report.ask import Query
from dgxlab.report.beside import columns_beside, label, matching, matching_series, rows_beside, sources
from dgxlab.report.evidence import Evidence, Measured, arms_of_job
from dgxlab.report.fleet import fleet
from dgxlab.report.history import history
from dgxlab.report.imports import imports
from dgxlab.report.ledger import experiments, steps
from dgxlab.report.profile import profile
from dgxlab.report.records import Beside, Column, Number, Origin, Page, Provenance, Row, Table, Value
from dgxlab.report.session import WORDS, ChainSession, invalid_since, newest_with_verdicts
from dgxlab.report.tables import (
    OPS,
    SERVING,
    contents_text,
    fidelity_text,
    gate_tables,
    provenance,
    sort_key,
    tables,
    with_host_gap,
)
from dgxlab.report.tries import ledgers
from dgxlab.report.verdicts import collect_session
from dgxlab.roofline import Peaks
from dgxlab.store import REJECTED, UNCOUNTED, alias
from dgxlab.tools import BY_FORM, llama_server

if TYPE_CHECKING:
    from dgxlab.store import Job, Store


def page(store: Store, wanted: Query) -> Page:
    """Return the tables of a query; its sessions may be named by prefix or alias.

    Raises UsageError if the record has no matching data, or a session's name is unknown or ambiguous.
    """
    sessions = tuple(map(store.named, wanted.session))
    return FORMS[wanted.form](store, replace(wanted, session=sessions))


# of a chain, runs are results once a verdict has judged them
_WITH_RUNS = f"""SELECT job_id, arm FROM runs LEFT JOIN chain_runs USING (run_id)
                 WHERE status = 'valid' AND tool IN (SELECT value FROM json_each(:tools))
                 AND job_id NOT IN ({UNCOUNTED})
                 AND (chain IS NULL OR EXISTS (SELECT 1 FROM verdicts AS v WHERE v.job_id = runs.job_id
                                               AND v.chain = chain_runs.chain AND verdict <> 'invalid'))"""  # noqa: S608 - our own
_WITH_GATES = "SELECT job_id, arm FROM gates UNION SELECT job_id, arm FROM checks"


def newest_arms(store: Store, form: str, host: str | None = None) -> list[str]:
    """Return the experiment, or both arms, of the newest session that has results for a form; of a fleet's but one.

    Raises UsageError if none has any, on the host where one is given.
    """
    fitting = {"gates": _WITH_GATES, "provenance": "SELECT job_id, arm FROM arms"}.get(form, _WITH_RUNS)
    forms = {"steps": ("ops", "single-stream"), "fleet": tuple(BY_FORM)}.get(form, (form,))
    tools = [BY_FORM[each] for each in forms if each in BY_FORM]
    rows = store.rows(
        f"""SELECT job_id, arm FROM arms JOIN jobs USING (job_id)
            WHERE (job_id, arm) IN ({fitting}) AND job_id NOT IN ({REJECTED}) AND host = coalesce(:host, host)
            ORDER BY intent_at DESC, job_id DESC, arms.rowid""",  # noqa: S608 - our own
        {"tools": json.dumps(tools), "host": host},
    )
    if not rows:
        where = f"form={form} on {host!r}" if host else f"form={form}"
        raise UsageError(f"{store.path} has no session with results for {where}", next="dgxlab run --help")
    names = [row["arm"] for row in rows if row["job_id"] == rows[0]["job_id"]]
    return names[:1] if form == "fleet" else names


def _single_stream(store: Store, wanted: Query) -> Page:
    table = single_stream(of_forms(store, wanted, wanted.form))
    tests = {column.key for column in table.columns if column.metric}
    series = matching_series(wanted.form, wanted.published)
    return Page(wanted.form, (rows_beside(series, table, lambda cell: next(iter(tests & {cell["test"]}), None)),))


def _concurrency(store: Store, wanted: Query) -> Page:
    table = concurrency(of_forms(store, wanted, wanted.form))
    return Page(wanted.form, (columns_beside(matching_series(wanted.form, wanted.published), table),))


def _serving(store: Store, wanted: Query) -> Page:
    arms = [with_host_gap(arm) for arm in of_forms(store, wanted, "serving", "concurrency")]
    tool = BY_FORM["serving"]
    served = [replace(arm, measured=tuple(each for each in arm.measured if each.ask.cell.tool == tool)) for arm in arms]
    if empty := [arm.name for arm in served if not arm.measured]:
        raise UsageError(f"{empty[0]} has nothing measured for form=serving", next="dgxlab report")
    results = []
    for arrives in (False, True):  # streams at once, then requests at random times
        arms = [
            replace(arm, measured=tuple(cell for cell in arm.measured if ("rate" in cell.ask.cell.params) is arrives))
            for arm in served
        ]
        arms = [arm for arm in arms if arm.measured]
        every = {metric for arm in arms for cell in arm.measured for metric in cell.quantities}
        if arms:
            table = concurrency(arms, SERVING, [name for name in SERVING.metrics if name in every])
            results.append(replace(table, notes=(*table.notes, *_engines_differ(arms))))
    return Page(wanted.form, tuple(results))


def _engines_differ(arms: Sequence[Evidence]) -> Iterable[str]:
    """Yield, where servers of several engines are side by side, what each has that may make the difference."""
    if len({arm.measured[0].ask.cell.fixed.get("engine") for arm in arms}) > 1:
        setups = {arm.name: _setup(arm) for arm in arms}
        for what in next(iter(setups.values())):
            if len({each[what] for each in setups.values()}) > 1:
                yield f"{what}: {', '.join(f'{name} {each[what]}' for name, each in setups.items())}"


def _setup(arm: Evidence) -> dict[str, str]:
    ask = arm.measured[0].ask
    return llama_server.setup(ask.cell, type_of(arm.ask.models.get(ask.model)), ask.env, arm.ask.arm.cmake)


def _ops(store: Store, wanted: Query) -> Page:
    arms = of_forms(store, wanted, wanted.form)
    series = matching_series(wanted.form, wanted.published)
    results: list[Table] = []
    for arm in arms:
        for table in tables(arm):
            if table.form == "ops":
                cells = [cell for cell in arm.measured if OPS.title(cell.ask) == table.title]
                beside = columns_beside(series, _with_roof(table, cells), cells[0].ask.cell.params.get("op_name"))
                results.append(replace(beside, title=f"{arm.name}: {table.title}") if len(arms) > 1 else beside)
    return Page(wanted.form, tuple(results))


def _gates(store: Store, wanted: Query) -> Page:
    results: list[Table] = []
    for each in [replace(wanted, session=(session,)) for session in wanted.session] or [wanted]:
        if each.session and (job := store.job(each.session[0])).kind in SESSIONS:
            compared = ChainSession(store, job)
            results += [replace(table, title=compared.title) for table in compared.gate_tables()]
        else:
            every = [(arm.name, table) for arm in find_arms(store, each) for table in gate_tables(arm)]
            results += [replace(table, title=f"{name}: {table.title}") for name, table in every]
    if not results:
        raise UsageError("no gate was asked for there", next="dgxlab report")
    return Page(wanted.form, (_gates_beside(wanted, results[0]), *results[1:]))


def _gates_beside(wanted: Query, table: Table) -> Table:
    if not wanted.published:
        return table
    every = {entry.line: entry for pattern in wanted.published for entry in matching(figures.gates(), pattern, "gate")}
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
    jobs: list[tuple[Job, Job | None]] = [(store.job(session), None) for session in wanted.session]
    for name in wanted.experiment:
        newest, newer = newest_with_verdicts(store, name, wanted.baseline, wanted.host)
        if newest is None:
            raise asking.no_verdict(store, name, wanted.baseline, wanted.host)
        jobs.append((newest, newer))
    results: list[Table] = []
    summaries = []
    for job, newer in jobs:
        if job.kind not in SESSIONS:
            raise UsageError(f"session {job.job_id} compares nothing", next=f"dgxlab report {job.job_id}")
        report = collect_session(store, job.job_id)
        if not report.ended:
            message = f"session {job.job_id} has not ended and shows nothing before"
            raise UsageError(message, next=f"dgxlab attach {job.job_id}")
        _, _, what = report.title.partition(": ")
        summaries.append(f"{what}: {report.summary}" if len(jobs) > 1 else report.summary)
        results += [table for table in report.tables if table.form == "verdicts"]
        if newer:
            results[-1] = replace(results[-1], notes=(*results[-1].notes, invalid_since(store, newer)))
    if not results:
        name = jobs[0][0].job_id
        raise UsageError(f"session {name} has no verdict", next=f"dgxlab report {name}")
    return Page(wanted.form, tuple(results), " · ".join(summaries))


def _published(_: Store, wanted: Query) -> Page:
    for name in wanted.table:
        if name not in published.TABLES:
            known = ", ".join(published.TABLES)
            message = f"there is no published table {name!r}; there are {known}"
            raise UsageError(message, next="dgxlab report --form published")
    results = [published.TABLES[name]() for name in wanted.table]
    return Page(wanted.form, (*results, *(published.series(pattern) for pattern in wanted.source)))


def _provenance(store: Store, wanted: Query) -> Page:
    jobs = [(asking.job_of_arm(store, name, wanted.host), name) for name in wanted.experiment]
    jobs += [(store.job(session), "") for session in wanted.session]
    arms: list[tuple[Job, Mapping[str, Any]]] = []
    for job, name in jobs:
        built = store.rows("SELECT * FROM arms WHERE job_id = ? AND ? IN ('', arm) ORDER BY arm", (job.job_id, name))
        if not built:
            raise UsageError(f"session {job.job_id} has built nothing", next=f"dgxlab report {job.job_id}")
        arms += [(job, row) for row in built]
    names = [row["arm"] for _, row in arms]
    origins, columns = [], [Column("what", "what")]
    rows: dict[str, dict[str, Value]] = {}
    for number, (job, row) in enumerate(arms):
        name = row["arm"] if names.count(row["arm"]) == 1 else f"{row['arm']} in {alias(job.job_id)}"
        arm = arms_of_job(store, job)[row["arm"]]
        origins.append(Origin(name, provenance(arm, [job.job_id])))
        columns.append(Column(f"arm.{number}", name))
        for what, value in _facts(store, job, origins[-1].provenance, row):
            rows.setdefault(what, {"what": what})[f"arm.{number}"] = value
    shown = tuple(row for row in rows.values() if any(value for key, value in row.items() if key != "what"))
    first = origins[0].provenance
    table = Table("provenance", "Provenance", tuple(columns), shown, first, kind="arms", origins=tuple(origins))
    return Page(wanted.form, (table,))


def _facts(store: Store, job: Job, arm: Provenance, row: Mapping[str, Any]) -> Iterable[tuple[str, Value]]:
    cmake, tools = json.loads(row["cmake"]), json.loads(row["toolchain"])
    details: Mapping[str, Any] = (job.facts or {}).get("details", {})
    driver, memory = details.get("driver", {}), details.get("memory_mib")
    gpus = [f"{gpu['name']} (sm {gpu.get('compute_cap')})" for gpu in details.get("gpus", []) if gpu.get("name")]
    yield "session", job.job_id
    yield "kind", WORDS.get(job.plan.shown_kind, job.kind)
    yield "ended", job.state
    yield "pin", row["pin"]
    yield "tree", row["tree"]
    yield "commit", row["commit_id"]
    yield "series", ", ".join(f"{ref.name}@{ref.digest}" for ref in arm.series) or "none"
    yield "dirty", "yes, a working tree" if row["dirty"] else "no"
    yield "build", row["build_id"]
    yield "cmake definitions", " ".join(f"{name}={value}" for name, value in sorted(cmake.items()))
    yield from ((tool, tools.get(tool, "")) for tool in ("cc", "cxx", "cmake", "nvcc", "machine"))
    yield from ((f"sha256 of {program}", digest) for program, digest in sorted(json.loads(row["binaries"]).items()))
    yield "host", arm.host
    yield "Slurm", ", ".join(f"{key} {value}" for key, value in details.get("slurm", {}).items())
    yield "os", ", ".join(filter(None, (details.get("os"), details.get("kernel"))))
    yield "processor", details.get("cpu")
    yield "memory", None if memory is None else units.size(memory << 20)
    yield "GPU", ", ".join(gpus)
    yield "driver", ", CUDA ".join(filter(None, (driver.get("version"), driver.get("cuda"))))
    for model in store.rows("SELECT * FROM inputs WHERE job_id = ? ORDER BY name, model_id", (job.job_id,)):
        how = "synthetic, recipe" if model["model_id"].startswith("synthetic") else ""
        facts = [f"{how} {model['model_id']}".strip(), units.size(model["size"]), model["digest"]]
        if model["contents"]:
            facts += [contents_text(model["contents"]), *fidelity_text(model["contents"])]
        yield f"model {model['name']}", "; ".join([", ".join(facts[:3]), *facts[3:]])
    yield "dgxlab", job.dgxlab_version
    yield "agent", job.agent_version
    yield "protocol", job.protocol


# The kernel, not the weights' type, decides the compute path: a W4A16 kernel converts 4-bit weights to bf16, MMQ uses
# int8. No row has the path, so every row is compared with the bf16 peak, which all kernels could use. Shares of two
# kernels then compare like their times, and more than 100 % is the gain of a faster path. If reading the operands once
# takes longer than the FLOPS at that peak, the row also has its share of the bandwidth (above 100 % from a cache).

BYTES = {name.lower(): size / count for name, count, size in TYPES.values()}
"""Bytes per weight in ggml's blocks, scales included."""

PATH = "bf16"  # the compute path whose peak is the reference of all rows


def _with_roof(table: Table, cells: Sequence[Measured]) -> Table:
    """Add columns to a table of operations: bandwidth, and shares of the GPU's peaks if these are known."""
    device = table.provenance.device
    peaks = roofline.together(device.names, alone=True) if device else None
    added = [_roof_row(cell, peaks) for cell in sorted(cells, key=lambda cell: sort_key(OPS, cell.ask))]
    columns = [
        Column("rate", "", "rate"),
        Column("of_flops", f"% of {PATH} peak", numeric=True),
        Column("of_bandwidth", "% of bandwidth", numeric=True),
    ]
    columns = [column for column in columns if any(column.key in row for row in added)]
    settings = dict(table.settings)
    if peaks is not None and len(columns) > 1:
        bandwidth = f" and {peaks.bandwidth / 1e9:.4g} GB/s" if len(columns) > 2 else ""
        settings["peaks"] = f"{peaks.gpu}'s {peaks.flops[PATH] / 1e12:.4g} TFLOPS {PATH}{bandwidth}"
    if columns:
        settings["GB/s"] = "of every operand once, as if none came from a cache"
    rows = tuple({**row, **more} for row, more in zip(table.rows, added, strict=True))
    return replace(table, columns=(*table.columns, *columns), rows=rows, settings=settings)


def _roof_row(cell: Measured, peaks: Peaks | None) -> dict[str, Value]:
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
    """Return the floating-point operations and the bytes of a plain matrix multiplication; None for anything else."""
    weights, other = (BYTES.get(str(params.get(name)).lower()) for name in ("type_a", "type_b"))
    plain = params.get("bs", "[1,1]") == params.get("nr", "[1,1]") == "[1,1]"  # without batches
    m, n, k = (params.get(name) for name in ("m", "n", "k"))
    if params.get("op_name") != "MUL_MAT" or weights is None or other is None or not plain:
        return None
    if not (isinstance(m, int) and isinstance(n, int) and isinstance(k, int)):
        return None
    return 2.0 * m * n * k, m * k * weights + n * k * other + m * n * BYTES["f32"]


FORMS: Mapping[str, Callable[[Store, Query], Page]] = {
    "steps": lambda store, wanted: Page(wanted.form, (steps(store, wanted),)),
    "single-stream": _single_stream,
    "concurrency": _concurrency,
    "serving": _serving,
    "ops": _ops,
    "profile": profile,
    "history": history,
    "gates": _gates,
    "verdicts": _verdicts,
    "fleet": fleet,
    "levers": lambda store, wanted: Page(wanted.form, (experiments(store, wanted),)),
    "tries": ledgers,
    "provenance": _provenance,
    "published": _published,
    "imported": lambda store, wanted: Page(wanted.form, imports(store, wanted)),
}
"""By form, the function that returns its page."""
