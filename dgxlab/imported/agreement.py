"""Whether the numbers of one row of test-backend-ops can be of one measurement: those of two that became one cannot."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from dgxlab.imported.reading import Refused

SCALE = {"k": "e3", "M": "e6", "G": "e9", "T": "e12"}
FACTOR = {scale: float(f"1{exponent}") for scale, exponent in SCALE.items()}

HALF = 0.0050001
"""Half of the console's second decimal, and what binary fractions make of it."""

EXACT = 5.0001e-7
"""Half of the sixth decimal that SQL has."""

SIZES = {"MUL_MAT": ("m", "n", "k", "bs", "nr"), "MUL_MAT_ID": ("m", "n", "k", "n_used")}
"""By operation what its FLOPs are twice the product of; others have formulas that change with llama.cpp."""


def printed(time_us: str, per_run: tuple[str, str], per_second: tuple[str, str], number: int) -> None:
    """Refuse a line of the console whose three rounded numbers cannot come from one measurement.

    Raises:
        Refused: if they cannot.
    """
    (least, most), (low, high), time = _rounded(*per_run), _rounded(*per_second), float(time_us)
    shortest = time - HALF
    if least / (time + HALF) * 1e6 > high or (shortest > 0 and most / shortest * 1e6 < low):
        raise Refused(f"{' '.join(per_run)}FLOP in {time_us} us are not {' '.join(per_second)}FLOPS", number)


def _rounded(digits: str, scale: str) -> tuple[float, float]:
    """Return between what values a number with two decimals and a scale was rounded; FLOPs a run are cut to whole."""
    factor = FACTOR[scale]
    return (float(digits) - HALF) * factor - 1, (float(digits) + HALF) * factor + 1


def columns(op: str, params: Mapping[str, Any], values: Mapping[str, float], number: int) -> None:
    """Refuse a row whose rate, times its time, is not what one run of its case computes or moves.

    Args:
        op: Whose case it is.
        params: The case's.
        values: time_us, and as far as the row has them flops, bandwidth_gb_s in GiB/s and memory_kb, cut to whole.
        number: Its line.

    Raises:
        Refused: if so.
    """
    time, wanted = values["time_us"], flops_of(op, params)
    if "flops" in values:
        flop, off = _product(values["flops"], time)
        away = abs((flop + 0.5) % 1 - 0.5 if wanted is None else flop - wanted)
        if not away <= off:  # damaged sizes and rates can make inf and nan, which are no more than off either
            what = "no whole number" if wanted is None else f"not the {wanted:.15g} of its shape"
            raise Refused(f"{values['flops']:.6g} FLOPS for {time:g} us are {flop:.10g} FLOP, {what}", number)
    if "bandwidth_gb_s" in values and "memory_kb" in values:
        gib, off = _product(values["bandwidth_gb_s"], time)
        if gib + off < values["memory_kb"] * 2.0**-20:  # it may be more: nodes before the operation's are counted
            said = f"{values['bandwidth_gb_s']:g} GiB/s for {time:g} us"
            raise Refused(f"{said} are {gib * 2**20:.10g} KiB, less than the {values['memory_kb']:g} it says", number)


def _product(rate: float, time_us: float) -> tuple[float, float]:
    """Return what a rate makes in a time, and by how much rounding of both may have changed it."""
    made = rate * time_us / 1e6
    return made, made * (EXACT / time_us + EXACT / rate + 1e-12)


def flops_of(op: str, params: Mapping[str, Any]) -> float | None:
    """Return the FLOPs of one run of a case; None where its parameters do not tell them."""
    sizes = [str(params.get(name, "")) for name in SIZES.get(op, ())]
    numbers = [re.findall(r"[0-9]+", size) for size in sizes]
    if not numbers or not all(numbers):
        return None
    return 2 * math.prod(float(digits) for found in numbers for digits in found)
