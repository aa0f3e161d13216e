"""The picture of a session: the value of every run over time, temperature and clock beneath on the same axis."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from dgxlab import units
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE
from dgxlab.plots import paper
from dgxlab.plots.paper import COLOURS, FAINT, INK, PAPER, Sheet
from dgxlab.plots.trace import Conditions, Held, Panel, Point, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

STYLES = {BURN_IN: (FAINT, "s", 4.0), BASELINE: (COLOURS[0], "o", 5.5), CANDIDATE: (COLOURS[1], "^", 6.5)}
"""Colour, marker and its size, by role."""

DISCARD = "#dcdcd6"
"""Behind a cycle that does not count."""

VALUES, CONDITION = 1.05, 0.62
"""Inches that a panel is high."""

GAP, BELOW, ABOVE = 0.3, 0.5, 0.34
"""Inches between panels, under the last of a chain, and above the first for the chain's own title."""

SHORT = 12
"""Letters that tell one device from another: `GPU-32d9179a`."""

WHISKERS = "median of each run, whiskers from its lowest to its highest sample"

TITLES = 104
"""Letters that fit above a panel."""

LABEL = 75
"""Of these, letters of a panel's name; a longer one is written smaller, and leaves this much of a verdict."""


def figure(trace: Trace) -> Figure:
    """Draw all chains of a session, one beneath the other, each with a time axis of its own."""
    with paper.look():
        lines = paper.origins(trace.origins)
        handles = _legend(trace)
        legend = paper.legend_height([str(handle.get_label()) for handle in handles])
        height = 0.63 + paper.LINE * len(lines) + legend
        sheet = Sheet(height + sum(_height(chain) for chain in trace.chains))
        sheet.skip(0.12)
        sheet.title(trace.what)
        for line in lines:
            sheet.text(line)
        sheet.skip(0.13)
        sheet.legend(handles)
        for chain in trace.chains:
            _chain(sheet, chain)
    return sheet.figure


def _height(chain: Held) -> float:
    return ABOVE + BELOW + len(chain.panels) * (VALUES + GAP) + len(chain.conditions) * (CONDITION + GAP)


def _chain(sheet: Sheet, chain: Held) -> None:
    sheet.skip(0.12)
    sheet.text(chain.title, 10.0, weight="bold", height=ABOVE - 0.12)
    scale, unit = (60.0, "min") if chain.seconds > 300 else (1.0, "s")
    axes: list[Axes] = []
    for panel in chain.panels:
        sheet.skip(GAP)
        axes += sheet.panels(VALUES, axes[0] if axes else None)
        _values(axes[-1], panel, scale)
    for quantity in chain.conditions:
        sheet.skip(GAP)
        axes += sheet.panels(CONDITION, axes[0])
        _conditions(axes[-1], quantity, scale)
    if chain.conditions and len(chain.conditions[-1].devices) > 1:
        axes[-1].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, borderpad=0.0, borderaxespad=0.2)
    for above in axes[:-1]:
        above.tick_params(labelbottom=False)
    if chain.conditions:
        axes[-1].annotate(
            WHISKERS, (0, 0), (0, -18), xycoords="axes fraction", textcoords="offset points", size=8.0, va="top"
        )
    axes[-1].set_xlabel(f"time since the chain began ({unit})", loc="right", size=8.0, labelpad=1.0)
    axes[0].set_xlim(0, chain.seconds / scale)
    sheet.skip(BELOW)


# -- one panel --------------------------------------------------------------------------------------------------------


def _values(axes: Axes, panel: Panel, scale: float) -> None:
    metric = units.metric(panel.metric)
    style = units.style(metric, [point.value for point in panel.points])
    _titles(axes, f"{panel.label}, {metric.better} is better", panel.verdict)
    _unit(axes, style.unit)
    for begin, end in panel.discards:
        axes.axvspan(begin / scale, end / scale, color=DISCARD, linewidth=0, zorder=0.5)
    for role, mean in zip((BASELINE, CANDIDATE), panel.means, strict=True):
        if mean is not None:
            axes.axhline(mean / style.factor, color=STYLES[role][0], linewidth=0.9, linestyle=(0, (5, 3)), zorder=1.5)
    there = [(point, point.value / style.factor) for point in panel.points if point.value is not None]
    baselines = [(point.at / scale, value) for point, value in there if point.role == BASELINE]
    if baselines:
        axes.plot(*zip(*baselines, strict=True), color=COLOURS[0], linewidth=0.7, alpha=0.6, label="_drift", zorder=2)
    for role in STYLES:
        for counts in (True, False):
            mine = [(p.at / scale, v) for p, v in there if p.role == role and _solid(p) == counts]
            if mine:
                axes.plot(*zip(*mine, strict=True), **_marker(role, counts=counts))
    lost = [point.at / scale for point in panel.points if point.value is None]
    if lost:
        axes.plot(lost, [0.04] * len(lost), **LOST, transform=axes.get_xaxis_transform(), clip_on=False)
    _limits(axes, [value for _, value in there], 0.004)


def _solid(point: Point) -> bool:
    return point.counts or point.role == BURN_IN


def _conditions(axes: Axes, quantity: Conditions, scale: float) -> None:
    _titles(axes, quantity.label, "")
    _unit(axes, quantity.unit)
    ends: list[float] = []
    for i, (device, runs) in enumerate(quantity.devices.items()):
        middles = [run.median for run in runs]
        below, above = [run.median - run.low for run in runs], [run.high - run.median for run in runs]
        axes.errorbar(
            [run.at / scale for run in runs],
            middles,
            yerr=[below, above],
            fmt=paper.MARKERS[i % len(paper.MARKERS)],
            color=INK if len(quantity.devices) == 1 else COLOURS[i % len(COLOURS)],
            markersize=3.5,
            elinewidth=0.9,
            label=device[:SHORT],
        )
        ends += [end for run in runs for end in (run.low, run.high)]
    _limits(axes, ends, 0.01)


def _titles(axes: Axes, left: str, right: str) -> None:
    """Name a panel, never cut; what stands on the right gets the room that is left."""
    left = paper.plain(left)
    axes.set_title(left, loc="left", weight="bold", size=9.0 * min(1.0, LABEL / len(left)), pad=4.0)
    room = TITLES - min(len(left), LABEL)
    axes.set_title(textwrap.shorten(right, room, placeholder=" ..."), loc="right", size=8.5, pad=4.0)


def _unit(axes: Axes, unit: str) -> None:
    """Name a vertical axis where the others of the picture have their names."""
    axes.set_ylabel(unit, size=8.0)
    axes.yaxis.set_label_coords(-0.56 / (paper.WIDTH - paper.LEFT - paper.RIGHT), 0.5)


def _limits(axes: Axes, values: list[float], least: float) -> None:
    """Leave air around values, and show those that hardly differ as what they are: `least` is a share of them."""
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 2.5, 5, 10]))
    if values:
        low, high = min(values), max(values)
        air = max(0.12 * (high - low), least * abs(high), 1e-12)
        axes.set_ylim(low - air, high + air)


# -- legend -----------------------------------------------------------------------------------------------------------

LOST: dict[str, Any] = {"marker": "x", "color": INK, "linestyle": "none", "markersize": 5.0, "label": "no value"}


def _marker(role: str, *, counts: bool) -> dict[str, Any]:
    colour, marker, size = STYLES[role]
    face = colour if counts else PAPER
    label = role if counts else f"{role}, does not count"
    return {
        "marker": marker,
        "color": colour,
        "markerfacecolor": face,
        "markersize": size,
        "linestyle": "none",
        "label": label,
        "zorder": 3,
    }


def _legend(trace: Trace) -> list[Line2D]:
    """Explain what is there, in one row."""
    from matplotlib.lines import Line2D

    panels = [panel for chain in trace.chains for panel in chain.panels]
    points = [point for panel in panels for point in panel.points]
    one, two = trace.arms
    names = {BASELINE: f"baseline {one}", CANDIDATE: f"candidate {two}", BURN_IN: "burn-in"}
    handles = []
    for role, name in names.items():
        if any(point.role == role for point in points):
            handles.append(Line2D([], [], **{**_marker(role, counts=True), "label": name}))
    if any(mean is not None for panel in panels for mean in panel.means):
        handles.append(Line2D([], [], color=FAINT, linewidth=0.9, linestyle=(0, (5, 3)), label="mean"))
    if any(not _solid(point) and point.value is not None for point in points):
        hollow = _marker(BASELINE, counts=False)
        handles.append(Line2D([], [], **{**hollow, "color": FAINT, "label": "does not count, its cycle grey"}))
    if any(point.value is None for point in points):
        handles.append(Line2D([], [], **LOST))
    return handles
