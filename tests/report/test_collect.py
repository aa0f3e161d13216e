"""What a report finds: the newest valid run of each cell of one build on one host, and all that is not there."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dgxlab import stats
from dgxlab.model import (
    BackendOpsBench,
    CellResult,
    CheckStep,
    Device,
    FileModel,
    LlamaBench,
    Measurement,
    ParityGate,
    PerplexityGate,
    RunStep,
    to_json,
)
from dgxlab.report import Number, Report, Table, collect, collect_experiment
from dgxlab.store import Store
from tests.journals import facts, source
from tests.report.worlds import H200, Session, fails, h200, numbers, whole

A, B, C = (f"20261120-10{n}000-h200-{letter}" for n, letter in enumerate("abc"))
SMALL = h200(gates=(), bench=(LlamaBench("q4k", (512,), (32,)),))


DEVICE = Device.of(to_json(H200), h200().cmake)


def form(report: Report, name: str) -> Table:
    """Return the only table of that form."""
    (table,) = (table for table in report.tables if table.form == name)
    return table


def speeds(report: Report) -> dict[str, float]:
    """Return the single-stream medians by test."""
    found = {}
    for row in form(report, "single-stream").rows:
        assert isinstance(row["avg_ts"], Number)
        found[str(row["test"])] = row["avg_ts"].median
    return found


def test_the_newest_valid_run_of_a_cell_counts(store: Store) -> None:
    """A newer valid run replaces an older one; a newer failed one does not, and is listed."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    Session(store, SMALL, B).build().runs(numbers(200.0)).end()
    Session(store, SMALL, C).build().runs(ends=fails("killed by SIGKILL")).end("failed", 4)
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0, "tg32": 200.0}
    assert form(report, "single-stream").provenance.sessions == (B,)
    assert report.missing == ()
    lost = [(f.session, f.what, f.status, f.reason, f.again) for f in report.failures]
    assert (C, "llama-bench q4k: pp512, tg32", "failed", "killed by SIGKILL", True) in lost


def test_cells_may_come_from_several_sessions(store: Store) -> None:
    """A second session measured only what was missing; both are named beneath."""
    whole(store, A, wanted=lambda model, env, cell: cell.label != "tg32")
    Session(store, h200(), B, wanted=lambda model, env, cell: cell.label == "tg32").build().runs(numbers(7.0)).end()
    table = form(collect(store, "h200"), "single-stream")
    assert table.provenance.sessions == (A, B)
    assert [row["test"] for row in table.rows] == ["pp512", "pp2048", "tg32"]


def test_another_experiments_run_of_the_same_build_counts(store: Store) -> None:
    """The run that makes a cell up to date is the run that the report shows, whoever asked for it."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    other = dataclasses.replace(SMALL, name="other")
    report = collect_experiment(store, other, source(), DEVICE)
    assert report.title == "Experiment other"
    assert speeds(report) == {"pp512": 100.0, "tg32": 100.0}
    assert form(report, "single-stream").provenance.sessions == (A,)
    assert (report.missing, report.failures) == ((), ())


def test_a_machine_is_the_same_under_another_name(store: Store) -> None:
    """What makes a cell up to date is in the report, whatever the host was called when it measured."""
    Session(store, SMALL, A, host_name="box").build().runs(numbers(100.0)).end()
    named = dataclasses.replace(SMALL, host="spark")
    assert speeds(collect_experiment(store, named, source(), DEVICE)) == {"pp512": 100.0, "tg32": 100.0}
    Session(store, SMALL, B, wanted=lambda model, env, cell: cell.label == "pp512").build().runs(numbers(200.0)).end()
    assert speeds(collect(store, "h200")) == {"pp512": 200.0, "tg32": 100.0}


def test_what_nobody_asked_for_is_not_listed_as_failed(store: Store) -> None:
    """Another experiment's crash of the same build, in an environment of its own, is no failure of this one."""
    broken = dataclasses.replace(SMALL, name="broken", env={"TOY": "crash"})
    Session(store, broken, A).build().runs(ends=fails("it was killed by SIGSEGV")).end()
    Session(store, SMALL, B).build().runs(numbers(100.0)).end()
    assert collect(store, "h200").failures == ()
    (failure, *_) = collect(store, "broken").failures
    assert "SIGSEGV" in failure.reason


@pytest.mark.parametrize("what", ["tree", "cmake", "host", "toolchain", "protocol", "env", "recipe"])
def test_what_differs_is_never_mixed_in(store: Store, what: str) -> None:
    """An older run under other conditions fills no gap of the newest session: the cell is missing."""
    older, newer = {}, {}
    first = second = SMALL
    if what == "tree":
        older = {"tree": source(["w4a16"])}
    if what == "cmake":
        first = dataclasses.replace(SMALL, cmake={"GGML_CUDA": "ON"})
    if what == "host":
        older = {"host": facts("host-gb10", "spark"), "host_name": "dgx"}
    if what == "toolchain":
        there = facts("host-h200", "h200-7")
        older = {"host": dataclasses.replace(there, toolchain=dataclasses.replace(there.toolchain, cxx="g++ 14"))}
    if what == "env":
        first = dataclasses.replace(SMALL, env={"GGML_CUDA_W4A16": "1"})
    if what == "recipe":
        first = dataclasses.replace(SMALL, models={"q4k": dataclasses.replace(h200().models["q4k"], seed=1)})
    Session(store, first, A, **older).build().runs(numbers(100.0)).end()
    if what == "protocol":
        store.update_job(A, protocol=0)
    newer_session = Session(store, second, B, wanted=lambda model, env, cell: cell.label == "pp512", **newer)
    newer_session.build().runs(numbers(200.0)).end()
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0}
    assert [(m.tool, m.model, m.labels, m.reason) for m in report.missing] == [
        ("llama-bench", "q4k", ("tg32",), "not measured")
    ]


def test_two_models_with_the_same_tests_stay_apart(store: Store) -> None:
    """Cells are alike, models are not: a file is known by its path, a recipe by itself."""
    models = {"big": FileModel("~/bench/Qwen3-32B-Q4_K_M.gguf"), "q4k": h200().models["q4k"]}
    experiment = dataclasses.replace(SMALL, models=models, bench=(LlamaBench("big", (512,), ()), *SMALL.bench))
    session = Session(store, experiment, A).build()
    session.runs(lambda step: numbers(50.0 if step.model == "big" else 900.0)(step)).end()
    rows = form(collect(store, "h200"), "single-stream").rows
    medians = [(row["model"], row["test"], row["avg_ts"].median) for row in rows]  # type: ignore[union-attr]
    assert medians == [("big", "pp512", 50.0), ("q4k", "pp512", 900.0), ("q4k", "tg32", 900.0)]


def test_a_file_that_changed_is_another_model(store: Store) -> None:
    """The same path with other content: the older content's numbers do not fill in."""
    experiment = dataclasses.replace(SMALL, models={"q4k": FileModel("~/m.gguf")})
    for job, identity, value, cells in ((A, "file-old", 100.0, ("pp512", "tg32")), (B, "file-new", 200.0, ("pp512",))):
        session = Session(store, experiment, job, wanted=lambda model, env, cell, cells=cells: cell.label in cells)  # type: ignore[misc]
        session.journal.build("h200")
        for step in session.plan.steps:
            if step.kind == "model":
                session.model(step, model_id=identity)  # type: ignore[arg-type]
        session.runs(numbers(value), model_id=identity).end()
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0}
    assert [missing.labels for missing in report.missing] == [("tg32",)]


def test_a_session_shows_only_its_own(store: Store) -> None:
    """An old session's report does not change when newer ones come; its own plan says what it should have."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    before = collect(store, job_id=A)
    session = Session(store, SMALL, B, wanted=lambda model, env, cell: cell.label == "pp512")
    session.build().runs(numbers(200.0)).end()
    assert collect(store, job_id=A) == before
    assert speeds(before) == {"pp512": 100.0, "tg32": 100.0}
    only = collect(store, job_id=B)
    assert (only.title, only.hypothesis) == (f"Session {B}", SMALL.hypothesis)
    assert (speeds(only), only.missing) == ({"pp512": 200.0}, ())


# -- gates ------------------------------------------------------------------------------------------------------------


def test_a_gate_that_was_not_run_says_so(store: Store) -> None:
    """Its row has no numbers, and no 0."""
    Session(store, h200(), A).build().runs().end()
    (row,) = form(collect(store, "h200"), "gates").rows
    assert dict(row) == {"op": "MUL_MAT", "backend": "CUDA0", "status": "not run"}


def test_gates_tell_recorded_expected_and_flaky_apart(store: Store) -> None:
    """The first clean gate recorded the count; a flaky case is named; an environment is a column."""
    gates = (ParityGate("MUL_MAT", "CUDA0"), ParityGate("MUL_MAT", "CUDA0", env={"GGML_CUDA_W4A16": "1"}))
    experiment = h200(gates=gates, bench=(BackendOpsBench("MUL_MAT", "CUDA0", {"n": (1,)}),))
    Session(store, experiment, A).build().gates(status="flaky", flaky=["type_a=q4_0,n=1"]).end()
    Session(store, experiment, B).build().gates().end()
    table = form(collect(store, "h200"), "gates")
    assert [column.key for column in table.columns][:4] == ["op", "backend", "env", "count"]
    assert [row["expected"] for row in table.rows] == ["1103, recorded here", "1103, recorded here"]
    older = form(collect(store, job_id=A), "gates")
    assert [(row["status"], row["flaky"], row["expected"]) for row in older.rows] == [
        ("flaky", "type_a=q4_0,n=1", None),
        ("flaky", "type_a=q4_0,n=1", None),
    ]


def test_a_gate_that_is_not_asked_for_is_no_failure_here(store: Store) -> None:
    """Another experiment's on the same build; the same gate is evidence of the build, whoever ran it."""
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


def test_a_check_that_is_not_asked_for_is_no_failure_here(store: Store) -> None:
    """The same of gates on models."""
    asked = PerplexityGate("q4k", "q4k", env={"FAST": "1"}, against={"FAST": None}, kld_ratio_at_most=0.5)
    other = dataclasses.replace(asked, kld_ratio_at_most=0.1)
    for job, name, gate, status in ((A, "other", other, "failed"), (B, "h200", asked, "passed")):
        session = Session(store, h200(name=name, gates=(gate,), bench=SMALL.bench), job).build()
        (step,) = (step for step in session.plan.steps if isinstance(step, CheckStep))
        session.journal.check(id=step.id, gate=gate, arm=name, env=dict(step.env), status=status)
        session.runs(numbers(100.0)).end()
    assert collect(store, "h200").failures == ()
    assert len(collect(store, "other").failures) == 1


# -- what is not there ------------------------------------------------------------------------------------------------


# -- names, versions, JSON --------------------------------------------------------------------------------------------


def test_a_spec_of_another_dgxlab_falls_back_to_the_plan(store: Store) -> None:
    """The experiment has fields that this version does not know: the session's plan says what was asked."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    (row,) = store.rows("SELECT digest, spec FROM experiments")
    changed = json.dumps({**json.loads(row["spec"]), "new_field": 1})
    store.connection.execute("UPDATE experiments SET spec = ?", (changed,))
    assert speeds(collect(store, "h200")) == {"pp512": 100.0, "tg32": 100.0}


def test_the_json_twin_has_the_numbers(store: Store) -> None:
    """Raw medians, spreads and counts in stored units, null for what is missing; plain JSON."""
    whole(store, A)
    report = json.loads(json.dumps(to_json(collect(store, "h200")), allow_nan=False))
    (ops,) = (table for table in report["tables"] if table["form"] == "ops")
    alone = {"n": 1, "spread": None, "of": "samples"}
    assert ops["rows"][0] == {
        "type_a": "q4_0",
        "m": 4096,
        "n": 1,
        "k": 14336,
        "time_us": {"metric": "time_us", "unit": "us", "median": 14.388455, **alone},
        "flops": {"metric": "flops", "unit": "FLOPS", "median": 8162135152842.867, **alone},
    }
    assert ops["provenance"]["sessions"] == [A]


@pytest.mark.parametrize("samples", [(7.0,), (3.0, 1.0), (0.3, 0.1, 0.2, 9.9), (5.0, 5.0, 1.7, 2.4, 9.1)])
def test_views_say_what_stats_says(store: Store, samples: tuple[float, ...]) -> None:
    """Median and scaled MAD of any number of samples; the newest value that counts is in `latest`."""

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
