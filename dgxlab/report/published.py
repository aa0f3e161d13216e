"""Tables out of the published record: those of the documents themselves, and the gates that they report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dgxlab import published
from dgxlab.published import Figure, GateResult
from dgxlab.report.beside import by_notes, fitting, sources
from dgxlab.report.records import Column, Flag, Provenance, Remark, Source, Table, Value

W4A16 = "seed000:W4A16_MARLIN_KERNEL_PLAN.md@fc589b3fad"
GDN = "seed002:BYTEGATE_PROGRESS.md@fd4332e8f0"
BLACKWELL = "seed004:DGX_BLACKWELL_PLAN.md"


@dataclass(frozen=True)
class PublishedTable(Table):
    """A table of figures of documents. Its flags are figures that cannot be true.

    Attributes:
        provenance: Says so; nothing of it is known but the host.
        sources: Of all its figures.
        remarks: In the order of the figures.
    """

    sources: tuple[Source, ...] = ()
    remarks: tuple[Remark, ...] = ()


# -- the step table of the W4A16 plan ---------------------------------------------------------------------------------

STEPS = (
    ("P2", "P2 (1 warp/tile)", ()),
    ("W4A16 Step1", "Step 1: block tiling (load_generic, BM64/4w)", ()),
    ("W4A16 P3b-1", "P3b-1: skew-pad ldmatrix + BM128/8w", ((1, ("q4_K", "q4_0")),)),
    ("W4A16 P3b-2", "P3b-2: + BN128/16w (current)", ((2, ("q4_K", "pp512")), (1, ("pp512",)))),
)
"""How the notes of a step's figures begin, its name, and what the plan compares with which earlier step."""


def steps() -> PublishedTable:
    """Return P2, step 1 and P3b of the W4A16 kernel: operations, prompts, and the ratio to MMQ."""
    known = _document(W4A16)
    mmq = _one(known, lambda f: _step_column(f) == "q4_K" and f.notes.startswith("MMQ") and "n=512" in f.test)
    asked = ("q4_K", "q4_0", "pp512", "pp2048", "ratio")
    rows: list[dict[str, Value]] = []
    for notes, name, against in STEPS:
        of_step = {_step_column(figure): figure for figure in known if figure.notes.startswith(notes)}
        row: dict[str, Value] = {"step": name, **{key: of_step[key] for key in asked if key in of_step}}
        if (op := of_step.get("q4_K")) and "ratio" not in row:
            row["ratio"] = round(op.value / mmq.value, 2)
        remarks = ["cold A/B"] if op and "cold A/B" in op.notes else []
        remarks += [_gains(of_step, rows[place], metrics, STEPS[place][1]) for place, metrics in against]
        rows.append({**row, "notes": "; ".join(remarks)})
    labels = {"q4_K": "q4_K n=512 (TFLOPS)", "q4_0": "q4_0 n=512 (TFLOPS)"}
    labels |= {"pp512": "pp512 (t/s)", "pp2048": "pp2048 (t/s)", "ratio": f"vs MMQ's {mmq.text} (x)"}
    columns = [Column("step", "step"), *_numeric(labels), Column("notes", "notes")]
    how = Remark((STEPS[0][1],), "the ratio is not published; it is q4_K's, as in the rows below")
    settings = {"MUL_MAT": "m=4096 k=14336", "pp512 and pp2048": "Qwen3-32B Q4_K_M"}
    return _table("steps", "W4A16 steps", columns, rows, settings, extra=(how,), also=(mmq,), remark=False)


def _step_column(figure: Figure) -> str:
    if figure.metric == "ratio_vs_MMQ":
        return "ratio"
    if figure.metric == "throughput":
        return figure.quant
    return figure.metric if figure.metric.startswith(("pp", "tg")) else figure.test


def _gains(figures: Mapping[str, Figure], before: Mapping[str, Value], metrics: Iterable[str], name: str) -> str:
    pairs = [(key, figures.get(key), before.get(key)) for key in metrics]
    gains = [f"{(b.value / a.value - 1) * 100:+.0f} % {key}" for key, b, a in pairs if b and isinstance(a, Figure)]
    return f"{', '.join(gains)} over {name.partition(':')[0]}"


# -- the concurrency table of the Blackwell plan ----------------------------------------------------------------------

ARMS = (("llama.cpp", "Q8_0"), ("llama.cpp", "MXFP4_MOE"), ("vLLM 0.23.0", "FP8"))


def concurrency() -> PublishedTable:
    """Return prompt and generation rates by B, of llama.cpp in two types of weights and vLLM."""
    known = [f for f in _document(BLACKWELL) if f.metric in ("S_PP", "S_TG") and f.test.startswith("B=")]
    rows: dict[int, dict[str, Value]] = {}
    labels = {"B": "B"}
    for engine, quant in ARMS:
        for metric in ("S_PP", "S_TG"):
            for figure in known:
                # stock and paged are the two arms of another table, from another session
                own = figure.notes == "" or figure.notes.startswith("suspect")
                if not own or (figure.engine, figure.quant, figure.metric) != (engine, quant, metric):
                    continue
                batch, *how = figure.test.split()
                name = " ".join((engine, quant, *how, metric))
                labels[name] = f"{name} (t/s)"
                rows.setdefault(int(batch.removeprefix("B=")), {})[name] = figure
    table_rows = [{"B": batch, **rows[batch]} for batch in sorted(rows)]
    model = _figures(table_rows)[0].model
    return _table("concurrency", "Concurrency", _numeric(labels), table_rows, {"model": model})


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


def kernel_bytes() -> PublishedTable:
    """Return what the recurrence of one step moves, how long it takes, and what that is of the memory's peak."""
    known = _document(GDN)
    peak = _one(known, lambda figure: figure.metric == "mem_bw_peak")
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
    columns = [Column("kernel", "kernel"), Column("state", "state"), *_numeric(BYTES)]
    settings: dict[str, Value] = {"B": 128, "peak": f"{peak.text} GB/s", "model": _figures(rows)[0].model}
    title = "Bytes of the GDN recurrence"
    return _table("bytes", title, columns, rows, settings, leads=2, extra=remarks, also=(peak,))


# -- gates ------------------------------------------------------------------------------------------------------------


def gates() -> PublishedTable:
    """Return every gate that a document reports."""
    entries = published.gates()
    rows: list[dict[str, Value]] = []
    for gate in entries:
        about = {"gate": f"{_GATES[gate.metric]}: {gate.test}", "result": gate.value, "pin": gate.pin}
        rows.append({**about, "model": gate.model, "source": gate.source_doc, "notes": gate.notes})
    columns = [Column(key, key) for key in rows[0]]
    return _table("gates", "Published gates", columns, rows, {}, also=entries)


_GATES = {"tests_passed": "parity", "greedy_md5": "greedy"}

# -- any series -------------------------------------------------------------------------------------------------------

ABOUT = ("source_doc", "host", "engine", "pin", "model", "quant", "tool", "test", "metric")
"""What tells figures apart, in the order of its columns."""


def series(pattern: str) -> PublishedTable:
    """Return every figure that has all words of a pattern, one a row; what is alike in all of them has no column.

    Raises:
        UsageError: if there is none.
    """
    figures = fitting(published.figures(), pattern, "figure")
    values = {name: {getattr(figure, name) for figure in figures} for name in ABOUT}
    alike = {name: getattr(figures[0], name) for name in ABOUT if len(values[name]) == 1}
    leads = [name for name in ABOUT if name not in alike] or ["metric"]
    rows: list[dict[str, Value]] = [
        {**{name: getattr(figure, name) for name in leads}, "value": figure, "unit": figure.unit, "notes": figure.notes}
        for figure in figures
    ]
    columns = [Column(name, name.removesuffix("_doc")) for name in leads]
    columns += [*_numeric({"value": "value"}), Column("unit", "unit"), Column("notes", "notes")]
    settings = {name: value for name, value in alike.items() if name in ("model", "quant", "test", "metric") and value}
    title = f"Published figures: {pattern}"
    return _table("published", title, columns, rows, settings, leads=len(leads), remark=False)


TABLES: tuple[Callable[[], PublishedTable], ...] = (steps, concurrency, kernel_bytes, gates)


# -- any of them ------------------------------------------------------------------------------------------------------


def _numeric(labels: Mapping[str, str]) -> list[Column]:
    return [Column(key, label, numeric=True) for key, label in labels.items()]


def _document(doc: str) -> list[Figure]:
    return [figure for figure in published.figures() if figure.source_doc == doc]


def _one(figures: Iterable[Figure], wanted: Callable[[Figure], bool]) -> Figure:
    (figure,) = filter(wanted, figures)
    return figure


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
        also: What is published and used, and is not a number in it.
        remark: Whether the notes of the figures are remarks beneath it.
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
