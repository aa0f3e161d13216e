"""The picture of a session of two arms: the value of every run over time, with temperature and clock beneath."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dgxlab import judgement, plots, units
from dgxlab.chains import Comparison, comparisons
from dgxlab.errors import UsageError
from dgxlab.judgement import Judged
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, SESSIONS, ChainStep
from dgxlab.report.ask import label
from dgxlab.report.cells import effect_text
from dgxlab.report.records import grouped
from dgxlab.report.session import ChainSession
from dgxlab.report.tables import provenance
from dgxlab.report.verdicts import MARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dgxlab.store import Store

Row = Mapping[str, Any]

STYLES = {
    BASELINE: (plots.COLOURS[0], "o", 5.5),
    CANDIDATE: (plots.COLOURS[1], "^", 6.5),
    BURN_IN: (plots.FAINT, "s", 4.0),
}
"""Colour, marker and its size, by role."""
VALUES, CONDITION = 1.45, 0.98  # heights of panels in inches, with title
TITLES, LABEL = 104, 75
"""Characters that fit above a panel, and how many of them its name may take; a longer name gets a smaller font."""

CONDITIONS = (
    {"temperature.gpu": ("GPU temperature", "°C"), "clocks.sm": ("SM clock", "MHz")},
    {"cpu_temp_c": ("CPU temperature", "°C"), "cpu_mhz": ("CPU clock", "MHz")},
)
"""Quantities drawn under a chain, by their sampled name: those of a GPU, or without any, those of the processor."""


MEDIANS = """SELECT run_id, cell, metric, value FROM measurements
             WHERE run_id IN (SELECT run_id FROM runs WHERE job_id = ?)"""

TELEMETRY = """SELECT run_id, device, name, median, min, max FROM telemetry JOIN runs USING (run_id)
               WHERE job_id = ? ORDER BY device, position"""


@dataclass(frozen=True)
class _Record:
    """What is drawn of a session: medians by run, cell and metric; verdicts by chain and comparison; telemetry."""

    values: Mapping[tuple[str, str, str], float]
    verdicts: Mapping[tuple[str, Comparison], Judged]
    telemetry: Sequence[Row]
    shown: Mapping[str, tuple[str, str]]  # those of CONDITIONS that were sampled
    mark: str


class RunPoint(NamedTuple):
    """One run of a chain, for one comparison; `counts` is true for the runs in an arm's mean, and for the burn-in."""

    role: str
    cycle: int
    at: float
    value: float | None
    counts: bool


def figure(store: Store, job_id: str) -> Figure:
    """Draw the chains of a session of two arms, one beneath the other, each with its own time axis.

    Raises UsageError if the session has no chains or has not ended, or matplotlib is missing.
    """
    job = store.job(job_id)
    if job.kind not in SESSIONS:
        raise UsageError(f"session {job_id} is a {job.kind} and held no chains", next=f"dgxlab report {job_id}")
    session = ChainSession(store, job)
    if not session.ended:
        message = f"session {job_id} has not ended, and nothing of its chains is shown before"
        raise UsageError(message, next=f"dgxlab attach {job_id}")
    runs = grouped((run["chain"], run) for run in session.runs)
    steps = [step for step in session.plan.chains if step.id in runs]
    if not steps:
        raise UsageError(f"session {job_id} ended before any run of a chain", next=f"dgxlab report {job_id}")
    telemetry = store.rows(TELEMETRY, (job_id,))
    sampled = {row["name"] for row in telemetry}
    shown = next((names for names in CONDITIONS if sampled.intersection(names)), {})
    shown = {name: quantity for name, quantity in shown.items() if name in sampled}
    values = {(row["run_id"], row["cell"], row["metric"]): row["value"] for row in store.rows(MEDIANS, (job_id,))}
    verdicts = {(judged.chain, judged.comparison): judged for judged in judgement.recorded(store, job_id)}
    record = _Record(values, verdicts, telemetry, shown, MARK[job.plan.shown_kind])
    heights = [h for step in steps for h in [VALUES] * len(comparisons(step)) + [CONDITION] * len(shown)]
    with plots.new(sum(heights)) as figure:
        rows = iter(figure.add_gridspec(len(heights), 1, height_ratios=heights))
        for step in steps:
            _chain(figure, rows, step, runs[step.id], record)
        figure.align_ylabels()
        arms = [session.baseline, *([session.candidate] if session.candidate else [])]
        models = {step.baseline.model for step in session.plan.chains}
        about = [f"baseline {arms[0].name}", f"candidate {arms[-1].name}"]
        if shown:
            about.append("temperature and clock: median of each run, whiskers from its lowest to its highest sample")
        plots.label(figure, session.title, about, [provenance(arm, [job_id], models) for arm in arms])
    return figure


def _chain(figure: Figure, rows: Any, step: ChainStep, runs: Sequence[Row], record: _Record) -> None:
    began = min(run["started"] for run in runs)  # not the first run: the clock may have been set back
    seconds = max(run["started"] + run["seconds"] for run in runs) - began
    scale, unit = (60.0, "min") if seconds > 300 else (1.0, "s")
    times = {run["run_id"]: (run["started"] + run["seconds"] / 2 - began) / scale for run in runs}
    compared = comparisons(step)
    several = len({comparison.metric for comparison in compared}) > 1
    cells = {cell.key: label(cell) for cell in step.baseline.cells}
    axes: list[Axes] = []
    for _ in (*compared, *record.shown):
        axes.append(figure.add_subplot(next(rows), sharex=axes[0] if axes else None))
        axes[-1].tick_params(labelbottom=False)
    for above, comparison in zip(axes, compared, strict=False):
        metric = units.metric(comparison.metric).label if several else ""
        judged = record.verdicts.get((step.id, comparison))
        points = _points(runs, times, comparison, record)
        _verdict(above, f"{cells[comparison.baseline]} {metric}".strip(), comparison.metric, judged, record.mark)
        _values(above, comparison.metric, points, judged)
    for below, (name, quantity) in zip(axes[len(compared) :], record.shown.items(), strict=True):
        _conditions(below, quantity, [row for row in record.telemetry if row["name"] == name], times)
    title = " ".join(filter(None, (step.baseline.tool, step.baseline.model)))
    axes[0].annotate(
        title, (0, 1), (0, 22), xycoords="axes fraction", textcoords="offset points", weight="bold", size=10.0
    )
    axes[-1].tick_params(labelbottom=True)
    axes[-1].set_xlabel(f"time since the chain began ({unit})", loc="right", size=8.0)
    axes[0].set_xlim(0, seconds / scale)


def _points(runs: Sequence[Row], times: Mapping[str, float], comparison: Comparison, record: _Record) -> list[RunPoint]:
    judged = record.verdicts.get((runs[0]["chain"], comparison))
    counted = {(role, n) for role in (BASELINE, CANDIDATE) if judged for n in judgement.counted(judged.verdict, role)}
    last = {(run["role"], run["cycle"]): run["run_id"] for run in runs}  # the last try of each repeated run
    points = []
    for run in runs:
        role, run_id = run["role"], run["run_id"]
        cell = comparison.candidate if role == CANDIDATE else comparison.baseline
        counts = role == BURN_IN or ((role, run["cycle"]) in counted and last[role, run["cycle"]] == run_id)
        points.append(
            RunPoint(role, run["cycle"], times[run_id], record.values.get((run_id, cell, comparison.metric)), counts)
        )
    return points


def _verdict(axes: Axes, cell: str, metric: str, judged: Judged | None, mark: str) -> None:
    """Write a panel's name above it, and the verdict: `slower -7.20 % (-10.17 to -4.13)`, or why it is invalid."""
    name = plots.plain(f"{cell}, {units.metric(metric).better} is better")
    axes.set_title(name, weight="bold", size=9.0 * min(1.0, LABEL / len(name)))
    words = f"{judged.verdict.verdict}{mark}{effect_text(judged.verdict)}" if judged else "no verdict"
    room = TITLES - min(len(name), LABEL)
    axes.set_title(textwrap.shorten(words, room, placeholder=" ..."), loc="right", size=8.5)


def _values(axes: Axes, metric: str, points: Sequence[RunPoint], judged: Judged | None) -> None:
    style = units.style(units.metric(metric), [point.value for point in points])
    placed = [(point, point.at, point.value / style.factor) for point in points if point.value is not None]

    def plot(xy: Iterable[tuple[float, float]], **look: Any) -> None:
        if xy := list(xy):
            axes.plot(*zip(*xy, strict=True), **look)

    for cycle in sorted(judged.verdict.flaws) if judged else ():
        runs = ((BASELINE, cycle - 1), (CANDIDATE, cycle), (BASELINE, cycle))
        if times := [point.at for point in points if (point.role, point.cycle) in runs]:
            axes.axvspan(min(times), max(times), color=plots.DISCARD, linewidth=0, zorder=0.5)
    baselines = ((at, value) for point, at, value in placed if point.role == BASELINE)
    plot(baselines, color=STYLES[BASELINE][0], linewidth=0.7, alpha=0.6, label="_drift", zorder=2)
    means = {BASELINE: judged.baseline, CANDIDATE: judged.candidate} if judged else {}
    for role, (colour, marker, size) in STYLES.items():
        look = {"color": colour, "marker": marker, "markersize": size, "linestyle": "none", "zorder": 3}
        for counts, name, face in ((True, role, colour), (False, f"{role}, does not count", plots.PAPER)):
            xy = ((at, value) for point, at, value in placed if (point.role, point.counts) == (role, counts))
            plot(xy, **look, markerfacecolor=face, label=name)
        if (mean := means.get(role)) is not None:
            dashes = (0, (5, 3))
            axes.axhline(
                mean / style.factor, color=colour, linewidth=0.9, linestyle=dashes, zorder=1.5, label=f"{role}, mean"
            )
    plot(
        ((point.at, 0.04) for point in points if point.value is None),
        color=plots.INK,
        marker="x",
        markersize=5.0,
        linestyle="none",
        clip_on=False,
        label="no value",
        transform=axes.get_xaxis_transform(),
    )
    _limits(axes, style.unit, [value for _, _, value in placed], 0.004)


def _conditions(axes: Axes, quantity: tuple[str, str], sampled: Sequence[Row], times: Mapping[str, float]) -> None:
    axes.set_title(quantity[0], weight="bold")
    devices = grouped((row["device"], row) for row in sampled if row["run_id"] in times)
    for i, (device, runs) in enumerate(devices.items()):
        axes.errorbar(
            [times[run["run_id"]] for run in runs],
            [run["median"] for run in runs],
            yerr=[[run["median"] - run["min"] for run in runs], [run["max"] - run["median"] for run in runs]],
            fmt=plots.MARKERS[i % len(plots.MARKERS)],
            color=plots.INK if len(devices) == 1 else plots.COLOURS[i % len(plots.COLOURS)],
            markersize=3.5,
            elinewidth=0.9,
            label=device[:12] if len(devices) > 1 else "_only",  # as GPU-32d9179a
        )
    if len(devices) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4)
    _limits(axes, quantity[1], [run[end] for runs in devices.values() for run in runs for end in ("min", "max")], 0.01)


def _limits(axes: Axes, unit: str, values: Sequence[float], least: float) -> None:
    """Set axis limits with a margin of at least the share `least`, so that nearly equal values look alike."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(unit, size=8.0)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 2.5, 5, 10]))
    if values:
        space = max(0.12 * (max(values) - min(values)), least * max(map(abs, values)), 1e-12)
        axes.set_ylim(min(values) - space, max(values) + space)
