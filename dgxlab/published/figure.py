"""One published figure."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Where something was published, and what it is about; as the document has it, "" where it says nothing.

    Attributes:
        figure: Identity: 16 hex digits, of everything but the line.
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
        line: Where it stands in the file.
    """

    figure: str
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


@dataclass(frozen=True)
class Figure(Published):
    """A published number.

    Attributes:
        value: In `unit`.
        excess: Why it cannot be true, see `published.implausible`; "" where nothing speaks against it.
    """

    value: float
    excess: str = ""

    @property
    def text(self) -> str:
        """The number with every digit that was published: `718`, `~2`, `2215 ± 15`."""
        about = "~" if re.search(r"\bapprox\b", self.notes) else ""
        spread = "" if self.stddev is None else f" ± {_digits(self.stddev)}"
        return f"{about}{_digits(self.value)}{spread}"


@dataclass(frozen=True)
class GateResult(Published):
    """A published verdict of a gate.

    Attributes:
        value: `1103/1103`, or the md5 of greedy tokens.
    """

    value: str


def _digits(value: float) -> str:
    return repr(int(value) if value.is_integer() else value)
