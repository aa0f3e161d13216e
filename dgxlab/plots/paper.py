"""What every picture is drawn on: size, colours and letters; and how it becomes the same bytes each time."""

from __future__ import annotations

import io
import math
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab.errors import UsageError
from dgxlab.report import Provenance

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

WIDTH = 9.0
"""Inches; heights follow from what is drawn."""

DPI = 120
LEFT, RIGHT = 0.85, 0.2
"""Inches left of every panel, for its numbers and unit, and right of it."""

LINE = 0.19
"""Inches that one line of small text takes."""

WRAP = 128
"""Letters of small text that fit into one line."""

TITLE = 80
"""Letters of a title that fit."""

HANDLE = 12
"""Letters whose room a legend's line and the space beside it take."""

PAPER, INK, FAINT, RULE = "#f4f4f1", "#24292f", "#8c8c88", "#d9d9d4"
"""A page of its own, so that a picture reads the same on a light and on a dark one."""

COLOURS = ("#0b62a4", "#c2500a", "#1a7f5a", "#8a3d8f", "#6b5b00", "#333333")
MARKERS = ("o", "^", "s", "D", "v", "P")
DASHES = ("-", "--", "-.", ":")
"""Lines are told apart by all three: no reader depends on colour alone."""

LOOK = {
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "text.color": INK,
    "text.parse_math": False,  # a $ in a name is a $
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.titlesize": 9.0,
    "axes.titlelocation": "left",
    "axes.unicode_minus": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 5.5,
}

FLOOR = "matplotlib>=3.9"


def need() -> None:
    """Make sure that pictures can be drawn here.

    Raises:
        UsageError: if matplotlib is not installed, or does not load.
    """
    install = f"{sys.executable} -m pip install '{FLOOR}'"
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(
            f"pictures are drawn with matplotlib, and there is no module {error.name}", next=install
        ) from None
    except ImportError as error:
        raise UsageError(
            f"matplotlib is installed and does not load: {error}", next=f"{install} --force-reinstall"
        ) from error


@contextmanager
def look() -> Iterator[None]:
    """Draw as `LOOK` says, whatever the user's own settings are, and leave those as they were."""
    from matplotlib import style

    with style.context(["default", LOOK]):
        yield


class Sheet:
    """A figure that is filled from its top down, in inches.

    Attributes:
        figure: matplotlib's.
        height: Of all of it.
    """

    def __init__(self, height: float) -> None:
        from matplotlib.figure import Figure

        self.figure: Figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER)
        self.height = height
        self._top = 0.0

    def skip(self, height: float) -> None:
        """Leave room."""
        self._top += height

    def text(self, text: str, size: float = 8.0, *, weight: str = "normal", height: float = LINE) -> None:
        """Write one line."""
        self.figure.text(
            0.2 / WIDTH, self._up(height / 2), plain(text), size=size, weight=weight, va="center_baseline", color=INK
        )
        self._top += height

    def title(self, text: str) -> None:
        """Write what the picture shows; a long one in smaller letters."""
        self.text(text, 12.0 * min(1.0, TITLE / len(text)), weight="bold", height=0.3)

    def legend(self, handles: Sequence[Line2D]) -> None:
        """Explain lines and markers, above what they could cover."""
        labels = [str(handle.get_label()) for handle in handles]
        self.figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.2 / WIDTH, self._up(0)),
            ncols=_columns(labels),
            borderpad=0.1,
            borderaxespad=0.0,
        )
        self._top += legend_height(labels)

    def panels(self, height: float, share: Axes | None = None, *, count: int = 1) -> list[Axes]:
        """Place panels side by side; `share` has the same horizontal axis."""
        gap = LEFT
        width = (WIDTH - LEFT - RIGHT - gap * (count - 1)) / count
        rects = [
            ((LEFT + (width + gap) * i) / WIDTH, self._up(height), width / WIDTH, height / self.height)
            for i in range(count)
        ]
        self._top += height
        return [self.figure.add_axes(rect, sharex=share) for rect in rects]

    def _up(self, further: float) -> float:
        return 1 - (self._top + further) / self.height


def legend_height(labels: Sequence[str]) -> float:
    """Return how much room a legend takes."""
    return 0.1 + 0.2 * math.ceil(len(labels) / _columns(labels)) if labels else 0.0


def _columns(labels: Sequence[str]) -> int:
    """Return how many columns of a legend fit; it is filled column by column, the first get what is left over."""
    for columns in range(len(labels), 1, -1):
        least, over = divmod(len(labels), columns)
        ends = [least * i + min(i, over) for i in range(columns + 1)]
        widths = [max(map(len, labels[begin:end])) + HANDLE for begin, end in pairwise(ends)]
        if sum(widths) <= WRAP:
            return columns
    return 1


def origins(found: Sequence[Provenance]) -> list[str]:
    """Say where numbers come from, in lines that fit; arms are named where they differ."""
    origins = list(dict.fromkeys(found))
    sessions = list(dict.fromkeys(session for origin in origins for session in origin.sessions))
    hosts = list(dict.fromkeys(origin.host for origin in origins))
    built = {origin.experiment: _built(origin) for origin in origins}
    backends = dict.fromkeys(origin.backend for origin in origins)
    synthetic = sorted({model for origin in origins for model in origin.synthetic})
    said = [
        f"session {sessions[0]}" if sessions else "no session",
        *sessions[1:],
        f"host {', '.join(hosts)}",
        f"backend {', '.join(backends)}",
        *([f"{name}: {what}" for name, what in built.items()] if len(set(built.values())) > 1 else set(built.values())),
        *([f"synthetic model {', '.join(synthetic)}"] if synthetic else []),
    ]
    return wrapped(said)


def wrapped(parts: Sequence[str]) -> list[str]:
    """Return lines of small text; they break between parts, each of which no-break spaces hold together."""
    held = [plain(part).replace(" ", "\N{NO-BREAK SPACE}") for part in parts]
    return [line.removesuffix(" ·") for line in textwrap.wrap(" · ".join(held), WRAP, break_on_hyphens=False)]


def plain(text: str) -> str:
    """Make one line of a text."""
    return "".join(char if char.isprintable() else " " for char in text)


def _built(origin: Provenance) -> str:
    series = ", ".join(f"{one.name}@{one.digest[:12]}" for one in origin.series) or "none"
    return f"pin {origin.pin[:12]} · series {series}" + " · dirty tree" * origin.dirty


def png(figure: Figure) -> bytes:
    """Return the picture; nothing in it tells when or with which matplotlib it was drawn."""
    buffer = io.BytesIO()
    with look(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box stands for it, which is enough
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def write(figure: Figure, path: Path) -> Path:
    """Write the picture, never seen half-written, into a folder that is made if need be.

    Raises:
        UsageError: if it cannot be written there.
    """
    content = png(figure)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise UsageError(
            f"the picture {path} cannot be written: {error.strerror}", next=f"ls -ld {shlex.quote(str(path.parent))}"
        ) from error
    return path
