"""The picture of a session: the value of every run over time, temperature and clock beneath on the same axis."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dgxlab import judgement, stats, units
from dgxlab.chains import Comparison, comparisons
from dgxlab.errors import UsageError
from dgxlab.judgement import Judged
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, SESSIONS, ChainStep
from dgxlab.plots import paper
from dgxlab.report.ask import label, plan_of
from dgxlab.report.session import ChainSession
from dgxlab.report.verdicts import PREFIX

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dgxlab.store import Store

Row = Mapping[str, Any]
Sampled = tuple[float, float, float, float]
"""The middle of a run, and the minimum, median and maximum of a quantity in it."""
Devices = Mapping[str, Sequence[Sampled]]

STYLES = {
    BASELINE: (paper.COLOURS[0], "o", 5.5),
    CANDIDATE: (paper.COLOURS[1], "^", 6.5),
    BURN_IN: (paper.FAINT, "s", 4.0),
}
"""Colour, marker and its size, by role."""
DISCARD = "#dcdcd6"
"""Behind a cycle that does not count."""
VALUES, CONDITION = 1.45, 0.98
"""Inches that a panel is high, with its title."""
SHORT = 12
"""Letters that tell one device from another: `GPU-32d9179a`."""
TITLES, LABEL = 104, 75
"""Letters that fit above a panel, and how many of them its name has; a longer name is written smaller."""

CONDITIONS = (
    {"temperature.gpu": ("GPU temperature", "°C"), "clocks.sm": ("SM clock", "MHz")},
    {"cpu_temp_c": ("CPU temperature", "°C"), "cpu_mhz": ("CPU clock", "MHz")},
)
"""What is shown under a chain, by the name under which it was sampled: the processor's where no GPU was."""


@dataclass(frozen=True)
class Point:
    """One run of a chain, as one comparison sees it.

    Attributes:
        at: The middle of the run, in seconds after its chain began.
        value: Median of its counted samples in the metric's stored unit; None where it gave none.
        counts: The verdict counts its cycle, or it is burn-in, which no verdict counts.
    """

    at: float
    role: str
    cycle: int
    value: float | None
    counts: bool


@dataclass(frozen=True)
class Panel:
    """One comparison over time: its runs in their order, and its verdict in words, with the interval."""

    label: str
    metric: str
    points: tuple[Point, ...]
    verdict: str
    judged: Judged | None


@dataclass(frozen=True)
class Chain:
    """One chain, from the beginning of its first run to the end of its last."""

    title: str
    seconds: float
    panels: tuple[Panel, ...]
    conditions: Mapping[tuple[str, str], Devices]
    """By label and unit."""


RUNS = """SELECT run_id, chain, role, cycle, started, seconds
          FROM chain_runs JOIN runs USING (run_id) WHERE job_id = ? ORDER BY position"""

SAMPLES = """SELECT run_id, cell, metric, value FROM samples JOIN runs USING (run_id)
             WHERE job_id = ? AND discarded IS NULL ORDER BY run_id, cell, metric, ordinal"""

TELEMETRY = """SELECT run_id, device, name, median, min, max FROM telemetry JOIN runs USING (run_id)
               WHERE job_id = ? ORDER BY device, position"""


def chain(store: Store, job_id: str, path: Path) -> Path:
    """Write the picture of a session of two arms: the value of every run of its chains over time.

    Raises:
        UsageError: if there is no such session, it has no chains or has not ended, there is no matplotlib, or the file
            cannot be written.
    """
    return paper.write(figure(store, job_id), path)


# -- out of the record ------------------------------------------------------------------------------------------------


def read(store: Store, job_id: str) -> tuple[ChainSession, list[Chain]]:
    """Return a session and the chains of it of which anything ran; no value is shown before its end.

    Raises:
        UsageError: if there are none.
    """
    job = store.job(job_id)
    if job.kind not in SESSIONS:
        raise UsageError(f"session {job_id} is a {job.kind} and held no chains", next=f"dgxlab report {job_id}")
    session = ChainSession(store, job, plan_of(job))
    if not session.ended:
        raise UsageError(
            f"session {job_id} has not ended, and nothing of its chains is shown before", next=f"dgxlab attach {job_id}"
        )
    runs: defaultdict[str, list[Row]] = defaultdict(list)
    for row in store.rows(RUNS, (job_id,)):
        runs[row["chain"]].append(row)
    samples: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in store.rows(SAMPLES, (job_id,)):
        samples[row["run_id"], row["cell"], row["metric"]].append(row["value"])
    values = {key: stats.median(group) for key, group in samples.items()}
    telemetry = store.rows(TELEMETRY, (job_id,))
    sampled = {row["name"] for row in telemetry}
    shown = next((names for names in CONDITIONS if sampled.intersection(names)), {})
    verdicts = {(judged.chain, judged.comparison): judged for judged in judgement.recorded(store, job_id)}
    result = []
    for step in session.plan.chains:
        if not runs[step.id]:
            continue
        began = min(run["started"] for run in runs[step.id])  # not the first: a clock may have been set back
        times = {run["run_id"]: run["started"] + run["seconds"] / 2 - began for run in runs[step.id]}
        panels = []
        for comparison, name in _names(step).items():
            judged = verdicts.get((step.id, comparison))
            points = _points(runs[step.id], times, comparison, values, judged)
            verdict = _verdict(PREFIX[job.kind], judged)
            panels.append(Panel(name, comparison.metric, points, verdict, judged))
        conditions: dict[tuple[str, str], dict[str, list[Sampled]]] = {}
        for name, quantity in shown.items():
            for row in telemetry:
                if row["name"] == name and row["run_id"] in times:
                    numbers = (times[row["run_id"]], row["min"], row["median"], row["max"])
                    conditions.setdefault(quantity, {}).setdefault(row["device"], []).append(numbers)
        seconds = max(run["started"] + run["seconds"] for run in runs[step.id]) - began
        title = " ".join(filter(None, (step.baseline.tool, step.baseline.model)))
        result.append(Chain(title, seconds, tuple(panels), conditions))
    if not result:
        raise UsageError(f"session {job_id} ended before any run of a chain", next=f"dgxlab report {job_id}")
    return session, result


def _names(step: ChainStep) -> dict[Comparison, str]:
    compared = comparisons(step)
    cells = {cell.key: label(cell) for cell in step.baseline.cells}
    several = len({comparison.metric for comparison in compared}) > 1
    names = {}
    for comparison in compared:
        metric = units.metric(comparison.metric).label if several else ""
        names[comparison] = f"{cells[comparison.baseline]} {metric}".strip()
    return names


def _points(
    runs: Sequence[Row],
    times: Mapping[str, float],
    comparison: Comparison,
    values: Mapping[tuple[str, str, str], float],
    judged: Judged | None,
) -> tuple[Point, ...]:
    verdict = judged.verdict if judged else None
    cycles = [cycle for cycle in range(1, verdict.cycles + 1) if cycle not in verdict.flaws] if verdict else []
    counted = {place for cycle in cycles for place in _places(cycle)}
    last = {(run["role"], run["cycle"]): run["run_id"] for run in runs}  # of those that were run again
    points = []
    for run in runs:
        place = run["role"], run["cycle"]
        cell = comparison.candidate if run["role"] == CANDIDATE else comparison.baseline
        counts = run["role"] == BURN_IN or (place in counted and last[place] == run["run_id"])
        points.append(Point(times[run["run_id"]], *place, values.get((run["run_id"], cell, comparison.metric)), counts))
    return tuple(points)


def _places(cycle: int) -> tuple[tuple[str, int], ...]:
    """Return the places of a cycle: its candidate, and the baselines before and after."""
    return (BASELINE, cycle - 1), (CANDIDATE, cycle), (BASELINE, cycle)


def _verdict(prefix: str, judged: Judged | None) -> str:
    """Say a verdict: `slower -7.20 % (-10.17 to -4.13)`, or why it is invalid."""
    if judged is None:
        return "no verdict"
    verdict = judged.verdict
    words = prefix + verdict.verdict
    if verdict.effect is None:
        return f"{words}: {verdict.reasons[0]}" if verdict.reasons else words
    bounds = " to ".join(f"{100 * bound:+.2f}" for bound in verdict.interval or ())
    return f"{words} {100 * verdict.effect:+.2f} %" + (f" ({bounds})" if bounds else "")


# -- onto paper -------------------------------------------------------------------------------------------------------


def figure(store: Store, job_id: str) -> Figure:
    """Draw all chains of a session, one beneath the other, each with a time axis of its own."""
    session, drawn = read(store, job_id)
    heights = [h for c in drawn for h in (*[VALUES] * len(c.panels), *[CONDITION] * len(c.conditions))]
    with paper.new(sum(heights)) as figure:
        rows = iter(figure.add_gridspec(len(heights), 1, height_ratios=heights))
        for chain in drawn:
            _chain(figure, rows, chain)
        figure.align_ylabels()
        arms = [session.baseline, *([session.candidate] if session.candidate else [])]
        models = {step.baseline.model for step in session.plan.chains}
        about = [f"baseline {arms[0].name}", f"candidate {arms[-1].name}"]
        if any(chain.conditions for chain in drawn):
            about.append("temperature and clock: median of each run, whiskers from its lowest to its highest sample")
        lines = paper.wrapped(about) + paper.wrapped(paper.origins([session.origin(arm, models) for arm in arms]))
        paper.head(figure, session.what, lines)
    return figure


def _chain(figure: Figure, rows: Any, chain: Chain) -> None:
    scale, unit = (60.0, "min") if chain.seconds > 300 else (1.0, "s")
    axes: list[Axes] = []
    for _ in (*chain.panels, *chain.conditions):
        axes.append(figure.add_subplot(next(rows), sharex=axes[0] if axes else None))
        axes[-1].tick_params(labelbottom=False)
    for above, panel in zip(axes, chain.panels, strict=False):
        _values(above, panel, scale)
    for below, (quantity, devices) in zip(axes[len(chain.panels) :], chain.conditions.items(), strict=True):
        _conditions(below, quantity, devices, scale)
    heading: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "weight": "bold"}
    axes[0].annotate(chain.title, (0, 1), (0, 22), **heading, size=10.0)
    axes[-1].tick_params(labelbottom=True)
    axes[-1].set_xlabel(f"time since the chain began ({unit})", loc="right", size=8.0)
    axes[0].set_xlim(0, chain.seconds / scale)


def _values(axes: Axes, panel: Panel, scale: float) -> None:
    metric = units.metric(panel.metric)
    style = units.style(metric, [point.value for point in panel.points])
    name = paper.plain(f"{panel.label}, {metric.better} is better")
    axes.set_title(name, weight="bold", size=9.0 * min(1.0, LABEL / len(name)))
    room = TITLES - min(len(name), LABEL)
    axes.set_title(textwrap.shorten(panel.verdict, room, placeholder=" ..."), loc="right", size=8.5)
    for cycle in sorted(panel.judged.verdict.flaws) if panel.judged else ():
        times = [point.at / scale for point in panel.points if (point.role, point.cycle) in _places(cycle)]
        if times:
            axes.axvspan(min(times), max(times), color=DISCARD, linewidth=0, zorder=0.5)
    there = [(point, point.at / scale, point.value / style.factor) for point in panel.points if point.value is not None]
    baselines = [(at, value) for point, at, value in there if point.role == BASELINE]
    _plot(axes, baselines, color=STYLES[BASELINE][0], linewidth=0.7, alpha=0.6, label="_drift", zorder=2)
    judged = panel.judged
    means = {BASELINE: judged.baseline, CANDIDATE: judged.candidate} if judged else {}
    for role, (colour, marker, size) in STYLES.items():
        points = {"color": colour, "marker": marker, "markersize": size, "linestyle": "none", "zorder": 3}
        for counts, name, face in ((True, role, colour), (False, f"{role}, does not count", paper.PAPER)):
            xy = [(at, value) for point, at, value in there if point.role == role and point.counts == counts]
            _plot(axes, xy, **points, markerfacecolor=face, label=name)
        if (mean := means.get(role)) is not None:
            dashed: dict[str, Any] = {"color": colour, "linewidth": 0.9, "linestyle": (0, (5, 3)), "zorder": 1.5}
            axes.axhline(mean / style.factor, **dashed, label=f"{role}, mean")
    lost = [(point.at / scale, 0.04) for point in panel.points if point.value is None]
    cross: dict[str, Any] = {"color": paper.INK, "marker": "x", "markersize": 5.0, "linestyle": "none"}
    _plot(axes, lost, **cross, label="no value", transform=axes.get_xaxis_transform(), clip_on=False)
    _limits(axes, style.unit, [value for _, _, value in there], 0.004)


def _plot(axes: Axes, points: Sequence[tuple[float, float]], **look: Any) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), **look)


def _conditions(axes: Axes, quantity: tuple[str, str], devices: Devices, scale: float) -> None:
    name, unit = quantity
    axes.set_title(name, weight="bold")
    for i, (device, runs) in enumerate(devices.items()):
        axes.errorbar(
            [at / scale for at, *_ in runs],
            [median for _, _, median, _ in runs],
            yerr=[[median - low for _, low, median, _ in runs], [high - median for *_, median, high in runs]],
            fmt=paper.MARKERS[i % len(paper.MARKERS)],
            color=paper.INK if len(devices) == 1 else paper.COLOURS[i % len(paper.COLOURS)],
            markersize=3.5,
            elinewidth=0.9,
            label=device[:SHORT] if len(devices) > 1 else "_only",
        )
    if len(devices) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
    ends = [end for runs in devices.values() for _, low, _, high in runs for end in (low, high)]
    _limits(axes, unit, ends, 0.01)


def _limits(axes: Axes, unit: str, values: Sequence[float], least: float) -> None:
    """Leave space around values: at least the share `least` of them, so that those that hardly differ look alike."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(unit, size=8.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 2.5, 5, 10]))
    if values:
        space = max(0.12 * (max(values) - min(values)), least * max(map(abs, values)), 1e-12)
        axes.set_ylim(min(values) - space, max(values) + space)
