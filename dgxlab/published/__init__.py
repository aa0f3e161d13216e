"""Figures that others have published, each with document, host, version and unit; they are in two CSV files here.

None was measured by dgxlab, most have neither n nor spread, and some are impossible: `Figure.excess` says why. Only
`report` shows them beside measured numbers, and labels them.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from dgxlab import roofline
from dgxlab.roofline import Peaks

FLOPS = {"GFLOPS": 1e9, "TFLOPS": 1e12, "TOPS": 1e12}
TOKENS = ("t/s", "t/s/seq")

GENERATED = re.compile(r"S_TG|decode|tg\d")
"""Metrics of generated tokens; other rates of tokens are only compared with the compute peak."""

STREAMS = re.compile(r"(?:^|\s)(?:B|N|n|npl)=?(\d+)(?!\S)")


@dataclasses.dataclass(frozen=True)
class Published:
    """What a document says about a published number or gate; "" where it says nothing."""

    source_doc: str  # with its commit where that is known
    host: str
    engine: str  # llama.cpp, vLLM 0.23.0, ...
    pin: str  # its version
    model: str  # or another subject
    quant: str
    tool: str
    test: str
    metric: str
    unit: str  # "" for a gate
    stddev: float | None
    notes: str  # further remarks, e.g. that a later document retracts it
    line: int  # of the file


@dataclasses.dataclass(frozen=True)
class Figure(Published):
    """A published number with what the document says about it."""

    value: float  # in `unit`
    excess: str = ""  # why it is impossible on the GPU in its host name

    @property
    def text(self) -> str:
        """The number as published: `718`, `~2`, `2215 ± 15`."""
        about = "~" if re.search(r"\bapprox\b", self.notes) else ""
        spread = "" if self.stddev is None else f" ± {_digits(self.stddev)}"
        return f"{about}{_digits(self.value)}{spread}"


@dataclasses.dataclass(frozen=True)
class GateResult(Published):
    """The published result of a gate: `1103/1103` tests passed, or the md5 of greedily sampled tokens."""

    value: str


@cache
def figures() -> tuple[Figure, ...]:
    """Return all published numbers, in the order of published.csv."""
    known = (Figure(**{**row, "value": float(row["value"])}) for row in _rows("published.csv"))
    return tuple(dataclasses.replace(figure, excess=_implausible(figure)) for figure in known)


@cache
def gates() -> tuple[GateResult, ...]:
    """Return all published results of gates, in the order of published_gates.csv."""
    return tuple(GateResult(**row) for row in _rows("published_gates.csv"))


def _rows(name: str) -> Iterator[dict[str, Any]]:
    text = resources.files("dgxlab.published").joinpath(name).read_text(encoding="utf-8")
    for line, row in enumerate(csv.DictReader(text.splitlines(), strict=True), 2):
        yield {**row, "stddev": float(row["stddev"]) if row["stddev"] else None, "line": line}


def _implausible(figure: Figure) -> str:
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
    streams = None
    if GENERATED.match(figure.metric):
        streams = 1
        if figure.tool != "llama-bench" and figure.unit != "t/s/seq":
            stated = STREAMS.search(figure.test)
            streams = int(stated[1]) if stated else None
    return roofline.tokens(figure.value, weights, peaks, streams)


def peaks_of(host: str) -> Peaks | None:
    """Return the peaks of the only GPU in a document's host name, such as `dgx.casa GB10 sm_121`; None if unknown."""
    named = re.fullmatch(r"(?:[\w. ]+ )?(?!sm_)(\w+)(?: sm_\d+)?", host)
    return roofline.peaks(named[1]) if named else None


def _digits(value: float) -> str:
    return repr(int(value) if value.is_integer() else value)
