"""What every picture is drawn on: size, colours, title and legend; and how it becomes the same bytes each time."""

from __future__ import annotations

import io
import math
import shlex
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgxlab.errors import UsageError
from dgxlab.report import Provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 9.0
"""Inches; heights follow from what is drawn."""
DPI = 120
LINE = 0.19
"""Inches that one line of small text takes."""
WRAP = 128
"""Letters of small text that fit into one line."""
TITLE = 80
"""Letters of a title that fit; a longer one is written smaller."""
HANDLE = 12
"""Letters whose room a legend's line and the space beside it take."""

PAPER, INK, FAINT, RULE = "#f4f4f1", "#24292f", "#8c8c88", "#d9d9d4"
"""A background of its own, so that a picture reads the same on a light and on a dark page."""
COLOURS = ("#0b62a4", "#c2500a", "#1a7f5a", "#8a3d8f", "#6b5b00", "#333333")
MARKERS = ("o", "^", "s", "D", "v", "P")
DASHES = ("-", "--", "-.", ":")
"""Lines differ in all three: no reader depends on colour alone."""

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
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.6,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.0,
    "lines.linewidth": 1.5,
    "lines.markersize": 5.5,
}

FLOOR = "matplotlib>=3.9"


@contextmanager
def new(height: float) -> Iterator[Figure]:
    """Give a figure whose panels take `height` inches; draw on it inside the `with`, whatever the user's settings.

    Raises:
        UsageError: if matplotlib is not installed, or does not load.
    """
    install = f"{sys.executable} -m pip install '{FLOOR}'"
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError(
            f"pictures are drawn with matplotlib, and there is no module {error.name}", next=install
        ) from None
    except ImportError as error:
        raise UsageError(
            f"matplotlib is installed and does not load: {error}", next=f"{install} --force-reinstall"
        ) from error
    with style.context(["default", LOOK]):
        yield Figure(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER, layout="constrained")


def head(figure: Figure, title: str, lines: Sequence[str]) -> None:
    """Make room above the panels for the title, lines of small text and a legend of all that was drawn."""
    drawn = [axes.get_legend_handles_labels() for axes in figure.axes if axes.get_legend() is None]
    entries = {label: handle for handles, labels in drawn for handle, label in zip(handles, labels, strict=True)}
    columns = max(1, WRAP // (HANDLE + max(map(len, entries)))) if entries else 1
    above, panels = 0.5 + LINE * len(lines), figure.get_figheight()
    height = above + 0.2 * math.ceil(len(entries) / columns) + 0.2 + panels
    figure.set_figheight(height)
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0.01, 0.0, 0.98, panels / height), h_pad=0.06)
    left = 0.2 / WIDTH
    title = plain(title)
    size = 12.0 * min(1.0, TITLE / len(title))
    figure.text(left, 1 - 0.15 / height, title, size=size, weight="bold", va="top")
    figure.text(left, 1 - 0.43 / height, "\n".join(lines), size=8.0, va="top", linespacing=1.5)
    if entries:
        figure.legend(
            list(entries.values()),
            list(entries),
            loc="upper left",
            bbox_to_anchor=(left, 1 - above / height),
            ncols=columns,
        )


def origins(provenances: Sequence[Provenance]) -> list[str]:
    """Say where numbers come from; experiments are named where they were built from different trees."""
    unique = list(dict.fromkeys(provenances))
    sessions = dict.fromkeys(session for origin in unique for session in origin.sessions)
    builds = {origin.experiment: _build(origin) for origin in unique}
    synthetic = sorted({model for origin in unique for model in origin.synthetic})
    return [
        f"session {' · '.join(sessions)}" if sessions else "no session",
        f"host {', '.join(dict.fromkeys(origin.host for origin in unique))}",
        f"backend {', '.join(dict.fromkeys(origin.backend for origin in unique))}",
        *([f"{name}: {build}" for name, build in builds.items()] if len(set(builds.values())) > 1 else builds.values()),
        *([f"synthetic model {', '.join(synthetic)}"] if synthetic else []),
    ]


def _build(origin: Provenance) -> str:
    series = ", ".join(f"{ref.name}@{ref.digest[:12]}" for ref in origin.series) or "none"
    return f"pin {origin.pin[:12]} · series {series}" + " · dirty tree" * origin.dirty


def wrapped(parts: Sequence[str]) -> list[str]:
    """Return lines of small text that break between parts: no-break spaces hold each together."""
    held = [plain(part).replace(" ", "\N{NO-BREAK SPACE}") for part in dict.fromkeys(parts)]
    return [line.removesuffix(" ·") for line in textwrap.wrap(" · ".join(held), WRAP, break_on_hyphens=False)]


def plain(text: str) -> str:
    """Make one line of a text."""
    return "".join(char if char.isprintable() else " " for char in text)


def write(figure: Figure, path: Path) -> Path:
    """Write the picture, never seen half-written, into a folder that is made if need be.

    Nothing in the file tells when or with which matplotlib it was drawn.

    Raises:
        UsageError: if it cannot be written there.
    """
    from matplotlib import style

    buffer = io.BytesIO()
    with style.context(["default", LOOK]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box is drawn for it, which is enough
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_bytes(buffer.getvalue())
        part.replace(path)
    except OSError as error:
        raise UsageError(
            f"the picture {path} cannot be written: {error.strerror}", next=f"ls -ld {shlex.quote(str(path.parent))}"
        ) from error
    return path
