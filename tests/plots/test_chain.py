"""The picture of a session: what is on it, run by run, and that there is none before its end."""

from collections.abc import Sequence
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from dgxlab.errors import UsageError
from dgxlab.model import BASELINE, BURN_IN, CANDIDATE, ChainStep
from dgxlab.plots import chains
from dgxlab.store import Store
from dgxlab.tools import BatchedBench, LlamaBench
from tests.journals import THROTTLED
from tests.report.worlds import CYCLES, Session, h200, places, session_of_two

A, B = "20261120-103000-h200-a", "20261120-114500-h200-b"
STREAM = (LlamaBench("q4k", (512,), (32,), {"n_ubatch": (2048,)}),)
TOGETHER = (BatchedBench("q4k", (128,), (64,), (8,), {"n_ubatch": (2048,)}),)


def sampled(name: str, low: float, median: float, high: float, device: str = "GPU-1") -> dict[str, Any]:
    unit = "C" if "temp" in name else "MHz"
    return {"device": device, "name": name, "unit": unit, "n": 3, "median": median, "min": low, "max": high}


WARM = [sampled("temperature.gpu", 41, 42, 50), sampled("clocks.sm", 345, 1980, 1980), sampled("cpu_mhz", 1, 2, 3)]


def value(step: ChainStep, role: str, cycle: int) -> float:
    if role == CANDIDATE:
        return 1100.0 + cycle
    return 1200.0 if (role, cycle) == (BASELINE, 3) else 1000.0 + cycle


def held(store: Store, job_id: str = A, telemetry: Sequence[dict[str, Any]] = WARM, **changes: Any) -> Figure:
    session = session_of_two(store, job_id, **{"bench": STREAM, **changes}).build().gates()
    for step in session.plan.chains:
        for role, cycle in places(step.cycles + 2):
            flags = [THROTTLED] if (role, cycle) == (BASELINE, 3) else []
            session.place(step, role, cycle, value(step, role, cycle), telemetry=list(telemetry), flags=flags)
    session.gates(after=True).end()
    return chains.figure(store, job_id)


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left").partition(",")[0]: axes for axes in figure.axes}


def drawn(axes: Axes, label: str) -> list[float]:
    return [float(y) for line in axes.get_lines() if line.get_label() == label for y in line.get_ydata()]


def text(figure: Figure) -> str:
    words = [figure.legends[0].get_title(), *figure.texts]
    return " ".join(text.get_text() for text in words).replace("\N{NO-BREAK SPACE}", " ")


def test_runs_by_role_and_cycles_that_do_not_count(store: Store) -> None:
    figure = held(store)
    for axes in (panels(figure)["pp512"], panels(figure)["tg32"]):
        assert drawn(axes, BURN_IN) == [1001, 1002]
        assert drawn(axes, BASELINE) == [1000 + cycle for cycle in range(CYCLES + 3) if cycle != 3]
        assert drawn(axes, "baseline, does not count") == [1200]
        assert drawn(axes, CANDIDATE) == [1101, 1102, *(1100 + cycle for cycle in range(5, CYCLES + 3))]
        assert drawn(axes, "candidate, does not count") == [1103, 1104]
        times = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
        _, _, before, between = times["_drift"][:4]
        after = times["_drift"][4]
        spans = [patch.get_extents().transformed(axes.transData.inverted()) for patch in axes.patches]
        cycles = [pytest.approx(ends) for ends in ((before, between), (between, after))]
        assert [(span.x0, span.x1) for span in spans] == cycles
        assert 0 < times[BURN_IN][0] < times[CANDIDATE][-1] < axes.get_xlim()[1]


def test_arms_differ_in_colour_and_in_marker(store: Store) -> None:
    lines = {line.get_label(): line for line in panels(held(store))["pp512"].get_lines()}
    roles = [lines[role] for role in (BASELINE, CANDIDATE, BURN_IN)]
    assert len({line.get_color() for line in roles}) == len({line.get_marker() for line in roles}) == 3
    empty = {label: to_hex(line.get_markerfacecolor()) != to_hex(line.get_color()) for label, line in lines.items()}
    assert (empty["candidate"], empty["candidate, does not count"]) == (False, True)


def test_temperature_and_clock_are_beneath_on_the_same_axis(store: Store) -> None:
    figure = held(store)
    figure.draw_without_rendering()
    shown = panels(figure)
    assert [(name, axes.get_ylabel()) for name, axes in shown.items()] == [
        ("pp512", "t/s"),
        ("tg32", "t/s"),
        ("GPU temperature", "°C"),
        ("SM clock", "MHz"),
    ]
    assert len({axes.get_xlim() for axes in shown.values()}) == 1
    tops = [axes.get_position().y1 for axes in shown.values()]
    assert tops == sorted(tops, reverse=True)
    for name, ends in (("GPU temperature", (41, 50)), ("SM clock", (345, 1980))):
        (whiskers,) = shown[name].collections
        bars = [tuple(float(y) for y in segment[:, 1]) for segment in whiskers.get_segments()]
        assert bars == [ends] * len(places(CYCLES + 2))


def test_without_a_gpu_the_processor_is_shown(store: Store) -> None:
    cpu = [sampled("cpu_temp_c", 60, 61, 70, "host"), sampled("cpu_mhz", 2000, 2100, 2200, "host")]
    assert list(panels(held(store, telemetry=cpu))) == ["pp512", "tg32", "CPU temperature", "CPU clock"]
    assert list(panels(held(store, B, telemetry=[]))) == ["pp512", "tg32"]


def test_two_gpus_have_markers_and_names(store: Store) -> None:
    both = [sampled("clocks.sm", 345, 1980, 1980, device) for device in ("GPU-11111111-aaaa", "GPU-22222222-bbbb")]
    figure = held(store, telemetry=both)
    axes = panels(figure)["SM clock"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["GPU-11111111", "GPU-22222222"]
    assert len({line.get_marker() for line in axes.get_lines()} - {"None", "", "|", "_"}) == 2
    assert not any("GPU" in text.get_text() for text in figure.legends[0].get_texts())


def test_words_above_name_where_the_numbers_come_from(store: Store) -> None:
    figure = held(store, noise=0.004)
    above = text(figure)
    for words in (
        "A/B of w4a16 against h200",
        "baseline h200 · candidate w4a16",
        f"session {A}",
        "host h200 (h200-7",
        "h200: pin e3a74b299085 · series none",
        "w4a16: pin e3a74b299085 · series w4a16@",
        "synthetic model q4k",
    ):
        assert words in above
    assert panels(figure)["pp512"].get_title(loc="right").startswith("faster +9.99 % (+9.")


@pytest.mark.parametrize("name", ["w4a16", "w4a16-with-a-name-that-is-as-long-as-names-of-experiments-may-b"])
def test_title_legend_and_origins_fit_around_the_panels(store: Store, name: str) -> None:
    figure = held(store, candidate={"name": name})
    figure.draw_without_rendering()
    legend, (origins,) = figure.legends[0].get_window_extent(), (text.get_window_extent() for text in figure.texts)
    panels = [axes.get_tightbbox() for axes in figure.axes]
    for box in (legend, origins, *panels):
        assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert figure.bbox.y1 > legend.y1 > legend.y0 > max(box.y1 for box in panels)
    assert min(box.y0 for box in panels) > origins.y1 > origins.y0 > 0


def test_each_chain_has_its_own_axis(store: Store) -> None:
    figure = held(store, bench=(*STREAM, *TOGETHER))
    assert [axes.texts[0].get_text() for axes in figure.axes if axes.texts] == ["llama-bench q4k", "batched-bench q4k"]
    assert [name[-4:] for name in panels(figure)] == ["p512", "tg32", "ture", "lock", "S_PP", "S_TG"]
    assert len(figure.axes) == 4 + 4
    assert [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()] == ["time since the chain began (s)"] * 2


def test_a_run_without_a_value_has_a_cross(store: Store) -> None:
    session = session_of_two(store, A, bench=STREAM).build().gates()
    (step,) = session.plan.chains
    for role, cycle in places(CYCLES):
        if (role, cycle) == (CANDIDATE, 2):
            session.place(step, role, cycle, None)
        session.place(step, role, cycle, value(step, role, cycle))
    session.gates(after=True).end()
    axes = panels(chains.figure(store, A))["pp512"]
    assert len(drawn(axes, "no value")) == 1
    assert drawn(axes, CANDIDATE)[:2] == [1101, 1102]


def test_an_invalid_session_says_why(store: Store) -> None:
    session = session_of_two(store, A, bench=STREAM).build().gates().chains(value)
    session.gates(
        after=True, passed=1101, status="failed", reasons=[f"1101 of 1103, {'and so on ' * 9}"], failed=[]
    ).end("failed", 5)
    axes = panels(chains.figure(store, A))["pp512"]
    title = axes.get_title(loc="right")
    assert title.startswith("invalid: gate MUL_MAT on CUDA0 failed for h200 after the chains: 1101 of")
    assert title.endswith(" ...")
    assert drawn(axes, BURN_IN) == [1001, 1002]
    assert drawn(axes, "baseline, mean") == []


def test_an_a_a_session_is_called_one(store: Store) -> None:
    figure = held(store, kind="noise")
    assert "A/A of h200 against itself" in text(figure)
    assert panels(figure)["tg32"].get_title(loc="right").startswith("faster (A/A) ")


def test_nothing_is_drawn_before_the_end(store: Store) -> None:
    session = session_of_two(store, A, bench=STREAM).build().gates().chains(value)
    session.save()
    with pytest.raises(UsageError, match="has not ended") as refused:
        chains.figure(store, A)
    assert refused.value.next == f"dgxlab attach {A}"
    session.gates(after=True).end()
    assert chains.figure(store, A).axes


def test_other_sessions_have_no_chains(store: Store) -> None:
    Session(store, h200(bench=STREAM), A).build().gates().end()
    session_of_two(store, B, bench=STREAM).build().end("failed", 5)
    for job_id, words in ((A, "held no chains"), (B, "ended before any run of a chain")):
        with pytest.raises(UsageError, match=words) as refused:
            chains.figure(store, job_id)
        assert refused.value.next == f"dgxlab report {job_id}"
