"""The pictures of a report's tables: speed against concurrency, the throughput of operations against n."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dgxlab import units
from dgxlab.plots import paper
from dgxlab.plots.paper import COLOURS, DASHES, MARKERS, Sheet
from dgxlab.report import Mean, Provenance, Quantity, Report, SessionTable, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@dataclass(frozen=True)
class Axis:
    """What a form's tables are drawn against.

    Attributes:
        key: Column of the horizontal axis.
        label: What the axis says.
        metrics: Each with a panel of its own; with `one`, the first of them that a table has.
    """

    key: str
    label: str
    metrics: tuple[str, ...]
    one: bool = False


AXES = {
    "concurrency": Axis("B", "B, sequences at once", ("speed_pp", "speed_tg")),
    "ops": Axis("n", "n, columns", ("flops", "bandwidth_gb_s"), one=True),
}

NAMES = {
    "speed_pp": "Prompt, S_PP",
    "speed_tg": "Generation, S_TG",
    "flops": "Throughput",
    "bandwidth_gb_s": "Bandwidth",
}
"""What stands above a panel, by metric."""

OTHER = ("label", "baseline", "candidate")
"""Columns without a metric that tell no rows apart, and the first of those that only verdicts have."""

MOST = 8
"""Lines in one picture."""

WIDE = 8.0
"""From how many times the smallest value on a vertical axis is logarithmic."""

HEIGHT = 3.1
"""Inches that a panel is high."""


@dataclass(frozen=True)
class Mark:
    """One number in a picture; its spread is None where it has none."""

    x: float
    y: float
    spread: float | None


@dataclass(frozen=True)
class Curve:
    """One line.

    Attributes:
        identity: What tells it from others, by name: its experiment or arm, and the columns that vary.
        marks: By metric, by x.
    """

    identity: Mapping[str, str]
    marks: Mapping[str, tuple[Mark, ...]]


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        form: concurrency or ops.
        title: As above its table.
        curves: Its lines.
        shared: What all of its lines have in common, by name.
        origins: Where its numbers come from.
    """

    form: str
    title: str
    curves: tuple[Curve, ...]
    shared: Mapping[str, str]
    origins: tuple[Provenance, ...]

    @property
    def metrics(self) -> list[str]:
        """Those that are there, in the order of their panels."""
        axis = AXES[self.form]
        found = [metric for metric in axis.metrics if any(curve.marks.get(metric) for curve in self.curves)]
        return found[:1] if axis.one else found


# -- out of tables ----------------------------------------------------------------------------------------------------


def charts(made: Report) -> list[Chart]:
    """Return every picture that a report has something for, in the order of its tables."""
    groups: dict[tuple[str, str], list[Table]] = {}
    for table in made.tables:
        if form := _form(table):
            groups.setdefault((form, table.title), []).append(table)
    return [chart for (form, title), tables in groups.items() for chart in _charts(form, title, tables)]


def _form(table: Table) -> str:
    """Return as what a table is drawn, "" for not at all; verdicts on concurrency are two arms of it."""
    form = table.form
    if form == "verdicts" and {row.get("metric") for row in table.rows} <= set(AXES["concurrency"].metrics):
        form = "concurrency"
    return form if form in AXES else ""


def _charts(form: str, title: str, tables: Sequence[Table]) -> Iterator[Chart]:
    found: dict[tuple[tuple[str, str], ...], dict[str, list[Mark]]] = {}
    for table in tables:
        for identity, metric, mark in _marks(form, table):
            found.setdefault(tuple(identity.items()), {}).setdefault(metric, []).append(mark)
    curves = [
        Curve(dict(identity), {k: tuple(sorted(v, key=_x)) for k, v in marks.items()})
        for identity, marks in found.items()
    ]
    if len({mark.x for curve in curves for marks in curve.marks.values() for mark in marks}) < 2:
        return
    names = dict.fromkeys(name for curve in curves for name in curve.identity)
    values = {name: {curve.identity.get(name, "") for curve in curves} for name in names}
    shared = {name: next(iter(values[name])) for name in names if len(values[name]) == 1}
    told = [replace(curve, identity={k: v for k, v in curve.identity.items() if k not in shared}) for curve in curves]
    origins = tuple(origin for table in tables for origin in _origins(table))
    for start in range(0, len(told), MOST):
        yield Chart(form, title, tuple(told[start : start + MOST]), shared, origins)


def _x(mark: Mark) -> float:
    return mark.x


def _marks(form: str, table: Table) -> Iterator[tuple[dict[str, str], str, Mark]]:
    """Yield every number of a table that is drawn, with the line that it is on and its metric."""
    axis = AXES[form]
    leading = []
    for column in table.columns:
        if column.key in OTHER:
            break
        if not column.metric and column.key != axis.key:
            leading.append(column.key)
    for row in table.rows:
        x = row.get(axis.key)
        if isinstance(x, bool) or not isinstance(x, (int, float)) or x <= 0:
            continue
        told = {key: str(row[key]) for key in leading if row.get(key) not in (None, "")}
        for arm, value in _values(table, row, axis.metrics):
            spread = value.spread if isinstance(value, Quantity) else None
            yield {"experiment": arm, **told}, value.metric, Mark(float(x), value.middle, spread)


def _values(table: Table, row: Mapping[str, object], metrics: Sequence[str]) -> Iterator[tuple[str, Quantity | Mean]]:
    names = ("baseline", "candidate") if isinstance(table, SessionTable) else metrics
    arms = {"baseline": "baseline ", "candidate": "candidate "}
    candidate = table.candidate if isinstance(table, SessionTable) and table.candidate else table.provenance
    for name in names:
        value = row.get(name)
        origin = candidate if name == "candidate" else table.provenance
        if isinstance(value, (Quantity, Mean)):
            yield arms.get(name, "") + origin.experiment, value


def _origins(table: Table) -> list[Provenance]:
    candidate = table.candidate if isinstance(table, SessionTable) else None
    return [table.provenance, *([candidate] if candidate else [])]


# -- onto paper -------------------------------------------------------------------------------------------------------


def figure(chart: Chart) -> Figure:
    """Draw a picture, a panel for each metric."""
    with paper.look():
        handles = [_line(i, curve) for i, curve in enumerate(chart.curves) if curve.identity]
        legend = paper.legend_height([str(handle.get_label()) for handle in handles])
        lines = [*paper.wrapped(_about(chart)), *paper.origins(chart.origins)]
        sheet = Sheet(1.4 + paper.LINE * len(lines) + legend + HEIGHT)
        sheet.skip(0.12)
        sheet.title(chart.title)
        for line in lines:
            sheet.text(line)
        sheet.skip(0.13)
        if handles:
            sheet.legend(handles)
        sheet.skip(0.3)
        metrics = chart.metrics
        for axes, metric in zip(sheet.panels(HEIGHT, count=len(metrics)), metrics, strict=True):
            _panel(axes, chart, metric)
    return sheet.figure


def _about(chart: Chart) -> list[str]:
    """Say what all numbers have in common, and what they and their bars are."""
    said = [f"{name} {value}" for name, value in chart.shared.items()]
    if any(mark.spread for curve in chart.curves for marks in curve.marks.values() for mark in marks):
        said.append("median of a run's samples or of a chain's runs, bars: their scaled MAD")
    return said


def _panel(axes: Axes, chart: Chart, metric: str) -> None:
    every = [mark for curve in chart.curves for mark in curve.marks.get(metric, ())]
    style = units.style(units.metric(metric), [mark.y for mark in every])
    for i, curve in enumerate(chart.curves):
        marks = curve.marks.get(metric, ())
        if not marks:
            continue
        axes.errorbar(
            [mark.x for mark in marks],
            [mark.y / style.factor for mark in marks],
            yerr=[(mark.spread or 0.0) / style.factor for mark in marks] if any(m.spread for m in marks) else None,
            label=_name(curve),
            **_look(i),
        )
    axes.set_title(NAMES[metric], weight="bold", pad=5.0)
    axes.set_ylabel(style.unit)
    axes.set_xlabel(AXES[chart.form].label)
    _scales(axes, sorted({mark.x for mark in every}), [mark.y / style.factor for mark in every])


def _scales(axes: Axes, xs: Sequence[float], ys: Sequence[float]) -> None:
    """Doubling goes one step to the right, ticks stand where something was measured, numbers are written out."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    plain = FuncFormatter(lambda value, position: f"{value:g}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_apart(xs)))
    axes.xaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_locator(NullLocator())
    if min(ys) > 0 and max(ys) > WIDE * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=min(0.0, *ys))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))


def _apart(xs: Sequence[float]) -> list[float]:
    """Leave out ticks whose numbers would run into one another."""
    kept: list[float] = []
    for x in xs:
        if not kept or math.log2(x / kept[-1]) > math.log2(xs[-1] / xs[0]) / 16:
            kept.append(x)
    return kept


def _look(i: int) -> dict[str, Any]:
    return {
        "color": COLOURS[i % len(COLOURS)],
        "marker": MARKERS[i % len(MARKERS)],
        "linestyle": DASHES[i % len(DASHES)],
        "elinewidth": 1.0,
        "capsize": 2.5,
    }


def _line(i: int, curve: Curve) -> Line2D:
    from matplotlib.lines import Line2D

    look = _look(i)
    return Line2D([], [], **{key: look[key] for key in ("color", "marker", "linestyle")}, label=_name(curve))


def _name(curve: Curve) -> str:
    """Name a line by what tells it from the others."""
    return " ".join(v if k == "experiment" else f"{k} {v}" for k, v in curve.identity.items())
