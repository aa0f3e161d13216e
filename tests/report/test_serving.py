"""Servers in the record: engines side by side, what the host costs a step, and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgxlab.cli.report import Form
from dgxlab.errors import UsageError
from dgxlab.model import CellResult, RunStep, SyntheticModel
from dgxlab.plots import serving, write
from dgxlab.report import Number, collect, page, query, render_page
from dgxlab.store import Store
from dgxlab.tools import BENCHES, BatchedBench, ServeBench
from tests.journals import source
from tests.report.worlds import Session, agrees, h200
from tests.tools.streams import ABOUT, output, stream

GOLDEN = Path(__file__).parent / "golden" / "forms"
SERVE = ServeBench("text", (16,), (100,), (1, 4), axes={"n_ubatch": (2048,)})
ALONE = BatchedBench("text", (16,), (100,), (1, 4, 8), {"n_ubatch": (2048,)})


def record(store: Store, name: str, step_us: int, **changes: Any) -> None:
    """Record a server with this step, and llama-batched-bench with one of 1 ms."""
    models = {"text": SyntheticModel(vocab="llama-spm", n_vocab=32000)}
    experiment = h200(**{"name": name, "bench": (ALONE, SERVE), "gates": (), "models": models, **changes})

    def tool(step: RunStep) -> tuple[CellResult, ...]:
        rows = [
            {"pp": 16, "tg": 100, "pl": pl, "t_pp": 0.1, "speed_pp": pl * 160, "t_tg": 0.1, "speed_tg": pl * 1000}
            for pl in (1, 4, 8)
        ]
        whole = [{**row, "t": 0.2, "speed": row["pl"] * 580} for row in rows]
        text = output((1, 4), 16, 100, 4, step_us, {**ABOUT, "slots": 8})
        parsed = BENCHES[step.tool].parse(
            text if step.tool == "serve" else "\n".join(map(json.dumps, whole * 2)), step.cells
        )
        assert parsed.problems == ()
        return parsed.results

    job = f"20261120-1{len(store.jobs())}0000-{name}"
    Session(store, experiment, job, tree=source([name])).build().runs(tool, only=("batched-bench", "serve")).end()


def test_golden(store: Store) -> None:
    record(store, "plain", 2000)
    record(store, "patched", 1600)
    text = render_page(page(store, query({"form": "serving", "experiment": "plain,patched"})))
    assert agrees(text, GOLDEN / "serving.md")


def test_the_host_gap_is_the_difference_of_two_steps(store: Store) -> None:
    record(store, "plain", 2000)
    (table,) = page(store, query({"form": "serving", "experiment": "plain"})).tables
    gaps = [row["host_gap_ms.0"] for row in table.rows]
    assert [gap.middle for gap in gaps if isinstance(gap, Number)] == pytest.approx([1.0, 1.0])
    (whole,) = (each for each in collect(store, "plain").tables if each.form == "serving")
    assert [row["host_gap_ms"] for row in whole.rows] == gaps


def test_a_host_gap_of_exactly_0(store: Store) -> None:
    record(store, "plain", 1000)
    (table,) = page(store, query({"form": "serving", "experiment": "plain"})).tables
    assert [row["host_gap_ms.0"] for row in table.rows] == [Number("host_gap_ms", "ms", None, value=0.0)] * 2


def test_without_the_same_sizes_there_is_no_host_gap(store: Store) -> None:
    record(store, "alone", 2000, bench=(SERVE,))
    (table,) = page(store, query({"form": "serving", "experiment": "alone"})).tables
    assert "host_gap_ms.0" not in table.rows[0]


def test_requests_that_arrive_have_a_table_of_their_own(store: Store, tmp_path: Path) -> None:
    entry = ServeBench("text", (16,), (100,), rates=(4.0, 16.0), repetitions=1, axes={"n_parallel": (4,)})
    waves = [{"cpu": 0.05, "late_us": 90, "streams": [stream(5000, sent_us=1000 * at) for at in range(3)]}] * 2
    rows = [{"pp": 16, "tg": 100, "rate": rate, "waves": waves} for rate in entry.rates]
    text = "\n".join(map(json.dumps, [{"server": ABOUT}, *rows]))
    models = {"text": SyntheticModel(vocab="llama-spm", n_vocab=32000)}
    experiment = h200(name="arrivals", bench=(SERVE, entry), gates=(), models=models)

    def tool(step: RunStep) -> tuple[CellResult, ...]:
        printed = text if "rate" in step.cells[0].params else output((1, 4), 16, 100, 4)
        return BENCHES[step.tool].parse(printed, step.cells).results

    Session(store, experiment, "20261120-100000-arrivals", tree=source(["arrivals"])).build().runs(
        tool, only=("serve",)
    ).end()
    at_once, arrived = page(store, query({"form": "serving", "experiment": "arrivals"})).tables
    assert [row["B"] for row in at_once.rows] == [1, 4]
    assert [row["requests/s"] for row in arrived.rows] == [4.0, 16.0]
    assert all(isinstance(row["ttft_p95_ms.0"], Number) and "speed_tg.0" not in row for row in arrived.rows)
    ((_, points),) = serving.curves([arrived], "ttft_p50_ms")
    assert [(point.x, point.load) for point in points] == [(5.0, "4.0"), (5.0, "16.0")]
    assert write(serving.figure([arrived]), tmp_path / "arrivals.png").read_bytes().startswith(b"\x89PNG")
    both, rates = (_texts(serving.figure(tables)) for tables in ([at_once, arrived], [arrived]))
    assert ("rows by requests/s are not drawn" in both, "not drawn" in rates) == (True, False)


def _texts(figure: Any) -> str:
    texts = figure.findobj(match=lambda artist: hasattr(artist, "get_text"))
    return " ".join(" ".join(text.get_text() for text in texts).split())


def test_what_two_engines_differ_in_is_listed(store: Store) -> None:
    record(store, "plain", 2000, bench=(SERVE,))
    command = ("vllm", "serve", "/models/Qwen3-0.6B", "--dtype", "bfloat16", "--enforce-eager")
    vllm = ServeBench(n_prompt=(16,), n_gen=(100,), streams=(1, 4), engine="vllm", command=command)
    record(store, "vllm", 1600, bench=(vllm,))
    (table,) = page(store, query({"form": "serving", "experiment": "plain,vllm"})).tables
    assert [note for note in table.notes if ": plain " in note] == [
        "weights: plain Q4_0, vllm Qwen3-0.6B, bfloat16",
        "KV: plain f16, f16, vllm auto",
        "state: plain f32, vllm auto",
        "kernels: plain CUDA graphs, vllm one by one",
        "context: plain 256, vllm auto",
    ]


def test_an_experiment_without_a_server_has_no_such_table(store: Store) -> None:
    record(store, "none", 2000, bench=(ALONE,))
    with pytest.raises(UsageError, match="none has nothing measured for form=serving"):
        page(store, query({"form": "serving", "experiment": "none"}))


def test_the_picture_has_a_curve_for_each_arm(store: Store, tmp_path: Path) -> None:
    record(store, "plain", 2000)
    record(store, "patched", 1600)
    tables = page(store, query({"form": Form.serving.value, "experiment": "plain,patched"})).tables
    curves = dict(serving.curves(tables, "itl_p50_ms"))
    assert curves == {
        "plain": [(2.0, pytest.approx(500.0), "1"), (2.0, pytest.approx(2000.0), "4")],
        "patched": [(1.6, pytest.approx(625.0), "1"), (1.6, pytest.approx(2500.0), "4")],
    }
    figure = serving.figure(tables)
    assert all(axes.get_xlim()[1] > 1.04 * axes.dataLim.xmax for axes in figure.axes)  # no point is at the edge
    assert write(figure, tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
