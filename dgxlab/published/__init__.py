"""Figures that others have published, each with document, host, version and unit; they are in a CSV file here.

None was measured by dgxlab, most have neither n nor spread, and some are impossible: `Figure.excess` says why. They are
shown in tables of their own.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from functools import cache
from importlib import resources

from dgxlab import roofline
from dgxlab.roofline import Peaks

FLOPS = {"GFLOPS": 1e9, "TFLOPS": 1e12, "TOPS": 1e12}
TOKENS = ("t/s", "t/s/seq")

GENERATED = re.compile(r"S_TG|decode|tg\d")
"""Metrics of generated tokens; other rates of tokens are only compared with the compute peak."""

STREAMS = re.compile(r"(?:^|\s)(?:B|N|n|npl)=?(\d+)(?!\S)")


@dataclasses.dataclass(frozen=True)
class Figure:
    """A published number, or the result of a gate, with what the document says about it; "" where it says nothing."""

    source_doc: str  # with its commit where that is known
    host: str
    engine: str  # llama.cpp, vLLM 0.23.0, ...
    pin: str  # its version
    model: str  # or another subject
    quant: str
    tool: str
    test: str
    metric: str
    value: float | str  # in `unit`; of a gate `1103/1103` tests passed, or the md5 of greedily sampled tokens
    unit: str  # "" for a gate
    stddev: float | None
    notes: str  # further remarks, e.g. that a later document retracts it
    line: int  # of the file
    excess: str = ""  # why it is impossible on the GPU in its host name

    @property
    def text(self) -> str:
        """The value as published: `718`, `~2`, `2215 ± 15`, `1103/1103`."""
        if isinstance(self.value, str):
            return self.value
        about = "~" if re.search(r"\bapprox\b", self.notes) else ""
        spread = "" if self.stddev is None else f" ± {_digits(self.stddev)}"
        return f"{about}{_digits(self.value)}{spread}"


@cache
def figures() -> tuple[Figure, ...]:
    """Return all figures, in the order of published.csv, whose texts tests/published checks."""
    text = resources.files("dgxlab.published").joinpath("published.csv").read_text(encoding="utf-8")
    known = []
    for line, row in enumerate(csv.DictReader(text.splitlines(), strict=True), 2):
        value = float(row["value"]) if row["unit"] else row["value"]
        stddev = float(row["stddev"]) if row["stddev"] else None
        known.append(Figure(**{**row, "value": value, "stddev": stddev, "line": line}))  # type: ignore[arg-type]
    return tuple(dataclasses.replace(figure, excess=_implausible(figure)) for figure in known)


def _implausible(figure: Figure) -> str:
    peaks = _peaks_of(figure.host)
    if peaks is None or isinstance(figure.value, str):
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


def _peaks_of(host: str) -> Peaks | None:
    """Return the peaks of the only GPU in a document's host name, such as `dgx.casa GB10 sm_121`; None if unknown."""
    named = re.fullmatch(r"(?:[\w. ]+ )?(?!sm_)(\w+)(?: sm_\d+)?", host)
    return roofline.peaks(named[1]) if named else None


def _digits(value: float) -> str:
    return repr(int(value) if value.is_integer() else value)
