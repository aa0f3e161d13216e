"""Which columns a table has, and how its rows are ordered."""

import re
from dataclasses import replace

import pytest

from dgxlab.model import CellResult, EngagedGate, Measurement, RunStep
from dgxlab.report import Table, collect, page, query, render, render_page
from dgxlab.report.cells import layout
from dgxlab.report.records import ShownFlag
from dgxlab.store import Store
from dgxlab.tools import BackendOpsBench, BatchedBench, LlamaBench
from dgxlab.tools.llama_bench import name_of_test
from dgxlab.units import MISSING as DASH
from tests.report.worlds import Session, Tool, fails, h200, numbers, valid

JOB = "20261120-103000-h200-a"


def only_table(store: Store, *bench: object, **changes: object) -> Table:
    experiment = h200(bench=bench, gates=(), **changes)
    Session(store, experiment, JOB).build().runs(numbers(samples=3)).end()
    (table,) = collect(store, "h200").tables
    return table


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"n_prompt": 512, "n_gen": 0}, "pp512"),
        ({"n_prompt": 0, "n_gen": 128, "n_depth": 0}, "tg128"),
        ({"n_prompt": 0, "n_gen": 128, "n_depth": 4096}, "tg128 @ d4096"),
        ({"n_prompt": 512, "n_gen": 128}, "pp512+tg128"),
    ],
)
def test_tests_are_called_as_llama_bench_calls_them(params: dict[str, int], name: str) -> None:
    assert name_of_test(params) == name


def test_what_varies_is_a_column_and_the_rest_is_beneath(store: Store) -> None:
    table = only_table(
        store, LlamaBench("q4k", (512,), (32,), {"n_ubatch": (2048, 512), "type_k": ("f16",)}, repetitions=3)
    )
    headers, _, body = layout(table)
    assert headers == ["model", "test", "n_ubatch", "t/s"]
    assert [row[:3] for row in body] == [["q4k", test, size] for test in ("pp512", "tg32") for size in ("512", "2048")]
    assert table.settings == {"type_k": "f16"}


def test_environment_tells_rows_apart(store: Store) -> None:
    table = only_table(
        store, LlamaBench("q4k", (512,), ()), LlamaBench("q4k", (512,), (), env={"GGML_CUDA_W4A16": "1"})
    )
    headers, _, body = layout(table)
    assert headers == ["model", "test", "env", "t/s"]
    assert [row[2] for row in body] == [DASH, "GGML_CUDA_W4A16=1"]


def test_what_a_gate_must_find_on_stderr_is_beneath(store: Store) -> None:
    gate = replace(h200().gates[0], engaged="w4a16: on", env={"GGML_CUDA_W4A16_MIN_N": "1"})
    experiment = h200(gates=(gate, EngagedGate("gemv: on")), bench=h200().bench[1:2])
    session = Session(store, experiment, JOB).build().save()
    for verb, status in (("must be", "not run"), ("was", "passed")):
        note, env = f"\n- MUL_MAT: 'w4a16: on' {verb} on stderr", "GGML_CUDA_W4A16_MIN_N=1"
        brief, whole = (render(collect(store, "h200"), wide=wide) for wide in (False, True))
        assert (f"{note}\n" in brief, f"| {env} |" in brief, f"{note}; env {env}\n" in whole) == (True, True, True)
        assert all(f"| engaged | {status} |" in page for page in (brief, whole))
        session.gates().runs().end()
    assert "\n- engaged: 'gemv: on' on stderr of each valid run of llama-bench\n" in brief


def test_a_marker_that_one_tool_did_not_print_fails_its_gate(store: Store) -> None:
    """Whether runs that ended before printed another marker too is not known."""
    gates, why = (EngagedGate("gemv: on"), EngagedGate("gemm: on")), "'gemv: on' is not on llama-bench's stderr"
    session = Session(store, h200(gates=gates, bench=h200().bench[:2]), JOB).build().runs(only=("backend-ops",))
    ends = (fails("killed"), fails(f"the path under test did not run: {why}", "discarded"), valid)
    for end, status in zip(ends, (["not run"] * 2, ["failed", "not run"], ["passed"] * 2), strict=True):
        session.runs(ends=end, only=("llama-bench",)).save()
        table = collect(store, "h200").tables[0]
        assert [row["status"] for row in table.rows] == status
        assert table.provenance.sessions == (JOB,)
        assert (why in str(table.rows[0].get("found"))) == (status[0] == "failed")


def test_op_columns_come_in_the_order_of_a_gemm(store: Store) -> None:
    table = only_table(
        store,
        BackendOpsBench(
            "MUL_MAT",
            "CUDA0",
            {"bs": ("[1,1]",), "k": (14336,), "n": (512, 1, 8), "m": (4096,), "type_a": ("q4_K", "q4_0")},
        ),
    )
    headers, rules, body = layout(table)
    assert headers == ["type_a", "m", "n", "k", "bs", "time (us)"]
    assert rules == ["---", "---:", "---:", "---:", "---", "---:"]
    assert [(row[0], row[2]) for row in body] == [(type_a, n) for type_a in ("q4_0", "q4_K") for n in ("1", "8", "512")]


def test_each_op_backend_and_model_has_its_table(store: Store) -> None:
    experiment = h200(
        gates=(),
        models={"a": h200().models["q4k"], "b": h200().models["q4k"]},
        bench=(
            BackendOpsBench("MUL_MAT", "CUDA0", {"n": (1,)}),
            BackendOpsBench("GATED_DELTA_NET", "CUDA0", {"head_size": (128,)}),
            BatchedBench("a", (128,), (64,), (1, 8)),
            BatchedBench("b", (128,), (64,), (1, 8)),
            LlamaBench("a", (512,), ()),
            LlamaBench("b", (512,), ()),
        ),
    )
    Session(store, experiment, JOB).build().runs(numbers()).end()
    tables = collect(store, "h200").tables
    assert [(table.title, len(table.rows)) for table in tables] == [
        ("MUL_MAT on CUDA0", 1),
        ("GATED_DELTA_NET on CUDA0", 1),
        ("Single stream", 2),
        ("Concurrency: a", 2),
        ("Concurrency: b", 2),
    ]


def test_a_metric_that_a_row_lacks_is_missing_there(store: Store) -> None:
    """FLOPS for one shape, bandwidth for the other: two columns with a dash each, no zero.

    What llama.cpp calls GB/s are GiB/s, stored as such and shown as GB/s of 10^9.
    """

    def tool(step: RunStep) -> tuple[CellResult, ...]:
        metrics = [("flops", "FLOPS", 5.77e12), ("bandwidth_gb_s", "GiB/s", 273.0)]
        return tuple(
            CellResult(cell.key, (Measurement(cell.key, metric, unit, (value,)),), {"row": cell.label})
            for cell, (metric, unit, value) in zip(step.cells, metrics, strict=True)
        )

    experiment = h200(gates=(), bench=(BackendOpsBench("MUL_MAT", "CUDA0", {"n": (1, 512)}),))
    Session(store, experiment, JOB).build().runs(tool).end()
    (table,) = collect(store, "h200").tables
    headers, _, body = layout(table)
    assert headers == ["n", "TFLOPS", "GB/s"]
    assert body == [["1", "5.77", DASH], ["512", DASH, "293"]]


def test_a_cell_that_spreads_too_far_says_so(store: Store) -> None:
    experiment = h200(bench=(LlamaBench("q4k", (512,), (32,)),), gates=())

    def tool(value: float, other: float) -> Tool:
        def given(step: RunStep) -> tuple[CellResult, ...]:
            first, second = step.cells
            return (
                *numbers(value, 3)(replace(step, cells=(first,))),
                *numbers(other, 3)(replace(step, cells=(second,))),
            )

        return given

    def flags_of(job: str, *values: float) -> tuple[ShownFlag, ...]:
        Session(store, experiment, job).build().runs(tool(*values)).end()
        report = collect(store, "h200")
        (table,) = report.tables
        for flag in table.flags:
            shown = " ".join(render(report, wide=True).split())
            assert f"- flag in {', '.join(flag.labels) or 'every row'}: {flag.reason} " in shown
        return table.flags

    reason = "the MAD is above 5 % of the median, {} % at most; dgxlab run h200 --host h200 --again measures all again"
    assert flags_of("20261120-103001-h200-a", 28.66, 28.66) == ()
    first, second = (ShownFlag((), False, reason.format(most)) for most in (5, 49))
    one, two = ("20261120-103002-h200-a",), ("20261120-103003-h200-a",)
    assert flags_of(*one, 28.65, 28.66) == (replace(first, labels=("pp512",), sessions=one),)
    assert flags_of(*two, 28.65, 2.0) == (replace(second, sessions=two),)
    (compared,) = page(store, query({"form": "single-stream", "experiment": "h200"})).tables
    assert compared.flags == (replace(second, labels=("h200",), sessions=two),)


@pytest.mark.parametrize(
    ("cmake", "layers", "backend"),
    [
        ({}, (), "CPU"),
        ({"GGML_CUDA": "OFF"}, (), "CPU"),
        ({"GGML_CUDA": "ON"}, (), "CUDA"),
        ({"GGML_CUDA": "ON"}, (99,), "CUDA"),
        ({"GGML_CUDA": "ON"}, (0,), "CPU and CUDA"),
        ({"GGML_CUDA": "ON"}, (0, 99), "CPU and CUDA, CUDA"),
        ({"GGML_VULKAN": "ON"}, (99,), "Vulkan"),
    ],
)
def test_every_table_names_what_computed_it(
    store: Store, cmake: dict[str, str], layers: tuple[int, ...], backend: str
) -> None:
    axes = {"n_gpu_layers": layers} if layers else {}
    bench = (
        BackendOpsBench("MUL_MAT", "CPU", {"n": (1,)}),
        LlamaBench("q4k", (512,), (), axes),
        BatchedBench("q4k", (128,), (64,), (8,), axes),
    )
    Session(store, h200(bench=bench, gates=(), cmake=cmake), JOB).build().runs(numbers()).end()
    report = collect(store, "h200")
    assert [(table.form, table.provenance.backend) for table in report.tables] == [
        ("ops", "CPU"),
        ("single-stream", backend),
        ("concurrency", backend),
    ]
    alone = render_page(page(store, query({"form": "concurrency", "experiment": "h200"})))
    for shown in (render(report), alone):
        assert re.search(rf"(-|·) backend {backend}( · pin \w+)?\n", shown)
