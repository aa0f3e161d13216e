"""The picture of servers: throughput against latency, a point for each number of streams, or rate of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dgxlab import units
from dgxlab.plots import HEIGHT, label, looks, new
from dgxlab.report import Number, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LATENCIES = {"itl_p50_ms": "Between tokens, ITL p50", "ttft_p50_ms": "To the first token, TTFT p50"}
"""The panels: the metric of the x axis, and the title."""
THROUGHPUT = {"B": "speed_tg", "requests/s": "speed_out"}  # the metric of the y axis, by what is next to each point


class LoadPoint(NamedTuple):
    """A row of a table: latency, throughput, and the number of streams, or the rate of requests."""

    x: float
    y: float
    load: str


def figure(tables: Sequence[Table]) -> Figure:
    """Draw the tables of servers, a panel for each of LATENCIES; raises UsageError if there is no matplotlib."""
    load = _load(tables)
    throughput = units.metric(THROUGHPUT[load])
    with new(HEIGHT) as figure:
        for place, (metric, title) in enumerate(LATENCIES.items(), 1):
            axes = figure.add_subplot(1, len(LATENCIES), place)
            for (name, points), look in zip(curves(tables, metric), looks(), strict=False):
                axes.plot([point.x for point in points], [point.y for point in points], label=name, **look)
                for point in points:
                    axes.annotate(point.load, point[:2], xytext=(4, 4), textcoords="offset points", size=7.5)
            axes.set_title(title, weight="bold", pad=5.0)
            axes.set_xlabel(units.metric(metric).unit)
            axes.set_ylabel(f"{throughput.label} ({throughput.unit})")
            axes.update_datalim([(0.0, 0.0)])  # so that margins are shares of the whole axes, however alike the points
            axes.autoscale_view()
            axes.set_xlim(left=0.0)
            axes.set_ylim(bottom=0.0)
        settings = [f"{name} {value}" for table in tables for name, value in table.settings.items()]
        origins = [origin.provenance for table in tables for origin in table.origins] or [
            table.provenance for table in tables
        ]
        about = [*settings, f"numbers: {'streams at once' if load == 'B' else load}"]
        if any(load not in row for table in tables for row in table.rows):
            about.append("rows by requests/s are not drawn")
        label(figure, "Throughput against latency", about, origins)
    return figure


def _load(tables: Sequence[Table]) -> str:
    """Return what to draw: streams at once, unless all tables are of requests at random times."""
    return next((name for name in THROUGHPUT if any(name in row for table in tables for row in table.rows)), "B")


def curves(tables: Sequence[Table], metric: str) -> Iterator[tuple[str, list[LoadPoint]]]:
    """Yield the points of each arm in each table, by its name; one that shares rows with others has numbered keys."""
    load = _load(tables)
    for table in tables:
        arms = {f".{number}": origin.label for number, origin in enumerate(table.origins)}
        for suffix, name in (arms or {"": table.provenance.experiment}).items():
            points = [
                LoadPoint(x.middle, y.middle, f"{row[load]}")
                for row in table.rows
                if load in row
                and isinstance(x := row.get(f"{metric}{suffix}"), Number)
                and isinstance(y := row.get(f"{THROUGHPUT[load]}{suffix}"), Number)
            ]
            if points:
                yield name, points
