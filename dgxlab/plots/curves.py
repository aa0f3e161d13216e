"""The pictures of a report's tables: speed against concurrency, the throughput of operations against n."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dgxlab import units
from dgxlab.plots import paper
from dgxlab.report import Number, Provenance, Report, SessionTable, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Axis:
    """What a form's tables are drawn against: a column, its label, and the metrics with the titles of their panels."""

    key: str
    label: str
    metrics: Mapping[str, str]


AXES = {
    "concurrency": Axis("B", "B, sequences at once", {"speed_pp": "Prompt, S_PP", "speed_tg": "Generation, S_TG"}),
    "ops": Axis("n", "n, columns", {"flops": "Throughput", "bandwidth_gb_s": "Bandwidth"}),
}

MOST = 8
"""Lines in one picture."""
WIDE = 8.0
"""From how many times the smallest value on a vertical axis is logarithmic."""
HEIGHT = 3.6
"""Inches that a panel is high, with its title and labels."""


@dataclass(frozen=True, order=True)
class Mark:
    """One number in a picture; its spread is 0 where it has none."""

    x: float
    y: float
    spread: float


Curve = Mapping[str, Sequence[Mark]]
"""The marks of one line, by metric and then by x."""


@dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        form: A key of AXES.
        title: That of its tables.
        curves: By what tells each from the others: its experiment or arm, and the columns that vary; "" for one alone.
        shared: What all curves have in common.
        origins: Where its numbers come from.
    """

    form: str
    title: str
    curves: Mapping[str, Curve]
    shared: tuple[str, ...]
    origins: tuple[Provenance, ...]


def draw(report: Report, folder: Path, stem: str) -> list[Path]:
    """Write the pictures of a report's tables: STEM-concurrency.png, STEM-ops.png, a second of a kind STEM-ops-2.png.

    Concurrency needs two widths and operations two n; what has fewer, and single stream, has no picture.

    Raises:
        UsageError: if there is no matplotlib, or the files cannot be written.
    """
    written: list[Path] = []
    counts = dict.fromkeys(AXES, 0)
    for chart in charts(report):
        counts[chart.form] += 1
        number = f"-{counts[chart.form]}" if counts[chart.form] > 1 else ""
        written.append(paper.write(figure(chart), folder / f"{stem}-{chart.form}{number}.png"))
    return written


# -- out of tables ----------------------------------------------------------------------------------------------------


def charts(report: Report) -> list[Chart]:
    """Return every picture that a report has two points for, in the order of its tables."""
    groups: dict[tuple[str, str], list[Table]] = {}
    for table in report.tables:
        form = table.form
        if form == "verdicts" and {row.get("metric") for row in table.rows} <= AXES["concurrency"].metrics.keys():
            form = "concurrency"  # of two arms
        if form in AXES:
            groups.setdefault((form, table.title), []).append(table)
    return [chart for (form, title), tables in groups.items() for chart in _charts(form, title, tables)]


def _charts(form: str, title: str, tables: Sequence[Table]) -> Iterator[Chart]:
    curves: dict[tuple[tuple[str, str], ...], dict[str, list[Mark]]] = {}
    for table in tables:
        for identity, metric, mark in _marks(AXES[form], table):
            curves.setdefault(tuple(identity.items()), {}).setdefault(metric, []).append(mark)
    if len({mark.x for curve in curves.values() for marks in curve.values() for mark in marks}) < 2:
        return
    names = dict.fromkeys(name for identity in curves for name, _ in identity)
    values = {name: {dict(identity).get(name) for identity in curves} for name in names}
    shared = tuple(f"{name} {next(iter(values[name]))}" for name in names if len(values[name]) == 1)
    labelled = [
        (
            " ".join(v if k == "experiment" else f"{k} {v}" for k, v in identity if len(values[k]) > 1),
            {metric: sorted(marks) for metric, marks in curve.items()},
        )
        for identity, curve in curves.items()
    ]
    origins = tuple(origin for table in tables for origin in _arms(table).values())
    for start in range(0, len(labelled), MOST):
        yield Chart(form, title, dict(labelled[start : start + MOST]), shared, origins)


def _arms(table: Table) -> dict[str, Provenance]:
    candidate = table.candidate if isinstance(table, SessionTable) else None
    return {"baseline": table.provenance, **({"candidate": candidate} if candidate else {})}


def _marks(axis: Axis, table: Table) -> Iterator[tuple[dict[str, str], str, Mark]]:
    arms = _arms(table) if isinstance(table, SessionTable) else {}
    telling = []  # columns before the first number, without x
    for column in table.columns:
        if column.key in ("label", "baseline", "candidate"):
            break
        if not column.metric and column.key != axis.key:
            telling.append(column.key)
    for row in table.rows:
        x = row.get(axis.key)
        if isinstance(x, bool) or not isinstance(x, (int, float)) or x <= 0:
            continue
        identity = {key: str(row[key]) for key in telling if row.get(key) not in (None, "")}
        for name in arms or axis.metrics:
            value = row.get(name)
            if isinstance(value, Number):
                experiment = f"{name} {arms[name].experiment}" if arms else table.provenance.experiment
                spread = value.spread if value.mean is None else None
                yield {"experiment": experiment, **identity}, value.metric, Mark(float(x), value.middle, spread or 0.0)


# -- onto paper -------------------------------------------------------------------------------------------------------


def figure(chart: Chart) -> Figure:
    """Draw a picture, a panel for each metric."""
    with paper.new(HEIGHT) as figure:
        metrics = [name for name in AXES[chart.form].metrics if any(name in curve for curve in chart.curves.values())]
        for i, metric in enumerate(metrics):
            _panel(figure.add_subplot(1, len(metrics), i + 1), chart, metric)
        about = [*chart.shared]
        if any(mark.spread for curve in chart.curves.values() for marks in curve.values() for mark in marks):
            about.append("median of a run's samples or of a chain's runs, bars: their scaled MAD")
        paper.head(figure, chart.title, [*paper.wrapped(about), *paper.wrapped(paper.origins(chart.origins))])
    return figure


def _panel(axes: Axes, chart: Chart, metric: str) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    every = [mark for curve in chart.curves.values() for mark in curve.get(metric, ())]
    style = units.style(units.metric(metric), [mark.y for mark in every])
    for i, (label, curve) in enumerate(chart.curves.items()):
        marks = curve.get(metric, ())
        axes.errorbar(
            [mark.x for mark in marks],
            [mark.y / style.factor for mark in marks],
            yerr=[mark.spread / style.factor for mark in marks] if any(mark.spread for mark in marks) else None,
            label=label,
            color=paper.COLOURS[i % len(paper.COLOURS)],
            marker=paper.MARKERS[i % len(paper.MARKERS)],
            linestyle=paper.DASHES[i % len(paper.DASHES)],
            elinewidth=1.0,
            capsize=2.5,
        )
    axes.set_title(AXES[chart.form].metrics[metric], weight="bold", pad=5.0)
    axes.set_ylabel(style.unit)
    axes.set_xlabel(AXES[chart.form].label)
    # doubling goes one step to the right, ticks are where something was measured, numbers are written out
    plain = FuncFormatter(lambda value, position: f"{value:g}")
    axes.set_xscale("log", base=2)
    ticks: list[float] = []  # without those whose numbers would run into one another
    xs = sorted({mark.x for mark in every})
    for x in xs:
        if not ticks or math.log2(x / ticks[-1]) > math.log2(xs[-1] / xs[0]) / 16:
            ticks.append(x)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = min(mark.y for mark in every) / style.factor, max(mark.y for mark in every) / style.factor
    if low > 0 and high > WIDE * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=min(0.0, low))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
