"""How near operations come to what their GPU can do: bytes a second, and shares of two named peaks.

Which of a GPU's paths a kernel multiplies on is the kernel's choice and not the weights' type: of 4 bits a W4A16 kernel
makes bf16, as cuBLAS after a dequantisation does, MMQ makes int8, a Blackwell GPU takes fp4 as it is, and a matrix
times a vector waits for memory whatever it multiplies with. No row says which it was. A share of "the" roofline would
therefore guess, and guess differently for two rivals on one shape, so that the slower could have the larger share.
Every row is set against the same peak instead, bf16's, which every rival could use: shares then compare as times do. A
kernel on a faster path may exceed 100 %, and that is what it gains.

Where the operands once at memory's bandwidth take longer than the FLOPS at that peak, memory is the nearer bound, and
the row has its share of the bandwidth too. In a warm loop that may exceed 100 % as well, of operands that stay in the
cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dgxlab import roofline
from dgxlab.model import Param
from dgxlab.report.evidence import Measured
from dgxlab.report.numbers import Mean, Quantity, Value
from dgxlab.report.records import Column, Table
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
PATH = "bf16"
"""The path whose peak rows are set against."""

OF_FLOPS = Column("of_flops", f"% of {PATH} peak", numeric=True)
OF_BANDWIDTH = Column("of_bandwidth", "% of bandwidth", numeric=True)


def with_roof(table: Table, cells: Sequence[Measured]) -> Table:
    """Return a table of operations with what they moved a second and their shares of the GPU's peaks.

    Columns that nothing is known for are left out.

    Args:
        cells: Of the table.
    """
    device = table.provenance.device
    peaks = roofline.together(device.names, alone=True) if device else None
    cells = sorted(cells, key=lambda cell: rank(OPS, cell.ask))  # as its rows are
    found = [_row(cell, peaks) for cell in cells]
    rows = tuple({**row, **more} for row, more in zip(table.rows, found, strict=True))
    new = tuple(column for column in (RATE, OF_FLOPS, OF_BANDWIDTH) if any(row.get(column.key) for row in found))
    settings = dict(table.settings)
    if peaks is not None and OF_FLOPS in new:
        bandwidth = f" and {peaks.bandwidth / 1e9:.4g} GB/s" if OF_BANDWIDTH in new else ""
        settings["peaks"] = f"{peaks.gpu}'s {peaks.flops[PATH] / 1e12:.4g} TFLOPS {PATH}{bandwidth}"
    if RATE in new:
        settings["GB/s"] = "of every operand once, as if none came from a cache"
    return replace(table, columns=(*table.columns, *new), rows=rows, settings=settings)


def _row(cell: Measured, peaks: Peaks | None) -> dict[str, Value]:
    time, params = cell.quantities.get("time_us"), cell.ask.cell.params
    shape = _shape(params)
    if time is None or shape is None:
        return {}
    flops, moved = shape
    seconds = time.middle / 1e6
    rate = moved / seconds / 1e9
    spread = None if time.spread is None else rate * time.spread / time.middle
    made = Mean if isinstance(time, Mean) else Quantity
    row: dict[str, Value] = {"rate": made("rate", "GB/s", rate, time.n, spread)}
    return row if peaks is None else {**row, **_shares(flops / seconds, moved / seconds, peaks)}


def _shares(flops: float, moved: float, peaks: Peaks) -> dict[str, Value]:
    """Return a row's shares as text and as numbers, given its FLOPS and bytes a second."""
    of_flops, of_bandwidth = 100 * flops / peaks.flops[PATH], 100 * moved / peaks.bandwidth
    row: dict[str, Value] = {"of_flops": f"{of_flops:.1f}", "of_flops_pct": of_flops}
    if of_bandwidth >= of_flops:
        row |= {"of_bandwidth": f"{of_bandwidth:.1f}", "of_bandwidth_pct": of_bandwidth}
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
