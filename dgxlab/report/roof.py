"""How near operations come to what their GPU can do: bytes a second, and the share of the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dgxlab import roofline
from dgxlab.model import Param
from dgxlab.report.evidence import Measured
from dgxlab.report.records import Column, Quantity, Table, Value
from dgxlab.report.tables import OPS, rank
from dgxlab.roofline import Peaks

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
"""What a weight takes in ggml's blocks, their scales among it."""

RATE = Column("rate", "", "rate")
SHARE = Column("roofline", "% of roofline", numeric=True)


def with_roof(table: Table, cells: Sequence[Measured]) -> Table:
    """Return a table of operations with what they moved a second and their share of the roofline.

    The share is of the least time in which the GPU could do it: its FLOPS on the path that the weights' type allows, or
    its memory's bandwidth with every operand moved once, whichever takes longer. Columns that nothing is known for are
    left out.

    Args:
        cells: Of the table.
    """
    peaks = roofline.peaks(table.provenance.host)
    cells = sorted(cells, key=lambda cell: rank(OPS, cell.ask))  # as its rows are
    found = [_row(cell, peaks) for cell in cells]
    rows = tuple({**row, **more} for row, more in zip(table.rows, found, strict=True))
    new = tuple(column for column in (RATE, SHARE) if any(row.get(column.key) for row in found))
    settings = dict(table.settings)
    if peaks is not None and SHARE in new:
        paths = {roofline.path_of(str(cell.ask.cell.params.get("type_a"))) for cell in cells}
        flops = dict(peaks.path(path) for path in sorted(paths))
        said = ", ".join(f"{most / 1e12:.4g} TFLOPS {path}" for path, most in flops.items())
        settings["roofline"] = f"{peaks.gpu}'s {said} and {peaks.bandwidth / 1e9:.4g} GB/s"
    if RATE in new:
        settings["GB/s"] = "of every operand once, as if none came from a cache"
    *columns, samples = table.columns
    return replace(table, columns=(*columns, *new, samples), rows=rows, settings=settings)


def _row(cell: Measured, peaks: Peaks | None) -> dict[str, Value]:
    time, params = cell.quantities.get("time_us"), cell.ask.cell.params
    shape = _shape(params)
    if time is None or shape is None:
        return {}
    flops, moved = shape
    seconds = time.median / 1e6
    row: dict[str, Value] = {"rate": Quantity("rate", "GB/s", moved / seconds / 1e9, time.n)}
    if peaks is not None:
        _, most = peaks.path(roofline.path_of(str(params.get("type_a"))))
        share = 100 * max(flops / most, moved / peaks.bandwidth) / seconds
        row |= {"roofline_pct": share, "roofline": f"{share:.1f}"}
    return row


def _shape(params: Mapping[str, Param]) -> tuple[float, float] | None:
    """Return operations and bytes, of operands and result, of a plain matrix multiplication; None for anything else."""
    weights, other = (BITS.get(str(params.get(name))) for name in ("type_a", "type_b"))
    plain = all(params.get(name, alone) == alone for name, alone in PLAIN.items())
    sizes = [size for name in ("m", "n", "k") if isinstance(size := params.get(name), int)]
    if params.get("op_name") != "MUL_MAT" or weights is None or other is None or not plain or len(sizes) < 3:
        return None
    m, n, k = sizes
    return 2.0 * m * n * k, (m * k * weights + n * k * other + m * n * BITS["f32"]) / 8


PLAIN: Mapping[str, Param] = {"bs": "[1,1]", "nr": "[1,1]"}
"""Parameters of a matrix multiplication without batches; one that is not said is so."""
