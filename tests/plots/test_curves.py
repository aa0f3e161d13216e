"""The pictures of a report: concurrency and operations, from the real output of an H200."""

from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from dgxlab import plots
from dgxlab.model import CANDIDATE, ChainStep
from dgxlab.plots import MOST, Chart
from dgxlab.report import Number, Report, Table, collect, collect_job
from dgxlab.store import Store
from dgxlab.tools import BatchedBench
from tests.report.worlds import session_of_two, whole

A = "20261120-103000-h200-a"


@pytest.fixture
def report(store: Store) -> Report:
    whole(store)
    return collect(store, "h200")


def chart(report: Report, form: str) -> Chart:
    (chart,) = (chart for chart in plots.charts(report) if chart.form == form)
    return chart


def table(report: Report, form: str) -> Table:
    (table,) = (table for table in report.tables if table.form == form)
    return table


def lines(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    drawn = {}
    for container in axes.containers:
        assert isinstance(container, ErrorbarContainer)
        data = container.lines[0]
        drawn[str(container.get_label())] = ([float(x) for x in data.get_xdata()], [float(y) for y in data.get_ydata()])
    return drawn


def test_concurrency_has_both_speeds_against_b(report: Report) -> None:
    figure = plots.figure(chart(report, "concurrency"))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["Prompt, S_PP", "Generation, S_TG"]
    rows = table(report, "concurrency").rows
    for axes, metric in zip(figure.axes, ("speed_pp", "speed_tg"), strict=True):
        ((xs, ys),) = lines(axes).values()
        values = [row[metric] for row in rows]
        assert xs == [row["B"] for row in rows] == [8, 32, 64]
        assert ys == [value.median for value in values if isinstance(value, Number)]
        assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "B, sequences at once", "t/s")
        assert [float(tick) for tick in axes.get_xticks()] == xs
        bottom, top = axes.get_ylim()
        assert (bottom, top > 1.03 * max(ys)) == (0, True)


def test_operations_have_a_line_for_each_type_against_n(report: Report) -> None:
    picture = chart(report, "ops")
    assert list(picture.curves) == ["type_a q4_0", "type_a q4_K"]
    (axes,) = plots.figure(picture).axes
    assert (axes.get_xscale(), axes.get_ylabel(), axes.get_xlabel()) == ("log", "TFLOPS", "n, columns")
    rows = [row for row in table(report, "ops").rows if row["type_a"] == "q4_K"]
    xs, ys = lines(axes)["type_a q4_K"]
    assert xs == [1, 8, 512]
    flops = [row["flops"] for row in rows]
    assert ys == pytest.approx([value.median / 1e12 for value in flops if isinstance(value, Number)])


def words(figure: Figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\N{NO-BREAK SPACE}", " ")


def test_what_all_lines_share_is_above_the_panels(report: Report) -> None:
    figure = plots.figure(chart(report, "ops"))
    assert "experiment h200 · m 4096 · k 14336" in words(figure)
    assert f"session {A} · host h200 (h200-7" in words(figure)
    assert "pin e3a74b299085 · series none" in words(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["type_a q4_0", "type_a q4_K"]
    assert plots.figure(chart(report, "concurrency")).legends[0].get_texts() == []


def test_lines_differ_in_colour_marker_and_dashes(report: Report) -> None:
    (axes,) = plots.figure(chart(report, "ops")).axes
    drawn = [container.lines[0] for container in axes.containers if isinstance(container, ErrorbarContainer)]
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in drawn]
    assert all(len(set(kind)) == len(drawn) for kind in zip(*looks, strict=True))


def test_a_spread_is_drawn_and_explained(report: Report) -> None:
    plain = table(report, "ops")
    rows = [{**row, "flops": Number("flops", "FLOPS", 5, 1e11, median=2e12)} for row in plain.rows]
    figure = plots.figure(chart(replace(report, tables=(replace(plain, rows=tuple(rows)),)), "ops"))
    (bars,) = {tuple(float(y) for y in seg[:, 1]) for c in figure.axes[0].collections for seg in c.get_segments()}
    assert bars == pytest.approx((1.9, 2.1))
    assert "bars: their scaled MAD" in words(figure)
    assert "MAD" not in words(plots.figure(chart(report, "ops")))


def test_experiments_of_one_report_are_lines_of_one_picture(report: Report) -> None:
    first = table(report, "concurrency")
    other = replace(first, provenance=replace(first.provenance, experiment="w4a16", dirty=True))
    picture = chart(replace(report, tables=(first, other)), "concurrency")
    assert list(picture.curves) == ["h200", "w4a16"]
    above = words(plots.figure(picture))
    assert "w4a16: pin e3a74b299085 · series none · working tree" in above


def test_many_lines_are_spread_over_pictures(report: Report) -> None:
    ops = table(report, "ops")
    many = [{**row, "type_a": f"t{i}"} for i in range(MOST + 1) for row in ops.rows if row["type_a"] == "q4_0"]
    pictures = plots.charts(replace(report, tables=(replace(ops, rows=tuple(many)),)))
    assert [len(each.curves) for each in pictures] == [MOST, 1]
    assert len(plots.figure(pictures[1]).legends) == 1
    figure = plots.figure(pictures[0])
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().x1 < figure.bbox.x1


def test_one_number_is_no_curve(report: Report) -> None:
    first, ops = table(report, "concurrency"), table(report, "ops")
    nameless = tuple({key: value for key, value in row.items() if key != "n"} for row in ops.rows)
    few = (replace(first, rows=first.rows[:1]), replace(ops, rows=nameless), table(report, "single-stream"))
    assert plots.charts(replace(report, tables=few)) == []


def test_verdicts_on_concurrency_are_two_lines(store: Store) -> None:
    session = session_of_two(store, A, bench=(BatchedBench("q4k", (128,), (64,), (8, 32), {"n_ubatch": (2048,)}),))

    def value(step: ChainStep, role: str, cycle: int) -> float:
        return 1100.0 if role == CANDIDATE else 1000.0

    session.build().gates().chains(value).save()
    assert plots.charts(collect_job(store, A)) == []
    session.gates(after=True).end()
    figure = plots.figure(chart(collect_job(store, A), "concurrency"))
    for axes in figure.axes:
        (first, (_, a)), (two, (_, b)) = lines(axes).items()
        assert (first, two) == ("baseline h200", "candidate w4a16")
        assert a == pytest.approx([1000, 1000])
        assert b == pytest.approx([1100, 1100])
