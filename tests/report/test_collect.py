"""What a report finds: the newest valid run of each cell of one build on one host, and all that is not there."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dgxlab import stats
from dgxlab.model import (
    CellResult,
    DerivedModel,
    Device,
    Expectation,
    FileModel,
    GateStep,
    Measurement,
    ModelStep,
    ParityGate,
    RunStep,
    case_digest,
    to_json,
)
from dgxlab.report import (
    Number,
    Report,
    Table,
    collect,
    collect_experiment,
    collect_job,
    evidence,
    overview,
    page,
    query,
    render,
)
from dgxlab.store import Store
from dgxlab.tools import BackendOpsBench, LlamaBench, PerplexityGate
from tests.journals import CLOCK, THROTTLED, facts, source
from tests.report.worlds import H200, Session, fails, h200, numbers, whole

A, B, C, D = (f"20261120-10{n}000-h200-{letter}" for n, letter in enumerate("abcd"))
SMALL = h200(gates=(), bench=(LlamaBench("q4k", (512,), (32,)),))


DEVICE = Device.of(to_json(H200), h200().cmake)


def form(report: Report, name: str) -> Table:
    (table,) = (table for table in report.tables if table.form == name)
    return table


def speeds(report: Report) -> dict[str, float]:
    medians = {}
    for row in form(report, "single-stream").rows:
        assert isinstance(row["avg_ts"], Number)
        medians[str(row["test"])] = row["avg_ts"].median
    return medians


def test_the_newest_valid_run_of_a_cell_counts(store: Store) -> None:
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    Session(store, SMALL, B).build().runs(numbers(200.0)).end()
    Session(store, SMALL, C).build().runs(ends=fails("killed by SIGKILL")).end("failed", 4)
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0, "tg32": 200.0}
    assert form(report, "single-stream").provenance.sessions == (B,)
    assert report.missing == ()
    lost = [(f.session, f.what, f.status, f.reason, f.again) for f in report.failures]
    assert (C, "llama-bench q4k: pp512, tg32", "failed", "killed by SIGKILL", False) in lost  # B was before
    Session(store, SMALL, D).build().runs(numbers(300.0)).end()
    assert [failure.again for failure in collect(store, "h200").failures] == [True] * len(lost)


def test_a_run_that_lost_more_than_is_asked_for_counted_later(store: Store) -> None:
    more = replace(SMALL, bench=(LlamaBench("q4k", (512, 2048), (32,)),))
    Session(store, more, A).build().runs(ends=fails("killed by SIGKILL")).end("failed", 4)
    Session(store, SMALL, B).build().runs(numbers(100.0)).end()
    assert [failure.again for failure in collect(store, "h200").failures] == [True]


def test_a_disturbed_run_counts_only_without_another(store: Store) -> None:
    Session(store, SMALL, A, wanted=lambda model, env, cell: cell.label == "pp512").build().runs(numbers(100.0)).end()
    Session(store, SMALL, B).build().runs(numbers(200.0), flags=[THROTTLED]).end()
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 100.0, "tg32": 200.0}
    assert [(flag.labels, flag.hard) for flag in form(report, "single-stream").flags] == [(("tg32",), True)]


def test_a_disturbed_run_that_was_repeated_is_listed(store: Store) -> None:
    """With its hard event and what it measured; it is no reason why a session ended."""
    session = Session(store, SMALL, A).build().runs(numbers(100.0), flags=[THROTTLED]).runs(numbers(200.0))
    session.end("cancelled", 130)
    report = collect_job(store, A)
    what = "llama-bench q4k: pp512, tg32"
    why = f"{THROTTLED['reason']}; measured pp512 100.0 t/s, tg32 100.0 t/s"
    assert [(each.what, each.status, each.reason, each.again) for each in report.failures] == [
        ("session", "cancelled", "it ended before everything was measured", False),
        (what, "disturbed", why, True),
    ]
    assert f"1 run disturbed (counted later): see dgxlab report {A[-6:]} --wide" in render(report)
    assert "| disturbed, counted later |" in render(report, wide=True)


def test_a_disturbed_run_did_not_count_later_where_every_try_was_disturbed(store: Store) -> None:
    session = Session(store, SMALL, A).build()
    for value in (100.0, 200.0):
        session.runs(numbers(value), flags=[THROTTLED])
    session.end()
    report = collect(store, "h200")
    assert [(each.status, each.again) for each in report.failures] == [("disturbed", False)]
    assert f"\n1 run disturbed: see dgxlab report {A[-6:]} --wide\n" in render(report)


def test_cells_may_come_from_several_sessions(store: Store) -> None:
    whole(store, A, wanted=lambda model, env, cell: cell.label != "tg32")
    Session(store, h200(), B, wanted=lambda model, env, cell: cell.label == "tg32").build().runs(numbers(7.0)).end()
    table = form(collect(store, "h200"), "single-stream")
    assert table.provenance.sessions == (A, B)
    assert [row["test"] for row in table.rows] == ["pp512", "pp2048", "tg32"]


def test_another_experiments_run_of_the_same_build_counts(store: Store) -> None:
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    other = replace(SMALL, name="other")
    report = collect_experiment(store, other, source(), DEVICE)
    assert report.title == "Experiment other"
    assert speeds(report) == {"pp512": 100.0, "tg32": 100.0}
    assert form(report, "single-stream").provenance.sessions == (A,)
    assert (report.missing, report.failures) == ((), ())


def test_a_machine_is_the_same_under_another_name(store: Store) -> None:
    Session(store, SMALL, A, host_name="box").build().runs(numbers(100.0)).end()
    named = replace(SMALL, host="spark")
    Session(store, replace(SMALL, gates=h200().gates), B).build().gates().end()
    assert speeds(collect_experiment(store, named, source(), DEVICE)) == {"pp512": 100.0, "tg32": 100.0}
    report = collect(store, "h200")
    box, spark = f"box (h200-7, {DEVICE.label})", f"h200 (h200-7, {DEVICE.label})"
    assert form(report, "single-stream").provenance.host == box
    assert form(report, "gates").provenance.host == spark
    Session(store, SMALL, C, wanted=lambda model, env, cell: cell.label == "pp512").build().runs(numbers(200.0)).end()
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0, "tg32": 100.0}
    assert form(report, "single-stream").provenance.host == f"{box} and {spark}"


def test_a_failure_of_another_experiment_is_not_listed(store: Store) -> None:
    broken = replace(SMALL, name="broken", env={"TOY": "crash"})
    Session(store, broken, A).build().runs(ends=fails("it was killed by SIGSEGV")).end()
    Session(store, SMALL, B).build().runs(numbers(100.0)).end()
    assert collect(store, "h200").failures == ()
    (failure, *_) = collect(store, "broken").failures
    assert "SIGSEGV" in failure.reason


THERE = facts("host-h200", "h200-7")
OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tree": ({}, {"tree": source(["w4a16"])}),
    "cmake": ({"cmake": {"GGML_CUDA": "ON"}}, {}),
    "host": ({}, {"host": facts("host-gb10", "spark"), "host_name": "dgx"}),
    "toolchain": ({}, {"host": replace(THERE, toolchain=replace(THERE.toolchain, cxx="g++ 14"))}),
    "protocol": ({}, {}),
    "env": ({"env": {"GGML_CUDA_W4A16": "1"}}, {}),
    "recipe": ({"models": {"q4k": replace(h200().models["q4k"], seed=1)}}, {}),
}
"""How an older run differs: in its experiment, and in its session."""


@pytest.mark.parametrize("what", OLDER)
def test_what_differs_is_never_mixed_in(store: Store, what: str) -> None:
    experiment, session = OLDER[what]
    Session(store, replace(SMALL, **experiment), A, **session).build().runs(numbers(100.0)).end()
    if what == "protocol":
        store.update_job(A, protocol=0)
    Session(store, SMALL, B, wanted=lambda model, env, cell: cell.label == "pp512").build().runs(numbers(200.0)).end()
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0}
    assert [(m.tool, m.model, m.labels, m.reason) for m in report.missing] == [("llama-bench", "q4k", ("tg32",), "")]


def test_two_models_with_the_same_tests_stay_apart(store: Store) -> None:
    models = {"big": FileModel("~/bench/Qwen3-32B-Q4_K_M.gguf"), "q4k": h200().models["q4k"]}
    experiment = replace(SMALL, models=models, bench=(LlamaBench("big", (512,), ()), *SMALL.bench))
    session = Session(store, experiment, A).build()
    session.runs(lambda step: numbers(50.0 if step.model == "big" else 900.0)(step)).end()
    rows = form(collect(store, "h200"), "single-stream").rows
    medians = [(row["model"], row["test"], row["avg_ts"].median) for row in rows]  # type: ignore[union-attr]
    assert medians == [("big", "pp512", 50.0), ("q4k", "pp512", 900.0), ("q4k", "tg32", 900.0)]


def test_a_file_that_changed_is_another_model(store: Store) -> None:
    experiment = replace(SMALL, models={"q4k": FileModel("~/m.gguf")})
    for job, identity, value, cells in ((A, "file-old", 100.0, ("pp512", "tg32")), (B, "file-new", 200.0, ("pp512",))):
        session = Session(store, experiment, job, wanted=lambda model, env, cell, cells=cells: cell.label in cells)  # type: ignore[misc]
        session.build(model_id=identity).runs(numbers(value), model_id=identity).end()
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0}
    assert [missing.labels for missing in report.missing] == [("tg32",)]


def test_a_session_shows_only_its_own(store: Store) -> None:
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    before = collect_job(store, A)
    session = Session(store, SMALL, B, wanted=lambda model, env, cell: cell.label == "pp512")
    session.build().runs(numbers(200.0)).end()
    assert collect_job(store, A) == before
    assert speeds(before) == {"pp512": 100.0, "tg32": 100.0}
    only = collect_job(store, B)
    assert (only.title, only.hypothesis) == (f"Session {B}", SMALL.hypothesis)
    assert (speeds(only), only.missing) == ({"pp512": 200.0}, ())


def test_a_rejected_session_does_not_say_that_nothing_was_run(store: Store) -> None:
    Session(store, h200(), A).build().gates().runs().end()
    store.put("rejections", {"job_id": A, "reason": "hot", "at": 0.0})
    report = collect_job(store, A)
    assert (report.tables, report.missing) == ((), ())
    assert [(each.status, each.reason) for each in report.failures] == [("rejected", "hot")]
    page = render(report)
    assert f"- **session {A[-6:]}** rejected: hot" in page
    assert "Nothing was measured" not in page


def test_a_gate_that_was_not_run_says_so(store: Store) -> None:
    Session(store, h200(), A).build().runs().end()
    (row,) = form(collect(store, "h200"), "gates").rows
    assert dict(row) == {"op": "MUL_MAT", "backend": "CUDA0", "env": "", "status": "not run"}


def test_gates_tell_recorded_expected_and_flaky_apart(store: Store) -> None:
    gates = (ParityGate("MUL_MAT", "CUDA0"), ParityGate("MUL_MAT", "CUDA0", env={"GGML_CUDA_W4A16": "1"}))
    experiment = h200(gates=gates, bench=(BackendOpsBench("MUL_MAT", "CUDA0", {"n": (1,)}),))
    Session(store, experiment, A).build().gates(status="flaky", flaky=["type_a=q4_0,n=1"]).end()
    Session(store, experiment, B).build().gates().end()
    table = form(collect(store, "h200"), "gates")
    assert [column.key for column in table.columns][:4] == ["op", "backend", "env", "count"]
    assert [row["expected"] for row in table.rows] == ["1103, recorded here", "1103, recorded here"]
    older = form(collect_job(store, A), "gates")
    assert [(row["status"], row["flaky"], row["expected"]) for row in older.rows] == [
        ("flaky", "type_a=q4_0,n=1", None),
        ("flaky", "type_a=q4_0,n=1", None),
    ]


def test_a_gate_that_is_not_asked_for_is_no_failure_here(store: Store) -> None:
    failed = {"passed": 1101, "status": "failed", "rc": 1, "reasons": ["2 of 1103 cases failed"]}
    stricter = (*h200().gates, ParityGate("MUL_MAT", "CUDA0", env={"GGML_CUDA_FORCE_MMQ": "1"}))
    Session(store, h200(name="stricter", gates=stricter[1:]), A).build().gates(**failed).end("failed", 5)
    whole(store, B)
    assert collect(store, "h200").failures == ()
    assert [failure.what for failure in collect(store, "stricter").failures] == ["gate MUL_MAT on CUDA0"]
    Session(store, h200(name="same"), C).build().gates(**failed).end("failed", 5)
    report = collect(store, "h200")
    assert [(failure.session, failure.what) for failure in report.failures] == [(C, "gate MUL_MAT on CUDA0")]
    assert [row["status"] for row in form(report, "gates").rows] == ["failed"]


@pytest.mark.parametrize("limit", [{"expect": Expectation(1104, 1104)}, {"unsupported": 305}, {"cases": "0" * 16}])
def test_a_gate_that_must_reach_something_else_is_no_result_here(store: Store, limit: dict[str, Any]) -> None:
    """One experiment expects what there is, another does not: each shows how its own gate ended."""
    listed = {"cases": case_digest(["MUL_MAT(n=1)"])}
    whole(store, A)
    wrong = h200(name="wrong", gates=(replace(h200().gates[0], **limit),))
    failed = {"status": "failed", "reasons": ["not what was expected"]}
    Session(store, wrong, B).build().gates(**failed, **listed).end("failed", 5)
    assert [row["status"] for row in form(collect(store, "h200"), "gates").rows] == ["passed"]
    assert collect(store, "h200").failures == ()
    Session(store, h200(), C).build().gates(**listed).end()
    (gates,) = (table for table in overview(store).tables if table.title == "Gates")
    assert [(row["arm"], str(row["status"])[:6], row["session"]) for row in gates.rows] == [
        ("h200", "passed", C),
        ("wrong", "failed", B),
    ]
    report = collect(store, "wrong")
    assert [row["status"] for row in form(report, "gates").rows] == ["failed"]
    assert [(failure.session, failure.again) for failure in report.failures] == [(B, False)]


def test_numbers_that_no_gate_checked_say_so(store: Store) -> None:
    """Until one of another experiment has checked the same build."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    assert form(collect(store, "h200"), "single-stream").notes == ("no gate checked this build",)
    assert "\n- no gate checked this build\n" in render(collect_job(store, A))
    Session(store, h200(name="other"), B).build().gates().end()
    assert form(collect(store, "h200"), "single-stream").notes == ()


def test_numbers_from_before_a_gate_failed_say_so(store: Store) -> None:
    whole(store, A)
    failed = {"passed": 1101, "status": "failed", "rc": 1, "reasons": ["2 of 1103 cases failed"]}
    Session(store, h200(), B).build().gates(**failed).end("failed", 5)
    notes = {table.form: table.notes for table in collect(store, "h200").tables}
    before = ("measured before gate MUL_MAT on CUDA0 failed",)
    assert notes == {"gates": (), "ops": before, "single-stream": before, "concurrency": before}
    whole(store, C)
    assert {table.notes for table in collect(store, "h200").tables} == {()}


def test_a_check_that_is_not_asked_for_is_no_failure_here(store: Store) -> None:
    asked = PerplexityGate("q4k", "q4k", env={"FAST": "1"}, against={"FAST": None}, kld_ratio_at_most=0.5)
    other = replace(asked, kld_ratio_at_most=0.1)
    for job, name, gate, status in ((A, "other", other, "failed"), (B, "h200", asked, "passed")):
        session = Session(store, h200(name=name, gates=(gate,), bench=SMALL.bench), job).build()
        (step,) = (step for step in session.plan.steps if isinstance(step, GateStep) and step.gate == gate)
        session.journal.check(id=step.id, gate=gate, arm=name, env=dict(step.env), status=status)
        session.runs(numbers(100.0)).end()
    assert collect(store, "h200").failures == ()
    assert len(collect(store, "other").failures) == 1


def test_a_spec_of_another_dgxlab_falls_back_to_the_plan(store: Store) -> None:
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    (row,) = store.rows("SELECT digest, spec FROM experiments")
    changed = json.dumps({**json.loads(row["spec"]), "new_field": 1})
    store.connection.execute("UPDATE experiments SET spec = ?", (changed,))
    assert speeds(collect(store, "h200")) == {"pp512": 100.0, "tg32": 100.0}


@pytest.mark.parametrize("samples", [(7.0,), (3.0, 1.0), (0.3, 0.1, 0.2, 9.9), (5.0, 5.0, 1.7, 2.4, 9.1)])
def test_views_say_what_stats_says(store: Store, samples: tuple[float, ...]) -> None:
    def tool(step: RunStep) -> tuple[CellResult, ...]:
        return tuple(
            CellResult(cell.key, (Measurement(cell.key, "avg_ts", "t/s", samples),), {}) for cell in step.cells
        )

    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    Session(store, SMALL, B).build().runs(tool).end()
    spread = stats.mad(samples) if len(samples) > 1 else None
    wanted = {"value": stats.median(samples), "spread": spread, "n": len(samples), "job_id": B}
    columns = ",".join(wanted)
    rows = store.rows(f"SELECT {columns} FROM measurements WHERE job_id = ?", (B,))  # noqa: S608 - names above
    assert rows == store.rows(f"SELECT {columns} FROM latest") == [wanted] * 2  # noqa: S608


def test_tables_name_what_a_model_holds(store: Store) -> None:
    """Architecture, weights and type beneath the table; how near the weights are with the provenance of a session."""
    near = {"types": "Q4_0", "weights": 9000, "sampled": 8192, "nmse": 0.01, "sqnr_db": 20.0}
    unknown = {**near, "types": "IQ2_XS", "sampled": 0, "nmse": None, "sqnr_db": None}
    contents = {
        "architecture": "qwen3",
        "parameters": 1_500_000_000,
        "type": "Q4_0",
        "bits": 4.5,
        "per_token": 1_000_000_000,
        "files": {},
        "requantised": True,
        "fidelity": {"ffn": near, "output": unknown},
    }
    Session(store, SMALL, A).build(contents=contents).runs(numbers(100.0)).end()
    report = collect(store, "h200")
    text = "q4k: qwen3, 1.50 B weights, Q4_0, 4.50 bits a weight, quantised twice: not for quality"
    assert form(report, "single-stream").provenance.models == (text,)
    assert f"model {text}" in render(report)
    shares = {row["test"]: row["of_ceiling"] for row in form(report, "single-stream").rows}
    assert shares == {"pp512": None, "tg32": "2.1"}  # 100 times 1 GB of the 4800 GB/s of the data sheet
    copies = {**CLOCK, "name": "copy.bandwidth", "unit": "GB/s", **dict.fromkeys(("min", "median", "max"), 4000.0)}
    Session(store, SMALL, B).build(contents=contents).runs(numbers(100.0), telemetry=[copies]).end()
    report = collect(store, "h200")
    assert [row["of_ceiling"] for row in form(report, "single-stream").rows] == [None, "2.5"]
    assert "median of a run: copies 4000 GB/s" in render(report)
    (table,) = page(store, query({"form": "provenance", "experiment": "h200"})).tables
    (told,) = (row for row in table.rows if "model q4k" in row.values())
    assert "ffn Q4_0 SQNR 20.0 dB (NMSE 0.01) over 8,192 of 9,000 weights; output IQ2_XS no SQNR" in str(told)


def test_a_model_made_from_a_file_is_the_one_of_the_newest_run(store: Store) -> None:
    """The host knows the file's content, and so the model's id; the client knows the recipe."""
    models = {"f": FileModel("~/f16.gguf"), "q4k": DerivedModel(FileModel("~/f16.gguf"), "Q4_K_M")}
    experiment = replace(SMALL, models=models)
    for job, identity, value in ((A, "derived-old", 100.0), (B, "derived-new", 200.0)):
        session = Session(store, experiment, job)
        session.journal.build("h200")
        for step in session.plan.steps:
            if isinstance(step, ModelStep):
                session.model(step, **({"model_id": identity} if step.recipe else {}))
        session.runs(numbers(value), model_id=identity).end()
    report = collect(store, "h200")
    assert (speeds(report), report.missing) == ({"pp512": 200.0, "tg32": 200.0}, ())
    assert form(report, "single-stream").provenance.synthetic == ()


def test_a_cell_is_found_however_many_newer_runs_lack_it(store: Store) -> None:
    whole(store)
    rows = {table.title: len(table.rows) for table in collect(store, "h200").tables}
    for number in range(2 * evidence.BATCH + 1):
        again = Session(store, h200(), f"20261121-103000-h200-{chr(98 + number)}").build()
        again.runs(numbers(1.0 + number), only=("llama-bench",)).end()
    found = collect(store, "h200").tables
    assert {table.title: len(table.rows) for table in found} == {**rows, "Gates": 1}
    (streams,) = [table for table in found if table.form == "single-stream"]
    assert {row["avg_ts"].middle for row in streams.rows} == {2.0 * evidence.BATCH + 1}
