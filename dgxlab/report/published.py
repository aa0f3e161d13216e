"""Tables out of the published record: those of the documents themselves, and the gates that they report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dgxlab import published
from dgxlab.published import Figure, GateResult
from dgxlab.report.citation import Remark, Source, absent, by_notes, fitting, sources
from dgxlab.report.numbers import Value
from dgxlab.report.records import Column, Flag, Provenance, Table
from dgxlab.store import Store

W4A16 = "seed000:W4A16_MARLIN_KERNEL_PLAN.md@fc589b3fad"
GDN = "seed002:BYTEGATE_PROGRESS.md@fd4332e8f0"
BLACKWELL = "seed004:DGX_BLACKWELL_PLAN.md"


@dataclass(frozen=True)
class PublishedTable(Table):
    """A table of figures that nobody here measured. Its flags are figures that cannot be true.

    Attributes:
        provenance: Says so; nothing of it is known but the host.
        sources: Of all its figures.
        remarks: In the order of the figures.
    """

    sources: tuple[Source, ...] = ()
    remarks: tuple[Remark, ...] = ()


def seed_tables(store: Store) -> dict[str, PublishedTable]:
    """Return every table by the name of its function.

    Raises:
        UsageError: if the published record is not in this database, or not all of it.
    """
    return {make.__name__: make(store) for make in TABLES}


# -- the step table of the W4A16 plan ---------------------------------------------------------------------------------

STEPS = (
    ("P2", "P2 (1 warp/tile)", ()),
    ("W4A16 Step1", "Step 1: block tiling (load_generic, BM64/4w)", ()),
    ("W4A16 P3b-1", "P3b-1: skew-pad ldmatrix + BM128/8w", ((1, ("q4_K", "q4_0")),)),
    ("W4A16 P3b-2", "P3b-2: + BN128/16w (current)", ((2, ("q4_K", "pp512")), (1, ("pp512",)))),
)
"""How the notes of a step's figures begin, its name, and what the plan compares with which earlier step."""


def steps(store: Store) -> PublishedTable:
    """Return P2, step 1 and P3b of the W4A16 kernel: operations, prompts, and the ratio to MMQ."""
    known = _document(store, W4A16)
    mmq = _one(store, known, lambda f: _step_column(f) == "q4_K" and f.notes.startswith("MMQ") and "n=512" in f.test)
    asked = ("q4_K", "q4_0", "pp512", "pp2048", "ratio")
    rows: list[dict[str, Value]] = []
    for notes, name, against in STEPS:
        found = {_step_column(figure): figure for figure in known if figure.notes.startswith(notes)}
        row: dict[str, Value] = {"step": name, **{key: found[key] for key in asked if key in found}}
        if (op := found.get("q4_K")) and "ratio" not in row:
            row["ratio"] = round(op.value / mmq.value, 2)
        said = ["cold A/B"] if op and "cold A/B" in op.notes else []
        said += [_gains(found, rows[place], metrics, STEPS[place][1]) for place, metrics in against]
        rows.append({**row, "notes": "; ".join(said)})
    columns = (
        Column("step", "step"),
        Column("q4_K", "q4_K n=512 (TFLOPS)", numeric=True),
        Column("q4_0", "q4_0 n=512 (TFLOPS)", numeric=True),
        Column("pp512", "pp512 (t/s)", numeric=True),
        Column("pp2048", "pp2048 (t/s)", numeric=True),
        Column("ratio", f"vs MMQ's {mmq.text} (x)", numeric=True),
        Column("notes", "notes"),
    )
    how = Remark((STEPS[0][1],), "the ratio is not published; it is q4_K's, as in the rows below")
    settings = {"MUL_MAT": "m=4096 k=14336", "pp512 and pp2048": "Qwen3-32B Q4_K_M"}
    return _table("steps", "W4A16 steps", columns, rows, settings, extra=(how,), also=(mmq,), remark=False)


def _step_column(figure: Figure) -> str:
    if figure.metric == "ratio_vs_MMQ":
        return "ratio"
    if figure.metric == "throughput":
        return figure.quant
    return figure.metric if figure.metric.startswith(("pp", "tg")) else figure.test


def _gains(found: Mapping[str, Figure], before: Mapping[str, Value], metrics: Iterable[str], name: str) -> str:
    pairs = [(key, found.get(key), before.get(key)) for key in metrics]
    gains = [f"{(b.value / a.value - 1) * 100:+.0f} % {key}" for key, b, a in pairs if b and isinstance(a, Figure)]
    return f"{', '.join(gains)} over {name.partition(':')[0]}"


# -- the concurrency table of the Blackwell plan ----------------------------------------------------------------------

ARMS = (("llama.cpp", "Q8_0"), ("llama.cpp", "MXFP4_MOE"), ("vLLM 0.23.0", "FP8"))


def concurrency(store: Store) -> PublishedTable:
    """Return prompt and generation rates by B, of llama.cpp in two types of weights and vLLM."""
    known = [f for f in _document(store, BLACKWELL) if f.metric in ("S_PP", "S_TG") and f.test.startswith("B=")]
    rows: dict[int, dict[str, Value]] = {}
    columns: dict[str, Column] = {}
    for engine, quant in ARMS:
        for metric in ("S_PP", "S_TG"):
            for figure in known:
                # stock and paged are the two arms of another table, from another session
                own = figure.notes == "" or figure.notes.startswith("suspect")
                if not own or (figure.engine, figure.quant, figure.metric) != (engine, quant, metric):
                    continue
                batch, *how = figure.test.split()
                name = " ".join((engine, quant, *how, metric))
                columns[name] = Column(name, f"{name} (t/s)", numeric=True)
                rows.setdefault(int(batch.removeprefix("B=")), {})[name] = figure
    if not rows:
        raise absent(store, BLACKWELL)
    made = [{"B": batch, **rows[batch]} for batch in sorted(rows)]
    model = _figures(made)[0].model
    every = (Column("B", "B", numeric=True), *columns.values())
    return _table("concurrency", "Concurrency", every, made, {"model": model})


# -- the byte table of the GDN gate -----------------------------------------------------------------------------------

KERNELS = (
    ("gated_delta_net_cuda", ("NVFP4, f32 state", "f32 state"), "f32"),
    ("fused_recurrent_packed_decode", ("'bf16 state' (LATER REFUTED: f32)", "'bf16 state' (LATER REFUTED)"), "'bf16'"),
    ("gated_delta_net_cuda", ("bf16 state (projected)",), "bf16, projected"),
)
"""Each kernel with what the record calls its state, and what this table does."""

BYTES = {
    "state bytes R+W": "state R+W (MB/call)",
    "state+qkv+out bytes": "with q, k, v, out (MB/call)",
    "avg": "time (ms/call)",
    "min": "min (ms/call)",
    "max": "max (ms/call)",
    "floor time": "floor (ms/call)",
    "effective BW": "rate (GB/s)",
    "pct of peak BW": "of peak (%)",
    "re-stream hard cap": "re-stream cap (x)",
}


def kernel_bytes(store: Store) -> PublishedTable:
    """Return what the recurrence of one step moves, how long it takes, and what that is of the memory's peak."""
    known = _document(store, GDN)
    peak = _one(store, known, lambda figure: figure.metric == "mem_bw_peak")
    rows: list[dict[str, Value]] = []
    remarks: list[Remark] = []
    for kernel, quants, state in KERNELS:
        row: dict[str, Value] = {"kernel": kernel, "state": state}
        for figure in known:
            key = "avg" if figure.metric == kernel else figure.metric.removeprefix(f"{kernel} ")
            if figure.quant in quants and key in BYTES:
                row[key] = figure
        rate = row.get("effective BW")
        if isinstance(rate, Figure) and "pct of peak BW" not in row:
            row["pct of peak BW"] = round(100 * rate.value / peak.value)
            why = f"the share is not published as a figure; it is {rate.text} of {peak.text} GB/s"
            remarks.append(Remark((f"of peak at {kernel}, {state}",), why))
        rows.append(row)
    columns = [Column("kernel", "kernel"), Column("state", "state")]
    columns += [Column(key, label, numeric=True) for key, label in BYTES.items()]
    settings: dict[str, Value] = {"B": 128, "peak": f"{peak.text} GB/s", "model": _figures(rows)[0].model}
    title = "Bytes of the GDN recurrence"
    return _table("bytes", title, columns, rows, settings, leads=2, extra=remarks, also=(peak,))


# -- gates ------------------------------------------------------------------------------------------------------------


def gates(store: Store) -> PublishedTable:
    """Return every gate that a document reports."""
    found = published.gates(store)
    if not found:
        raise absent(store, "gates")
    rows: list[dict[str, Value]] = []
    for gate in found:
        about = {"gate": f"{_GATES[gate.metric]}: {gate.test}", "result": gate.value, "pin": gate.pin}
        rows.append({**about, "model": gate.model, "source": gate.source_doc, "notes": gate.notes})
    columns = [Column(key, key) for key in rows[0]]
    return _table("gates", "Published gates", columns, rows, {}, also=found)


_GATES = {"tests_passed": "parity", "greedy_md5": "greedy"}

# -- any series -------------------------------------------------------------------------------------------------------

ABOUT = ("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test", "metric")
"""What tells figures apart, in the order of its columns."""


def series(store: Store, pattern: str) -> PublishedTable:
    """Return every figure that has all words of a pattern, one a row; what is alike in all of them has no column.

    Raises:
        UsageError: if there is none.
    """
    found = fitting(store, published.figures(store), pattern, "figure")
    alike = {name: getattr(found[0], name) for name in ABOUT if len({getattr(one, name) for one in found}) == 1}
    leads = [name for name in ABOUT if name not in alike] or ["metric"]
    rows: list[dict[str, Value]] = [
        {**{name: getattr(one, name) for name in leads}, "value": one, "unit": one.unit, "notes": one.notes}
        for one in found
    ]
    columns = [Column(name, name.removesuffix("_doc")) for name in leads]
    columns += [Column("value", "value", numeric=True), Column("unit", "unit"), Column("notes", "notes")]
    settings = {name: said for name, said in alike.items() if name in ("model", "quant", "test", "metric") and said}
    title = f"Published figures: {pattern}"
    return _table("published", title, columns, rows, settings, leads=len(leads), remark=False)


TABLES: tuple[Callable[[Store], PublishedTable], ...] = (steps, concurrency, kernel_bytes, gates)


# -- any of them ------------------------------------------------------------------------------------------------------


def _document(store: Store, doc: str) -> list[Figure]:
    if found := published.figures(store, source_doc=doc):
        return found
    raise absent(store, doc)


def _one(store: Store, figures: Iterable[Figure], wanted: Callable[[Figure], bool]) -> Figure:
    found = [figure for figure in figures if wanted(figure)]
    if len(found) == 1:
        return found[0]
    raise absent(store, "all of it")


def _table(
    form: str,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Value]],
    settings: Mapping[str, Value],
    *,
    leads: int = 1,
    extra: Iterable[Remark] = (),
    also: Sequence[Figure | GateResult] = (),
    remark: bool = True,
) -> PublishedTable:
    """Put a table together.

    Args:
        leads: How many columns tell its rows apart, from the left.
        extra: Remarks about what was computed here.
        also: What is published, is not a number in it and stands behind it.
        remark: Whether notes of the figures stand beneath it.
    """
    figures: list[tuple[str, Figure]] = []
    for row in rows:
        of_row = ", ".join(_lead(column.key, row[column.key]) for column in columns[:leads])
        for column in columns:
            if isinstance(value := row.get(column.key), Figure):
                figures.append((f"{column.label.partition(' (')[0]} at {of_row}", value))
    notes = [Remark(labels, text) for text, labels in by_notes(figures).items()] if remark else []
    every = (*(figure for _, figure in figures), *also)
    host = ", ".join(dict.fromkeys(entry.host for entry in every))
    return PublishedTable(
        form,
        title,
        tuple(columns),
        tuple(rows),
        Provenance("published", (), "", (), "", None, host),
        settings,
        flags=tuple(Flag((label,), True, figure.excess) for label, figure in figures if figure.excess),
        sources=sources(every),
        remarks=(*notes, *extra),
    )


def _lead(key: str, value: Value) -> str:
    return f"{key} {value}" if isinstance(value, int) else str(value)


def _figures(rows: Iterable[Mapping[str, Value]]) -> list[Figure]:
    return [value for row in rows for value in row.values() if isinstance(value, Figure)]
