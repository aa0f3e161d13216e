"""The picture of histories: a panel each, a point for each session, the level before and since each change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dgxlab import units
from dgxlab.plots import COLOURS, FAINT, INK, MARKERS, label, new
from dgxlab.report import Number, Table
from dgxlab.report.records import grouped
from dgxlab.store import alias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL = 2.6  # height of a panel with its title and sessions, in inches
NAMES = 24  # names of sessions for which there is room below a panel


def figure(tables: Sequence[Table]) -> Figure:
    """Draw histories (`report.history`), one beneath the other; raises UsageError if there is no matplotlib."""
    pins = dict.fromkeys(str(row["pin"]) for table in tables for row in table.rows)
    looks = dict(zip(pins, itertools.cycle(zip(COLOURS, MARKERS, strict=True)), strict=False))
    with new(PANEL * len(tables)) as figure:
        for place, table in enumerate(tables, 1):
            _panel(figure.add_subplot(len(tables), 1, place), table, looks)
        settings = [f"{name} {value}" for table in tables for name, value in table.settings.items()]
        how = ["a point: median of a session, bars: scaled MAD", "lines: median level between changes"]
        label(figure, "History", [*settings, *how], [])
    return figure


def _panel(axes: Axes, table: Table, looks: dict[str, Any]) -> None:
    numbers = [value for row in table.rows if isinstance(value := row["value"], Number)]
    style = units.style(units.metric(numbers[0].metric), [number.middle for number in numbers])
    for pin, points in grouped((str(row["pin"]), point) for point, row in enumerate(table.rows)).items():
        colour, marker = looks[pin]
        ys = [numbers[point].middle / style.factor for point in points]
        bars = [(numbers[point].spread or 0.0) / style.factor for point in points]
        look = {"color": colour, "marker": marker, "linestyle": "none", "elinewidth": 1.0, "capsize": 2.5}
        axes.errorbar(points, ys, yerr=bars, label=f"pin {pin}", **look)
    begin = 0
    for level, rows in itertools.groupby(table.rows, key=lambda row: row["level"]):
        end = begin + len(list(rows))
        assert isinstance(level, float)
        axes.plot([begin - 0.4, end - 0.6], [level / style.factor] * 2, color=INK, linewidth=1.0, zorder=1.5)
        if begin:
            axes.axvline(begin - 0.5, color=FAINT, linestyle=":", linewidth=1.2)
            words = f"{table.rows[begin]['change']} "
            axes.annotate(words, (begin - 0.5, 1), xycoords=axes.get_xaxis_transform(), ha="right", va="top", size=8.5)
        begin = end
    axes.set_title(table.title, weight="bold", pad=5.0)
    axes.set_ylabel(style.unit)
    axes.set_xlim(-0.6, len(table.rows) - 0.4)
    axes.margins(y=0.15)
    shown = range(0, len(table.rows), -(-len(table.rows) // NAMES))
    names = [f"{alias(str(row['session']))} {str(row['when'])[5:10]}" for row in (table.rows[n] for n in shown)]
    axes.set_xticks(list(shown), names, rotation=40, ha="right")
    axes.grid(visible=False, axis="x")
