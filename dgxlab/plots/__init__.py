"""Pictures, PNG for documents and SVG for pages: the only package that draws, with matplotlib.

`figures` takes a report: throughput against the number of sequences or n, and profiles. `chains.figure` takes a session
of two arms: the value of every run over time, with temperature and clock beneath. The same record gives the same bytes.
matplotlib is an extra, `dgxlab[plots]`, and imported inside the functions that draw.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dgxlab import units
from dgxlab.errors import UsageError, access, install, needs
from dgxlab.report import Number, Provenance, Report, Table
from dgxlab.source.programs import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 9.0, 120  # width in inches; the height depends on the content
WRAP = 128  # characters of small text in one line
TITLE = 80  # characters of a title in one line; a longer title gets a smaller font
HANDLE = 12  # width of a legend's sample line and the space beside it, in characters

PAPER, INK, FAINT, RULE, DISCARD = "#f4f4f1", "#24292f", "#8c8c88", "#d9d9d4", "#dcdcd6"
"""The background has a colour, so that a picture reads the same on a light and on a dark page; DISCARD is that of a
cycle that does not count."""
COLOURS = ("#0b62a4", "#c2500a", "#1a7f5a", "#8a3d8f", "#6b5b00", "#333333")
MARKERS = ("o", "^", "s", "D", "v", "P")
DASHES = ("-", "--", "-.", ":")  # lines differ in colour, dash and marker, so that colour alone is never needed

LOOK = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "text.parse_math": False,  # a $ in a name is printed as $
    "svg.fonttype": "none",
    "svg.hashsalt": "dgxlab",  # else the names of its parts are other ones each time
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("font.size", "axes.titlesize"), 9.0),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 8.0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.formatter.useoffset", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "axes.edgecolor": FAINT,
    "axes.facecolor": PAPER,
    "axes.titlelocation": "left",
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.handlelength": 2.6,
    **dict.fromkeys(("legend.borderpad", "legend.borderaxespad"), 0.0),
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.1,
    "lines.linewidth": 1.5,
    "lines.markersize": 5.5,
}

FLOOR = "matplotlib>=3.9"


# -- common to all pictures ------------------------------------------------------------------------------------------


@contextmanager
def new(height: float) -> Iterator[Figure]:
    """Yield an empty figure whose panels take `height` inches; its text is added by `label`.

    Raises UsageError if matplotlib is missing or does not load.
    """
    try:
        with needs(FLOOR, "pictures are drawn with matplotlib"):
            from matplotlib import style
            from matplotlib.figure import Figure
    except ImportError as error:
        message = f"matplotlib is installed and does not load: {error}"
        raise UsageError(message, next=f"{install(FLOOR)} --force-reinstall") from error
    with style.context(["default", LOOK]):
        yield Figure(figsize=(WIDTH, height), dpi=DPI, facecolor=PAPER, layout="constrained")


def label(figure: Figure, title: str, about: Sequence[str], provenances: Sequence[Provenance]) -> None:
    """Write a title and the legend of all panels above them, and small text beneath; the figure becomes higher.

    The small text has the parts of `about`, then the origins of the numbers.
    """
    lines = []
    for texts in (about, _origins(provenances) if provenances else ()):
        # lines of small text break between parts: no-break spaces hold each together
        parts = dict.fromkeys(plain(text).replace(" ", "\N{NO-BREAK SPACE}") for text in texts)
        wrapped = textwrap.wrap(" · ".join(parts), WRAP, break_on_hyphens=False)
        lines += [line.removesuffix(" ·") for line in wrapped]
    drawn = [axes.get_legend_handles_labels() for axes in figure.axes if axes.get_legend() is None]
    entries = {name: handle for handles, names in drawn for handle, name in zip(handles, names, strict=True)}
    columns = max(1, WRAP // (HANDLE + max(map(len, entries)))) if entries else 1
    figure.set_figheight(figure.get_figheight() + 0.5 + 0.2 * math.ceil(len(entries) / columns) + 0.19 * len(lines))
    title = plain(title)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside upper left",
        ncols=columns,
        title=title,
        title_fontproperties={"size": 12.0 * min(1.0, TITLE / len(title)), "weight": "bold"},
        alignment="left",
        borderaxespad=0.8,
    )
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", size=8.0, linespacing=1.5)


def _origins(provenances: Sequence[Provenance]) -> list[str]:
    unique = list(dict.fromkeys(provenances))
    sessions = dict.fromkeys(session for origin in unique for session in origin.sessions)
    builds = {}
    for origin in unique:
        series = ", ".join(map(str, origin.series)) or "none"
        builds[origin.experiment] = f"pin {origin.pin[:12]} · series {series}" + " · working tree" * origin.dirty
    synthetic = sorted({model for origin in unique for model in origin.synthetic})
    return [
        f"session {' · '.join(sessions)}" if sessions else "no session",
        f"host {', '.join(dict.fromkeys(origin.host for origin in unique))}",
        f"backend {', '.join(dict.fromkeys(origin.backend for origin in unique))}",
        *([f"{name}: {build}" for name, build in builds.items()] if len(set(builds.values())) > 1 else builds.values()),
        *([f"synthetic model {', '.join(synthetic)}"] if synthetic else []),
    ]


def looks() -> Iterator[dict[str, Any]]:
    """Yield how each line of a panel is drawn: in its own colour, with its own marker and dashes."""
    for colour, marker, dashes in zip(*map(itertools.cycle, (COLOURS, MARKERS, DASHES)), strict=False):
        yield {"color": colour, "marker": marker, "linestyle": dashes}


def plain(text: str) -> str:
    """Return a text as one line: characters that cannot be printed become blanks."""
    return "".join(char if char.isprintable() else " " for char in text)


def write(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG, atomically, and return the path; creates the folder if needed.

    The file has neither a date nor matplotlib's version. Raises UsageError if it cannot be written there.
    """
    content = _saved(figure, format="png", dpi=DPI, metadata={"Software": None})
    with access(path, "written", UsageError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return path


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element for a page, whose style sheet gives its colours: `var(--ink)` and so on.

    Texts stay texts, set in the reader's own font.
    """
    about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    text = _saved(figure, format="svg", metadata=about).decode()
    colours = dict(zip(COLOURS, (f"curve-{number}" for number in range(1, 7)), strict=True))
    names = {**colours, PAPER: "paper", INK: "ink", FAINT: "faint", RULE: "rule", DISCARD: "discard", "#ffffff": "page"}
    return re.sub(
        r"(?<=: )#[0-9a-f]{6}\b", lambda found: f"var(--{names[found[0]]})" if found[0] in names else found[0], text
    )[text.index("<svg") :]


def _saved(figure: Figure, **how: Any) -> bytes:
    from matplotlib import style

    buffer = io.BytesIO()
    with style.context(["default", LOOK]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a box is drawn for it instead
        figure.savefig(buffer, **how)
    return buffer.getvalue()


# -- the pictures of a report: tables to charts -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    """The x axis of a form's pictures: a column of its tables and its label; by metric, the titles of panels."""

    key: str
    label: str
    metrics: Mapping[str, str]


AXES = {
    "concurrency": _Axis("B", "B, sequences at once", {"speed_pp": "Prompt, S_PP", "speed_tg": "Generation, S_TG"}),
    "ops": _Axis("n", "n, columns", {"flops": "Throughput", "bandwidth_gb_s": "Bandwidth"}),
}

MOST = 8  # max lines in one picture; more lines make another picture
WIDE = 8.0  # the y axis is logarithmic if the largest value exceeds the smallest by this factor
HEIGHT = 3.4  # height of a panel with its title and labels, in inches


class Dot(NamedTuple):
    """One point of a line, with the half length of its error bar, 0 for none."""

    x: float
    y: float
    spread: float


@dataclass(frozen=True)
class Chart:
    """The content of one picture, before it is drawn."""

    form: str  # a key of AXES
    title: str
    curves: Mapping[str, Mapping[str, Sequence[Dot]]]  # by line name ("" for a single line), then by metric; by x
    shared: tuple[str, ...]  # settings common to all lines
    origins: tuple[Provenance, ...]


def figures(report: Report, stem: str) -> Iterator[tuple[str, Figure]]:
    """Yield the pictures of a report's tables by name.

    They are STEM-concurrency, STEM-ops, STEM-serving and STEM-profile; a second of one kind is STEM-ops-2. A table with
    a single number of sequences, or a single n, gets no picture. Raises UsageError if there is no matplotlib.
    """
    counts = dict.fromkeys(AXES, 0)
    for chart in charts(report):
        counts[chart.form] += 1
        number = f"-{counts[chart.form]}" if counts[chart.form] > 1 else ""
        yield f"{stem}-{chart.form}{number}", figure(chart)
    if served := [table for table in report.tables if table.form == "serving"]:
        from dgxlab.plots import serving  # needs this module's parts

        yield f"{stem}-serving", serving.figure(served)
    if steps := [table for table in report.tables if table.form == "profile"]:
        yield f"{stem}-profile", bars(steps)


def charts(report: Report) -> list[Chart]:
    """Return the charts of a report's tables of throughput, in their order; none for a table with a single x value."""
    groups: dict[tuple[str, str], list[Table]] = {}
    for table in report.tables:
        form = table.form
        if form == "verdicts" and {row.get("metric") for row in table.rows} <= AXES["concurrency"].metrics.keys():
            form = "concurrency"  # of two arms
        if form in AXES:
            groups.setdefault((form, table.title), []).append(table)
    return [chart for (form, title), tables in groups.items() for chart in _charts(form, title, tables)]


def _charts(form: str, title: str, tables: Sequence[Table]) -> Iterator[Chart]:
    marks = [each for table in tables for each in _dots(AXES[form], table)]
    if len({mark.x for _, _, mark in marks}) < 2:
        return
    identities = [identity for identity, _, _ in marks]
    names = dict.fromkeys(name for identity in identities for name in identity)
    varying = {name for name in names if len({identity.get(name) for identity in identities}) > 1}
    shared = tuple(f"{name} {identities[0][name]}" for name in names if name not in varying)
    curves: dict[str, dict[str, list[Dot]]] = {}
    for identity, metric, mark in marks:
        own = " ".join(v if k == "experiment" else f"{k} {v}" for k, v in identity.items() if k in varying)
        bisect.insort(curves.setdefault(own, {}).setdefault(metric, []), mark)
    origins = tuple(origin for table in tables for origin in _arms(table).values())
    for start in range(0, len(curves), MOST):
        yield Chart(form, title, dict(list(curves.items())[start : start + MOST]), shared, origins)


def _arms(table: Table) -> dict[str, Provenance]:
    return {"baseline": table.provenance, **({"candidate": table.candidate} if table.candidate else {})}


def _dots(axis: _Axis, table: Table) -> Iterator[tuple[dict[str, str], str, Dot]]:
    arms = _arms(table) if table.kind == "session" else {}
    # columns before the first number, without x
    first = itertools.takewhile(lambda column: column.key not in ("label", "baseline", "candidate"), table.columns)
    telling = [column.key for column in first if not column.metric and column.key != axis.key]
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
                yield {"experiment": experiment, **identity}, value.metric, Dot(float(x), value.middle, spread or 0.0)


def figure(chart: Chart) -> Figure:
    """Draw a chart, with a panel for each metric."""
    with new(HEIGHT) as figure:
        metrics = [name for name in AXES[chart.form].metrics if any(name in curve for curve in chart.curves.values())]
        for i, metric in enumerate(metrics):
            _panel(figure.add_subplot(1, len(metrics), i + 1), chart, metric)
        spread = any(mark.spread for curve in chart.curves.values() for marks in curve.values() for mark in marks)
        bars = ["median of a run's samples or of a chain's runs, bars: their scaled MAD"] if spread else []
        label(figure, chart.title, [*chart.shared, *bars], chart.origins)
    return figure


def _panel(axes: Axes, chart: Chart, metric: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    every = [mark for curve in chart.curves.values() for mark in curve.get(metric, ())]
    style = units.style(units.metric(metric), [mark.y for mark in every])
    for (name, curve), look in zip(chart.curves.items(), looks(), strict=False):
        marks = curve.get(metric, ())
        xs, ys = [mark.x for mark in marks], [mark.y / style.factor for mark in marks]
        bars = [mark.spread / style.factor for mark in marks] if any(mark.spread for mark in marks) else None
        axes.errorbar(xs, ys, yerr=bars, label=name, elinewidth=1.0, capsize=2.5, **look)
    axes.set_title(AXES[chart.form].metrics[metric], weight="bold", pad=5.0)
    axes.set_ylabel(style.unit)
    axes.set_xlabel(AXES[chart.form].label)
    # log 2 axis, ticks only at measured values, numbers written out
    axes.set_xscale("log", base=2)
    ticks: list[float] = []  # without those whose labels would overlap
    xs = sorted({mark.x for mark in every})
    for x in xs:
        if not ticks or math.log2(x / ticks[-1]) > math.log2(xs[-1] / xs[0]) / 16:
            ticks.append(x)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    low, high = min(mark.y for mark in every) / style.factor, max(mark.y for mark in every) / style.factor
    if low > 0 and high > WIDE * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.update_datalim([(xs[0], 0.0)])  # so that the margin above is a share of the whole axis
        axes.autoscale_view()
        axes.set_ylim(bottom=min(0.0, low))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))


BAR = 0.55  # height of a bar and its distance to the next, in inches
HATCHES = ("", "//", "..")  # patterns that distinguish groups of the same colour


def bars(tables: Sequence[Table]) -> Figure:
    """Draw a bar for each table of groups (`report.profile.by_group`), divided by their shares, the first on top."""
    groups = dict.fromkeys(str(row["group"]) for table in tables for row in table.rows)
    looks = dict(zip(groups, itertools.cycle((colour, hatch) for hatch in HATCHES for colour in COLOURS), strict=False))
    with new(1.0 + BAR * len(tables)) as figure:
        axes = figure.add_subplot()
        for number, table in enumerate(tables):
            left = 0.0
            for row in table.rows:
                share, (colour, hatch) = row["share_pct"], looks[group := str(row["group"])]
                assert isinstance(share, float)
                axes.barh(number, share, 0.6, left, color=colour, hatch=hatch, edgecolor="white", label=group)
                left += share
        axes.set_yticks(range(len(tables)), [_name(table) for table in tables])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of kernel time (%)")
        settings = [f"{name} {value}" for name, value in tables[0].settings.items() if name != "model"]
        label(figure, "Where the time of a step goes", settings, [table.provenance for table in tables])
    return figure


def _name(table: Table) -> str:
    times = [row["step_us"] for row in table.rows]
    return f"{table.title}\n{sum(each.middle for each in times if isinstance(each, Number)):.1f} us of kernels"
