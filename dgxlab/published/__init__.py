"""Figures that documents state, each with its source, host, pin and unit; they come with dgxlab in two files.

None of them was measured here, most have neither n nor spread, and some cannot be true: `Figure.excess` says why. Only
`report` sets them beside what was measured, and says which is which.
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
"""Metrics of tokens that come one by one; a rate of anything else is only compared with what can be multiplied."""

STREAMS = re.compile(r"(?:^|\s)(?:B|N|n|npl)=?(\d+)(?!\S)")


@dataclasses.dataclass(frozen=True)
class Published:
    """Where something was published, and what it is about; as the document has it, "" where it says nothing.

    Attributes:
        source_doc: The document, with its commit where that is known.
        host: The machine, in the document's words.
        engine: llama.cpp, vLLM 0.23.0, ...
        pin: Its version.
        model: The model, or what else was looked at.
        quant: Type of its weights.
        tool: What measured it.
        test: How.
        metric: The document's name for it.
        unit: "" for a gate.
        stddev: None where none is stated.
        notes: Everything else that matters, e.g. that a later document takes it back.
        line: Of the file.
    """

    source_doc: str
    host: str
    engine: str
    pin: str
    model: str
    quant: str
    tool: str
    test: str
    metric: str
    unit: str
    stddev: float | None
    notes: str
    line: int


@dataclasses.dataclass(frozen=True)
class Figure(Published):
    """A published number.

    Attributes:
        value: In `unit`.
        excess: Why it cannot be true on the GPU that its host names; "" where that is not known.
    """

    value: float
    excess: str = ""

    @property
    def text(self) -> str:
        """The number with every digit that was published: `718`, `~2`, `2215 ± 15`."""
        about = "~" if re.search(r"\bapprox\b", self.notes) else ""
        spread = "" if self.stddev is None else f" ± {_digits(self.stddev)}"
        return f"{about}{_digits(self.value)}{spread}"


@dataclasses.dataclass(frozen=True)
class GateResult(Published):
    """A published verdict of a gate.

    Attributes:
        value: `1103/1103`, or the md5 of greedy tokens.
    """

    value: str


@cache
def figures() -> tuple[Figure, ...]:
    """Return every figure, in the order of the file."""
    known = (Figure(**{**row, "value": float(row["value"])}) for row in _rows("published.csv"))
    return tuple(dataclasses.replace(figure, excess=implausible(figure)) for figure in known)


@cache
def gates() -> tuple[GateResult, ...]:
    """Return every gate, in the order of the file."""
    return tuple(GateResult(**row) for row in _rows("published_gates.csv"))


def _rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, whose texts tests/published holds against what they may be."""
    text = resources.files("dgxlab.published").joinpath(name).read_text(encoding="utf-8")
    for line, row in enumerate(csv.DictReader(text.splitlines(), strict=True), 2):
        yield {**row, "stddev": float(row["stddev"]) if row["stddev"] else None, "line": line}


def implausible(figure: Figure) -> str:
    """Say why a figure cannot be true on the GPU that its host names; "" where it could be."""
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
    """Return the peaks of the one GPU that a document's name of a host ends in, `dgx.casa GB10 sm_121`."""
    named = re.fullmatch(r"(?:[\w. ]+ )?(?!sm_)(\w+)(?: sm_\d+)?", host)
    return roofline.peaks(named[1]) if named else None


def _digits(value: float) -> str:
    return repr(int(value) if value.is_integer() else value)
