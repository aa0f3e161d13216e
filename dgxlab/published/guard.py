"""What a published figure implies, in the words of documents: their units, metrics and ways to name a batch."""

from __future__ import annotations

import re

from dgxlab import roofline
from dgxlab.published.figure import Figure
from dgxlab.roofline import Peaks

FLOPS = {"GFLOPS": 1e9, "TFLOPS": 1e12, "TOPS": 1e12}
TOKENS = ("t/s", "t/s/seq")

GENERATED = re.compile(r"S_TG|decode|tg\d")
"""Metrics of tokens that come one by one; a rate of anything else is only compared with what can be multiplied."""

STREAMS = re.compile(r"(?:^|\s)(?:B|N|n|npl)=?(\d+)(?!\S)")


def implausible(figure: Figure) -> str:
    """Say why a figure cannot be true on the GPU that its host names; "" where nothing speaks against it."""
    peaks = peaks_of(figure.host)
    if peaks is None:
        return ""
    if figure.unit in FLOPS:
        return roofline.compute(figure.value * FLOPS[figure.unit], roofline.path_of(figure.quant), peaks)
    if figure.unit == "GB/s":
        return roofline.memory(figure.value * 1e9, peaks)
    weights = roofline.weights_of(figure.model, figure.quant)
    if figure.unit not in TOKENS or weights is None:
        return ""
    return roofline.tokens(figure.value, weights, peaks, _streams(figure))


def peaks_of(host: str) -> Peaks | None:
    """Return the peaks of the one GPU that a document's name of a host ends in, `dgx.casa GB10 sm_121`."""
    named = re.fullmatch(r"(?:[\w. ]+ )?(?!sm_)(\w+)(?: sm_\d+)?", host)
    return roofline.peaks(named[1]) if named else None


def _streams(figure: Figure) -> int | None:
    if not GENERATED.match(figure.metric):
        return None
    if figure.tool == "llama-bench" or figure.unit == "t/s/seq":
        return 1
    found = STREAMS.search(figure.test)
    return int(found[1]) if found else None
