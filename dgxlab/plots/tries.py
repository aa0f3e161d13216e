"""The picture of loops: a panel for each ledger, with the speed of each try and the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dgxlab.plots import COLOURS, FAINT, INK, label, new
from dgxlab.report import Table
from dgxlab.report.tries import NOT_YET
from dgxlab.stats import Ended

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 3.0  # height of a panel, in inches
LOOKS = {
    Ended.PROMOTED.value: ("o", COLOURS[2]),
    Ended.OVERFITTED.value: ("D", COLOURS[3]),
    Ended.CHAIN.value: ("s", COLOURS[0]),
    Ended.SCREEN.value: ("v", COLOURS[1]),
    Ended.GATE.value: ("x", INK),
    Ended.BUILD.value: ("+", FAINT),
    NOT_YET: ("*", INK),
}
"""Marker and colour of a try, by how it ended."""


def figure(tables: Sequence[Table]) -> Figure:
    """Draw ledgers (`report.tries`), one beneath the other; raises UsageError if there is no matplotlib."""
    with new(PANEL * len(tables)) as figure:
        for place, table in enumerate(tables, 1):
            _panel(figure.add_subplot(len(tables), 1, place), table)
        how = ["a point: speed of a try by the baseline's, from its chain, else from its screen", "line: best so far"]
        label(figure, "Tries", [*how, "at the bottom: without a speed"], [table.provenance for table in tables])
    return figure


def _panel(axes: Axes, table: Table) -> None:
    at = dict(enumerate(table.rows, 1))
    best = [100 * (float(str(row["best_speed"])) - 1) for row in at.values()]
    axes.step([0, *at], [0.0, *best], where="post", color=INK, linewidth=1.2, label="best so far")
    for ended, (marker, colour) in LOOKS.items():
        known = {
            n: 100 * (row["speed"] - 1)
            for n, row in at.items()
            if row["ended"] == ended and isinstance(row["speed"], float)
        }
        axes.plot(list(known), list(known.values()), marker, color=colour, label=ended if known else None)
        other = [n for n, row in at.items() if row["ended"] == ended and row["speed"] is None]
        axes.plot(
            other,
            [0.03] * len(other),
            marker,
            color=colour,
            transform=axes.get_xaxis_transform(),
            label=ended if other and not known else None,
        )
    axes.set_title(table.title, weight="bold", pad=5.0)
    axes.set_xlabel("try")
    axes.set_ylabel("speed over the baseline (%)")
    axes.set_xlim(0, len(at) + 1)
    axes.margins(y=0.15)
    axes.locator_params(axis="x", integer=True)
