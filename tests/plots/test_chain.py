"""The picture of a session: what is on it, run by run, and that there is none before its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dgxlab import plots
from dgxlab.errors import UsageError
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, BatchedBench, ChainStep, LlamaBench
from dgxlab.plots import chains
from dgxlab.plots.trace import Panel, Trace, trace
from dgxlab.store import Store
from tests.journals import THROTTLED
from tests.report.worlds import CYCLES, Session, h200, places, session_of_two

A, B = "20261120-103000-h200-a", "20261120-114500-h200-b"
STREAM = (LlamaBench("q4k", (512,), (32,), {"n_ubatch": (2048,)}),)
TOGETHER = (BatchedBench("q4k", (128,), (64,), (8,), {"n_ubatch": (2048,)}),)


def sampled(name: str, low: float, median: float, high: float, device: str = "GPU-1") -> dict[str, Any]:
    """Return what one quantity was during a run."""
    unit = "C" if "temp" in name else "MHz"
    return {"device": device, "name": name, "unit": unit, "n": 3, "median": median, "min": low, "max": high}


WARM = [sampled("temperature.gpu", 41, 42, 50), sampled("clocks.sm", 345, 1980, 1980), sampled("cpu_mhz", 1, 2, 3)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Give an empty record."""
    with Store.open(tmp_path / "results.db") as opened:
        yield opened


def value(step: ChainStep, role: str, cycle: int) -> float:
    """Candidates are a tenth faster; one baseline in between is far off, and was throttled."""
    if role == CANDIDATE:
        return 1100.0 + cycle
    return 1200.0 if (role, cycle) == (BASELINE, 3) else 1000.0 + cycle


def held(store: Store, job_id: str = A, telemetry: Sequence[dict[str, Any]] = WARM, **changes: Any) -> Trace:
    """Hold a whole session, two cycles more for those that do not count, and return what there is to show of it."""
    session = session_of_two(store, job_id, **{"bench": STREAM, **changes}).build().gates()
    for step in session.plan.chains:
        for role, cycle in places(step.cycles + 2):
            flags = [THROTTLED] if (role, cycle) == (BASELINE, 3) else []
            session.place(step, role, cycle, value(step, role, cycle), telemetry=list(telemetry), flags=flags)
    session.gates(after=True).end()
    return trace(store, job_id)


def panels(figure: Figure) -> dict[str, Axes]:
    """Return the panels of a picture by the name above them."""
    return {axes.get_title(loc="left").partition(",")[0]: axes for axes in figure.axes}


def drawn(axes: Axes, label: str) -> list[float]:
    """Return the values that are drawn as `label`."""
    return [float(y) for line in axes.get_lines() if line.get_label() == label for y in line.get_ydata()]


def test_every_run_is_there_by_its_role(store: Store) -> None:
    """Two of burn-in, baselines and candidates, in every panel of the chain."""
    (chain,) = held(store).chains
    assert [panel.label for panel in chain.panels] == ["pp512", "tg32"]
    for panel in chain.panels:
        assert [(point.role, point.cycle) for point in panel.points] == places(CYCLES + 2)
        values = [point.value for point in panel.points if point.role == CANDIDATE]
        assert values == [1100 + cycle for cycle in range(1, CYCLES + 3)]
        times = [point.at for point in panel.points]
        assert times == sorted(times)
        assert 0 < times[0] < times[-1] < chain.seconds


def test_cycles_that_do_not_count_are_marked(store: Store) -> None:
    """The baseline between them does not count either; those at their ends do, for the cycles beside."""
    panel = held(store).chains[0].panels[0]
    assert counts(panel, CANDIDATE) == {cycle: cycle not in (3, 4) for cycle in range(1, CYCLES + 3)}
    assert counts(panel, BASELINE) == {cycle: cycle != 3 for cycle in range(CYCLES + 3)}
    at = {(point.role, point.cycle): point.at for point in panel.points}
    assert panel.discards == ((at[BASELINE, 2], at[BASELINE, 3]), (at[BASELINE, 3], at[BASELINE, 4]))
    axes = panels(chains.figure(trace(store, A)))["pp512"]
    assert drawn(axes, "candidate") == [1101, 1102, *(1100 + cycle for cycle in range(5, CYCLES + 3))]
    assert drawn(axes, "candidate, does not count") == [1103, 1104]
    assert drawn(axes, "baseline, does not count") == [1200]
    spans = [
        patch for patch in axes.patches if patch.get_facecolor()[:3] == pytest.approx((0.863, 0.863, 0.839), abs=0.01)
    ]
    assert len(spans) == 2


def counts(panel: Panel, role: str) -> dict[int, bool]:
    """Return by cycle whether the verdict stands on it."""
    return {point.cycle: point.counts for point in panel.points if point.role == role}


def test_arms_differ_in_colour_and_in_marker(store: Store) -> None:
    """So do the runs of burn-in, which are grey; what is hollow does not count."""
    axes = panels(chains.figure(held(store)))["pp512"]
    looks = {
        line.get_label(): (line.get_color(), line.get_marker())
        for line in axes.get_lines()
        if line.get_marker() != "None"
    }
    arms = [looks[role] for role in (BASELINE, CANDIDATE, BURN_IN)]
    assert len({colour for colour, _ in arms}) == len({marker for _, marker in arms}) == 3
    (grey,) = (line for line in axes.get_lines() if line.get_label() == BURN_IN)
    assert str(grey.get_color()) == "#8c8c88"
    hollow = {line.get_label(): line.get_markerfacecolor() != line.get_color() for line in axes.get_lines()}
    assert (hollow["candidate"], hollow["candidate, does not count"]) == (False, True)


def test_temperature_and_clock_stand_beneath_on_the_same_axis(store: Store) -> None:
    """Whiskers go from the lowest to the highest sample; all panels of the chain share their time."""
    figure = chains.figure(held(store))
    found = panels(figure)
    assert list(found) == ["pp512", "tg32", "GPU temperature", "SM clock"]
    assert [axes.get_ylabel() for axes in found.values()] == ["t/s", "t/s", "°C", "MHz"]
    assert len({axes.get_xlim() for axes in found.values()}) == 1
    tops = [axes.get_position().y1 for axes in found.values()]
    assert tops == sorted(tops, reverse=True)
    for name, ends in (("GPU temperature", (41, 50)), ("SM clock", (345, 1980))):
        (whiskers,) = found[name].collections
        bars = [tuple(float(y) for y in segment[:, 1]) for segment in whiskers.get_segments()]
        assert bars == [ends] * len(places(CYCLES + 2))
    assert "time since the chain began (s)" in [axes.get_xlabel() for axes in found.values()]


def test_without_a_gpu_the_processor_is_shown(store: Store) -> None:
    """Its temperature and clock; what was not sampled has no panel."""
    cpu = [sampled("cpu_temp_c", 60, 61, 70, "host"), sampled("cpu_mhz", 2000, 2100, 2200, "host")]
    assert list(panels(chains.figure(held(store, telemetry=cpu)))) == ["pp512", "tg32", "CPU temperature", "CPU clock"]
    assert list(panels(chains.figure(held(store, B, telemetry=[])))) == ["pp512", "tg32"]


def test_two_gpus_are_told_apart(store: Store) -> None:
    """Each has its own marker and its name."""
    both = [sampled("clocks.sm", 345, 1980, 1980, device) for device in ("GPU-11111111-aaaa", "GPU-22222222-bbbb")]
    axes = panels(chains.figure(held(store, telemetry=both)))["SM clock"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["GPU-11111111", "GPU-22222222"]
    assert len({line.get_marker() for line in axes.get_lines()} - {"None", "", "|", "_"}) == 2


def test_session_pin_series_and_host_are_named(store: Store) -> None:
    """Both arms where they were built from different trees, and the verdict over each panel."""
    figure = chains.figure(held(store, noise=0.004))
    said = " ".join(text.get_text() for text in figure.texts)
    assert "A/B of w4a16 against h200" in said
    assert f"session {A}" in said
    assert "host h200 (h200-7" in said
    assert "h200: pin e3a74b299085 · series none" in said
    assert "w4a16: pin e3a74b299085 · series w4a16@" in said
    assert "synthetic model q4k" in said
    verdict = panels(figure)["pp512"].get_title(loc="right")
    assert verdict == trace(store, A).chains[0].panels[0].verdict
    assert verdict.startswith("faster +9.99 % (+9.")
    assert [text.get_text() for text in figure.legends[0].get_texts()][:3] == [
        "baseline h200",
        "candidate w4a16",
        BURN_IN,
    ]


def test_the_legend_covers_no_panel(store: Store) -> None:
    """It stands above the first of them, and inside the picture."""
    figure = chains.figure(held(store))
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent().transformed(figure.transFigure.inverted())
    assert box.y0 > max(axes.get_position().y1 for axes in figure.axes)
    assert box.x0 > 0
    assert box.x1 < 1


def test_names_of_any_length_stay_inside(store: Store) -> None:
    """A name may have 64 letters; title and legend make room."""
    name = "w4a16-with-a-name-that-is-as-long-as-names-of-experiments-may-b"
    figure = chains.figure(held(store, candidate={"name": name}))
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.texts] + [figure.legends[0].get_window_extent()]
    assert max(box.x1 for box in boxes) < figure.bbox.x1


def test_each_chain_has_its_own_axis(store: Store) -> None:
    """A cell with two speeds has a panel for each."""
    shown = held(store, bench=(*STREAM, *TOGETHER))
    assert [chain.title for chain in shown.chains] == ["llama-bench q4k", "batched-bench q4k"]
    assert [panel.label[-4:] for panel in shown.chains[1].panels] == ["S_PP", "S_TG"]
    figure = chains.figure(shown)
    assert len(figure.axes) == 2 + 2 + 2 + 2
    assert [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()] == ["time since the chain began (s)"] * 2


def test_a_run_without_a_value_has_a_cross(store: Store) -> None:
    """It failed and was run again in its place: only the last there counts."""
    session = session_of_two(store, A, bench=STREAM).build().gates()
    (step,) = session.plan.chains
    for role, cycle in places(CYCLES):
        if (role, cycle) == (CANDIDATE, 2):
            session.place(step, role, cycle, None)
        session.place(step, role, cycle, value(step, role, cycle))
    session.gates(after=True).end()
    panel = trace(store, A).chains[0].panels[0]
    assert [(p.value, p.counts) for p in panel.points if (p.role, p.cycle) == (CANDIDATE, 2)] == [
        (None, False),
        (1102, True),
    ]
    figure = chains.figure(trace(store, A))
    (lost,) = (line for line in panels(figure)["pp512"].get_lines() if line.get_label() == "no value")
    assert len(lost.get_xdata()) == 1
    assert "no value" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_an_invalid_session_says_why(store: Store) -> None:
    """A gate failed afterwards: its runs are there, means and effect are not."""
    session = session_of_two(store, A, bench=STREAM).build().gates().chains(value)
    session.gates(
        after=True, passed=1101, status="failed", reasons=[f"1101 of 1103, {'and so on ' * 9}"], failed=[]
    ).end("failed", 5)
    panel = trace(store, A).chains[0].panels[0]
    assert panel.verdict.startswith("invalid: gate MUL_MAT on CUDA0 failed for h200 after the chains: 1101 of 1103")
    assert panel.means == (None, None)
    axes = panels(chains.figure(trace(store, A)))["pp512"]
    assert axes.get_title(loc="right").endswith(" ...")
    assert drawn(axes, BURN_IN) == [1001, 1002]


def test_an_a_a_session_is_called_one(store: Store) -> None:
    """Its two arms are one; every verdict is of an A/A."""
    shown = held(store, kind="noise")
    assert shown.what == "A/A of h200 against itself"
    assert shown.arms == ("h200", "h200")
    assert {panel.verdict.partition(":")[0] for panel in shown.chains[0].panels} == {"A/A"}


def test_nothing_is_drawn_before_the_end(store: Store, tmp_path: Path) -> None:
    """Neither with one run there nor with all of them; once it has ended there is a picture."""
    session = session_of_two(store, A, bench=STREAM).build().gates()
    (step,) = session.plan.chains
    path = tmp_path / "chain.png"
    for role, cycle in places(CYCLES):
        session.place(step, role, cycle, 4242.0)
        session.save()
        with pytest.raises(UsageError, match="has not ended, and nothing of its chains is shown before") as refused:
            plots.chain(store, A, path)
        assert refused.value.next == f"dgxlab attach {A}"
    assert not path.exists()
    session.gates(after=True).end()
    assert plots.chain(store, A, path) == path
    assert path.exists()


def test_other_sessions_have_no_chains(store: Store, tmp_path: Path) -> None:
    """A run, and a session that ended before its first run: both are refused with what there is to see instead."""
    Session(store, h200(bench=STREAM), A).build().gates().end()
    session_of_two(store, B, bench=STREAM).build().end("failed", 5)
    for job_id, said in ((A, "held no chains"), (B, "ended before any run of a chain")):
        with pytest.raises(UsageError, match=said) as refused:
            plots.chain(store, job_id, tmp_path / "chain.png")
        assert refused.value.next == f"dgxlab report {job_id}"
